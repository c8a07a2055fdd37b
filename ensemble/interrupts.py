"""Ctrl-C, SIGTERM and SIGHUP (a terminal that closes), turned into an orderly end.

They are noticed at once, and acted on where nothing is half done.

Signals can be handled in the main thread only; in another all of this does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

log = logging.getLogger(__name__)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP, raised where Ctrl-C raises KeyboardInterrupt; its code is 143 or 129, as in shells.

    Attributes:
        said: whether the user has been told what became of the run.
    """

    def __init__(self, number: int = signal.SIGTERM, *, said: bool = False) -> None:
        super().__init__(128 + number)
        self.said = said


def interrupted(number: int, what: str) -> NoReturn:
    """Say what became of the run, and raise what the signal usually raises.

    Raises:
        KeyboardInterrupt: for SIGINT; Terminated: for another signal.
    """
    log.warning("%s", what)
    if number == signal.SIGINT:
        raise KeyboardInterrupt(what)
    raise Terminated(number, said=True)


@contextlib.contextmanager
def caught(act: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Within, the first SIGINT, SIGTERM or SIGHUP calls `act` and is added to the list that this yields.

    A second one has its usual effect.
    """
    received: list[int] = []
    usual: dict[signal.Signals, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for known, before in usual.items():
            signal.signal(known, before)
        act()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            usual[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, before in usual.items():
            signal.signal(number, before)


def exit_in_order() -> None:
    """From now on SIGTERM and SIGHUP end the program as `sys.exit` does, unless it has a handler of its own.

    Its usual effect ends it on the spot: nothing that waits for the interpreter's end is done.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        return
    for known in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(known) is signal.SIG_DFL:
            signal.signal(known, leave)


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, but without taking every module apart.

    That would cost a quarter of a CPU-second, half a one with torch loaded, and a forked worker a copy of most of
    the pages that it shares. Threads are joined, what is registered with atexit (as multiprocessing's queues are)
    runs.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: lets idle threads of a pool end before it joins them
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    os._exit(code)
