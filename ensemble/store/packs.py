"""Packs the small files of members that have ended, many members to a file, and opens files wherever they are.

A tiny member leaves a directory and four files of a few kilobytes, of which a file system bears a million badly.
So those of many members go into one zip archive, `packs/000001.zip`, with the names that they have below
`members/` (`unzip packs/000001.zip -d members` gives them back). A pack is written whole, flushed and logged
(`packed`), and only then are the files removed: a process that is killed in between leaves each file in one of the
two places at least. A pack is never changed. What lies in `members/` has precedence, and of packs the last one.

A pack is no more trusted than a file: its entries have the digests that the log has for the files, and a checksum
each (`ensemble.store.pack_index`).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ensemble.store.errors import DamagedError
from ensemble.store.pack_index import (
    FOLDER,
    MEMBERS,
    MOST_BYTES,
    find,
    list_packs,
    name_in_pack,
    read_entry,
    read_whole,
    write_archive,
)
from ensemble.store.regular_files import open_regular

#: Members whose files make a pack; a run with fewer has none.
MANY = 128
#: A pack has no more members, and bytes of files, unless one member alone has.
MOST_MEMBERS, MOST_PACK_BYTES = 4 * MANY, 2**28

_PACKED = re.compile(r"log\.txt|(checkpoint-|predictions-).*\.safetensors|initial-weights\.safetensors")
_NEEDLESS = re.compile(r"preparing-\d+-\d+")  # notes that an attempt left behind that has ended


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
        if (entry := find(Path(path))) is None:
            raise
    file = os.fdopen(os.memfd_create("packed", os.MFD_CLOEXEC), "w+b")
    try:
        file.write(read_entry(entry, name_in_pack(Path(path))))
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
    return path if path.exists() or (entry := find(path)) is None else entry.pack


def measure(path: Path) -> int | None:
    """The bytes of a file of a run, packed or not; None where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return None if (entry := find(path)) is None else entry.bytes


def unpack(path: Path) -> None:
    """Makes a file of a member a file again, to which it is about to append, if a pack has it.

    Raises:
        OSError: it cannot be read or written.
        DamagedError: the pack is damaged there.
    """
    from ensemble.store.files import make_directory, write_bytes

    if not path.exists() and (entry := find(path)) is not None:
        make_directory(path.parent)
        write_bytes(path, read_entry(entry, name_in_pack(path)))


def write_packs(run: Path, members: Iterable[str]) -> Iterator[tuple[Path, str, list[PackedFile], list[str]]]:
    """Writes the next packs of a run with the files of members, none of which runs; removes nothing.

    Yields:
        Each pack, its digest, what is in it, and of which members; nothing where there is nothing to pack.

    Raises:
        OSError: a file cannot be read.
        WriteError: a pack cannot be written.
    """
    from ensemble.store.files import make_directory, write_atomically

    folder = run / FOLDER
    for names, found in _group(run, members):
        make_directory(folder)
        path = folder / f"{1 + max((int(name[:-4]) for name in list_packs(folder)), default=0):06d}.zip"

        def write(temporary: Path, found: Sequence[PackedFile] = found) -> None:
            write_archive(temporary, (each.path for each in found))

        yield path, write_atomically(path, write, sum(each.bytes for each in found)), found, names


def _group(run: Path, members: Iterable[str]) -> Iterator[tuple[list[str], list[PackedFile]]]:
    """Members that have files to pack, with these, as many as one pack has."""
    names, files, size = list[str](), list[PackedFile](), 0
    for member in members:
        if not (more := list(_list_files(run / MEMBERS / member))):
            continue
        added = sum(each.bytes for each in more)
        if names and (len(names) == MOST_MEMBERS or size + added > MOST_PACK_BYTES):
            yield names, files
            names, files, size = [], [], 0
        names.append(member)
        files += more
        size += added
    if names:
        yield names, files


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


def finish_removal(run: Path, logged: Collection[str], packed: Collection[str]) -> list[dict[str, Any]]:
    """Removes what a process left that was killed while it packed: a torn pack; one that the log does not name, if
    all that it has is there as files; and files that a logged pack has as they are.

    Args:
        logged: the packs that the log names, by their paths in the run.
        packed: the members whose files the log says are packed; none of them runs.

    Returns:
        `packed` events of whole packs that the log has named before what it said of them was lost.
    """
    from ensemble.store.digests import digest_file

    lost = list[dict[str, Any]]()
    with contextlib.suppress(OSError):
        for torn in (run / FOLDER).glob(".*.zip.*.tmp"):
            torn.unlink()
        for name in list_packs(run / FOLDER):
            path, at = run / FOLDER / name, f"{FOLDER}/{name}"
            if at in logged or not (entries := read_whole(path)):
                continue
            if all((run / MEMBERS / each).exists() for each in entries):
                path.unlink()
                continue
            members = dict.fromkeys(each.partition("/")[0] for each in entries)
            gone = [member for member in members if not any(_list_files(run / MEMBERS / member))]
            size = path.stat().st_size
            lost.append(
                {"type": "packed", "path": at, "digest": digest_file(path), "bytes": size, "members": gone}
            )
        for member in set(packed).intersection(os.listdir(run / MEMBERS)) if packed else ():
            remove_packed([each for each in _list_files(run / MEMBERS / member) if _is_same(each)])
            _remove_folder(run / MEMBERS / member)
    return lost


def _is_same(file: PackedFile) -> bool:
    entry = find(file.path)
    try:
        return entry is not None and read_entry(entry, name_in_pack(file.path)) == file.path.read_bytes()
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
