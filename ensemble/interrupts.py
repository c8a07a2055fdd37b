"""Handles Ctrl-C, SIGTERM, SIGHUP (a terminal that closes) and SIGUSR1 (Slurm's) so that a run ends in order.

A signal is recorded at once and acted on where no operation is half done. Python handles signals in the main
thread only; in other threads the functions of this module do nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

log = logging.getLogger(__name__)

#: The signals that end a run.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Terminated(SystemExit):
    """SIGTERM, SIGHUP or SIGUSR1, raised where Ctrl-C raises KeyboardInterrupt; its code is 128 + n, as in shells.

    Attributes:
        reported: whether a message about the run has been printed.
    """

    def __init__(self, number: int = signal.SIGTERM, *, reported: bool = False) -> None:
        super().__init__(128 + number)
        self.reported = reported


class Interrupted(Exception):
    """What waited for long was ended because of a signal that is deferred."""


# What the deferrals in force have received, the innermost last. Each thread has its own context: a signal that
# ends one run ends nothing that another thread waits for.
_deferred = contextvars.ContextVar[tuple[list[int], ...]]("deferred", default=())


def raise_if_deferred() -> None:
    """For what waits for long: end when a signal has been received that is deferred in this context.

    Raises:
        Interrupted: one has been.
    """
    if any(_deferred.get()):
        raise Interrupted


def raise_interrupted(number: int, message: str) -> NoReturn:
    """Log a message about the run, and raise the exception that the signal usually raises.

    Args:
        number: of the signal.
        message: what happened to the run.

    Raises:
        KeyboardInterrupt: for SIGINT; Terminated: for another signal.
    """
    log.warning("%s", message)
    if number == signal.SIGINT:
        raise KeyboardInterrupt(message) from None
    raise Terminated(number, reported=True) from None


@contextlib.contextmanager
def defer_signals(act: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Defer the first signal of `ENDING`: call `act`, append the signal's number to the list that is yielded.

    A second signal has its usual effect.
    """
    received: list[int] = []
    usual: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for handled, before in usual.items():
            signal.signal(handled, before)
        act()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    usual |= {number: signal.signal(number, handle) for number in _list_handled()}
    token = _deferred.set((*_deferred.get(), received))
    try:
        yield received
    finally:
        _deferred.reset(token)
        for number, before in usual.items():
            if signal.getsignal(number) is handle:  # else the block has set its own
                signal.signal(number, before)


def _list_handled() -> list[signal.Signals]:
    """The signals of `ENDING` that are not ignored (under nohup), without a SIGUSR1 that the user handles."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    own = getattr(handlers[signal.SIGUSR1], "__module__", __name__)
    is_users = handlers[signal.SIGUSR1] is not signal.SIG_DFL and own != __name__
    return [
        number
        for number, handler in handlers.items()
        if handler is not signal.SIG_IGN and not (number == signal.SIGUSR1 and is_users)
    ]


def exit_on_signals() -> None:
    """Make SIGTERM, SIGHUP and SIGUSR1 end the program as `sys.exit` does, unless it has a handler of its own.

    By default they end it at once, without the functions that are registered with atexit.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        return
    for ending in ENDING[1:]:
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, terminate)


@contextlib.contextmanager
def exit_at_once() -> Iterator[None]:
    """Within the block the signals of `ENDING` end the process with one line, for imports with nothing to undo.

    An exception that a handler raises within an import is lost where it meets a destructor or a callback.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"ensemble: {describe(number)}\n".encode())
        os._exit(128 + number)

    with _handled(end):
        yield


@contextlib.contextmanager
def repeat_lost_signals() -> Iterator[None]:
    """A signal whose exception does not leave the block, since foreign code has lost it or turned it into another
    one, raises it again at the end.

    Raises:
        KeyboardInterrupt, Terminated: a signal was received.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise _make_exception(number)

    with _handled(end):
        try:
            yield
        except (KeyboardInterrupt, Terminated):
            raise
        except BaseException:
            if not received:
                raise
    if received:
        raise _make_exception(received[0])


def _make_exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


def describe(number: int) -> str:
    """What a signal did to a command, in a word."""
    return "interrupted" if number == signal.SIGINT else "terminated"


@contextlib.contextmanager
def _handled(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block `handle` handles the signals of `ENDING` that are ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.signal(number, handle) for number in _list_handled()}
    try:
        yield
    finally:
        for number, before in usual.items():
            if signal.getsignal(number) is handle:  # else the block has set its own
                signal.signal(number, before)


def exit_process(code: int) -> NoReturn:
    """End this process as the interpreter does, but without deallocating every module.

    Deallocation takes a quarter of a CPU-second, half a second with torch loaded, and makes a forked worker copy
    most of the pages that it shares. Threads are joined and functions registered with atexit run; from here on a
    signal ends the process at once.
    """
    for number in ENDING:
        if callable(signal.getsignal(number)) and threading.current_thread() is threading.main_thread():
            signal.signal(number, lambda received, _: os._exit(128 + received))
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: lets idle threads of a pool end before it joins them
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    os._exit(code)
