"""Work that goes on beside the backward pass: a thread of its own for collectives that are made of several."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Task:
    """A piece of work that was begun; `wait` returns when it is done, or raises what it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._done.is_set()

    def run(self) -> None:
        """Do it."""
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


def run_immediately(work: Callable[[], None]) -> Task:
    """A task that is done, or has failed, when it is returned."""
    task = Task(work)
    task.run()
    return task


class WorkerThread:
    """Does one piece of work after the other, in the order in which they came.

    All ranks give theirs the same work in the same order, so what the work says over a communicator that nobody
    else uses meets its counterpart. The thread does not keep the process from ending.

    Args:
        threads: torch's threads for the work; they are a matter of the thread that asks for them.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> Task:
        """Begin as soon as what came before is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lane", daemon=True)
            self._thread.start()
        task = Task(work)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """Take nothing more; what was begun is not waited for."""
        self._tasks.put(None)

    def _run(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        while (task := self._tasks.get()) is not None:
            task.run()
