"""A process that begins as a copy of this one: what limits or kills it touches no test, and it imports nothing."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

from ensemble.store import StoreError

FORK = multiprocessing.get_context("fork")


def say_what_fails(do: Callable[[], object], most_bytes: int) -> str:
    """The StoreError where no file may grow beyond a size, as if the disk were full; empty: nothing."""

    def limited(told: Connection) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        try:
            do()
        except StoreError as error:
            told.send(str(error))
        else:
            told.send("")

    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=limited, args=(theirs,))
    process.start()
    theirs.close()
    said = str(ours.recv())
    process.join()
    return said
