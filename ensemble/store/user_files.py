"""Decides whether a file that a user named may be written: it is new, empty, a device, or provably ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ensemble.store.errors import StoreError

#: The end of JSON that a command has written: white space that no other program puts there.
JSON_END = " \t\n"
_EDGE_BYTES = 4096


def check_writable(path: Path, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Refuse to write a file in which a user has something else.

    Args:
        is_ours: gets the first and the last 4 KiB of the file, joined.
        what: what the file would have to be, for the message.

    Raises:
        StoreError: it is something else, or cannot be read; its bytes are unchanged.
    """
    try:
        if not path.is_file() or not path.stat().st_size:  # such as /dev/null
            return
        with open(path, "rb") as file:
            content = file.read(_EDGE_BYTES)
            file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _EDGE_BYTES))
            content += file.read(_EDGE_BYTES)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; choose another file") from None
    if not is_ours(content):
        raise StoreError(f"{path} exists and is not {what}; it is left as it is: choose another file, or move it")


def is_our_json(content: bytes) -> bool:
    """Whether a file was written by `--json`."""
    return content[:1] in (b"[", b"{") and content.endswith(JSON_END.encode())
