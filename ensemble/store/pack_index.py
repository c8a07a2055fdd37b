"""Finds files in packs (`ensemble.store.packs`), and reads them. A pack is a zip archive.

Its comment has a checksum of its directory. Where that is damaged, entries are found by their own headers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import struct
import time
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ensemble.store.errors import DamagedError
from ensemble.store.regular_files import open_regular

#: The directory of a run's packs, and that of its members.
FOLDER, MEMBERS = "packs", "members"
#: Of a file in a pack.
MOST_BYTES = 2**20
#: That are read at once of a pack without a directory.
BLOCK_BYTES = 2**20

_NAME = re.compile(r"\d{6,}\.zip")
_HEADER, _MAGIC = struct.Struct("<4s10xIIIHH"), b"PK\3\4"  # of an entry: checksum, two sizes, two lengths
_END = struct.Struct("<12xI6x")  # after the directory: its length
_COMMENT = b"CRC-32 of the directory: %08x"
NO_COMMENT = _COMMENT % 0  # yet
_LONGEST = 2**10  # of a header with its name
_SETTLED_NS = 2 * 10**9  # after which another change of a directory has another time


class Entry(NamedTuple):
    """Where a pack has a file: at which byte, how many as it is packed and as it was, and their checksum."""

    pack: Path
    at: int
    packed_bytes: int
    bytes: int
    checksum: int


def list_packs(folder: Path) -> list[str]:
    """The names of a run's packs, the first one first.

    Raises:
        OSError: the directory cannot be read.
    """
    return sorted(filter(is_pack, os.listdir(folder)), key=lambda name: (len(name), name))


def is_pack(name: str) -> bool:
    """Whether a pack may have this name."""
    return _NAME.fullmatch(name) is not None


def name_in_pack(path: Path) -> str:
    """The name that a member's file has in a pack."""
    return f"{path.parent.name}/{path.name}"


def find(path: Path) -> Entry | None:
    """Where packs have a file of a run; None where none of them has it."""
    folder = path.parent.parent.parent / FOLDER
    if path.parent.parent.name != MEMBERS:
        return None
    with contextlib.suppress(OSError):
        status = os.stat(folder)
        return _index_of(str(folder)).find(name_in_pack(path), status)
    return None


class _Index:
    """What the packs of a run have, by name. A pack is read once, as it does not change."""

    def __init__(self, folder: str) -> None:
        self._folder, self._known = folder, (0, 0, 0)
        self._packs: dict[str, tuple[tuple[int, ...], dict[str, Entry]]] = {}
        self._entries: dict[str, Entry] = {}

    def find(self, name: str, folder: os.stat_result) -> Entry | None:
        """Where a file is by the packs that are there now.

        Args:
            folder: the status of the packs' directory.
        """
        known = folder.st_dev, folder.st_ino, folder.st_mtime_ns
        if known != self._known:
            is_settled = time.time_ns() - folder.st_mtime_ns > _SETTLED_NS
            if self._update() and is_settled:
                self._known = known
        return self._entries.get(name)

    def _update(self) -> bool:
        """Read new packs. False: one cannot be read; what it has is missing, which is said of each file."""
        before, names = self._packs, list_packs(Path(self._folder))
        packs: dict[str, tuple[tuple[int, ...], dict[str, Entry]]] = {}
        for name in names:
            with contextlib.suppress(OSError):
                path = Path(self._folder, name)
                status = path.stat()
                stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
                same = before.get(name)
                packs[name] = same if same and same[0] == stamp else (stamp, read_pack(path))
        if [id(each) for each in packs.values()] != [id(each) for each in before.values()]:
            entries: dict[str, Entry] = {}
            for _, each in packs.values():
                entries |= each
            self._packs, self._entries = packs, entries
        return len(packs) == len(names)


_index_of = functools.lru_cache(maxsize=16)(_Index)


def read_pack(pack: Path) -> dict[str, Entry]:
    """What a pack has, by name; by the headers of its entries where its directory is damaged."""
    with open_regular(pack) as file:
        with contextlib.suppress(zipfile.BadZipFile, ValueError, struct.error, NotImplementedError):
            if _has_directory(file):
                with zipfile.ZipFile(file) as archive:
                    return {
                        each.filename: Entry(
                            pack,
                            each.header_offset + _HEADER.size + len(each.filename.encode()),
                            each.compress_size,
                            each.file_size,
                            each.CRC,
                        )
                        for each in archive.infolist()
                    }
        return _scan(pack, file)


def read_whole(pack: Path) -> dict[str, Entry]:
    """What a pack has; nothing if any of it is damaged.

    Raises:
        OSError: it cannot be read.
    """
    with contextlib.suppress(DamagedError), open_regular(pack) as file:
        if _has_directory(file):
            entries = read_pack(pack)
            for name, each in entries.items():
                read_entry(each, name)
            return entries
    return {}


def seal(file: BinaryIO, start: int) -> None:
    """Writes the checksum of the directory, which begins at `start`, into the comment of a new pack."""
    file.seek(start)
    checksum = zlib.crc32(file.read()[: -len(NO_COMMENT)])
    file.seek(-len(NO_COMMENT), os.SEEK_END)
    file.write(_COMMENT % checksum)


def _has_directory(file: BinaryIO) -> bool:
    """Whether the directory of a pack is what was written."""
    if (rest := os.fstat(file.fileno()).st_size - _END.size - len(NO_COMMENT)) < 0:
        return False
    file.seek(rest)
    end = file.read()
    (length,) = _END.unpack_from(end)
    if length > rest:
        return False
    file.seek(rest - length)
    checksum = zlib.crc32(file.read(length) + end[: _END.size])
    return end[_END.size :] == _COMMENT % checksum


def _scan(pack: Path, file: BinaryIO) -> dict[str, Entry]:
    found, begin = dict[str, Entry](), 0
    while True:
        file.seek(begin)
        block = file.read(BLOCK_BYTES + _LONGEST)
        at = block.find(_MAGIC)
        while 0 <= at < min(BLOCK_BYTES, len(block) - _HEADER.size):
            _, checksum, packed, size, length, more = _HEADER.unpack_from(block, at)
            data = at + _HEADER.size + length
            name = block[at + _HEADER.size : data].decode(errors="replace")
            found[name] = Entry(pack, begin + data + more, packed, size, checksum)
            at = block.find(_MAGIC, at + 4)
        if len(block) <= BLOCK_BYTES:
            return found
        begin += BLOCK_BYTES


def read_entry(entry: Entry, name: str) -> bytes:
    """The content of an entry, checked.

    Raises:
        DamagedError: it is not what was packed.
    """
    with open_regular(entry.pack) as file, contextlib.suppress(zlib.error):
        file.seek(entry.at)
        packed = file.read(min(entry.packed_bytes, 2 * MOST_BYTES))
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, MOST_BYTES + 1)
        if len(content) == entry.bytes and zlib.crc32(content) == entry.checksum:
            return bytes(content)
    raise DamagedError(f"{name} in {entry.pack} is damaged")
