"""The processes of one run of the study: starts them, receives their messages, measures their usage."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.launch.hosts import Hosts
from benchmarks.sc18.config import ACROSS, Config
from pipelines.errors import PipelineError
from pipelines.ipc.child_processes import child_environment


class StudyProcesses:
    """All processes of one configuration, on one node or several; they end with `run_processes`.

    Attributes:
        received: the values of all messages by kind (`config.send_message`), in the order of their arrival.
    """

    def __init__(self, config: Config, nodes: list[subprocess.Popen[bytes]]) -> None:
        self.received: defaultdict[str, list[Any]] = defaultdict(list)
        self._design, self._nodes = config.design, nodes
        self._buffers = {node.stdout.fileno(): b"" for node in nodes if node.stdout is not None}

    def wait(self, kind: str, count: int) -> None:
        """Wait until `count` messages of a kind have been received.

        Raises:
            PipelineError: a process died.
        """
        while len(self.received[kind]) < count:
            for stdout in select.select([*self._buffers], [], [])[0]:
                if not self._read(stdout):
                    self.finish()
                    raise PipelineError(f"design {self._design}, a node's processes have ended")

    def start_reading(self) -> None:
        """Have all members, which are ready, begin at once."""
        for node in self._nodes:
            assert node.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: `wait` says why
                os.write(node.stdin.fileno(), b"\n")

    def finish(self) -> None:
        """End all processes and read their last messages."""
        _close_inputs(self._nodes)
        for stdout in self._buffers:
            while self._read(stdout):
                pass

    def _read(self, stdout: int) -> bool:
        """Read messages from a node, such as that a process died; returns False at the end of its output."""
        data = os.read(stdout, 1 << 16)
        *lines, self._buffers[stdout] = (self._buffers[stdout] + data).split(b"\n")
        for kind, value in map(json.loads, lines):
            if kind == "died":
                raise PipelineError(f"design {self._design}, {value}")
            self.received[kind].append(value)
        return bool(data)

    # --- resource usage ----------------------------------------------------------------------------------

    def cpu_clocks(self) -> dict[int, float]:
        """pid -> CPU-seconds of every process, so far."""
        clocks = {}
        for pid in self._pids():
            with contextlib.suppress(OSError):  # it has ended
                clocks[pid] = process_clock_s(pid)
        return clocks

    def preparation_pids(self) -> set[int]:
        """The processes that prepare samples."""
        below = (pid for parent in self.received["parent"] for pid in process_tree(parent)[1:])
        return {*self.received["producer"], *below}

    def memory_mb(self) -> float:
        """Proportional set size of all processes, 10^6 bytes: a page that n processes map counts 1/n in each."""
        return sum(read_memory(pid).get("Pss", 0) for pid in self._pids()) / 1e6

    def _pids(self) -> list[int]:
        return [pid for node in self._nodes for pid in process_tree(node.pid)]


@contextlib.contextmanager
def run_processes(config: Config, hosts: Hosts | None) -> Iterator[StudyProcesses]:
    """The processes of a configuration while the context lasts, each node on its host where there are hosts."""
    with contextlib.ExitStack() as stack:
        if config.design in ACROSS:
            meeting = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            config = dataclasses.replace(config, meeting=meeting)
        nodes: list[subprocess.Popen[bytes]] = []
        pipe = subprocess.PIPE
        try:
            for node in range(config.nodes):
                own = json.dumps(dataclasses.asdict(config) | {"node": node})
                command = [sys.executable, "-P", "-m", "benchmarks.sc18.node", own]
                command = hosts.command(node, command) if hosts else command
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=child_environment())
                nodes.append(stack.enter_context(process))
            yield StudyProcesses(config, nodes)
        finally:
            _close_inputs(nodes)


def _close_inputs(nodes: list[subprocess.Popen[bytes]]) -> None:
    for node in nodes:
        assert node.stdin is not None
        node.stdin.close()


def process_tree(pid: int) -> list[int]:
    """The ids of a process and all its descendants.

    The kernel's lists of children (proc_tid_children(5)) are read quickly. Looking at every process, as on kernels
    without those lists, takes so long that it distorts the clocks that are read next.
    """
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        return [pid, *(member_pid.pid for member_pid in psutil.Process(pid).children(recursive=True))]
    pids = [pid]
    for member_pid in pids:
        for children in Path(f"/proc/{member_pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                pids += map(int, children.read_text(encoding="utf-8").split())
    return pids


def process_clock_s(pid: int) -> float:
    """CPU-seconds of another process with the resolution of its clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def read_memory(pid: int) -> dict[str, int]:
    """What smaps_rollup says of a process's memory (proc_pid_smaps(5)): name -> bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    words = [line.split() for line in lines]
    return {word[0].removesuffix(":"): int(word[1]) * 1024 for word in words if word[-1] == "kB"}
