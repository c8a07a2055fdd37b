"""The process of a run's observers, a thread for each; a line of JSON is a message, from the controller and to it.

In: `{"observers": {NAME: {"kind": KIND, "options": OPTIONS}}}`, then `{"end": [NAME], "last": EVENT}`; at the end
of the input the controller is gone. Out: `{"started": true}`; with a "name", `{"failed": TEXT}` when one begins to
fail, `{"works": true}` when it works after that or at first, `{"ended": true, "missing": TEXT}` (or null).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ensemble.events import Event, read_event
from ensemble.reporting.loggers.base import Follower, Logger, RunObserver
from ensemble.spec.loggers import LOGGERS
from ensemble.store import RunDir
from ensemble.store.files import make_directory

WORK_SHARE = 0.1  # of the time that an observer works at most, until the run ends
LAST_S = 20.0  # for a last word when the controller is gone
RETRY_S, LONGEST_RETRY_S = 5.0, 60.0  # after a failure; doubled with each one that follows
LOST = {"lost": True}

Say = Callable[[dict[str, Any]], None]


def make_observer(run_dir: RunDir, name: str, kind: str, options: Mapping[str, Any]) -> RunObserver:
    """The observer of a name: its class is that of its kind in `LOGGERS`.

    Raises:
        PipelineError: it cannot be imported.
    """
    made = LOGGERS.load(kind)
    if issubclass(made, Logger):
        return Follower(run_dir, name, made, options)
    observer: RunObserver = made(run_dir, options)
    return observer


class ObserverThread:
    """Runs one observer: lets it catch up again and again, tries again after a failure, ends on request.

    Args:
        declared: kind and options of the observer.
        say: sends a message to the controller.

    Attributes:
        requests: of the controller.
    """

    def __init__(self, run_dir: RunDir, name: str, declared: Mapping[str, Any], say: Say) -> None:
        self.requests = queue.Queue[dict[str, Any]]()
        self._make: Callable[[], RunObserver] = lambda: make_observer(run_dir, name, **declared)
        self._say: Say = lambda message: say({"name": name, **message})
        self._observer: RunObserver | None = None
        self._failures, self._works = 0, False  # in a row; whether it has worked in this process
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until it has ended, for a limited time."""
        self._thread.join(seconds)

    def _run(self) -> None:
        pause_s = 0.0
        while (request := self._wait(pause_s)) is None:
            pause_s = self._catch_up()
        if request is LOST:
            self._get_observer().lose()
        else:
            self._end(None if request["last"] is None else read_event(request["last"]))

    def _get_observer(self) -> RunObserver:
        if self._observer is None:
            self._observer = self._make()
        return self._observer

    def _wait(self, seconds: float) -> dict[str, Any] | None:
        try:
            return self.requests.get(timeout=seconds)
        except queue.Empty:
            return None

    def _catch_up(self) -> float:
        """Write what is new; returns the seconds to wait before the next time."""
        began = time.monotonic()
        try:
            observer = self._get_observer()
            observer.catch_up()
        except BaseException as error:  # also when a library calls sys.exit
            self._failures += 1
            if self._failures == 1:
                self._say({"failed": describe(error)})
            return min(LONGEST_RETRY_S, RETRY_S * 2.0 ** (self._failures - 1))
        if self._failures or not self._works:
            self._failures, self._works = 0, True
            self._say({"works": True})
        worked_s = time.monotonic() - began
        return observer.follow_s if observer.may_wait else max(observer.follow_s, worked_s * (1 / WORK_SHARE - 1))

    def _end(self, last: Event | None) -> None:
        missing = None
        try:
            self._get_observer().end(last)
        except BaseException as error:
            lacks = "nothing was written" if self._observer is None else self._observer.missing
            missing = f"{describe(error)}; {lacks}"
        self._say({"ended": True, "missing": missing})


def describe(error: BaseException) -> str:
    """An error in one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def make_say() -> Say:
    """A function that sends a message to the controller, from any thread."""
    output, lock = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)  # what libraries print is no message

    def say(message: dict[str, Any]) -> None:
        with lock, contextlib.suppress(BrokenPipeError):  # the controller is gone; its loss is still to be told
            print(json.dumps(message), file=output, flush=True)

    return say


@contextlib.contextmanager
def only_process(run_dir: RunDir) -> Iterator[None]:
    """Wait until the observers of a controller that was killed have ended."""
    make_directory(run_dir.loggers)
    with open(run_dir.loggers / "observers.lock", "ab") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Run the process until the controller ends it, or is gone."""
    run_dir, temporary = RunDir(sys.argv[1]), sys.argv[2]
    say = make_say()
    os.umask(0o077)
    with only_process(run_dir):
        observers = json.loads(sys.stdin.readline())["observers"]
        threads = {name: ObserverThread(run_dir, name, declared, say) for name, declared in observers.items()}
        say({"started": True})
        for line in sys.stdin:
            request = json.loads(line)
            for name in request["end"]:
                threads[name].requests.put(request)
        until = time.monotonic() + LAST_S
        for thread in threads.values():
            thread.requests.put(LOST)
        for thread in threads.values():
            thread.join(max(0.0, until - time.monotonic()))
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(0)  # libraries' threads and exit handlers may wait for a server


if __name__ == "__main__":
    main()
