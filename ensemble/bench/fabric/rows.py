"""The rows of the fabric study, one for each case of its three parts, and the findings from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.results import format_bytes, group_by, quartiles

PLAIN = "plain"  # the layer that is the communicator itself
NETS = ("compute-heavy", "parameter-heavy")


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One collective of one size, in the columns of nccl-tests.

    Attributes:
        link: its name; hosts, ranks (in all), place, rate, mtu: its properties.
        backend, collective: what was run.
        size: bytes of a message, as nccl-tests counts them; count: its elements.  type: of an element.
        time_us: the median iteration of the slowest rank, microseconds; low_us, high_us: its quartiles.
        algbw, busbw: GB/s, 10^9 bytes.
        wrong: wrong elements of all ranks' results.
        predicted_us: what was predicted (`predict`).
        iterations: how many were timed.
        wire_mb: sent by the busiest host's interface in one iteration, frames with headers, 10^6 bytes; None on
            the loopback.  predicted_mb: the same as predicted, without headers.
    """

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

    link: str
    ranks: int
    backend: str
    threshold: int
    messages: int
    time_ms: float
    low_ms: float
    high_ms: float
    chosen: bool = False


def collective_rows(
    link: Link, root: str, by_rank: list[dict[str, Any]], machine: predict.Machine
) -> Iterator[CollectiveRow]:
    """The rows of `measure.measure_collectives`.

    Args:
        root: the backend.
        by_rank: what each rank returned.
        machine: on which all ranks are.
    """
    cases = zip(*(rank["cases"] for rank in by_rank), strict=True)
    for (collective, layer), same in group_by(
        cases, lambda each: (each[0]["collective"], each[0]["layer"])
    ).items():
        backend = root if layer == PLAIN else layer
        sizes = [each[0]["size"] for each in same]
        way = by_rank[0]["ways"][layer]
        models = [predict.layered_rounds(collective, len(link.placement), size, root, **way) for size in sizes]
        computed = [predict.seconds(m, link.placement, link.payload_bps, machine) for m in models]
        slowest = [max((rank["times"] for rank in each), key=statistics.median) for each in same]
        predicted = predict.with_latency(computed, statistics.median(slowest[0]))
        for each, model, times, predicted_s in zip(same, models, slowest, predicted, strict=True):
            yield _collective_row(link, backend, each, model, times, predicted_s)


def _collective_row(
    link: Link,
    backend: str,
    each: Sequence[dict[str, Any]],
    model: Sequence[predict.Round],
    times: Sequence[float],
    predicted_s: float,
) -> CollectiveRow:
    case, placement = each[0], link.placement
    middle, (low, high) = statistics.median(times), quartiles(times)
    algbw = case["size"] / middle / 1e9
    return CollectiveRow(
        link=link.name,
        hosts=link.hosts,
        ranks=len(placement),
        place=link.place,
        rate=link.rate,
        mtu=link.mtu,
        backend=backend,
        collective=case["collective"],
        size=case["size"],
        count=case["count"],
        type="float32",
        time_us=middle * 1e6,
        algbw=algbw,
        busbw=algbw * predict.bus_factor(case["collective"], len(placement)),
        wrong=sum(rank["wrong"] for rank in each),
        predicted_us=predicted_s * 1e6,
        low_us=low * 1e6,
        high_us=high * 1e6,
        iterations=len(times),
        wire_mb=max(rank["wire"] for rank in each) / 1e6 if link.hosts > 1 else None,
        predicted_mb=predict.wire_bytes(model, placement) / 1e6 if link.hosts > 1 else None,
    )


def training_rows(
    link: Link, by_rank: list[dict[str, Any]], machine: predict.Machine, backend: str = "gloo"
) -> Iterator[TrainingRow]:
    """The rows of `measure.measure_training`; arguments as above. The prediction is for gloo's ring."""
    for net in by_rank[0]["nets"]:
        each = [rank["nets"][net] for rank in by_rank]
        first = each[0]
        step_s = max(statistics.median(rank["together"]) for rank in each)
        alone_s = max(statistics.median(rank["alone"]) for rank in each)
        model = predict.rounds("all_reduce", range(len(each)), first["grad_bytes"])
        exchange_s = predict.seconds(model, link.placement, link.payload_bps, machine)
        exchange_s += first["messages"] * by_rank[0]["latency_s"]
        predicted_s = predict_step_s(alone_s, first["backward_s"], exchange_s)
        yield TrainingRow(
            link=link.name,
            hosts=link.hosts,
            ranks=len(each),
            rate=link.rate,
            backend=backend,
            net=net,
            parameters=first["parameters"],
            grad_mb=first["grad_bytes"] / 1e6,
            messages=first["messages"],
            batch=first["batch"],
            samples_per_s=len(each) * first["batch"] / step_s,
            step_ms=step_s * 1e3,
            alone_ms=alone_s * 1e3,
            backward_ms=first["backward_s"] * 1e3,
            exchange_ms=exchange_s * 1e3,
            efficiency=alone_s / step_s,
            predicted=alone_s / predicted_s,
        )


def predict_step_s(alone_s: float, backward_s: float, exchange_s: float) -> float:
    """Seconds of a step whose exchange overlaps with the backward pass, and may go on after it."""
    return alone_s + max(0.0, exchange_s - backward_s)


def fusion_rows(link: Link, by_rank: list[list[dict[str, Any]]]) -> Iterator[FusionRow]:
    """The rows of `measure.measure_fusion`."""
    for cases in zip(*by_rank, strict=True):
        case, times = cases[0], max((case["times"] for case in cases), key=statistics.median)
        low, high = quartiles(times)
        yield FusionRow(
            link=link.name,
            ranks=len(link.placement),
            backend="gloo",
            threshold=case["threshold"],
            messages=case["messages"],
            time_ms=statistics.median(times) * 1e3,
            low_ms=low * 1e3,
            high_ms=high * 1e3,
            chosen=case["chosen"],
        )


class Results(NamedTuple):
    """All rows of a study."""

    collectives: Sequence[CollectiveRow]
    training: Sequence[TrainingRow]
    fusion: Sequence[FusionRow]
    members: Sequence[TrainingRow] = ()


def findings(results: Results) -> Iterator[str]:
    """Conclusions, one line each."""
    for row in (row for row in results.collectives if row.wrong):
        what = f"{row.collective} {format_bytes(row.size)}, {row.backend}, {row.link}"
        yield f"WRONG: {row.wrong} elements of {what}"
    yield from _against_plain(results.collectives)
    yield from _hybrid(results.collectives)
    for net, rows in group_by(results.training, lambda row: row.net).items():
        each = ", ".join(f"{row.efficiency:.0%} (predicted {row.predicted:.0%}) on {row.link}" for row in rows)
        yield f"{net} net, {rows[0].parameters:,} parameters: efficiency {each}"
    at = {(row.net, row.backend, row.link): row.step_ms for row in results.members}
    for net, rows in group_by(results.members, lambda row: row.net).items():
        home = next(row for row in rows if row.hosts == 1)
        away = [
            f"{row.step_ms / at[net, row.backend, home.link]:.2f} x on {row.link} ({row.backend})"
            for row in rows
            if row.hosts > 1
        ]
        if away:
            yield f"{net} net, {home.ranks} ranks: its step takes {', '.join(away)} of its time on one host"
    for (link, _), here in group_by(results.fusion, lambda row: (row.link, row.backend)).items():
        best = min(here, key=lambda row: row.time_ms)
        tuned = next((row for row in here if row.chosen), None)
        ends = (
            f"{here[0].time_ms:.0f} ms at {format_bytes(here[0].threshold)}, {here[-1].time_ms:.0f} at the largest"
        )
        line = f"fusion, {link}: best {best.time_ms:.0f} ms at {format_bytes(best.threshold)}; {ends}"
        if tuned is not None:
            line += (
                f"; tuned {format_bytes(tuned.threshold)}, {tuned.time_ms / best.time_ms - 1:.0%} above the best"
            )
        yield line


def _against_plain(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """Every backend's all-reduce against gloo's."""
    at = {(row.link, row.backend, row.size): row for row in rows if row.collective == "all_reduce"}
    for link, backend in dict.fromkeys((link, backend) for link, backend, _ in at if backend != "gloo"):
        pairs = [
            (size, at[link, "gloo", size].time_us / row.time_us)
            for (there, name, size), row in at.items()
            if (there, name) == (link, backend) and (link, "gloo", size) in at
        ]
        if pairs:
            each = ", ".join(f"{times:.2f} x at {format_bytes(size)}" for size, times in pairs)
            yield f"all_reduce by {backend} against gloo's, {link}: {each}"


def _hybrid(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """The hybrid against the better of the two that it chooses from, at the size where it is worst."""
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
            yield f"hybrid, {link}: at most {ratios[worst]:.2f} x the better of the two, at {format_bytes(worst)}"
