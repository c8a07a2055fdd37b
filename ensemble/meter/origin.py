"""Names the origins of figures, and converts joules and seconds to ticks, whose parts sum to their total.

`measured`: a counter was read. `attributed`: a share of a measured total. `estimated`: computed from a model of
the machine. `unavailable`: it is None, never a guess. A tick is 2**-20 of a joule or second: sums of whole ticks
are exact in any order.
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
