"""Preparation workers that are forked from the process that reads their samples.

A worker is ready within milliseconds and shares the pages of all libraries that the process has imported; one
that is started as a new interpreter imports them again. What must not be shared is not: each worker has its own
copy of the pipeline (`pipelines.memory_pickle.Inherited`), our sockets to other workers are closed in it, and it
runs no exit handler and no signal handler of its parent. Libraries compute on one thread there: thread pools do
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
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.child_processes import SINGLE_THREADED
from pipelines.errors import SampleError
from pipelines.prepare.global_generators import preserve_states
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.prepare.torch_threads import limit_torch_threads

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline

_OWN_THREADS = 2  # of a feeder's process before it serves: the main thread, and the one that watches its parent


def prepare_to_fork(pipeline: Pipeline) -> bool:
    """Get a feeder's process ready to fork its workers: prepare a sample, to import here once what stages need.

    Returns:
        Whether it may fork them: no stage or library has begun a thread, which a fork would end.
    """
    with contextlib.suppress(SampleError), limit_torch_threads(), preserve_states():  # a worker meets the error
        SampleMaker(pipeline).make(0, 0)
    if len(os.listdir("/proc/self/task")) > _OWN_THREADS:
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
    os.environ.update(SINGLE_THREADED)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    opencv = sys.modules.get("cv2")
    if opencv is not None:
        opencv.setNumThreads(0)
