"""Says where the live page is: with its token on a terminal, else in a private file.

What is printed elsewhere is kept, and often read by others: the file of a batch job, `nohup.out`, the output of a
Ray job, which its page shows to all who may see the cluster's jobs. There the address has no token.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ensemble.spec import SpecError

if TYPE_CHECKING:
    from ensemble.executors.private_directory import PrivateDirectory


class PageAddress:
    """Announces the address of a page, each time that it has a new token, while the context lasts.

    Args:
        is_shown: whether what is printed goes to a terminal.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._private: PrivateDirectory | None = None
        self._written: set[str] = set()

    def announce(self, url: str) -> None:
        """Print an address, or where the file with it is.

        Raises:
            SpecError: the file cannot be made; what fails later is only said, for a browser has the page by then.
        """
        self._announce(url, "live page", "for one browser", "address")

    def announce_viewer(self, url: str) -> None:
        """Print the address of those who may only look; as `announce`."""
        self._announce(url, "live page to look at", "for any number of browsers", "viewer-address")

    def _announce(self, url: str, what: str, whom: str, name: str) -> None:
        if self._is_shown:
            say(f"{what}, {whom}: {url}")
            return
        is_first = name not in self._written
        try:
            file = self._write(url, name)
        except OSError as error:
            if is_first:
                raise SpecError(
                    f"cannot write the page's address: {error}; TMPDIR can name another folder"
                ) from None
            say(f"cannot write the page's address for a further browser: {error}")
            return
        self._written.add(name)
        if is_first:
            where = f"{url.partition('?')[0]} on {socket.gethostname()}"
            say(f"{what}: {where}; the address with its token is in {file} there")

    def _write(self, url: str, name: str) -> Path:
        from ensemble.executors.private_directory import PrivateDirectory

        self._private = self._private or PrivateDirectory("ensemble-page-", None)
        file = self._private.path / name
        # Not truncated: all addresses have one length, and what is written over needs no space on a full disk.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        with open(descriptor, "w", encoding="utf-8") as opened:
            opened.write(url + "\n")
        return file

    def __enter__(self) -> PageAddress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._private is not None:
            self._private.close()


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line, on standard output if no other is given, if it can be written."""
    with contextlib.suppress(OSError):
        print(line, file=file or sys.stdout, flush=True)
