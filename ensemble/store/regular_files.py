"""Opens files that somebody else may have put there: pipes and devices, which would be waited for, are refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str], *, follows_link: bool = False) -> BinaryIO:
    """Opens a regular file to read it.

    Args:
        follows_link: whether the path may be a symbolic link; else that is refused as well.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_link else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return open(descriptor, "rb")


def measure(path: Path) -> int | None:
    """The bytes of a file; None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the content of a regular file that is no symbolic link.

    Raises:
        OSError: there is none, it cannot be read, or it is larger than `most_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most_bytes}", os.fspath(path))
        return file.read(most_bytes)
