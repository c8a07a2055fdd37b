"""Starts the processes of preparation workers: new interpreters, or forks of the process that feeds them.

A forked worker is ready within milliseconds and shares the pages of all imported libraries. What must not be
shared is not: each has its own copy of the pipeline (`memory_pickle.Inherited`) and none of our sockets to others,
exit handlers and signal handlers; libraries compute on one thread, as thread pools do not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from pipelines.description import PipelineDescription
from pipelines.environment.machine_limits import free_pinned_thread
from pipelines.environment.torch_threads import limit_torch_threads
from pipelines.fingerprint import is_ours
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import SINGLE_THREADED, child_environment
from pipelines.prepare.generators import find_global, preserve_states
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.sources import Source
from pipelines.sources._subset import Subset

_JEMALLOC = "jemalloc_bg_thd"  # of pyarrow; forks do without it
_OWN_THREADS = 1  # of a feeder's process before it serves, without the main one: that which watches its parent


class CannotStart(OSError):
    """There can be no further process."""


class Starter:
    """Starts workers of the same pipelines.

    Args:
        pipelines: number -> pipeline.
        is_forked: whether workers are forked from this process: they are ready at once.

    Raises:
        PipelineError: a pipeline cannot be pickled.
    """

    def __init__(self, pipelines: Mapping[int, PipelineDescription], *, is_forked: bool) -> None:
        self.is_forked = is_forked
        self._pipelines = dict(pipelines)
        self._payload: int | None = None
        if is_forked:
            self._inherited = memory_pickle.Inherited(self._pipelines, is_shared_after_fork)
        else:
            self.get_payload()

    def get_payload(self) -> int:
        """The descriptor of a memory file with the pipelines by number, for new interpreters."""
        if self._payload is None:
            self._payload = memory_pickle.dump(self._pipelines)
        return self._payload

    def start(self, end: socket.socket) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start a worker that serves this end of a socket.

        Raises:
            CannotStart: there can be no further process.
        """
        descriptor = os.dup(end.fileno())  # the socket itself is closed in every child
        try:
            if self.is_forked:
                # Not above: a new interpreter runs that module as its program, and would warn of this import.
                from pipelines.workers.worker_main import run_forked

                return ForkedProcess(functools.partial(run_forked, descriptor, self._inherited))
            inherited = [self.get_payload(), descriptor]
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.workers.worker_main", *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        except OSError as error:
            raise CannotStart(*error.args) from error
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Free what workers would be started with."""
        if self._payload is not None:
            os.close(self._payload)
            self._payload = None


def is_shared_after_fork(part: Any) -> bool:
    """Whether forked workers may use a part of a pipeline as it is."""
    return isinstance(part, Source) and part.is_fork_safe and is_ours(type(part))


def list_descriptors() -> set[int]:
    """The open file descriptors of this process, without memory files, which are mapped."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            if not os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                descriptors.add(int(name))
    return descriptors


def list_threads() -> list[str]:
    """The names of this process's threads that a fork would lack and miss, without the main one."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append((int(thread), Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").strip()))
    return [name for thread, name in names if thread != os.getpid() and name != _JEMALLOC]


def prepare_to_fork(pipeline: PipelineDescription, known: Set[int]) -> bool:
    """Get a feeder's process ready to fork its workers: run all stages, to import here once what they need.

    Args:
        known: the descriptors that were open before the pipeline was unpickled.

    Returns:
        Whether it may fork them. It may not where a stage or library has begun a thread, which a fork would end,
        or has opened a file, whose position all workers would share; only sources that are made for it may.
    """
    whole = pipeline.source
    while isinstance(whole, Subset):
        whole = whole.source
    if is_shared_after_fork(whole) and list_descriptors() <= known:
        with contextlib.suppress(Exception):  # a worker meets the error, too
            pipeline.source[0]
        known = list_descriptors()
    with contextlib.suppress(Exception), limit_torch_threads(), preserve_states(find_global()):
        _ = pipeline.layouts  # the feeder reports an error
        SampleMaker(pipeline).make(0, 0)
    if len(list_threads()) > _OWN_THREADS or not list_descriptors() <= known:
        return False
    gc.collect()
    gc.freeze()  # a collection here would write to pages that the workers share
    return True


class ForkedProcess:
    """A forked child of this process, with what a worker pool uses of `subprocess.Popen`.

    Args:
        run: what the child runs; the process ends when it returns.

    Raises:
        OSError: the process cannot be forked.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):  # it is closed, or leads nowhere
                    stream.flush()  # else the child would write the buffer's content, too
        self._parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(run)
        self._has_ended = False

    def kill(self) -> None:
        """Kill the child."""
        if not self._has_ended and os.getpid() == self._parent:
            os.kill(self.pid, signal.SIGKILL)  # until it is waited for, no other process can have its number

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the child's end.

        Raises:
            subprocess.TimeoutExpired: it has not ended after so many seconds.
        """
        if self._has_ended or os.getpid() != self._parent:
            return
        if timeout is not None:
            try:
                ended = os.pidfd_open(self.pid)
            except ProcessLookupError:  # this program ignores SIGCHLD, or waits for all children
                self._has_ended = True
                return
            try:
                waiting = select.poll()  # not select(2): it knows 1,024 descriptors
                waiting.register(ended, select.POLLIN)
                if not waiting.poll(1000 * timeout):
                    raise subprocess.TimeoutExpired("a preparation worker", timeout)
            finally:
                os.close(ended)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._has_ended = True


def _run_child(run: Callable[[], None]) -> None:
    """Be the child; does not return."""
    try:
        _detach_from_parent()
        run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _detach_from_parent() -> None:
    """Undo what a fork passes on and a worker must not have."""
    gc.freeze()  # a collection that touched the parent's objects would copy their pages
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C in a terminal reaches all its processes; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    free_pinned_thread()
    os.environ.update(SINGLE_THREADED)
    torch, opencv = sys.modules.get("torch"), sys.modules.get("cv2")
    if torch is not None:
        torch.set_num_threads(1)
    if opencv is not None:
        opencv.setNumThreads(0)
