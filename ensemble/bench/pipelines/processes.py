"""One run of the pipelines study: its processes on one node or several, what they say and what they use."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
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

# A node's process -> the command that runs it there.
Placed = Callable[[int, Sequence[str]], list[str]]


class Running:
    """All processes of one configuration; they end with the context.

    Args:
        placed: makes a command one that runs on node i.

    Attributes:
        said: of each "last": the mean time of a step in milliseconds, and where it was computed.
        groups: node -> what its feeder said of its group (`host.group`), once `finish` was called.
    """

    def __init__(self, config: Config, placed: Placed | None = None) -> None:
        self.said: list[tuple[float, str]] = []
        self.groups: dict[int, dict[str, Any]] = {}
        self._owned = contextlib.ExitStack()
        if config.design in ACROSS:
            meeting = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            config = dataclasses.replace(config, meeting=meeting)
        self._config = config
        self._heard: Counter[str] = Counter()
        self._producers: set[int] = set()
        self._buffers: dict[int, bytes] = {}
        self._selector = self._owned.enter_context(selectors.DefaultSelector())
        self._nodes: list[subprocess.Popen[bytes]] = []
        try:
            for node in range(config.nodes):
                self._start(node, placed or (lambda _, command: list(command)))
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _start(self, node: int, placed: Placed) -> None:
        config = dataclasses.replace(self._config, node=node)
        command = placed(node, [sys.executable, "-P", "-m", "ensemble.bench.pipelines.node", config.to_json()])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
        self._nodes.append(self._owned.enter_context(process))
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ)
        ended = os.pidfd_open(process.pid)
        self._owned.callback(os.close, ended)
        self._selector.register(ended, selectors.EVENT_READ)

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell_to_end()
        self._owned.close()

    def _tell_to_end(self) -> None:
        for process in self._nodes:
            assert process.stdin is not None
            process.stdin.close()

    def wait(self, awaited: str, count: int) -> None:
        """Wait until a word was said `count` times.

        Raises:
            PipelineError: a process died.
        """
        while self._heard[awaited] < count:
            for key, _ in self._selector.select():
                if isinstance(key.fileobj, int):
                    self._last_words()
                    raise self._died("a node's processes have ended")
                if not self._listen(key.fd):
                    self._selector.unregister(key.fileobj)

    def finish(self) -> None:
        """End all processes and take their last reports."""
        self._tell_to_end()
        self._last_words()

    def _last_words(self) -> None:
        """What is said until everybody has ended, or that somebody died."""
        self._tell_to_end()
        for process in self._nodes:
            assert process.stdout is not None
            while self._listen(process.stdout.fileno()):
                pass

    def _listen(self, stdout: int) -> bool:
        """Take what was said; False at its end."""
        got = os.read(stdout, 1 << 16)
        *lines, self._buffers[stdout] = (self._buffers.get(stdout, b"") + got).split(b"\n")
        for line in lines:
            self._hear(*line.decode().split(" ", 2))
        return bool(got)

    def _hear(self, word: str, number: str, text: str) -> None:
        self._heard[word] += 1
        if word == "producer":
            self._producers.add(int(number))
        elif word == "last":
            mean_ms, where = text.split(" ")
            self.said.append((float(mean_ms), where))
        elif word == "feeder":
            self.groups[int(number)] = json.loads(text)
        elif word == "died":
            raise self._died(text)

    def _died(self, text: str) -> PipelineError:
        return PipelineError(f"design {self._config.design}, {text}")

    # --- what they use ----------------------------------------------------------------------------------

    def clocks(self) -> dict[int, float]:
        """pid -> CPU-seconds so far of every process."""
        clocks = {}
        for pid in self._pids():
            with contextlib.suppress(OSError):  # it has ended
                clocks[pid] = process_clock_s(pid)
        return clocks

    def preparers(self) -> set[int]:
        """The processes that prepare samples."""
        workers = {
            pid
            for pid in self._pids()
            if b"pipelines.feeder.worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        }
        return workers | self._producers

    def memory_mb(self) -> float:
        """Proportional set size of all processes, 10^6 bytes: a page that n processes map counts 1/n in each."""
        return sum(map(proportional_bytes, self._pids())) / 1e6

    def _pids(self) -> list[int]:
        return [pid for node in self._nodes for pid in tree(node.pid)]


def tree(pid: int) -> list[int]:
    """A process and all that descend from it.

    The kernel's lists of children (proc_tid_children(5)) are read at once, where looking at every process of the
    machine takes so long that the clocks read next say something else: only a kernel without them is asked so.
    """
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                found += map(int, children.read_text().split())
    return found


def process_clock_s(pid: int) -> float:
    """CPU-seconds of another process with the resolution of its clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def proportional_bytes(pid: int) -> int:
    """A process's proportional set size (proc_pid_smaps(5)).

    Its resident size counts shared memory in every process that maps it: a sum of those means nothing.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise PipelineError(f"process {pid} has no proportional set size")
