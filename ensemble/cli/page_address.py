"""Says where the live page is: with its token on a terminal, else in a private file.

What is printed elsewhere is kept, and often read by others: the file of a batch job, `nohup.out`, the output of a
Ray job, which its page shows to all who may see the cluster's jobs. There the address has no token.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import TextIO

from ensemble.spec import SpecError


@contextlib.contextmanager
def announced(url: str, *, is_shown: bool) -> Iterator[None]:
    """Announce the address of a page, whose private file is there while the context lasts.

    Args:
        is_shown: whether what is printed goes to a terminal.

    Raises:
        SpecError: the file cannot be made.
    """
    if is_shown:
        say(f"live page: {url}")
        yield
        return
    from ensemble.executors.private_directory import PrivateDirectory

    with contextlib.ExitStack() as stack:
        try:
            private = PrivateDirectory("ensemble-page-", None)
            stack.callback(private.close)
            file = private.path / "address"
            with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as opened:
                opened.write(url + "\n")
        except OSError as error:
            raise SpecError(f"cannot write the page's address: {error}; TMPDIR can name another folder") from None
        where = f"{url.partition('?')[0]} on {socket.gethostname()}"
        say(f"live page: {where} (the address with its token: {file})")
        yield


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line, on standard output if no other is given, if it can be written."""
    with contextlib.suppress(OSError):
        print(line, file=file or sys.stdout, flush=True)
