"""Measures the CPU time of Ray's own processes on a node: raylet, GCS, dashboard, log monitor, idle workers.

They are found by their names and command lines in the process table; Ray itself is not imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ensemble.meter.cpu import cpu_seconds, make_usage, read_start


@dataclass(frozen=True)
class ProcessInfo:
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


def ray_processes(table: Iterable[ProcessInfo], session: str) -> dict[int, str]:
    """Ray's own processes in a process table: pid -> kind.

    Helpers that a daemon starts (the dashboard's modules, fork servers) count as that daemon.

    Args:
        table: see `process_table`.
        session: name or folder of a Ray session (``session_2026-...``).
    """
    rows = {row.pid: row for row in table}
    kinds = {pid: classify_ray_process(row.name, row.cmdline) for pid, row in rows.items()}

    def belongs(pid: int) -> bool:
        """Titles hide command lines, so the session is looked for in the ancestors', too."""
        while pid in rows:
            if session in rows[pid].cmdline:
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

    return {pid: kind for pid in rows if (kind := kind_of(pid)) is not None and belongs(pid)}


def process_table() -> list[ProcessInfo]:
    """All processes of this machine that can be seen."""
    import psutil

    processes = ((process.pid, process.info) for process in psutil.process_iter(["ppid", "name", "cmdline"]))
    return [
        ProcessInfo(pid, info["ppid"] or 0, info["name"] or "", " ".join(info["cmdline"] or ()))
        for pid, info in processes
    ]


class _Process:
    """CPU time of one process; what it used last is kept when it has ended."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.pid = pid
        self._process = psutil.Process(pid)
        self._began: float = time.monotonic() - max(0.0, time.time() - self._process.create_time())
        self.cpu_s, self.start = 0.0, read_start(pid)

    def update(self) -> bool:
        """Reads its CPU time; False where it has ended."""
        # is_running compares start times, so that a pid given to another process is not taken for this one.
        seconds = cpu_seconds(self.pid) if self._process.is_running() else None
        if seconds is not None:
            self.cpu_s = max(self.cpu_s, seconds)
        return seconds is not None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began


class RaySampler:
    """CPU time of Ray's own processes on this node, as fields of `usage` events of the role ``ray``.

    All daemons are reported as one figure. An idle worker is reported alone, for it may become a member's worker,
    whose own account then covers it from its first second: the ledger drops what ``ray`` reported of such a pid.

    Args:
        node: its name, as in the events.
        session: see `ray_processes`.
        refresh_s: how often the process table is read anew; between, only the known ones are looked at.
        table: what reads it.
    """

    def __init__(
        self,
        node: str,
        session: str,
        *,
        refresh_s: float = 10.0,
        table: Callable[[], Iterable[ProcessInfo]] = process_table,
    ) -> None:
        self._node, self._session = node, session
        self._refresh_s, self._table = refresh_s, table
        self._looked = float("-inf")
        self._daemons: dict[int, _Process] = {}
        self._workers: dict[int, _Process] = {}
        self._kinds: dict[int, str] = {}
        self._ended_s = 0.0  # of daemons
        self._pid, self._start = 0, 0  # of the raylet

    def sample(self) -> list[dict[str, Any]]:
        """One `usage` event for the daemons, one for each idle worker; none where there is no Ray.

        `cpu_s` is all that the processes have used. What ended since the last sample is reported once more.
        """
        now_s = time.monotonic()
        ended = _remove_ended(self._daemons), _remove_ended(self._workers)
        if now_s - self._looked >= self._refresh_s:
            self._looked = now_s
            self._kinds = ray_processes(self._table(), self._session)
            for pid, kind in self._kinds.items():
                followed = self._workers if kind == "idle_worker" else self._daemons
                if pid not in followed and (process := _open_process(pid)) is not None:
                    followed[pid] = process
            if self._pid == 0 and (raylets := [pid for pid, kind in self._kinds.items() if kind == "raylet"]):
                self._pid = min(raylets)
                self._start = read_start(self._pid) or 0
        daemons, workers = (
            [*gone, *followed.values()]
            for gone, followed in zip(ended, (self._daemons, self._workers), strict=True)
        )
        cpu_s = self._ended_s + sum(process.cpu_s for process in daemons)
        self._ended_s += sum(process.cpu_s for process in ended[0])
        events = [
            {
                **self._make_usage(worker.pid, worker.start, worker.cpu_s, time.time() - worker.age_s),
                "for_s": worker.age_s,
            }
            for worker in workers
            if self._kinds.get(worker.pid) == "idle_worker"
        ]
        if not daemons and cpu_s == 0.0:
            return events
        oldest = max((process.age_s for process in daemons), default=None)
        since = None if oldest is None else time.time() - oldest
        return [self._make_usage(self._pid, self._start, cpu_s, since), *events]

    def _make_usage(self, pid: int, began: int | None, cpu_s: float, since: float | None) -> dict[str, Any]:
        return {**make_usage(self._node, "ray", pid, cpu_s, began=began), "since": since}


def _open_process(pid: int) -> _Process | None:
    """Begins to follow a process; None where it has ended already."""
    import psutil

    try:
        process = _Process(pid)
    except psutil.NoSuchProcess:
        return None
    return process if process.update() else None


def _remove_ended(processes: dict[int, _Process]) -> list[_Process]:
    """Reads the CPU time of all; removes and returns those that have ended."""
    return [processes.pop(pid) for pid, process in list(processes.items()) if not process.update()]
