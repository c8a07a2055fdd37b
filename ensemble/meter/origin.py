"""Names the origins of figures, and converts joules and seconds to ticks, whose parts sum to their total.

An **origin** says how far a figure can be trusted:

- ``measured``: a counter was read (a process's CPU time, a package's energy counter);
- ``attributed``: a share of a measured total (a member's part of what its node's counter said);
- ``estimated``: computed from a model of the machine, or a share of such a total;
- ``unavailable``: it could not be had; the figure is then None, never a guess.

Floating-point sums depend on their order, so shares of 0.1 J rarely add up to the joule they were cut from.
Multiples of a power of two do: they add without rounding, in any order, up to 2**53 of them. Figures that are
split or summed are therefore kept as whole **ticks** of 2**-20 (about a millionth) of a joule or second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Origin = Literal["measured", "attributed", "estimated", "unavailable"]
ORIGINS: tuple[Origin, ...] = ("measured", "attributed", "estimated", "unavailable")
TICKS_PER_UNIT = 1 << 20


def to_ticks(value: float) -> int:
    """Whole ticks nearest to a number of joules or seconds."""
    return round(value * TICKS_PER_UNIT)


def from_ticks(ticks: int) -> float:
    """Joules or seconds of a whole number of ticks, exact below 2**53 ticks."""
    return ticks / TICKS_PER_UNIT


def round_to_tick(value: float) -> float:
    """The value rounded to a whole tick, so that sums of such values are exact."""
    return from_ticks(to_ticks(value))


def weakest(origins: Iterable[Origin]) -> Origin:
    """The origin of a sum: that of its least trustworthy part; of no part at all, ``unavailable``.

    Parts that are themselves unavailable are left out by the caller: a sum says what it covers.
    """
    return max(origins, key=ORIGINS.index, default="unavailable")
