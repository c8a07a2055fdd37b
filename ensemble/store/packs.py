"""Packs the small files of members that have ended, many members to a file, and opens files wherever they are.

A tiny member leaves a directory and four files of a few kilobytes, of which a file system bears a million badly.
So those of many members go into one zip archive, `packs/000001.zip`, with the names that they have below
`members/` (`unzip packs/000001.zip -d members` gives them back). A pack is written whole, flushed and logged
(`packed`), and only then are the files removed: a process that is killed in between leaves each file in one of the
two places at least. A pack is never changed. What lies in `members/` has precedence, and of packs the last one.

A pack is no more trusted than a file: its entries have the digests that the log has for the files, and a checksum
each. Where its directory is damaged, its entries are found by their own headers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ensemble.store.errors import DamagedError
from ensemble.store.regular_files import open_regular

#: The directory of a run's packs, and that of its members.
FOLDER, MEMBERS = "packs", "members"
#: Members whose files make a pack; a run with fewer has none.
MANY = 128
#: A larger file stays a file.
MOST_BYTES = 2**20

_NAME = re.compile(r"\d{6,}\.zip")
_PACKED = re.compile(r"log\.txt|(checkpoint-|predictions-).*\.safetensors|initial-weights\.safetensors")
_NEEDLESS = re.compile(r"preparing-\d+-\d+")  # notes that an attempt left behind that has ended
_HEADER, _MAGIC = struct.Struct("<4s10xIIIHH"), b"PK\3\4"  # of an entry: checksum, two sizes, two lengths


class Entry(NamedTuple):
    """Where a pack has a file: at which offset, and of how many bytes, as it is packed and as it was."""

    pack: Path
    offset: int
    packed_bytes: int
    bytes: int


class PackedFile(NamedTuple):
    """A file that is in a pack now, with its size and the time of its last change when it was read."""

    path: Path
    bytes: int
    mtime_ns: int


def open_member_file(path: str | os.PathLike[str], *, follows_link: bool = False) -> BinaryIO:
    """Opens a file of a run; of a member that has ended it may be in a pack, and is then a file in memory.

    Args:
        follows_link: see `open_regular`.

    Raises:
        OSError: there is none, or it cannot be read.
        DamagedError: the pack that has it is damaged there.
    """
    try:
        return open_regular(path, follows_link=follows_link)
    except FileNotFoundError:
        if (entry := _find(Path(path))) is None:
            raise
    file = os.fdopen(os.memfd_create("packed", os.MFD_CLOEXEC), "w+b")
    try:
        file.write(_read(entry, _name(Path(path))))
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def is_packed(file: BinaryIO) -> bool:
    """Whether an open file has no name, as one that was in a pack."""
    return os.fstat(file.fileno()).st_nlink == 0


def find_home(path: Path) -> Path:
    """The file itself, or the pack that has it instead."""
    return path if path.exists() or (entry := _find(path)) is None else entry.pack


def measure(path: Path) -> int | None:
    """The bytes of a file of a run, packed or not; None where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return None if (entry := _find(path)) is None else entry.bytes


def unpack(path: Path) -> None:
    """Makes a file of a member a file again, to which it is about to append, if a pack has it.

    Raises:
        OSError: it cannot be read or written.
        DamagedError: the pack is damaged there.
    """
    from ensemble.store.files import make_directory, write_bytes

    if not path.exists() and (entry := _find(path)) is not None:
        make_directory(path.parent)
        write_bytes(path, _read(entry, _name(path)))


def write_pack(run: Path, members: Iterable[str]) -> tuple[Path, str, list[PackedFile]] | None:
    """Writes the next pack of a run with the files of members, none of which runs; removes nothing.

    Returns:
        The pack, its digest, and what is in it. None where there was nothing to pack.

    Raises:
        OSError: a file cannot be read.
        WriteError: the pack cannot be written.
    """
    from ensemble.store.files import make_directory, write_atomically

    found = [each for member in members for each in _list_files(run / MEMBERS / member)]
    if not found:
        return None
    folder = run / FOLDER
    make_directory(folder)
    path = folder / f"{1 + max((int(name[:-4]) for name in _list_packs(folder)), default=0):06d}.zip"

    def write(temporary: Path) -> None:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(descriptor, "w+b") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive,
        ):
            for each in found:
                archive.write(each.path, _name(each.path))

    return path, write_atomically(path, write, sum(each.bytes for each in found)), found


def remove_packed(files: Sequence[PackedFile]) -> None:
    """Removes files that a pack has, once that is logged, and the directories of members that are empty then.

    A file that was written to since, or cannot be removed, stays, and has precedence.
    """
    for each in files:
        with contextlib.suppress(OSError):
            now = each.path.stat()
            if (now.st_size, now.st_mtime_ns) == each[1:]:
                each.path.unlink()
    for folder in {each.path.parent for each in files}:
        _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something of another kind is in it
        for path in folder.iterdir():
            if _NEEDLESS.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


def finish_removal(run: Path, logged: Collection[str], packed: Collection[str]) -> None:
    """Removes what a process left that was killed while it packed: a pack that the log does not name, if all that
    it has is there as files, and files that a logged pack has as they are.

    Args:
        logged: the packs that the log names, by their paths in the run.
        packed: the members whose files the log says are packed; none of them runs.
    """
    with contextlib.suppress(OSError):
        for name in _list_packs(run / FOLDER):
            if f"{FOLDER}/{name}" in logged:
                continue
            if all((run / MEMBERS / each).exists() for each in _read_pack(str(run / FOLDER / name))):
                (run / FOLDER / name).unlink()
        for member in set(packed).intersection(os.listdir(run / MEMBERS)) if packed else ():
            remove_packed([each for each in _list_files(run / MEMBERS / member) if _is_same(each)])
            _remove_folder(run / MEMBERS / member)


def _is_same(file: PackedFile) -> bool:
    entry = _find(file.path)
    try:
        return entry is not None and _read(entry, _name(file.path)) == file.path.read_bytes()
    except DamagedError:
        return False


def _list_files(folder: Path) -> Iterator[PackedFile]:
    try:
        there = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for each in there:
        status = each.stat(follow_symlinks=False)
        if _PACKED.fullmatch(each.name) and stat.S_ISREG(status.st_mode) and status.st_size <= MOST_BYTES:
            yield PackedFile(Path(each.path), status.st_size, status.st_mtime_ns)


def _list_packs(folder: Path) -> list[str]:
    """The names of a run's packs, the first one first."""
    try:
        return sorted(filter(is_pack, os.listdir(folder)), key=lambda name: (len(name), name))
    except OSError:
        return []


def is_pack(name: str) -> bool:
    """Whether a pack may have this name."""
    return _NAME.fullmatch(name) is not None


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _find(path: Path) -> Entry | None:
    folder = path.parent.parent.parent / FOLDER
    if path.parent.parent.name != MEMBERS or not (names := _list_packs(folder)):
        return None
    with contextlib.suppress(OSError):
        last = os.stat(folder / names[-1])  # the same run: a directory may be made anew
        return _read_index(str(folder), tuple(names), (last.st_ino, last.st_mtime_ns)).get(_name(path))
    return None


@functools.lru_cache(maxsize=16)
def _read_index(folder: str, names: tuple[str, ...], stamp: tuple[int, int]) -> dict[str, Entry]:
    index: dict[str, Entry] = {}
    for name in names:
        with contextlib.suppress(OSError):  # what it has is missing, which is said of each file
            index |= _read_pack(os.path.join(folder, name))
    return index


def _read_pack(path: str) -> dict[str, Entry]:
    """What a pack has, by name; by the headers of its entries where its directory is damaged."""
    pack = Path(path)
    with open_regular(pack) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return {
                    each.filename: Entry(pack, each.header_offset, each.compress_size, each.file_size)
                    for each in archive.infolist()
                }
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError):
            file.seek(0)
            return _scan(pack, file.read())


def _scan(pack: Path, content: bytes) -> dict[str, Entry]:
    found, at = dict[str, Entry](), content.find(_MAGIC)
    while 0 <= at <= len(content) - _HEADER.size:
        _, _, packed, size, length, _ = _HEADER.unpack_from(content, at)
        name = content[at + _HEADER.size : at + _HEADER.size + length].decode(errors="replace")
        found[name] = Entry(pack, at, packed, size)
        at = content.find(_MAGIC, at + 4)
    return found


def _read(entry: Entry, name: str) -> bytes:
    """The content of an entry, checked.

    Raises:
        DamagedError: it is not what was packed.
    """
    with open_regular(entry.pack) as file:
        file.seek(entry.offset)
        header = file.read(_HEADER.size)
        try:
            magic, checksum, packed, size, length, more = _HEADER.unpack(header)
            rest = file.read(length + more + packed)
            content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(rest[length + more :], MOST_BYTES + 1)
        except (struct.error, zlib.error):
            magic = b""
    is_it = magic == _MAGIC and rest[:length] == name.encode() and len(content) == size == entry.bytes
    if is_it and zlib.crc32(content) == checksum:
        return bytes(content)
    raise DamagedError(f"{name} in {entry.pack} is damaged")
