"""Reads the lines of an event log; `ensemble.store.event_log` describes and writes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ensemble.events import VERSION, CodeSaved, Event, RunStarted, decode_event, explain_line
from ensemble.store.errors import DamagedError, StoreError, explain_format
from ensemble.store.files import make_read_error
from ensemble.store.regular_files import open_regular

#: Bytes that are read and parsed together.
BATCH_BYTES = 2**20

_CRC = b',"crc":"'


def add_crc(line: bytes) -> bytes:
    """Returns a line with a last field `crc`: the CRC-32 of what stands before it, as eight hexadecimal digits.

    A figure in which a bit has changed may well be JSON: it is known by this alone. Readers leave the field out.
    """
    body = line[:-1]
    return b'%b%b%08x"}' % (body, _CRC, zlib.crc32(body))


def _is_whole(line: bytes) -> bool:
    """Whether a line is as it was written, by its checksum."""
    return line[-18:-10] == _CRC and b"%08x" % zlib.crc32(line[:-18]) == line[-10:-2]


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Returns all complete events of a log.

    Raises:
        StoreError: see `read_batches`.
    """
    return read_events_from(path, 0)[0]


def read_events_from(path: str | os.PathLike[str], offset: int) -> tuple[list[Event], int]:
    """Returns the complete events from the beginning of a line on, and the offset behind them, to follow a log
    that grows.

    Raises:
        StoreError: as `read_events`.
    """
    found: list[Event] = []
    end = offset
    for events, behind in read_batches(path, offset):
        found += events
        end = behind
    return found, end


class SavedFiles(NamedTuple):
    """What a log says of the declarations of its run.

    Attributes:
        files: see `RunState.files`.
        arrays: digest of a declaration -> names of the files in `data` that it is read with, kept or in memory.
        info: what run.json says; empty where that was not logged.
    """

    files: dict[str, list[str]]
    arrays: dict[str, list[str]]
    info: dict[str, Any]


def read_files(path: str | os.PathLike[str]) -> SavedFiles:
    """Returns which files the declarations and the code of a run are, by its log, without reading the rest.

    Raises:
        OSError: it is unreadable.
    """
    known = SavedFiles({}, {}, {})
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, "rb") as file:
        for line in file:
            if b'"files":{' in line and _is_whole(line[:-1]) and (event := decode_event(line[:-1])) is not None:
                add_files(known.files, event)
                if isinstance(event, CodeSaved):
                    known.info.update(event.info or {})
                    if event.arrays is not None:
                        known.arrays[event.files["ensemble.pkl"]] = event.arrays
    return known


def add_files(known: dict[str, list[str]], event: Event) -> None:
    """Updates the digests of the declaration and the code by an event.

    `code_saved` comes before files are written, so that those of before are as good until a run has begun with the
    new ones, as its `run_started` says.
    """
    if not isinstance(event, RunStarted | CodeSaved):
        return
    if isinstance(event, RunStarted) and event.files:
        known.clear()
    for name, digest in event.files.items():
        known[name] = [each for each in known.get(name, ()) if each != digest] + [digest]


def identify_log(path: str | os.PathLike[str]) -> str:
    """Returns a digest of a log's first line, which has the time and the id of the run.

    It tells a log from another one in its place: a file that is removed and made anew often gets the same inode.

    Raises:
        OSError: there is no log, or it is unreadable.
    """
    with open(path, "rb") as file:
        return hashlib.sha256(file.readline()).hexdigest()


def end_of_events(path: str | os.PathLike[str], before: int | None = None) -> int:
    """Returns the offset behind the last complete line of a log, where its next event will begin.

    Args:
        before: of the lines that end by that byte only.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END) if before is None else max(0, before)
        while end:
            begin = max(0, end - BATCH_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
    return 0


def read_batches(path: str | os.PathLike[str], offset: int = 0) -> Iterator[tuple[list[Event], int]]:
    """Yields events in batches that are never empty, each with the offset behind it, from the beginning of a
    line on.

    What follows the last whole line is left out: a process or a machine that died has left it torn.

    Raises:
        DamagedError: a line is damaged, and whole ones follow it; the message names file and line.
        StoreError: there is no log, it cannot be read, it is another program's, or its format is another.
    """
    log, rest = Path(path), b""
    try:
        with open_regular(log, follows_link=True) as file:
            file.seek(offset)
            while block := file.read(BATCH_BYTES):
                end = block.rfind(b"\n") + 1
                if not end:
                    rest += block
                    continue
                lines = (rest + block[: end - 1]).split(b"\n")
                rest = block[end:]
                events = [decode_event(line) if _is_whole(line) else None for line in lines]
                count = events.index(None) if None in events else len(events)
                if whole := cast(list[Event], events[:count]):
                    _check_version(log, (event.v for event in whole))
                    offset += sum(map(len, lines[:count])) + count
                    yield whole, offset
                if count < len(events):
                    _check_tail(log, offset, lines[count:] + (rest + file.read()).split(b"\n")[:-1])
                    return
    except FileNotFoundError:
        raise StoreError(f"no run here: {log} does not exist; give a run directory (such as runs/NAME)") from None
    except OSError as error:
        raise make_read_error(log, error) from None


def _check_version(log: Path, versions: Iterable[int]) -> None:
    for version in versions:
        if version != VERSION:
            raise StoreError(explain_format(log, version, VERSION))


def _check_tail(log: Path, offset: int, lines: Sequence[bytes]) -> None:
    """Raises for lines from the first one on that is no event, unless they are a torn end.

    Args:
        offset: bytes of the log before them.
    """
    _check_version(log, [_find_version(lines[0])])
    if not any(map(_is_whole, lines)):
        if offset == 0 and not log.with_name("run.json").exists():
            raise StoreError(f"no run here: {log} is of another program; give a run directory")
        return
    with open(log, "rb") as file:
        number = file.read(offset).count(b"\n") + 1
    why = explain_line(lines[0]) if _is_whole(lines[0]) else "its checksum does not fit"
    raise DamagedError(
        f"{log}, line {number} is damaged: {why}; bring back a copy of the file, or cut it there "
        f"and what came after is done again: `truncate -s {offset} {shlex.quote(str(log))}`"
    )


def _find_version(line: bytes) -> int:
    """The version of the format of a line whose checksum is missing, as other versions have none."""
    try:
        version = json.loads(line)["v"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return VERSION
    return version if isinstance(version, int) else VERSION
