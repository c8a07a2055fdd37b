"""Reads the lines of an event log; `ensemble.store.event_log` describes and writes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from ensemble.events import VERSION, CodeSaved, Event, RunStarted, Unreadable, decode_event, explain_line
from ensemble.store.errors import explain_format
from ensemble.store.files import StoreError, make_read_error
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
    """Returns all complete events of a log; see `read_batches` for what is damaged.

    Zeros at its end, which a power failure leaves, are damage, too.

    Raises:
        StoreError: there is no log, it cannot be read at all, or its format is another.
    """
    events, end = read_events_from(path, 0)
    if size := measure_lost_end(path, end):
        events.append(Unreadable(v=VERSION, t=events[-1].t if events else 0.0, offset=end, bytes=size))
    return events


def measure_lost_end(path: str | os.PathLike[str], offset: int) -> int:
    """Returns how many bytes are behind the last event of a log, if zeros are among them; else 0.

    A line that a dying process left torn has none, nor has one that is being written on this machine. A log that
    another machine writes may show some for a moment, so that nobody who follows it goes by this.

    Raises:
        OSError: the log is unreadable.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        rest = file.read()
    return len(rest) if b"\0" in rest else 0


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
    """

    files: dict[str, list[str]]
    arrays: dict[str, list[str]]


def read_files(path: str | os.PathLike[str]) -> SavedFiles:
    """Returns which files the declarations and the code of a run are, by its log, without reading the rest.

    Raises:
        OSError: it is unreadable.
    """
    known = SavedFiles({}, {})
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if b'"files":{' in line and (event := _parse_line(line.rstrip(b"\n"))) is not None:
                add_files(known.files, event)
                if isinstance(event, CodeSaved) and event.arrays is not None:
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

    Lines that are no events (a block of the disk that was lost, or holds something else) are read around: in their
    place stands one event of the type `unreadable`, which no log contains (`describe_hole`).

    Raises:
        StoreError: as `read_events`.
    """
    log, rest = Path(path), b""
    since: float | None = None
    is_foreign = False  # it has lines, and none is an event
    try:
        with open_regular(log, follows_link=True) as file:
            file.seek(offset)
            while block := file.read(BATCH_BYTES):
                whole = block.rfind(b"\n") + 1
                if not whole:
                    rest += block
                    continue
                lines = (rest + block[: whole - 1]).split(b"\n")
                rest = block[whole:]
                last = file.tell() == os.fstat(file.fileno()).st_size
                is_foreign = offset == 0 or is_foreign
                events, read = _parse(lines, offset, last=last, path=log, since=since)
                is_foreign = is_foreign and all(isinstance(event, Unreadable) for event in events)
                if events:
                    offset, since = offset + sum(map(len, lines[:read])) + read, events[-1].t
                    yield events, offset
        if is_foreign and not log.with_name("run.json").exists():
            raise StoreError(f"no run here: {log} is of another program; give a run directory")
    except FileNotFoundError:
        raise StoreError(f"no run here: {log} does not exist; give a run directory (such as runs/NAME)") from None
    except OSError as error:
        raise make_read_error(log, error) from None


def _parse(
    lines: Sequence[bytes], offset: int, *, last: bool, path: Path, since: float | None
) -> tuple[list[Event], int]:
    """Returns the events of complete lines, and how many lines they are; pure.

    Args:
        offset: bytes of the log before the lines.
        last: whether no whole line follows: the last may then be torn, and is left out.
        path: what to say of where a line is.  since: `t` of the event before the lines.
    """
    events = [_parse_line(line) for line in lines]
    # A newline can reach the disk before the blocks that lie before it.
    if last and events[-1] is None and not _is_whole(lines[-1]):
        events.pop()
    newest = next((event.v for event in reversed(events) if event is not None), None)
    newest = _find_version(lines[-1]) if newest is None else newest
    if newest != VERSION:
        raise StoreError(explain_format(path, newest, VERSION))
    if any(event is not None and event.v != VERSION for event in events):  # a log has one version
        events = [event if event is not None and event.v == VERSION else None for event in events]
    return list(_fill_holes(lines, events, offset, since)), len(events)


def _find_version(line: bytes) -> int:
    """The version of the format of a line whose checksum is missing, as other versions have none."""
    try:
        known = json.loads(line)["v"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return VERSION
    return known if isinstance(known, int) else VERSION


def _parse_line(line: bytes) -> Event | None:
    """The event of a line; None where it is none, or is not as it was written."""
    return decode_event(line) if _is_whole(line) else None


def _fill_holes(
    lines: Sequence[bytes], events: Sequence[Event | None], offset: int, since: float | None
) -> Iterator[Event]:
    """Yields the events, and for each row of lines that are none one that says so."""
    if None not in events:
        yield from cast(Sequence[Event], events)
        return
    number = 0
    while number < len(events):
        event = events[number]
        if event is not None:
            yield event
            since = event.t
            offset += len(lines[number]) + 1
            number += 1
            continue
        first, number = number, number + 1
        if (wrong := explain_line(lines[first]) if _is_whole(lines[first]) else None) is not None:
            yield Unreadable(v=VERSION, t=since or 0.0, event=wrong[0], error=wrong[1])
            offset += len(lines[first]) + 1
            continue
        while number < len(events) and events[number] is None and not _is_whole(lines[number]):
            number += 1
        size = sum(len(line) + 1 for line in lines[first:number])
        following = events[number] if number < len(events) else None
        until = None if following is None else following.t
        t = since if since is not None else until if until is not None else 0.0
        yield Unreadable(v=VERSION, t=t, offset=offset, bytes=size, until=until)
        offset += size
