"""What the fabric study found: a row for each case of its three parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One collective of one size, in the columns of nccl-tests.

    Attributes:
        link: for people; hosts, ranks (in all), place, rate, mtu: what it is.
        backend, collective: what was run.
        size: bytes of a message, as nccl-tests counts them; count: its elements.  type: of an element.
        time_us: the median iteration of the slowest rank, microseconds; low_us, high_us: its quartiles.
        algbw, busbw: GB/s, 10^9 bytes.
        wrong: elements of all ranks' results that were not what they must be.
        predicted_us: what was predicted (`predict`).
        iterations: how many were timed.
        wire_mb: sent by the busiest host's interface in one iteration, frames with headers, 10^6 bytes; None on
            the loopback.  predicted_mb: the same as predicted, without headers.
    """

    part: str = field(default="collective", init=False)
    link: str
    hosts: int
    ranks: int
    place: str
    rate: str | None
    mtu: int
    backend: str
    collective: str
    size: int
    count: int
    type: str
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    predicted_us: float
    low_us: float
    high_us: float
    iterations: int
    wire_mb: float | None
    predicted_mb: float | None


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One net trained data-parallel over one link.

    Attributes:
        link, hosts, ranks, rate, backend: as above.
        net, parameters, batch: batch of each rank.  grad_mb: of a step, 10^6 bytes.  messages: of a step.
        samples_per_s: of all ranks.
        step_ms: the median step of the slowest rank; alone_ms: the same when all compute at once and none
            exchanges; backward_ms: of that, the backward pass, which the exchange overlaps.
        efficiency: alone_ms / step_ms: samples/s against as many ranks that need not exchange anything.
        predicted: the efficiency that was predicted.
        exchange_ms: the time of the exchange that was predicted.
    """

    part: str = field(default="training", init=False)
    link: str
    hosts: int
    ranks: int
    rate: str | None
    backend: str
    net: str
    parameters: int
    grad_mb: float
    messages: int
    batch: int
    samples_per_s: float
    step_ms: float
    alone_ms: float
    backward_ms: float
    exchange_ms: float
    efficiency: float
    predicted: float


@dataclass(frozen=True, kw_only=True)
class FusionRow:
    """The exchange of a ResNet-50's gradients at one threshold.

    Attributes:
        link, ranks, backend: as above.
        threshold: bytes at which a message is full; 0: every tensor by itself.
        messages: how many that makes.
        time_ms: the median of the slowest rank; low_ms, high_ms: its quartiles.
        chosen: whether the tuning at a member's start (`ensemble.comm.autotune.measure`) takes this one.
    """

    part: str = field(default="fusion", init=False)
    link: str
    ranks: int
    backend: str
    threshold: int
    messages: int
    time_ms: float
    low_ms: float
    high_ms: float
    chosen: bool = False


_WHERE = ("link", "backend")
_COLLECTIVE = (
    *_WHERE,
    "collective",
    "size",
    "count",
    "type",
    "time_us",
    "algbw",
    "busbw",
    "wrong",
    "predicted_us",
)
_COUNTS = ("net", "parameters", "grad_mb", "ranks", "batch")
_TRAINING = (*_WHERE, *_COUNTS, "samples_per_s", "step_ms", "alone_ms", "exchange_ms", "efficiency", "predicted")
_FUSION = (*_WHERE, "threshold", "messages", "time_ms", "low_ms", "high_ms", "chosen")


@dataclass(frozen=True)
class Found:
    """All rows of a study."""

    collectives: Sequence[CollectiveRow]
    training: Sequence[TrainingRow]
    fusion: Sequence[FusionRow]

    def as_dicts(self) -> list[dict[str, Any]]:
        """For programs: `part` says which columns a row has."""
        every: list[CollectiveRow | TrainingRow | FusionRow] = [*self.collectives, *self.training, *self.fusion]
        return [asdict(row) for row in every]

    def tables(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """For people."""
        if self.collectives:
            rows = [_columns(row, _COLLECTIVE) for row in self.collectives]
            yield "collectives (algbw, busbw: GB/s)", rows
        if self.training:
            yield "training, data-parallel", [_columns(row, _TRAINING) for row in self.training]
        if self.fusion:
            rows = [{**_columns(row, _FUSION), "threshold": human(row.threshold)} for row in self.fusion]
            yield "fusion of a ResNet-50's 161 gradients", rows


def _columns(row: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def human(size: int) -> str:
    """A size for people: "4 KiB"; 0 is "none"."""
    if size == 0:
        return "none"
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def findings(found: Found) -> Iterator[str]:
    """What follows, a line each."""
    wrong = [row for row in found.collectives if row.wrong]
    for row in wrong:
        yield f"WRONG: {row.wrong} elements of {row.collective} {human(row.size)}, {row.backend}, {row.link}"
    yield from _against_plain(found.collectives)
    yield from _hybrid(found.collectives)
    for net in dict.fromkeys(row.net for row in found.training):
        rows = [row for row in found.training if row.net == net]
        each = ", ".join(f"{row.efficiency:.0%} (predicted {row.predicted:.0%}) on {row.link}" for row in rows)
        yield f"{net} net, {rows[0].parameters:,} parameters: efficiency {each}"
    for link in dict.fromkeys((row.link, row.backend) for row in found.fusion):
        here = [row for row in found.fusion if (row.link, row.backend) == link]
        best = min(here, key=lambda row: row.time_ms)
        tuned = next((row for row in here if row.chosen), None)
        ends = f"{here[0].time_ms:.0f} ms at {human(here[0].threshold)}, {here[-1].time_ms:.0f} at the largest"
        said = f"fusion, {link[0]}: best {best.time_ms:.0f} ms at {human(best.threshold)}; {ends}"
        if tuned is not None:
            said += f"; tuned {human(tuned.threshold)}, {tuned.time_ms / best.time_ms - 1:.0%} above the best"
        yield said


def _against_plain(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """Each other backend's all-reduce against gloo's."""
    at = {(row.link, row.backend, row.size): row for row in rows if row.collective == "all_reduce"}
    for link, backend in dict.fromkeys((link, backend) for link, backend, _ in at if backend != "gloo"):
        pairs = [
            (size, at[link, "gloo", size].time_us / row.time_us)
            for (there, name, size), row in at.items()
            if (there, name) == (link, backend) and (link, "gloo", size) in at
        ]
        if pairs:
            each = ", ".join(f"{times:.2f} x at {human(size)}" for size, times in pairs)
            yield f"all_reduce by {backend} against gloo's, {link}: {each}"


def _hybrid(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """How far from the better of the two the hybrid is, where it is worst."""
    at = {(row.link, row.backend, row.size): row.time_us for row in rows if row.collective == "all_reduce"}
    for link in dict.fromkeys(link for link, backend, _ in at if backend == "hybrid"):
        ratios = {
            size: us / min(at[link, "gloo", size], at[link, "hierarchical", size])
            for (there, backend, size), us in at.items()
            if (there, backend) == (link, "hybrid")
            and {(link, b, size) for b in ("gloo", "hierarchical")} <= at.keys()
        }
        if ratios:
            worst = max(ratios, key=lambda size: ratios[size])
            yield f"hybrid, {link}: at most {ratios[worst]:.2f} x the better of the two, at {human(worst)}"
