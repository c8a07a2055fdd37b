"""Connects to Ray in a thread of its own, with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ensemble.interrupts import raise_if_deferred
from ensemble.spec import SpecError

LOOK_S = 0.1  # how often it is looked whether a signal has been received meanwhile


class Connector(threading.Thread):
    """Connects to Ray while another thread waits, which neither a signal nor a time limit could end otherwise.

    It lives as long as the connection: the kernel kills the daemons of a Ray of our own when the thread that
    started them ends (PR_SET_PDEATHSIG).

    Args:
        where: of the Ray, for messages.
        connect: connects to it, and raises where it cannot.
    """

    def __init__(self, where: str, connect: Callable[[], None]) -> None:
        super().__init__(name="ray", daemon=True)
        self.where = where
        self._connect = connect
        self._lock = threading.Lock()  # `connect` ends either in time or after it was given up
        self._tried, self._given_up = threading.Event(), threading.Event()
        self._ended = threading.Event()  # nothing of `connect` runs any more
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Connect, then wait for the end of the connection; one that comes too late is ended at once."""
        try:
            self._connect()
        except BaseException as error:
            self._error = error
        with self._lock:
            if not self._given_up.is_set():
                self._tried.set()
        if not self.has_tried and self._error is None:
            import ray

            ray.shutdown()
        self._ended.set()
        self._over.wait()

    @property
    def has_tried(self) -> bool:
        """Whether `connect` has ended, well or not, before it was given up."""
        return self._tried.is_set()

    def wait(self, limit_s: float) -> None:
        """Wait until `connect` has ended; raises what it raised.

        Raises:
            TimeoutError: it takes longer than `limit_s`.
            Interrupted: there is a signal that is deferred.
        """
        if not wait(self._tried, limit_s):
            raise TimeoutError(f"ray.init has not returned within {limit_s:g} s")
        if self._error is not None:
            raise self._error

    def wait_until_ended(self, limit_s: float) -> bool:
        """Wait until `connect` has ended, also one that was given up; False: it has not within `limit_s`."""
        return wait(self._ended, limit_s)

    def give_up(self) -> None:
        """Leave `connect` alone, which cannot be ended, unless it has just ended."""
        with self._lock:
            if not self.has_tried:
                self._given_up.set()

    def end(self) -> None:
        """The connection has ended."""
        self._over.set()


_latest: Connector | None = None  # of this process, which has at most one connection to Ray


def wait(event: threading.Event, limit_s: float) -> bool:
    """Wait for an event; False: it has not come. Raises `Interrupted` on a signal that is deferred."""
    until = time.monotonic() + limit_s
    while not event.wait(LOOK_S):
        raise_if_deferred()
        if time.monotonic() > until:
            return False
    return True


def connect_to(where: str, connect: Callable[[], None]) -> Connector:
    global _latest
    _latest = Connector(where, connect)
    return _latest


def await_earlier_start(limit_s: float) -> None:
    """Wait for a start that was given up and still hangs: two in one process would disturb each other.

    Raises:
        SpecError: it hangs for longer than `limit_s`.
        Interrupted: there is a signal that is deferred.
    """
    if _latest is not None and not _latest.wait_until_ended(limit_s):
        raise SpecError(
            f"an earlier start of Ray, which timed out, still hangs {_latest.where} and cannot be ended: "
            "start a new process"
        )
