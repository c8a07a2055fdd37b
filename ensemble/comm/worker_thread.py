"""A thread that runs collectives beside the backward pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class PendingCall:
    """A call in progress; `wait` returns when it is done, or raises its exception."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._done.is_set()

    def run(self) -> None:
        """Run the call."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Block until it is done."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def run_immediately(work: Callable[[], None]) -> PendingCall:
    """Run the call in this thread; the returned task is done or has failed."""
    task = PendingCall(work)
    task.run()
    return task


class WorkerThread:
    """Runs calls one after the other, in the order of `start`. It is a daemon thread.

    All ranks start the same calls in the same order, so their collectives match as long as only this thread uses
    the communicator.

    Args:
        threads: the number of torch's threads for the calls, a setting of each thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tasks: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> PendingCall:
        """Queue a call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)
            self._thread.start()
        task = PendingCall(work)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End the thread after the queued calls, without waiting for it."""
        self._tasks.put(None)

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        while (task := self._tasks.get()) is not None:
            task.run()
