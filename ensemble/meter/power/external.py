"""Reads an external meter of the whole node: a file of ``unix seconds,watts`` lines that it appends to.

The energy of a time is the area below the straight lines between rows (trapezoid rule), and only of time that
rows cover: nothing is assumed of the time before the first row or after the last. What is defined:

- A line that is not two finite numbers, the second at least 0, is left out: a header, garbage, a further column.
- A last line without its end of line is not read before the end has come.
- Rows may come seconds late, and seconds apart. What they say is of the time that they cover, which the node's
  meter holds open until they have come (`ensemble.meter.power.pending_interval`).
- A row that is not later than the one before, or more than `AHEAD_S` ahead of this host's clock, is left out.
- Between rows more than `GAP_S` apart the power is not known. When no row is younger than that, the meter is lost;
  it is found again when one is.
- A file that is shorter than it was (truncated) or another one than it was (rotated) is read from its beginning;
  of one that was rotated, what had not been read is read first.

The clocks of the meter and of this host must be in step (NTP), to a second or so: the parts of the node that are
measured here are compared with what the meter saw at the same time.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading, Trapezoid

NAME = "external meter"
GAP_S = 30.0
AHEAD_S = 60.0
_LONGEST_LINE = 4096  # bytes: what is longer is no row
_TAIL = 1 << 16  # bytes of an existing file in which its last row is looked for


class MeterRow(NamedTuple):
    """One reading of the meter: unix time in seconds, watts."""

    t: float
    watts: float


def parse_row(line: bytes) -> MeterRow | None:
    """The row in a line; None where it holds none."""
    fields = line.split(b",")
    if len(fields) != 2:
        return None
    try:
        row = MeterRow(float(fields[0]), float(fields[1]))
    except ValueError:
        return None
    return row if math.isfinite(row.t) and math.isfinite(row.watts) and row.watts >= 0 else None


@dataclass
class LineBuffer:
    """Splits what is read of a file into rows; `rest`: the line that has not ended yet."""

    rest: bytes = b""

    def add(self, data: bytes) -> list[MeterRow]:
        """The rows whose lines end in `data`."""
        *lines, rest = (self.rest + data).split(b"\n")
        self.rest = rest if len(rest) <= _LONGEST_LINE else b"#"  # no row, whatever follows
        return [row for row in map(parse_row, lines) if row is not None]


@dataclass
class PowerCurve:
    """Joins rows to trapezoids; `last`: the row that the next one is joined to."""

    last: MeterRow | None = None

    def add(self, rows: Iterable[MeterRow], now: float) -> list[Trapezoid]:
        """The power that becomes known by further rows.

        Args:
            rows: in the order of the file.
            now: unix time of this host.
        """
        known = []
        for row in rows:
            last = self.last
            if row.t > now + AHEAD_S or (last is not None and row.t <= last.t):
                continue
            if last is not None and row.t - last.t <= GAP_S:
                known.append(Trapezoid(last.t, row.t, last.watts, row.watts))
            self.last = row
        return known

    def find_reason(self, now: float) -> str:
        """Why the curve cannot be used now; empty where it can."""
        if self.last is None:
            return "it holds no line of `unix seconds,watts`"
        if now - self.last.t > GAP_S:
            return f"its last row is {now - self.last.t:.0f} s old (does the meter write, are the clocks in step?)"
        return ""


class _Tail:
    """Reads what is appended to a file, through truncation and rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        self._lines = LineBuffer()
        size = os.fstat(self._file.fileno()).st_size
        if size > _TAIL:
            self._file.seek(size - _TAIL)  # perhaps within a line: only the last row matters

    def read(self) -> list[MeterRow]:
        """The rows since the last call."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._lines = LineBuffer()
        rows = self._lines.add(self._file.read())
        try:
            now, then = os.stat(self._path), os.fstat(self._file.fileno())
        except FileNotFoundError:  # between the two steps of a rotation, or removed for good: no row will come
            return rows
        if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
            self._file.close()
            self._file, self._lines = _open(self._path), LineBuffer()
            rows += self._lines.add(self._file.read())
        return rows

    def close(self) -> None:
        self._file.close()


def _open(path: Path) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # a pipe would block
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def locate(meter: str, node: str) -> Path:
    """The file of a node: `Energy.meter` with the node's and the host's name in their places."""
    return Path(meter.replace("{node}", node).replace("{host}", socket.gethostname()))


def open_external(path: Path, clock: Callable[[], float] = time.time) -> PowerSource | Absent:
    """The external meter that writes a file.

    Args:
        path: see `locate`.
        clock: unix time in seconds.
    """
    try:
        tail = _Tail(path)
        rows = tail.read()
    except OSError as error:
        return Absent(NAME, f"{path} cannot be read: {error.strerror or error}")
    known_rows = [row for row in rows if row.t <= clock() + AHEAD_S]
    curve = PowerCurve(known_rows[-1] if known_rows else None)
    reason = curve.find_reason(clock())
    if rows and not known_rows:
        ahead_s = min(row.t for row in rows) - clock()
        reason = f"its rows are {ahead_s:.0f} s ahead of this host's clock (are the clocks in step?)"
    if reason:
        tail.close()
        return Absent(NAME, f"{path}: {reason}")

    def read() -> list[Reading]:
        try:
            rows = tail.read()
        except OSError as error:
            raise PowerError(f"{path} cannot be read: {error.strerror or error}") from None
        known = tuple(curve.add(rows, clock()))
        reason = curve.find_reason(clock())
        if reason and not known:
            raise PowerError(f"{path}: {reason}")
        return [Reading("node", "node", sum(each.energy_j for each in known), curve=known)]

    return PowerSource(
        NAME, "node", "measured", read, tail.close, is_late=True, reopen=lambda: open_external(path, clock)
    )
