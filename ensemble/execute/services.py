"""What a node offers to its members, whichever executor runs them: feeders, MPS, what they and the node use.

A thin shell over `pipelines.feed`: it turns the reports of feeder processes into `feeder` and `usage` events,
and samples the node's power once a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import selectors
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.execute.host import this_node
from ensemble.execute.mps import Mps, end_left_behind
from ensemble.schedule import Node
from ensemble.spec import Ensemble, SpecError

if TYPE_CHECKING:
    from pipelines import Peers
    from pipelines.feed import FeederProcess

POWER_EVERY_S = 1.0
TOLD = (
    "prepared",
    "consumed",
    "skipped",
    "restarts",
    "detached",
    "members",
    "fullness",
    "capacity",
    "group",
    "cache",
)
RETURN_S = 5.0  # a feeder that takes another's place waits no longer for those that went on alone


@dataclass(eq=False)
class _Feeder:
    cohort: int
    process: FeederProcess
    sample_bytes: int
    usage: dict[str, float] = field(default_factory=dict)


class NodeServices:
    """Feeders and power of one node.

    Args:
        node: its name in the events.
        run_dir: of the run; names the directory of the feeders' sockets.
        ensemble: whose pipelines are prepared.
        selector: where descriptors to wait on are registered, each with a function that takes what is there.
        tell: gets each event.

    Attributes:
        directory: mode 0700, for sockets; removed by `close`.
    """

    def __init__(
        self,
        node: str,
        run_dir: Path,
        ensemble: Ensemble,
        selector: selectors.BaseSelector,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        from ensemble.meter import PowerMeter

        self.node = node
        self.directory, self._lock = _socket_directory(run_dir, node)
        self._ensemble = ensemble
        self._selector = selector
        self._tell = tell
        self._feeders: dict[int, _Feeder] = {}
        self._known: set[int] = set()
        self._meter = PowerMeter(node)
        self._meter.start()
        self.next_sample = time.monotonic() + POWER_EVERY_S
        self._mps: Mps | None = None
        if ensemble.mps and ensemble.devices != "cpu" and self.describe().gpus:
            self._mps = Mps(self.directory)
        else:
            end_left_behind(self.directory)

    def describe(self) -> Node:
        """This host as a node."""
        return this_node(self.node, power=self._meter.describe())

    def sample(self) -> None:
        """Tell the power since the last sample, if a second has gone by; `next_sample` says when it will have."""
        now = time.monotonic()
        if now >= self.next_sample:
            self.next_sample = now + POWER_EVERY_S
            self._tell({"type": "power", **self._meter.sample()})

    def start_feeder(
        self, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str:
        """Start a cohort's feeder and return its address, the same one each time; see `Executor`.

        Raises:
            PipelineError: the pipeline cannot be prepared.
        """
        from pipelines.feed import spawn
        from pipelines.ring import sample_bytes

        ensemble = self._ensemble
        splits = {"valid": ensemble.valid, "test": ensemble.test}
        again = cohort in self._known
        self._known.add(cohort)
        process = spawn(
            ensemble.stream,
            resident={key: pipe for key, pipe in splits.items() if pipe is not None},
            replacement=again or late,
            expect=expect,
            capacity=capacity,
            workers=ensemble.prep_workers,
            gate_timeout_s=min(ensemble.gate_timeout_s, RETURN_S) if again else ensemble.gate_timeout_s,
            policy=ensemble.stall_policy,
            stall_limit_s=ensemble.stall_limit_s,
            cache=ensemble.cache,
            cache_bytes=ensemble.cache_bytes,
            cache_dir=ensemble.cache_dir,
            peers=peers,
            design="auto" if peers is None else ensemble.sharing,
            address=self.directory / f"feeder-{cohort}",
        )
        feeder = self._feeders[cohort] = _Feeder(cohort, process, sample_bytes(ensemble.stream.fields))
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._from_feeder(feeder))
        return process.address

    def expect(self, cohort: int, members: int) -> None:
        """Let a feeder's start gate wait for that many members."""
        if cohort in self._feeders:
            self._feeders[cohort].process.expect(members)

    def stop_feeder(self, cohort: int) -> None:
        """End that feeder; nothing happens where there is none."""
        feeder = self._feeders.pop(cohort, None)
        if feeder is not None:
            self._selector.unregister(feeder.process.stdout)
            for report in feeder.process.stop():
                self._report(feeder, report)

    def close(self) -> None:
        """End all feeders and remove the directory."""
        for cohort in list(self._feeders):
            self.stop_feeder(cohort)
        self._meter.close()
        if self._mps is not None:
            self._mps.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _from_feeder(self, feeder: _Feeder) -> None:
        reports = feeder.process.read()
        for report in reports or []:
            self._report(feeder, report)
        if reports is None:
            self._selector.unregister(feeder.process.stdout)
            del self._feeders[feeder.cohort]
            feeder.process.stop()
            self._tell({"type": "feeder_exited", "node": self.node, "cohort": feeder.cohort, "detail": "it died"})

    def _report(self, feeder: _Feeder, report: dict[str, Any]) -> None:
        """One line of a feeder as a `feeder` event and `usage` events of whole processes, their start included."""
        from ensemble.meter import cpu_seconds

        if report["type"] != "feeder":
            return
        pids = report["pids"]
        group = report["group"] or {}
        live = {"feed": [pids["feed"], *([group["pid"]] if group.get("pid") else [])], "prepare": pids["prepare"]}
        for role, reported_s in report["cpu"].items():
            seen_s = sum(cpu_seconds(pid) or 0.0 for pid in live[role])
            feeder.usage[role] = max(reported_s, seen_s, feeder.usage.get(role, 0.0))
        told = {"cohort": feeder.cohort, "pid": pids["feed"], "workers": self._ensemble.prep_workers}
        told |= {key: report[key] for key in TOLD} | {"ring_bytes": report["capacity"] * feeder.sample_bytes}
        self._tell({"type": "feeder", "node": self.node, **told, "sent_bytes": group.get("sent_bytes", 0)})
        for role, cpu_s in feeder.usage.items():
            self._used(role, pids["feed"], cpu_s)

    def _used(self, role: str, pid: int, cpu_s: float) -> None:
        who = {"node": self.node, "role": role, "member": None, "rank": None, "pid": pid}
        self._tell({"type": "usage", **who, "cpu_s": cpu_s, "origin": "measured"})


def _socket_directory(run_dir: Path, node: str) -> tuple[Path, int | None]:
    """A directory of mode 0700 for sockets, short enough for their names, and the lock that says it is in use.

    What a killed controller left of this run is removed, whatever its executor called this node: nobody locks it.
    The same directory again may still be locked by an agent that is just dying.
    """
    run, here = (hashlib.sha256(text).hexdigest() for text in (os.fsencode(run_dir), node.encode()))
    mine = f"ensemble-{os.geteuid()}-{run[:8]}"
    parent = Path(tempfile.gettempdir())
    for left in parent.glob(f"{mine}-*"):
        lock = _lock(left)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    directory = parent / f"{mine}-{here[:4]}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise SpecError(f"{directory} is not a directory of yours alone (mode 0700); remove it")
    return directory, _lock(directory)


def _lock(directory: Path) -> int | None:
    """A descriptor that keeps a directory locked (flock(2)); None where another process does."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
