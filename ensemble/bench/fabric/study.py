"""Runs the parts of the fabric study, link by link and backend by backend."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ensemble.bench import hosts
from ensemble.bench.backends import LAYERS
from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.rows import CollectiveRow, Found, FusionRow, TrainingRow
from ensemble.bench.ranks import LOOPBACK, run_ranks
from ensemble.bench.study import Say
from ensemble.spec import SpecError, unknown_name

PARTS = ("collectives", "training", "fusion")
SIZES = tuple(2**k for k in (12, 16, 20, 24))
ALL_SIZES = tuple(2**k for k in range(10, 27, 2))
THRESHOLDS = (0, *(2**k for k in (16, 20, 22, 24, 25, 26, 27)))
_ROUNDS = 4
_PLAIN = "plain"
_ROOM = "ensemble.bench.fabric"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        links: over which; those that are emulated are left out where they cannot be made.
        backends: words of `ensemble.bench.backends`.
        collectives: of `predict.COLLECTIVES`.  sizes: bytes, ascending.
        parts: of `PARTS`.
        iterations: of each case, at most; fewer, but three, where they take more than `seconds`.
        rounds: in which what is compared takes turns, in training and fusion.
        thresholds: of the fusion sweep, bytes.
        everywhere: whether the fusion sweep runs on all links, not on the first alone.
    """

    links: Sequence[Link]
    backends: Sequence[str]
    collectives: Sequence[str] = predict.COLLECTIVES
    sizes: Sequence[int] = SIZES
    parts: Sequence[str] = PARTS
    iterations: int = 20
    seconds: float = 1.0
    rounds: int = 3
    thresholds: Sequence[int] = THRESHOLDS
    everywhere: bool = False


def study(plan: Plan, say: Say = lambda _: None) -> Found:
    """Measure what the plan says.

    Raises:
        SpecError: there is no such backend, collective or part.
        RanksError: a rank failed.
    """
    for name, given, known in (
        ("collective", plan.collectives, predict.COLLECTIVES),
        ("part", plan.parts, PARTS),
    ):
        for word in given:
            if word not in known:
                raise SpecError(unknown_name(f"there is no {name}", word, list(known)))
    links = _possible(plan.links, say)
    collectives: list[CollectiveRow] = []
    training: list[TrainingRow] = []
    fusion: list[FusionRow] = []
    machine_bps: float | None = None
    for number, link in enumerate(links):
        with link.made() as made:
            if "collectives" in plan.parts:
                rows, moved_bps = _collectives(plan, link, made, say)
                collectives += rows
                machine_bps = machine_bps or moved_bps
            if "fusion" in plan.parts and (plan.everywhere or number == 0):
                fusion += _fusion(plan, link, made, say)
        if "training" in plan.parts and (link.emulated or len(links) == 1):
            one = dataclasses.replace(link, ranks=1 if link.emulated else 2)
            with one.made() as made:
                training += _training(plan, one, made, machine_bps, say)
    return Found(collectives, training, fusion)


def _possible(links: Sequence[Link], say: Say) -> list[Link]:
    """Without what this machine cannot emulate; then, if nothing is left, the loopback alone."""
    if any(link.emulated for link in links) and (reason := hosts.unavailable()) is not None:
        found = [link for link in links if not link.emulated]
        found = found or [Link(ranks=links[0].hosts * links[0].ranks)]
        say(f"{reason}; only {' and '.join(link.name for link in found)}")
        return found
    return list(links)


def _roots(backends: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Backends that connect, each with the layers that are measured over it in turn."""
    layers = [word for word in backends if word in LAYERS]
    for word in backends:
        if word not in LAYERS:
            yield word, [_PLAIN, *(layers if word == "gloo" else [])]
    if layers and "gloo" not in backends:
        yield "gloo", layers


# --- collectives -----------------------------------------------------------------------------------------------


def _collectives(
    plan: Plan, link: Link, made: hosts.Hosts | None, say: Say
) -> tuple[list[CollectiveRow], float | None]:
    rows: list[CollectiveRow] = []
    machine_bps = None
    for root, layers in _roots(plan.backends):
        say(f"collectives: {link.name}, {', '.join([root, *layers[1:]])}")
        by_rank = run_ranks(
            f"{_ROOM}.collectives:measure",
            {
                "collectives": list(plan.collectives),
                "sizes": sorted(plan.sizes),
                "layers": layers,
                "iterations": plan.iterations,
                "seconds": plan.seconds,
                "rounds": _ROUNDS,
                "placement": link.placement,
                "interface": hosts.INTERFACE if link.emulated else LOOPBACK,
            },
            placement=link.placement,
            hosts=made,
            backend=root,
            device="cuda" if root == "nccl" else "cpu",
            timeout_s=3600.0,
        )
        machine_bps = machine_bps or by_rank[0]["machine_bps"]
        rows += _rows(link, root, by_rank, machine_bps)
    return rows, machine_bps


def _rows(
    link: Link, root: str, by_rank: list[dict[str, Any]], machine_bps: float | None
) -> Iterator[CollectiveRow]:
    cases: dict[tuple[str, str], list[tuple[dict[str, Any], ...]]] = {}
    for each in zip(*(said["cases"] for said in by_rank), strict=True):
        cases.setdefault((each[0]["collective"], each[0]["layer"]), []).append(each)
    for (collective, layer), same in cases.items():
        backend = root if layer == _PLAIN else layer
        sizes = [each[0]["size"] for each in same]
        models = [pattern(backend, collective, link.placement, size) for size in sizes]
        computed = [predict.seconds(m, link.placement, link.payload_bps, machine_bps) for m in models]
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
        wire_mb=max(said["wire"] for said in each) / 1e6 if link.emulated else None,
        predicted_mb=predict.wire_bytes(model, placement) / 1e6 if link.emulated else None,
    )


def pattern(backend: str, collective: str, placement: Sequence[int], size: int) -> list[predict.Round]:
    """What ranks of a backend send each other."""
    flat = predict.rounds(collective, range(len(placement)), size, backend)
    if backend not in LAYERS or collective != "all_reduce":
        return flat
    return predict.hierarchical(placement, size)


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of a single value, that."""
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


# --- training --------------------------------------------------------------------------------------------------


def _training(
    plan: Plan, link: Link, made: hosts.Hosts | None, machine_bps: float | None, say: Say
) -> Iterator[TrainingRow]:
    from ensemble.bench.fabric.training import NETS

    say(f"training: {link.name}")
    by_rank = run_ranks(
        f"{_ROOM}.training:measure",
        {"nets": list(NETS), "steps": 6, "rounds": plan.rounds},
        placement=link.placement,
        hosts=made,
        timeout_s=1800.0,
    )
    for net in NETS:
        each = [said["nets"][net] for said in by_rank]
        first = each[0]
        step_s = max(statistics.median(said["together"]) for said in each)
        alone_s = max(statistics.median(said["alone"]) for said in each)
        model = pattern("gloo", "all_reduce", link.placement, first["grad_bytes"])
        exchange_s = predict.seconds(model, link.placement, link.payload_bps, machine_bps)
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


# --- fusion ----------------------------------------------------------------------------------------------------


def _fusion(plan: Plan, link: Link, made: hosts.Hosts | None, say: Say) -> Iterator[FusionRow]:
    from ensemble.bench.fabric.fusion import resnet50, slowest

    say(f"fusion: {link.name}")
    by_rank = run_ranks(
        f"{_ROOM}.fusion:measure",
        {"shapes": list(resnet50()), "thresholds": list(plan.thresholds), "rounds": plan.rounds, "steps": 2},
        placement=link.placement,
        hosts=made,
        timeout_s=1800.0,
    )
    for case in slowest(by_rank):
        low, high = quartiles(case["times"])
        yield FusionRow(
            link=link.name,
            ranks=len(link.placement),
            backend="gloo",
            threshold=case["threshold"],
            messages=case["messages"],
            time_ms=statistics.median(case["times"]) * 1e3,
            low_ms=low * 1e3,
            high_ms=high * 1e3,
        )
