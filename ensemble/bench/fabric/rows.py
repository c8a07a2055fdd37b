"""The rows of the fabric study, one for each case of its three parts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.results import group_by, quartiles

PLAIN = "plain"  # the layer that is the communicator itself
NETS = ("compute-heavy", "parameter-heavy")


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One collective of one size, in the columns of nccl-tests.

    Attributes:
        link: its name; hosts, ranks (in all), rate: its properties.
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
    rate: str | None
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
    link: Link, root: str, by_rank: list[dict[str, Any]], machine: predict.PredictedMachine
) -> Iterator[CollectiveRow]:
    """The rows of `measure.measure_collectives`.

    Args:
        root: the backend.
        by_rank: what each rank returned.
        machine: on which all ranks are.
    """
    placement, is_shared = link.placement, link.hosts > 1
    cases = zip(*(rank["cases"] for rank in by_rank), strict=True)
    groups = group_by(cases, lambda each: (each[0]["collective"], each[0]["layer"]))
    for (collective, layer), same in groups.items():
        ways = by_rank[0]["ways"][layer]
        sizes = [each[0]["size"] for each in same]
        models = [predict.layered_rounds(collective, len(placement), size, root, **ways) for size in sizes]
        computed = [predict.seconds(model, placement, link.payload_bps, machine) for model in models]
        slowest = [_slowest(rank["times"] for rank in each) for each in same]
        predicted = predict.with_latency(computed, statistics.median(slowest[0]))
        for each, model, times, predicted_s in zip(same, models, slowest, predicted, strict=True):
            middle, (low, high) = statistics.median(times), quartiles(times)
            algbw = each[0]["size"] / middle / 1e9
            yield CollectiveRow(
                link=link.name,
                hosts=link.hosts,
                ranks=len(placement),
                rate=link.rate,
                backend=root if layer == PLAIN else layer,
                collective=collective,
                size=each[0]["size"],
                count=each[0]["count"],
                type="float32",
                time_us=middle * 1e6,
                algbw=algbw,
                busbw=algbw * predict.bus_factor(collective, len(placement)),
                wrong=sum(rank["wrong"] for rank in each),
                predicted_us=predicted_s * 1e6,
                low_us=low * 1e6,
                high_us=high * 1e6,
                iterations=len(times),
                wire_mb=max(rank["wire"] for rank in each) / 1e6 if is_shared else None,
                predicted_mb=predict.wire_bytes(model, placement) / 1e6 if is_shared else None,
            )


def _slowest(by_rank: Iterable[Sequence[float]]) -> Sequence[float]:
    return max(by_rank, key=statistics.median)


def training_rows(
    link: Link, backend: str, by_rank: list[dict[str, Any]], machine: predict.PredictedMachine
) -> Iterator[TrainingRow]:
    """The rows of `measure.measure_training`; arguments as above."""
    for net, first in by_rank[0]["nets"].items():
        each = [rank["nets"][net] for rank in by_rank]
        step_s = statistics.median(_slowest(rank["together"] for rank in each))
        alone_s = statistics.median(_slowest(rank["alone"] for rank in each))
        model = predict.layered_rounds("all_reduce", len(each), first["grad_bytes"], backend, **by_rank[0]["ways"])
        exchange_s = predict.seconds(model, link.placement, link.payload_bps, machine)
        exchange_s += first["messages"] * by_rank[0]["latency_s"]
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
            predicted=alone_s / predict_step_s(alone_s, first["backward_s"], exchange_s),
        )


def predict_step_s(alone_s: float, backward_s: float, exchange_s: float) -> float:
    """Seconds of a step whose exchange overlaps with the backward pass, and may go on after it."""
    return alone_s + max(0.0, exchange_s - backward_s)


def fusion_rows(link: Link, by_rank: list[list[dict[str, Any]]]) -> Iterator[FusionRow]:
    """The rows of `measure.measure_fusion`."""
    for cases in zip(*by_rank, strict=True):
        case, times = cases[0], _slowest(case["times"] for case in cases)
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
