"""Starts a node's checker (`ensemble.executors.checker_main`) when a member first asks for it.

The socket is this process's, so members can connect before there is a checker. After `MOST_STARTS`, or where a
comparison has hung, there is none any more: members then go on without comparing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from ensemble.events import Report
from ensemble.executors.spawn import (
    ForkServer,
    kill_group,
    make_node_environment,
    make_plain_environment,
)
from ensemble.meter.cpu import cpu_seconds, make_usage, read_start
from ensemble.meter.memory import tree_memory_gb
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.train.node_checks import CHECKER, make_checker_address
from pipelines.ipc import messages

log = logging.getLogger(__name__)

MOST_STARTS = 3
#: The exit status of one that took too long for a comparison (`faulthandler`), or failed by itself.
_GAVE_UP = 1


class CheckerProcess:
    """The checker of one node, and the socket at which it serves.

    Args:
        node: its name in the events.
        directory: of the node.
        run_dir: the run directory.
        selector: where the socket is registered while there is no checker.
        emit: called with each event.
        fork: makes a request to the fork server.
        count: returns the number of a request to it.

    Attributes:
        number: of the request to the fork server.
        log: file of its output.
        pid: None while there is none.
    """

    def __init__(
        self,
        node: str,
        directory: Path,
        run_dir: str,
        selector: selectors.BaseSelector,
        emit: Callable[[Report], None],
        fork: Callable[[Callable[[ForkServer], None]], None],
        count: Callable[[], int],
    ) -> None:
        self.number = -1
        self.log = RunDir(run_dir).log(CHECKER)
        self.pid: int | None = None
        self._node, self._directory, self._run_dir = node, directory, run_dir
        self._selector, self._emit, self._fork, self._count = selector, emit, fork, count
        self._pidfd: int | None = None
        self._starts, self._is_running = 0, False
        self._reported_s = 0.0
        self._used_s: dict[int, float] = {}  # by process id
        self._listener: socket.socket | None = messages.listen(str(make_checker_address(directory)))
        selector.register(self._listener, selectors.EVENT_READ, self._start)

    def _start(self) -> None:
        """Start a checker: a member has connected."""
        assert self._listener is not None
        self._selector.unregister(self._listener)
        self._starts, self._is_running = self._starts + 1, True
        self.number = self._count()
        environment = make_plain_environment() | make_node_environment(self._directory)
        try:
            make_directory(self.log.parent)
            request = self.number, self.log, self._listener, environment, self._run_dir
            self._fork(lambda forks: forks.fork_checker(*request))
        except OSError as error:  # no process or descriptor is left
            self._is_running = False
            self._give_up(f"its checker cannot be started: {error}")

    def has_started(self, pid: int, pidfd: int | None) -> None:
        """Take note of its process."""
        self._began, self._pidfd, self._reported_s = read_start(pid), pidfd, 0.0
        self.pid = pid  # last: `make_usage` is called in another thread, too

    def watch(self) -> None:
        """Wait for the end of a process that no fork server reports, if there is one."""
        if not self._is_running:
            return
        if self._pidfd is None:
            self.has_ended(None)
        elif self._pidfd not in self._selector.get_map():
            self._selector.register(self._pidfd, selectors.EVENT_READ, lambda: self.has_ended(None))

    def has_ended(self, cpu_s: float | None, code: int | None = None) -> None:
        """Take note of its end, and wait for the next member that asks.

        Args:
            cpu_s: CPU-seconds that it has used; None if unknown.
            code: its exit status; None if unknown.
        """
        if self.pid is not None and cpu_s is not None:
            self._used_s[self.pid] = cpu_s
        self.report_usage()
        if self.pid is not None:
            kill_group(self.pid)
        self._close_process()
        self._is_running = False
        if self._listener is None:
            return
        if code == _GAVE_UP:
            self._give_up("a comparison took longer than prepare_timeout_s, or failed")
        elif self._starts == MOST_STARTS:
            self._give_up(f"its checker has died {MOST_STARTS} times")
        else:
            self._selector.register(self._listener, selectors.EVENT_READ, self._start)

    def _give_up(self, why: str) -> None:
        log.warning("samples are not compared any more on node %s: %s; see %s", self._node, why, self.log)
        self._close_listener()

    def make_usage(self) -> Report | None:
        """A `usage` event with the CPU time that it has used so far; None where it does not run."""
        pid = self.pid
        if pid is None:
            return None
        used_s = max(self._used_s.get(pid, 0.0), cpu_seconds(pid) or 0.0)
        return make_usage(self._node, "verify", pid, used_s, began=self._began)

    def report_usage(self) -> None:
        """Emit the CPU time that it has used so far, and the memory that it holds, if there is more to say."""
        usage = self.make_usage()
        if self.pid is not None and usage is not None and usage["cpu_s"] > self._reported_s:
            self._used_s[self.pid] = self._reported_s = usage["cpu_s"]
            held_gb = tree_memory_gb(self.pid)
            self._emit(usage if held_gb is None else {**usage, "memory_gb": held_gb})

    def _close_process(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
        self.pid = self._pidfd = None

    def _close_listener(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(make_checker_address(self._directory))

    def close(self) -> None:
        """Report what it has used, and end it."""
        self.report_usage()
        if self.pid is not None:
            kill_group(self.pid)
        self._close_process()
        self._close_listener()
