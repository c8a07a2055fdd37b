"""Digests of the files that a run reads again: they stand in its log and are compared at every reading.

XXH3 with 128 bits finds what disks, file systems and copies do to a file. It is no protection against somebody who
forges files (`ensemble.store.trust` is). It reads 7 GB/s on one core of a Xeon at 2.8 GHz, where SHA-256 reads 1.3
and the CRC-32 of zlib 2.9, and it is computed while the file is flushed to the disk, for which one waits anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ensemble.store.errors import DamagedError
from ensemble.store.regular_files import open_regular

_BLOCK_BYTES = 2**18
#: From so many bytes on a file is read by a thread while it is flushed.
_LARGE_BYTES = 2**23


def digest_bytes(content: bytes) -> str:
    """The digest of a file with this content."""
    return digest_blocks([content])


def digest_blocks(blocks: Iterable[bytes]) -> str:
    """The digest of a file that consists of these blocks."""
    import xxhash

    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return f"xxh3:{digest.hexdigest()}"


def digest_file(path: str | os.PathLike[str], check: Callable[[], None] = lambda: None) -> str:
    """The digest of a file.

    Args:
        check: called now and then; an exception from it ends the reading.

    Raises:
        OSError: it cannot be read.
    """
    import xxhash

    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            check()
    return f"xxh3:{digest.hexdigest()}"


def flush_and_digest(path: Path, descriptor: int) -> str:
    """Flushes an open file to the disk, and returns its digest.

    Raises:
        OSError: it cannot be written, or read.
    """
    if os.fstat(descriptor).st_size < _LARGE_BYTES:
        os.fsync(descriptor)
        return digest_file(path)
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(digest_file, path)
        os.fsync(descriptor)
        return digest.result()


@contextmanager
def pin_file(path: str | os.PathLike[str], *, follows_link: bool = True) -> Iterator[str]:
    """Yields a name that stays that of the present file at `path`, even if `path` is replaced meanwhile.

    For libraries that take a name and open it more than once (safetensors does: header, then data), which would
    mix two versions of a file that is renamed over in between. Linux: proc_pid_fd(5).

    Args:
        follows_link: see `open_regular`.
    """
    with open_regular(path, follows_link=follows_link) as file:
        yield f"/proc/self/fd/{file.fileno()}"


@contextmanager
def open_checked(
    path: str | os.PathLike[str],
    digest: str | None,
    others: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
    *,
    follows_link: bool = True,
) -> Iterator[str]:
    """Yields a name of a file, good until the end of the block, whose content has a digest; all readers use it.

    Args:
        digest: as the log has it; None: it has none, and any content is accepted.
        others: digests that are as good (`RunState.files`).
        check: see `digest_file`.
        follows_link: see `open_regular`.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: it has other content.
    """
    with pin_file(path, follows_link=follows_link) as name:
        if digest is not None and (present := digest_file(name, check)) not in (digest, *others):
            raise DamagedError(f"{path} is damaged: its digest is {present}, and was {digest} when it was written")
        yield name
