"""Measures the CPU time of Ray's own processes on a node: raylet, GCS, dashboard, log monitor, idle workers.

They are found by their names and command lines in the process table; Ray itself is not imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ensemble.meter.cpu import Sampler


@dataclass(frozen=True)
class ProcessInfo:
    """One line of the process table."""

    pid: int
    ppid: int
    name: str
    cmdline: str


# A worker that ran a task or an actor is called after it, `ray::MyActor`; the ones below belong to Ray itself.
_RAY_BINARIES = ("raylet", "gcs_server", "redis-server")
_RAY_TITLES = {
    "ray::IDLE": "idle_worker",
    "ray::SPILL": "idle_worker",
    "ray::RESTORE": "idle_worker",
    "ray::DELETE": "idle_worker",
    "ray::DashboardAgent": "dashboard_agent",
    "ray::RuntimeEnvAgent": "runtime_env_agent",
    "ray-dashboard-": "dashboard",
}
_RAY_SCRIPTS = {
    "ray/dashboard/dashboard.py": "dashboard",
    "ray/dashboard/agent.py": "dashboard_agent",
    "ray/_private/log_monitor.py": "log_monitor",
    "ray/_private/runtime_env/agent/main.py": "runtime_env_agent",
    "ray/autoscaler/_private/monitor.py": "monitor",
    "ray/_private/ray_process_reaper.py": "reaper",
    "ray.util.client.server": "client_server",
    "ray/_private/workers/default_worker.py": "idle_worker",
}


def classify_ray_process(name: str, cmdline: str) -> str | None:
    """Which of Ray's own processes this is (raylet, gcs_server, dashboard, idle_worker ...); None: none of them.

    Ray's workers that run somebody's task or actor are not Ray's own.
    """
    for title, kind in _RAY_TITLES.items():
        if cmdline.startswith(title):
            return kind
    if name in _RAY_BINARIES and "ray" in cmdline:
        return name.replace("redis-server", "redis")
    for script, kind in _RAY_SCRIPTS.items():
        if script in cmdline:
            return kind
    return None


def ray_processes(table: Iterable[ProcessInfo], session: str | None = None) -> dict[int, str]:
    """Ray's own processes in a process table: pid -> kind.

    Helpers that a daemon starts (the dashboard's modules, fork servers) count as that daemon.

    Args:
        table: see `process_table`.
        session: name or folder of a Ray session (``session_2026-...``); None takes those of all sessions.
    """
    rows = {row.pid: row for row in table}
    kinds = {pid: classify_ray_process(row.name, row.cmdline) for pid, row in rows.items()}

    def belongs(pid: int) -> bool:
        """Titles hide command lines, so the session is looked for in the ancestors', too."""
        while pid in rows:
            if session is None or session in rows[pid].cmdline:
                return True
            pid = rows[pid].ppid
        return False

    def kind_of(pid: int) -> str | None:
        own = kinds[pid]
        if own is not None or rows[pid].cmdline.startswith("ray::"):
            return own
        parent = rows[pid].ppid
        while parent in rows:
            inherited = kinds[parent]
            if inherited is not None:
                # The raylet's other children are workers: whose they are, their titles say.
                return inherited if inherited not in ("raylet", "idle_worker") else None
            if rows[parent].cmdline.startswith("ray::"):
                return None
            parent = rows[parent].ppid
        return None

    found = {pid: kind_of(pid) for pid in rows}
    return {pid: kind for pid, kind in found.items() if kind is not None and belongs(pid)}


def process_table() -> list[ProcessInfo]:
    """All processes of this machine that can be seen."""
    import psutil

    rows = []
    for process in psutil.process_iter(["ppid", "name", "cmdline"]):
        info = process.info
        rows.append(
            ProcessInfo(process.pid, info["ppid"] or 0, info["name"] or "", " ".join(info["cmdline"] or ()))
        )
    return rows


class RaySampler:
    """CPU time of Ray's own processes on this node, as fields of `usage` events of the role ``ray``.

    All daemons are reported as one figure. An idle worker is reported alone, for it may become a member's worker,
    whose own account then covers it from its first second: the ledger drops what ``ray`` reported of such a pid.
    """

    def __init__(
        self,
        node: str,
        session: str | None = None,
        *,
        since: float | None = None,
        refresh_s: float = 10.0,
        table: Callable[[], Iterable[ProcessInfo]] = process_table,
    ) -> None:
        """Begin.

        Args:
            node: its name, as in the events.
            session: see `ray_processes`.
            since: unix time when the run began; of a daemon that was there before, on a cluster that others use
                too, only what it uses from now on is the run's. None: now.
            refresh_s: how often the process table is read anew; between, only the known ones are looked at.
            table: what reads it.
        """
        self.node = node
        self._session = session
        self._refresh_s = refresh_s
        self._table = table
        self._looked = float("-inf")
        since = time.time() if since is None else since
        self._daemons = Sampler(node, since=since)
        self._workers = Sampler(node, since=since)
        self._kinds: dict[int, str] = {}
        self._pid = 0

    def sample(self) -> list[dict[str, Any]]:
        """One event for the daemons, one for each idle worker; none where there is no Ray."""
        now = time.monotonic()
        if now - self._looked >= self._refresh_s:
            self._looked = now
            self._kinds = ray_processes(self._table(), self._session)
            role = ("ray", None, None)
            self._daemons.watch({pid: role for pid, kind in self._kinds.items() if kind != "idle_worker"})
            self._workers.watch({pid: role for pid, kind in self._kinds.items() if kind == "idle_worker"})
            self._pid = min((pid for pid, kind in self._kinds.items() if kind == "raylet"), default=self._pid)
        events = self._daemons.sample()
        idle = [fields for fields in self._workers.sample() if self._kinds.get(fields["pid"]) == "idle_worker"]
        cpu_s = sum(self._daemons.totals().values())
        if not events and cpu_s == 0.0:
            return idle
        since = min((fields["since"] for fields in events), default=None)
        daemons = {
            "node": self.node,
            "role": "ray",
            "member": None,
            "rank": None,
            "pid": self._pid,
            "cpu_s": cpu_s,
        }
        return [{**daemons, "origin": "measured", "since": since}, *idle]
