"""Runs the parts `collectives` and `training` of the fabric study: a row for each case, link and backend."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fabric import predict
from benchmarks.fabric.links import Link
from benchmarks.fabric.measure import COLLECTIVES, PLAIN
from benchmarks.launch import hosts
from benchmarks.launch.backends import LAYERS
from benchmarks.launch.ranks import run_ranks
from benchmarks.net_shapes import step_seconds
from benchmarks.results import Report, group_by, slowest_quartiles

_BATCH = 64  # of a rank
#: Seconds of a step on an emulated accelerator, a P100, by net.
NETS = {net: step_s for net in ("resnet50", "inception", "vgg16") if (step_s := step_seconds("p100", net, _BATCH))}
_ROUNDS = 4
_TIMEOUT_S = 3600.0
_MEASURE = "benchmarks.fabric.measure:"


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """What rows of both parts have.

    Attributes:
        link: its name; hosts, ranks (in all), rate: its properties.
        backend: of the communicator.
    """

    link: str
    hosts: int
    ranks: int
    rate: str | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class CollectiveRow(LinkRow):
    """One collective of one size, in the columns of nccl-tests.

    Attributes:
        size: bytes of a message, as nccl-tests counts them; count: its elements.
        time_us: the median iteration of the slowest rank, microseconds; low_us, high_us: its quartiles.
        algbw, busbw: GB/s, 10^9 bytes.
        wrong: wrong elements of all ranks' results.
        predicted_us: what was predicted (`predict`); None of an all-reduce in two levels.
    """

    collective: str
    size: int
    count: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    predicted_us: float | None
    low_us: float
    high_us: float


@dataclass(frozen=True, kw_only=True)
class TrainingRow(LinkRow):
    """One net trained data-parallel over one link, on emulated accelerators.

    Attributes:
        net, parameters: what is trained.
        samples_per_s: of all ranks.
        step_ms: the median step of the slowest rank; low_ms, high_ms: its quartiles.
        alone_ms: the same when all compute at once and none exchanges.
        efficiency: alone_ms / step_ms: samples/s against as many ranks that need not exchange anything.
    """

    net: str
    parameters: int
    samples_per_s: float
    step_ms: float
    low_ms: float
    high_ms: float
    alone_ms: float
    efficiency: float


def possible_links(links: Sequence[Link], report: Report) -> list[Link]:
    """The links without those that this machine cannot emulate; the loopback if none is left."""
    if any(link.is_emulated for link in links) and (reason := hosts.unavailable()) is not None:
        possible = [link for link in links if not link.is_emulated]
        possible = possible or [Link(ranks=links[0].hosts * links[0].ranks)]
        report(f"{reason}; only {' and '.join(link.name for link in possible)}")
        return possible
    return list(links)


def study_collectives(
    links: Sequence[Link], backends: Sequence[str], options: Namespace, report: Report
) -> Iterator[CollectiveRow]:
    """Layers over gloo take turns with it; each other backend is measured by itself.

    Raises:
        RanksError: a rank failed.
    """
    layers = [name for name in backends if name in LAYERS]
    roots = {name: [PLAIN] for name in backends if name not in LAYERS}
    if layers:
        roots["gloo"] = [*roots.get("gloo", ()), *layers]
    for link in links:
        for root, names in roots.items():
            report(f"collectives: {link.name}, {', '.join(names).replace(PLAIN, root)}")
            arguments = {
                "collectives": options.collectives or list(COLLECTIVES),
                "sizes": sorted(options.sizes),
                "layers": names,
                "iterations": options.iterations,
                "seconds": 1.0,
                "rounds": _ROUNDS,
                "device": "cuda" if root == "nccl" else "cpu",
            }
            yield from collective_rows(link, root, _run(link, "measure_collectives", arguments, root))


def study_training(
    links: Sequence[Link], backends: Sequence[str], options: Namespace, report: Report
) -> Iterator[TrainingRow]:
    """Over each emulated link, and between the same hosts without a limit.

    Raises:
        RanksError: a rank failed.
    """
    emulated = [link for link in links if link.is_emulated]
    free = [Link(hosts=link.hosts, ranks=link.ranks) for link in emulated]
    arguments = {"nets": {name: NETS[name] for name in options.nets}, "steps": options.steps}
    for link in dict.fromkeys(free + emulated) or links[:1]:
        for backend in (name for name in backends if name != "nccl"):  # the nets are on the CPU
            report(f"training: {link.name}, {backend}, {', '.join(options.nets)}")
            yield from training_rows(link, backend, _run(link, "measure_training", arguments, backend))


def _run(link: Link, function: str, arguments: dict[str, Any], backend: str) -> list[Any]:
    device = "cuda" if backend == "nccl" else "cpu"
    with link.make_hosts() as made:
        where: dict[str, Any] = {"placement": link.placement, "hosts": made, "device": device}
        return run_ranks(_MEASURE + function, arguments, backend=backend, timeout_s=_TIMEOUT_S, **where)


def _name_link(link: Link, backend: str) -> dict[str, Any]:
    ranks = len(link.placement)
    return {"link": link.name, "hosts": link.hosts, "ranks": ranks, "rate": link.rate, "backend": backend}


def bus_factor(collective: str, world: int) -> float:
    """busbw / algbw of nccl-tests (its doc/PERFORMANCE.md)."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (world - 1) / world


def collective_rows(link: Link, root: str, by_rank: list[dict[str, Any]]) -> Iterator[CollectiveRow]:
    """The rows of what each rank's `measure.measure_collectives` returned; `root`: the backend."""
    ranks = len(link.placement)
    groups = group_by(zip(*by_rank, strict=True), lambda case: (case[0]["collective"], case[0]["layer"]))
    for (collective, layer), same in groups.items():
        models = [predict.rounds(collective, range(ranks), case[0]["size"], root) for case in same]
        computed = [predict.seconds(model, link.placement, link.payload_bps) for model in models]
        slowest = [slowest_quartiles(rank["times"] for rank in case) for case in same]
        predicted = predict.with_latency(computed, slowest[0][0])
        is_flat = layer == PLAIN or collective != "all_reduce"
        for case, times, predicted_s in zip(same, slowest, predicted, strict=True):
            time_us, low_us, high_us = (1e6 * value for value in times)
            size, algbw = case[0]["size"], case[0]["size"] / time_us / 1e3
            yield CollectiveRow(
                **_name_link(link, root if layer == PLAIN else layer),
                collective=collective,
                size=size,
                count=case[0]["count"],
                time_us=time_us,
                algbw=algbw,
                busbw=algbw * bus_factor(collective, ranks),
                wrong=sum(rank["wrong"] for rank in case),
                predicted_us=predicted_s * 1e6 if is_flat else None,
                low_us=low_us,
                high_us=high_us,
            )


def training_rows(link: Link, backend: str, by_rank: list[dict[str, Any]]) -> Iterator[TrainingRow]:
    """The rows of what each rank's `measure.measure_training` returned."""
    for net, first in by_rank[0].items():
        alone_s = slowest_quartiles(rank[net]["alone"] for rank in by_rank)[0]
        step_s, low_s, high_s = slowest_quartiles(rank[net]["together"] for rank in by_rank)
        yield TrainingRow(
            **_name_link(link, backend),
            net=net,
            parameters=first["parameters"],
            samples_per_s=len(by_rank) * _BATCH / step_s,
            step_ms=step_s * 1e3,
            low_ms=low_s * 1e3,
            high_ms=high_s * 1e3,
            alone_ms=alone_s * 1e3,
            efficiency=alone_s / step_s,
        )
