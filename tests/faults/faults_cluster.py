"""Several Ray nodes on this machine, to be killed whole: with its processes, its temporary files, its sockets.

Every process of a node carries `FAULTS_NODE` in its environment, which is how it is found, and `TMPDIR` below a
directory of its node, which goes when the node is killed, as the disk of a machine that is gone does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from kit.event_dicts import fold, read_events
from kit.leftovers import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "executors" / "ray"))
from started_cluster import make_cluster
from two_nodes import wait_for_nodes

from ensemble.store import RunState, StoreError

LIMIT_S = 600.0  # of what hangs
ROOT = Path(__file__).parents[2]
CHILD_PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)])


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Processes, not this one, that have a variable in their environment; of a zombie nobody can tell."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def list_left(processes: Iterable[psutil.Process], tmp: Path) -> list[str]:
    """Those of processes that live, and temporary files."""
    found = [str(path) for pattern in ("ensemble-*", "ray-*") for path in tmp.glob(pattern)]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


def kill_all(processes: Iterable[psutil.Process]) -> None:
    known = list(processes)
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(known, timeout=300)


class Nodes:
    """A Ray head (node 0) and more nodes, each with `cpus` cores to offer; with token authentication.

    Attributes:
        environment: for drivers.
        alive: the numbers of nodes that were not killed.
    """

    def __init__(self, count: int, cpus: int = 1) -> None:
        self._stack, self._cpus, self._next, self.alive = contextlib.ExitStack(), cpus, 0, set[int]()
        self._cluster = self._stack.enter_context(make_cluster())
        self.environment = self._cluster.environment
        self.environment["PYTHONPATH"] += f":{CHILD_PATH}"
        with contextlib.ExitStack() as closing:
            closing.callback(self.close)
            self.have(count)
            closing.pop_all()

    def have(self, count: int) -> None:
        """Start nodes until there are so many; Ray then knows of those that were killed."""
        if len(self.alive) >= count:
            return
        while len(self.alive) < count:
            number, self._next = self._next, self._next + 1
            self.tmp(number).mkdir(mode=0o700)
            marks = {"FAULTS_NODE": self._mark(number), "TMPDIR": str(self.tmp(number))}
            if number == 0:
                self._cluster.start(cpus=self._cpus, variables=marks)
            else:
                self._cluster.join(marks, self._cpus)
            self.alive.add(number)
        wait_for_nodes(self.environment, len(self.alive))

    def tmp(self, number: int) -> Path:
        return self._cluster.directory / f"n{number}"

    def _mark(self, number: int) -> str:
        return f"{self._cluster.directory.name}-{number}"

    def of(self, number: int) -> list[psutil.Process]:
        return processes_with("FAULTS_NODE", self._mark(number))

    def ours(self) -> list[psutil.Process]:
        """What runs on the nodes for our runs: agents, workers, feeders, fork servers and what they started."""
        return self._cluster.find("ray::NodeAgent", "ensemble.", "pipelines.", "multiprocessing")

    def kill(self, number: int) -> None:
        """End a node as a power cut does: all its processes at once, its temporary files gone."""
        self.alive.remove(number)
        known = self.of(number)
        for process in known:  # first stopped, so that none sees another's end before its own
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        kill_all([*known, *self.of(number)])
        kill_all(self.of(number))
        shutil.rmtree(self.tmp(number), ignore_errors=True)

    def close(self) -> None:
        for number in sorted(self.alive, reverse=True):
            self.kill(number)
        self._stack.close()


class Driver:
    """A driver (`faults_driver.py`) in a process group of its own, and what its run has logged."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str], **told: Any) -> None:
        self._log = run_dir / "events.jsonl"
        script = Path(__file__).with_name("faults_driver.py")
        command = [sys.executable, str(script), str(run_dir), json.dumps(told)]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads fills up
        self.process = subprocess.Popen(command, env=environment, stderr=self._said, start_new_session=True)

    def list_events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Events so far; none while the log is being written anew."""
        with contextlib.suppress(StoreError):
            events = read_events(self._log) if self._log.exists() else []
            return [event for event in events if kind in (None, event["type"])]
        return []

    @property
    def state(self) -> RunState:
        return fold(self.list_events())

    def wait_for(self, holds: Callable[[], object]) -> None:
        def is_so() -> bool:
            is_over = self.process.poll() is not None  # what it logs last may be what is waited for
            if holds():
                return True
            assert not is_over, self.end()
            return False

        wait_until(is_so, "what is waited for", LIMIT_S)

    def end(self) -> tuple[int, str]:
        try:
            code = self.process.wait(timeout=LIMIT_S)
        finally:
            self.process.kill()
        with self._said:
            self._said.seek(0)
            return code, self._said.read()
