"""Preparation workers that are forked from the process that feeds them.

A worker is ready within milliseconds and shares the pages of all libraries that the process has imported; one
that is started as a new interpreter imports them again. What must not be shared is not: each worker has its own
copy of the pipeline (`pipelines.ipc.memory_pickle.Inherited`), our sockets to other workers are closed in it, and
it runs no exit handler and no signal handler of its parent. Libraries compute on one thread there: thread pools do
not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Set
from typing import Any

from pipelines.description import PipelineDescription
from pipelines.environment.machine_limits import free_pinned_thread
from pipelines.fingerprint import is_ours
from pipelines.ipc.child_processes import SINGLE_THREADED
from pipelines.prepare.global_generators import preserve_states
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.prepare.torch_threads import limit_torch_threads
from pipelines.sources import Source
from pipelines.sources._base import Subset

_OWN_THREADS = 2  # of a feeder's process before it serves: the main thread, and the one that watches its parent


def is_shared_after_fork(part: Any) -> bool:
    """Whether forked workers may use a part of a pipeline as it is."""
    return isinstance(part, Source) and part.is_fork_safe and is_ours(type(part))


def list_descriptors() -> set[int]:
    """The open file descriptors of this process, without memory files, which are mapped."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            if not os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                found.add(int(name))
    return found


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
    with contextlib.suppress(Exception), limit_torch_threads(), preserve_states():  # the feeder reports the error
        _ = pipeline.layouts
        SampleMaker(pipeline).make(0, 0)
    if len(os.listdir("/proc/self/task")) > _OWN_THREADS or not list_descriptors() <= known:
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
                waiting = select.poll()
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
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    opencv = sys.modules.get("cv2")
    if opencv is not None:
        opencv.setNumThreads(0)
