"""The metrics that a cluster can collect itself: their families, as Prometheus calls them, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "info"]


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: as Prometheus stores it, with `_total` or `_info`.
        help: what it is, a sentence.
        labels: the names of its labels, in order.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The name without the ending that its kind brings."""
        return self.name.removesuffix({"counter": "_total", "info": "_info", "gauge": ""}[self.kind])

    @property
    def unit(self) -> str:
        """Its base unit, as OpenMetrics has it; empty where it counts things."""
        last = self.stem.rpartition("_")[2]
        return last if last in ("seconds", "joules", "watts", "ratio", "bytes") and self.kind != "info" else ""


class MetricSample(NamedTuple):
    """The value of one series; the labels are in the order of the family's."""

    family: Family
    labels: tuple[str, ...]
    value: float
