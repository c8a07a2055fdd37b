"""Starts the processes of preparation workers: new interpreters, or forks of this process."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from pipelines.description import PipelineDescription
from pipelines.ipc import memory_pickle, messages
from pipelines.ipc.child_processes import child_environment
from pipelines.samples.poison_records import PreparationNote
from pipelines.workers.forked import ForkedProcess, is_shared_after_fork


class CannotStart(OSError):
    """There can be no further process."""


class Process(Protocol):
    """A worker's process: `subprocess.Popen` or `ForkedProcess`."""

    pid: int

    def kill(self) -> None:
        """Kill the process."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for its end; raises `subprocess.TimeoutExpired`."""


class Starter:
    """Starts workers of the same pipelines.

    Args:
        pipelines: number -> pipeline.
        is_forked: whether workers are forked from this process.

    Raises:
        PipelineError: a pipeline cannot be pickled.
    """

    def __init__(self, pipelines: Mapping[int, PipelineDescription], *, is_forked: bool) -> None:
        self._pipelines = dict(pipelines)
        self._inherited: memory_pickle.Inherited | None = None
        self._payload: int | None = None
        if is_forked:
            self._inherited = memory_pickle.Inherited(self._pipelines, is_shared_after_fork)
        else:
            self.get_payload()

    @property
    def is_forked(self) -> bool:
        """Whether workers are forked: they are ready at once."""
        return self._inherited is not None

    def get_payload(self) -> int:
        """The descriptor of a memory file with the pipelines by number, for new interpreters."""
        if self._payload is None:
            self._payload = memory_pickle.dump(self._pipelines)
        return self._payload

    def start(self, ends: list[socket.socket]) -> Process:
        """Start a process that serves these ends of sockets: a worker for each, in threads if there are several.

        Raises:
            CannotStart: there can be no further process.
        """
        try:
            return self._start(ends)
        except OSError as error:
            raise CannotStart(*error.args) from error

    def _start(self, ends: list[socket.socket]) -> Process:
        if self._inherited is None:
            inherited = [self.get_payload(), *(end.fileno() for end in ends)]
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.workers.worker_main", *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        # Not above: a new interpreter runs that module as its program, and would warn of the one imported before.
        from pipelines.workers.worker_main import run_forked

        descriptor = os.dup(ends[0].fileno())  # the socket itself is closed in every child
        try:
            return ForkedProcess(functools.partial(run_forked, descriptor, self._inherited))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Free what workers would be started with."""
        if self._payload is not None:
            os.close(self._payload)
            self._payload = None


def send_progress_note(connection: socket.socket) -> PreparationNote:
    """Send a worker the shared memory in which it notes its present sample; returns it."""
    descriptor = os.memfd_create("note", os.MFD_CLOEXEC)
    try:
        with contextlib.suppress(messages.ConnectionLost):  # its end of file says that it has ended
            messages.send(connection, messages.pack("note"), descriptor)
        return PreparationNote(descriptor)
    finally:
        os.close(descriptor)


def has_message(connection: socket.socket) -> bool:
    """Whether a message of a worker, or its end, waits to be received."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(0))
