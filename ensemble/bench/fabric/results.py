"""From what each rank measured to the rows of the study."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.rows import CollectiveRow, FusionRow, TrainingRow

PLAIN = "plain"


def collective_rows(
    link: Link, root: str, by_rank: list[dict[str, Any]], machine: predict.Machine
) -> Iterator[CollectiveRow]:
    """The rows of `collectives.measure`.

    Args:
        root: the backend.
        by_rank: what each rank returned.
        machine: on which they all are.
    """
    cases: dict[tuple[str, str], list[tuple[dict[str, Any], ...]]] = {}
    for each in zip(*(said["cases"] for said in by_rank), strict=True):
        cases.setdefault((each[0]["collective"], each[0]["layer"]), []).append(each)
    for (collective, layer), same in cases.items():
        backend = root if layer == PLAIN else layer
        sizes = [each[0]["size"] for each in same]
        way = by_rank[0]["ways"][layer]
        models = [predict.layered(collective, len(link.placement), size, root, **way) for size in sizes]
        computed = [predict.seconds(m, link.placement, link.payload_bps, machine) for m in models]
        slowest = [max((said["times"] for said in each), key=statistics.median) for each in same]
        predicted = predict.with_latency(computed, statistics.median(slowest[0]))
        for each, model, times, predicted_s in zip(same, models, slowest, predicted, strict=True):
            yield _row(link, backend, each, model, times, predicted_s)


def _row(
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
        wrong=sum(said["wrong"] for said in each),
        predicted_us=predicted_s * 1e6,
        low_us=low * 1e6,
        high_us=high * 1e6,
        iterations=len(times),
        wire_mb=max(said["wire"] for said in each) / 1e6 if link.hosts > 1 else None,
        predicted_mb=predict.wire_bytes(model, placement) / 1e6 if link.hosts > 1 else None,
    )


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of a single value, that."""
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def training_rows(link: Link, by_rank: list[dict[str, Any]], machine: predict.Machine) -> Iterator[TrainingRow]:
    """The rows of `training.measure`; arguments as above."""
    for net in by_rank[0]["nets"]:
        each = [said["nets"][net] for said in by_rank]
        first = each[0]
        step_s = max(statistics.median(said["together"]) for said in each)
        alone_s = max(statistics.median(said["alone"]) for said in each)
        model = predict.rounds("all_reduce", range(len(each)), first["grad_bytes"])
        exchange_s = predict.seconds(model, link.placement, link.payload_bps, machine)
        exchange_s += first["messages"] * by_rank[0]["latency_s"]
        predicted_s = predicted_step_s(alone_s, first["backward_s"], exchange_s)
        yield TrainingRow(
            link=link.name,
            hosts=link.hosts,
            ranks=len(each),
            rate=link.rate,
            backend="gloo",
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


def predicted_step_s(alone_s: float, backward_s: float, exchange_s: float) -> float:
    """A step whose exchange goes on during the backward pass, and for as long after it as it needs."""
    return alone_s + max(0.0, exchange_s - backward_s)


def fusion_rows(link: Link, by_rank: list[list[dict[str, Any]]]) -> Iterator[FusionRow]:
    """The rows of `fusion.measure`."""
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
