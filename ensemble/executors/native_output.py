"""Keeps apart what native code writes to standard error, and what this program shows there.

Native code, such as Ray's, writes to descriptor 2. In a command `sys.stderr` gets a descriptor of its own, so that
the other one can lead to a file for a while. In other programs it is the user's, and nothing is diverted.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path

_NATIVE = 2
_separated = False

log = logging.getLogger(__name__)


def separate_stderr() -> None:
    """Give `sys.stderr` a descriptor of its own, so that native output can be diverted. For commands."""
    global _separated
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.fileno() == _NATIVE:
        sys.stderr.flush()
        own = os.dup(_NATIVE)
        sys.stderr = os.fdopen(own, "w", buffering=1, encoding=sys.stderr.encoding, errors="replace")
        _separated = True


class NativeOutput:
    """Leads native output to a file until `close`, if this process is a command.

    Args:
        path: of the file, to which it is appended; it is removed if nothing was.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._usual: int | None = None
        if _separated:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._begin = os.fstat(file).st_size
            self._usual = os.dup(_NATIVE)
            os.dup2(file, _NATIVE)
            os.close(file)

    def add_logger(self, name: str) -> None:
        """Lead the messages of a library's logger there, too, instead of to `sys.stderr`."""
        if self._usual is not None:
            logger = logging.getLogger(name)
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
            logger.addHandler(
                logging.StreamHandler(os.fdopen(_NATIVE, "w", buffering=1, encoding="utf-8", closefd=False))
            )
            logger.propagate = False

    def close(self) -> None:
        """Lead native output to standard error again; say where it is, if there was any."""
        if self._usual is None:
            return
        written = os.fstat(_NATIVE).st_size
        os.dup2(self._usual, _NATIVE)
        os.close(self._usual)
        self._usual = None
        if written > self._begin:
            log.warning("messages of Ray are in %s", self._path)
        elif not written:
            self._path.unlink(missing_ok=True)
