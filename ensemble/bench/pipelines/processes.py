"""The processes of one run of the pipelines study: starts them, receives their messages, measures their usage."""

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
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ensemble.bench.pipelines.config import ACROSS, Config
from pipelines.child_processes import child_environment
from pipelines.errors import PipelineError

# (node, command) -> the command that runs it on that node.
PlaceCommand = Callable[[int, Sequence[str]], list[str]]


class StudyProcesses:
    """All processes of one configuration, on one node or several; they end with the context.

    Args:
        place: turns a command into one that runs on node i.

    Attributes:
        first_ms: of each member: from the start of its reader to its first batch.
        step_times: of each member that has ended its batches: mean milliseconds of a step, and its device.
        groups: node -> the report of its feeder's group (`node.group_report`), after `finish`.
    """

    def __init__(self, config: Config, place: PlaceCommand | None = None) -> None:
        self.first_ms: list[float] = []
        self.step_times: list[tuple[float, str]] = []
        self.groups: dict[int, dict[str, Any]] = {}
        self._stack = contextlib.ExitStack()
        if config.design in ACROSS:
            meeting = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            config = dataclasses.replace(config, meeting=meeting)
        self._config = config
        self._received: Counter[str] = Counter()
        self._producers: set[int] = set()
        self._parents: set[int] = set()  # whose descendants prepare samples
        self._buffers: dict[int, bytes] = {}
        self._nodes: list[subprocess.Popen[bytes]] = []
        try:
            for node in range(config.nodes):
                self._start(node, place or (lambda _, command: list(command)))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _start(self, node: int, place: PlaceCommand) -> None:
        config = dataclasses.replace(self._config, node=node)
        command = place(node, [sys.executable, "-P", "-m", "ensemble.bench.pipelines.node", config.to_json()])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
        self._nodes.append(self._stack.enter_context(process))
        assert process.stdout is not None
        self._buffers[process.stdout.fileno()] = b""

    def __enter__(self) -> StudyProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_inputs()
        self._stack.close()

    def _close_inputs(self) -> None:
        for process in self._nodes:
            assert process.stdin is not None
            process.stdin.close()

    def wait(self, kind: str, count: int) -> None:
        """Wait until `count` messages of a kind have been received.

        Raises:
            PipelineError: a process died.
        """
        while self._received[kind] < count:
            for stdout in select.select([*self._buffers], [], [])[0]:
                if not self._read(stdout):
                    self.finish()
                    raise self._error("a node's processes have ended")

    def finish(self) -> None:
        """End all processes and read their last messages."""
        self._close_inputs()
        for stdout in self._buffers:
            while self._read(stdout):
                pass

    def _read(self, stdout: int) -> bool:
        """Read messages from a node, such as that a process died; returns False at the end of its output."""
        data = os.read(stdout, 1 << 16)
        *lines, self._buffers[stdout] = (self._buffers[stdout] + data).split(b"\n")
        for line in lines:
            self._handle(*line.decode().split(" ", 2))
        return bool(data)

    def _handle(self, kind: str, number: str, text: str) -> None:
        self._received[kind] += 1
        if kind == "producer":
            self._producers.add(int(number))
        elif kind == "parent":
            self._parents.add(int(number))
        elif kind == "first":
            self.first_ms.append(float(text))
        elif kind == "last":
            mean_ms, device = text.split(" ")
            self.step_times.append((float(mean_ms), device))
        elif kind == "feeder":
            self.groups[int(number)] = json.loads(text)
        elif kind == "died":
            raise self._error(text)

    def _error(self, text: str) -> PipelineError:
        return PipelineError(f"design {self._config.design}, {text}")

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
        return self._producers | {pid for parent in self._parents for pid in process_tree(parent)[1:]}

    def memory_mb(self) -> float:
        """Proportional set size of all processes, 10^6 bytes: a page that n processes map counts 1/n in each."""
        return sum(read_memory(pid).get("Pss", 0) for pid in self._pids()) / 1e6

    def _pids(self) -> list[int]:
        return [pid for node in self._nodes for pid in process_tree(node.pid)]


def process_tree(pid: int) -> list[int]:
    """The ids of a process and all its descendants.

    The kernel's lists of children (proc_tid_children(5)) are read quickly. Looking at every process, as on kernels
    without those lists, takes so long that it distorts the clocks that are read next.
    """
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                found += map(int, children.read_text(encoding="utf-8").split())
    return found


def process_clock_s(pid: int) -> float:
    """CPU-seconds of another process with the resolution of its clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def read_memory(pid: int) -> dict[str, int]:
    """What smaps_rollup says of a process's memory (proc_pid_smaps(5)): name -> bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    words = [line.split() for line in lines]
    return {each[0].removesuffix(":"): int(each[1]) * 1024 for each in words if each[-1] == "kB"}
