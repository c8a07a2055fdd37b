"""Reads values and energy counters from files of Linux's sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ensemble.meter.power.common import Kind, PowerError


@dataclass
class Counter:
    """An energy counter: its file, where it wraps (None: not known), and its last value in microjoules."""

    name: str
    kind: Kind
    file: Path
    range_uj: int | None
    last_uj: int

    def advance(self) -> float:
        """Joules since the last call."""
        now_uj = read_int(self.file)
        used_uj = now_uj - self.last_uj
        self.last_uj = now_uj
        if used_uj < 0:
            if self.range_uj is None:
                raise PowerError(f"{self.file} went back and where it wraps is not known")
            used_uj += self.range_uj
        return used_uj / 1e6


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        PowerError: it cannot be read.
    """
    try:
        return file.read_text().strip()
    except PermissionError:
        alike = file.parent.parent / "*" / re.sub(r"\d+", "*", file.name)
        raise PowerError(f"{file} is readable by root only: run as root, or `sudo chmod a+r {alike}`") from None
    except OSError as error:
        raise PowerError(f"{file} cannot be read: {error.strerror or error}") from None


def read_int(file: Path) -> int:
    """The whole number in a file.

    Raises:
        PowerError: it cannot be read, or holds something else.
    """
    text = read_text(file)
    try:
        return int(text)
    except ValueError:
        raise PowerError(f"{file} holds {text[:40]!r}, which is no number") from None
