"""Reads the lines of an event log; `ensemble.store.events` describes and writes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ensemble.store.errors import explain_format
from ensemble.store.files import StoreError, make_read_error

VERSION = 2

#: Type of the event that stands for a part of a log that cannot be read.
UNREADABLE = "unreadable"

#: Bytes that are read and parsed together.
BATCH_BYTES = 2**20

_CRC = b',"crc":"'


def add_crc(line: bytes) -> bytes:
    """Returns a line with a last field `crc`: the CRC-32 of what stands before it, as eight hexadecimal digits.

    A figure in which a bit has changed may well be JSON: it is known by this alone. Readers take the field away.
    """
    body = line[:-1]
    return b'%b%b%08x"}' % (body, _CRC, zlib.crc32(body))


def _are_intact(lines: Iterable[bytes]) -> bool:
    """Whether lines are as they were written; a line without a checksum is taken as it is."""
    return all(b"%08x" % zlib.crc32(line[:-18]) == line[-10:-2] for line in lines if line[-18:-10] == _CRC)


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns all complete events of a log; see `read_batches` for what is damaged.

    Zeros at its end, which a power failure leaves, are damage, too.

    Raises:
        StoreError: there is no log, it cannot be read at all, or its format is another.
    """
    events, end = read_events_from(path, 0)
    if size := measure_lost_end(path, end):
        hole = {"type": UNREADABLE, "offset": end, "bytes": size, "until": None}
        events.append({"v": VERSION, "t": events[-1]["t"] if events else 0.0, **hole})
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


def read_events_from(path: str | os.PathLike[str], offset: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the complete events from the beginning of a line on, and the offset behind them, to follow a log
    that grows.

    Raises:
        StoreError: as `read_events`.
    """
    found: list[dict[str, Any]] = []
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
            if b'"files":{' in line and _is_event(event := _parse_line(line)):
                add_files(known.files, event)
                if "arrays" in event:
                    known.arrays[event["files"]["ensemble.pkl"]] = event["arrays"]
    return known


def add_files(known: dict[str, list[str]], event: Mapping[str, Any]) -> None:
    """Updates the digests of the declaration and the code by an event.

    `code_saved` comes before files are written, so that those of before are as good until a run has begun with the
    new ones, as its `run_started` says.
    """
    if event["type"] == "run_started" and event.get("files"):
        known.clear()
    if event["type"] in ("run_started", "code_saved"):
        for name, digest in (event.get("files") or {}).items():
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


def read_batches(path: str | os.PathLike[str], offset: int = 0) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yields events in batches that are never empty, each with the offset behind it, from the beginning of a
    line on.

    Lines that are no events (a block of the disk that was lost, or holds something else) are read around: in their
    place stands one event of the type `unreadable`, which no log contains (`describe_hole`).

    Raises:
        StoreError: as `read_events`.
    """
    log, rest = Path(path), b""
    since: float | None = None
    try:
        with open(log, "rb") as file:
            file.seek(offset)
            while block := file.read(BATCH_BYTES):
                whole = block.rfind(b"\n") + 1
                if not whole:
                    rest += block
                    continue
                lines = (rest + block[: whole - 1]).split(b"\n")
                rest = block[whole:]
                last = file.tell() == os.fstat(file.fileno()).st_size
                events, read = _parse(lines, offset, last=last, path=log, since=since)
                if events:
                    offset, since = offset + sum(map(len, lines[:read])) + read, events[-1]["t"]
                    yield events, offset
    except FileNotFoundError:
        raise StoreError(f"no run here: {log} does not exist; give a run directory (such as runs/NAME)") from None
    except OSError as error:
        raise make_read_error(log, error) from None


def _is_event(event: Any) -> bool:
    """Whether a line's value has what each event has."""
    return (
        isinstance(event, dict)
        and isinstance(event.get("v"), int)
        and isinstance(event.get("t"), int | float)
        and isinstance(event.get("type"), str)
    )


def _parse(
    lines: Sequence[bytes], offset: int, *, last: bool, path: Path, since: float | None
) -> tuple[list[dict[str, Any]], int]:
    """Returns the events of complete lines, and how many lines they are; pure.

    Args:
        offset: bytes of the log before the lines.
        last: whether no whole line follows: the last may then be torn, and is left out.
        path: what to say of where a line is.  since: `t` of the event before the lines.
    """
    try:
        # All at once: the names of fields are then made once, which is most of an event's size, and of the time.
        events: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
        if not _are_intact(lines):
            raise ValueError("a line is not as it was written")
        for event in events:
            event.pop("crc", None)
        versions = [event["v"] for event in events if event["type"] and event["t"] is not None]
        if len(versions) != len(lines) or len(events) != len(lines):
            raise ValueError("a line is no event, or two that are none make one")
        if versions[-1] == VERSION and any(version != VERSION for version in versions):
            raise ValueError("a log has one version")
        are_events = [True] * len(lines)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        events = [_parse_line(line) for line in lines]
        are_events = [_is_event(event) for event in events]
        known = [
            number for number, is_event in enumerate(are_events) if is_event and events[number]["v"] == VERSION
        ]
        for number in range(known[-1] if known else 0):  # a log has one version
            are_events[number] = are_events[number] and events[number]["v"] == VERSION
    if last and not are_events[-1]:  # a newline can reach the disk before the blocks that lie before it
        events, are_events = events[:-1], are_events[:-1]
    read = len(events)
    if not all(are_events):
        events = list(_fill_holes(lines, events, are_events, offset, since))
    newest = next((event["v"] for event in reversed(events) if event["type"] != UNREADABLE), VERSION)
    if newest != VERSION:
        raise StoreError(explain_format(path, newest, VERSION))
    return events, read


def _parse_line(line: bytes) -> Any:
    try:
        event = json.loads(line) if _are_intact([line]) else None
    except (ValueError, RecursionError):
        return None
    if isinstance(event, dict):
        event.pop("crc", None)
    return event


def _fill_holes(
    lines: Sequence[bytes], events: Sequence[Any], are_events: Sequence[bool], offset: int, since: float | None
) -> Iterator[dict[str, Any]]:
    """Yields the events, and for each row of lines that are none one that says so."""
    number = 0
    while number < len(events):
        if are_events[number]:
            yield events[number]
            since = events[number]["t"]
            offset += len(lines[number]) + 1
            number += 1
            continue
        first = number
        while number < len(events) and not are_events[number]:
            number += 1
        size = sum(len(line) + 1 for line in lines[first:number])
        until = events[number]["t"] if number < len(events) else None
        t = since if since is not None else until if until is not None else 0.0
        yield {"v": VERSION, "t": t, "type": UNREADABLE, "offset": offset, "bytes": size, "until": until}
        offset += size
