"""Reads values and energy counters from files of Linux's sysfs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ensemble.meter.power.common import Kind, PowerError

#: Watts that no zone draws for as long as a counter needs to wrap: several times the largest limit of a socket
#: (500 W in 2025), which it may exceed by half for milliseconds.
MOST_W = 2000.0
_STEP_S = 0.1  # a counter may be so long behind


@dataclass
class Counter:
    """An energy counter: its file, where it wraps (None: not known), and its last value in microjoules.

    `clock`: seconds; by it, a counter that started anew is told from one that wrapped.
    """

    name: str
    kind: Kind
    file: Path
    range_uj: int | None
    last_uj: int
    clock: Callable[[], float] = time.monotonic
    last_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.last_s = self.clock()

    def advance(self) -> float:
        """Joules since the last call.

        Raises:
            PowerError: it cannot be read, or started anew, as it does where the machine was suspended or moved to
                another host: what was used since the last call is not known.
        """
        now_uj, now_s = read_int(self.file), self.clock()
        used_uj, length_s = now_uj - self.last_uj, now_s - self.last_s
        self.last_uj, self.last_s = now_uj, now_s
        if used_uj < 0:
            if self.range_uj is None:
                raise PowerError(f"{self.file} went back and where it wraps is not known")
            used_uj += self.range_uj
            if used_uj / 1e6 > MOST_W * (length_s + _STEP_S):
                raise PowerError(
                    f"{self.file} restarted: had it wrapped, it would have counted {used_uj / 1e6:.0f} J in "
                    f"{length_s:.1f} s"
                )
        return used_uj / 1e6


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        PowerError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").strip()
    except PermissionError:
        alike = file.parent.parent / "*" / re.sub(r"\d+", "*", file.name)
        text = f"{file} is readable by root only: run as root, or `sudo chmod a+r {alike}`"
        raise PowerError(text) from None
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
        raise PowerError(f"{file} holds {text[:40]!r}, which is not a number") from None
