"""Means over seeds, and how sure they are: Student's t intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over `n` values and its interval, `half` to either side; None of a single value, which has none."""

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float | None:
        """The interval's lower end."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """The interval's upper end."""
        return None if self.half is None else self.mean + self.half

    def holds(self, value: float) -> bool | None:
        """Whether a value is in it; None where there is no interval."""
        return None if self.half is None else abs(value - self.mean) <= self.half

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.half is None else f"{self.mean:.2f} ± {self.half:.2f}"


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of independent values with its t interval: mean ± t(n - 1) · s / √n.

    Args:
        values: one or more, of one seed each.
        confidence: how often such an interval holds the true mean, where values are normal.
    """
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Interval(mean, None, 1)
    from scipy.stats import t  # type: ignore[import-untyped]

    quantile = float(t.ppf((1 + confidence) / 2, n - 1))
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(n), n)


def paired(values: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean difference `values - others` of pairs, value i and other i of the same seed, with its interval."""
    return interval([a - b for a, b in zip(values, others, strict=True)], confidence)


def flat(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """A row's values for JSON: of the intervals `names` the mean as NAME, the ends as NAME_low and NAME_high."""
    found = {name: value for name, value in values.items() if name not in names}
    for name in names:
        value: Interval | None = values[name]
        ends = (None, None, None) if value is None else (value.mean, value.low, value.high)
        found |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return found
