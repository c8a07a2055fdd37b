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
from collections.abc import Iterable
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
_HEADER, _MAGIC = struct.Struct("<4s10xIIIHH"), re.compile(b"PK\3\4")  # of an entry: checksum, sizes, lengths
_LONGEST = 2**10  # of a header with its name
_END = struct.Struct("<12xI6x")  # after the directory: its length
_COMMENT = b"CRC-32 of the directory: %08x"
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
        self._folder, self._known = Path(folder), (0, 0, 0)
        self._packs: dict[tuple[object, ...], dict[str, Entry]] = {}
        self._entries: dict[str, Entry] = {}

    def find(self, name: str, folder: os.stat_result) -> Entry | None:
        """Where a file is by the packs that are there now; `folder`: the status of their directory."""
        known = folder.st_dev, folder.st_ino, folder.st_mtime_ns
        if known != self._known:
            is_settled = time.time_ns() - folder.st_mtime_ns > _SETTLED_NS
            packs, listed = dict[tuple[object, ...], dict[str, Entry]](), list_packs(self._folder)
            for pack in listed:
                with contextlib.suppress(OSError):  # what it has is missing, which is said of each file
                    now = os.stat(self._folder / pack)
                    stamp = pack, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
                    there = self._packs.get(stamp)
                    packs[stamp] = read_pack(self._folder / pack) if there is None else there
            if packs.keys() != self._packs.keys():
                entries = {each: entry for has in packs.values() for each, entry in has.items()}
                self._packs, self._entries = packs, entries
            if is_settled and len(packs) == len(listed):
                self._known = known
        return self._entries.get(name)


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


def write_archive(path: Path, files: Iterable[Path]) -> None:
    """Writes a new pack of files of members."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w+b") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
            archive.comment = _COMMENT % 0
            for each in files:
                archive.write(each, name_in_pack(each))
        file.write(_make_comment(file))


def _make_comment(file: BinaryIO) -> bytes:
    """The comment that a pack has if its directory is as it was written; the file is where it stands."""
    rest = os.fstat(file.fileno()).st_size - _END.size - len(_COMMENT % 0)
    file.seek(max(0, rest))
    begin = rest - (_END.unpack(file.read(_END.size))[0] if rest > 0 else 0)
    file.seek(max(0, begin))
    return _COMMENT % zlib.crc32(file.read(rest - begin + _END.size)) if begin > 0 else b""


def _has_directory(file: BinaryIO) -> bool:
    return (comment := _make_comment(file)) != b"" and comment == file.read()


def _scan(pack: Path, file: BinaryIO) -> dict[str, Entry]:
    found = dict[str, Entry]()
    for begin in range(0, os.fstat(file.fileno()).st_size, BLOCK_BYTES):
        file.seek(begin)
        block = file.read(BLOCK_BYTES + _LONGEST)
        for at in (match.start() for match in _MAGIC.finditer(block, 0, len(block) - _HEADER.size + 4)):
            _, checksum, packed, size, length, more = _HEADER.unpack_from(block, at)
            data = at + _HEADER.size + length
            name = block[at + _HEADER.size : data].decode(errors="replace")
            found[name] = Entry(pack, begin + data + more, packed, size, checksum)
    return found


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
