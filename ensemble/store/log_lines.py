"""Reads the lines of an event log; `ensemble.store.events` describes and writes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ensemble.store.files import StoreError, make_read_error

VERSION = 1

#: Bytes that are read and parsed together.
BATCH_BYTES = 2**20


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns all complete events of a log.

    Raises:
        StoreError: there is no log, a line that is not the last is unreadable, or its format is newer.
    """
    return read_events_from(path, 0)[0]


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

    Raises:
        StoreError: as `read_events`.
    """
    log, rest, number = Path(path), b"", 1
    began = f" after byte {offset}" if offset else ""
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
                events = _parse(lines, number, last=last, path=log, since=began)
                number += len(lines)
                offset += sum(map(len, lines[: len(events)])) + len(events)
                if events:
                    yield events, offset
    except FileNotFoundError:
        raise StoreError(f"no run here: {log} does not exist; give a run directory (such as runs/NAME)") from None
    except OSError as error:
        raise make_read_error(log, error) from None


def _parse(lines: Sequence[bytes], first: int, *, last: bool, path: Path, since: str) -> list[dict[str, Any]]:
    """Returns the events of complete lines, the first of which has the number `first`; pure.

    Args:
        last: whether no whole line follows: the last may then be torn, and is left out.
        path, since: what to say of where a line is.
    """
    try:
        # All at once: the names of fields are then made once, which is most of an event's size, and of the time.
        events: list[dict[str, Any]] = json.loads(b"[" + b",".join(lines) + b"]")
        newest = max(event["v"] for event in events)
        if len(events) != len(lines):
            raise ValueError("two lines that are none make one event")
    except (ValueError, KeyError, TypeError, RecursionError):
        events = []
        for number, line in enumerate(lines, start=first):
            try:
                event = json.loads(line)
                event["v"] + 0  # a number
            except (ValueError, KeyError, TypeError, RecursionError):
                if last and number == first + len(lines) - 1:
                    break  # a newline can reach the disk before the blocks that lie before it
                where = f"{path}: line {number}{since}"
                raise StoreError(f"{where} is not an event; restore the file from a backup") from None
            events.append(event)
        newest = max((event["v"] for event in events), default=VERSION)
    if newest > VERSION:
        raise StoreError(
            f"{path} was written by a newer ray-ensemble (log format {newest}, this one reads {VERSION}); "
            "upgrade ray-ensemble to read it"
        )
    return events
