"""The rows of the fabric study, made of what the ranks have measured and of what was predicted."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ensemble.bench.accelerators import step_seconds
from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.predict import Message, PredictedMachine
from ensemble.bench.launch import hosts
from ensemble.bench.results import format_bytes, group_by, slowest_quartiles

LATENCY_BYTES = 4096  # of the all-reduce whose time is the latency
PLAIN = "plain"  # the layer that is the communicator itself
# Batch of a rank and, where an accelerator is emulated, a P100, seconds of its step.
NETS: dict[str, tuple[int, float | None]] = {
    "compute-heavy": (8, None),
    "parameter-heavy": (32, None),
    **{net: (64, step_seconds("p100", net, 64)) for net in ("resnet50", "inception", "vgg16")},
}


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """What rows of all parts have.

    Attributes:
        link: its name; hosts, ranks (in all), rate, delay_ms: its properties.  delayed_by: "netem" or "relay".
        across_gbps: GB/s that this machine moves between hosts whose links have no limit, through that relay if
            there is one: a higher rate cannot be emulated; None where that was not measured.
        backend: of the communicator.
    """

    link: str
    hosts: int
    ranks: int
    rate: str | None
    delay_ms: float | None
    delayed_by: str | None
    across_gbps: float | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class CollectiveRow(LinkRow):
    """One collective of one size, in the columns of nccl-tests.

    Attributes:
        size: bytes of a message, as nccl-tests counts them; count: its elements.  type: of an element.
        time_us: the median iteration of the slowest rank, microseconds; low_us, high_us: its quartiles.
        algbw, busbw: GB/s, 10^9 bytes.
        wrong: wrong elements of all ranks' results.
        predicted_us: what was predicted (`predict`).
        iterations: how many were timed.
        wire_mb: sent by the busiest host's interface in one iteration, frames with headers, 10^6 bytes; None on
            the loopback.  predicted_mb: the same as predicted, without headers.
    """

    collective: str
    size: int
    count: int
    type: str = "float32"
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
class TrainingRow(LinkRow):
    """One net trained data-parallel over one link.

    Attributes:
        net, parameters, batch: batch of each rank.  grad_mb: of a step, 10^6 bytes.  messages: of a step.
        compute: "measured", or "emulated": waits of a published step's time.
        samples_per_s: of all ranks.
        step_ms: the median step of the slowest rank; low_ms, high_ms: its quartiles.
        alone_ms: the same when all compute at once and none exchanges; packed_ms: the same when gradients are
            packed for the exchange, and not sent.
        predicted_ms: the step that was predicted; error: predicted_ms / step_ms - 1.
        link_ms, processor_ms: of the prediction, what the exchange takes of the link and of all cores.
        efficiency: alone_ms / step_ms: samples/s against as many ranks that need not exchange anything.
        predicted: the efficiency that was predicted; free_processor: the same if the exchange took no processor
            time, as where network cards read the memory of accelerators.
    """

    net: str
    compute: str
    parameters: int
    grad_mb: float
    messages: int
    batch: int
    samples_per_s: float
    step_ms: float
    low_ms: float
    high_ms: float
    alone_ms: float
    packed_ms: float
    predicted_ms: float
    error: float
    link_ms: float
    processor_ms: float
    efficiency: float
    predicted: float
    free_processor: float


@dataclass(frozen=True, kw_only=True)
class FusionRow(LinkRow):
    """The exchange of a ResNet-50's gradients at one threshold.

    Attributes:
        threshold: bytes at which a message is full; 0: every tensor by itself.
        messages: how many that makes.
        time_ms: the median of the slowest rank; low_ms, high_ms: its quartiles.
        chosen: whether the tuning at a member's start (`ensemble.comm.autotune.measure`) takes this one.
    """

    threshold: int
    messages: int
    time_ms: float
    low_ms: float
    high_ms: float
    chosen: bool = False

    @property
    def threshold_text(self) -> str:
        """The threshold for people."""
        return format_bytes(self.threshold)


def _name_link(link: Link, backend: str, across_bps: float | None = None) -> dict[str, Any]:
    ranks = len(link.placement)
    by: dict[str, Any] = {"delay_ms": link.delay_ms, "delayed_by": None}
    if link.delay_ms is not None:
        by["delayed_by"] = hosts.delayed_by()
    by["across_gbps"] = across_bps / 1e9 if across_bps is not None else None
    return {"link": link.name, "hosts": link.hosts, "ranks": ranks, "rate": link.rate, **by, "backend": backend}


def collective_rows(
    link: Link, root: str, by_rank: list[dict[str, Any]], machine: PredictedMachine
) -> Iterator[CollectiveRow]:
    """The rows of `measure.measure_collectives`.

    Args:
        root: the backend.
        by_rank: what each rank returned.
        machine: on which all ranks are.
    """
    placement, is_shared, ranks = link.placement, link.hosts > 1, len(link.placement)
    machine, delay_s = _with_ranks(machine, by_rank), predict.message_delay(root, link.delay_s)
    cases = zip(*(rank["cases"] for rank in by_rank), strict=True)
    groups = group_by(cases, lambda each: (each[0]["collective"], each[0]["layer"]))
    for (collective, layer), same in groups.items():
        ways = by_rank[0]["ways"][layer]
        models = [predict.layered_rounds(collective, ranks, each[0]["size"], root, **ways) for each in same]
        computed = [predict.seconds(model, placement, link.payload_bps, machine, delay_s) for model in models]
        slowest = [slowest_quartiles(rank["times"] for rank in each) for each in same]
        predicted = predict.with_latency(computed, slowest[0][0])
        for each, model, times, predicted_s in zip(same, models, slowest, predicted, strict=True):
            time_us, low_us, high_us = (1e6 * value for value in times)
            size, algbw = each[0]["size"], each[0]["size"] / time_us / 1e3
            yield CollectiveRow(
                **_name_link(link, root if layer == PLAIN else layer, machine.across_bps),
                collective=collective,
                size=size,
                count=each[0]["count"],
                time_us=time_us,
                algbw=algbw,
                busbw=algbw * predict.bus_factor(collective, ranks),
                wrong=sum(rank["wrong"] for rank in each),
                predicted_us=predicted_s * 1e6,
                low_us=low_us,
                high_us=high_us,
                iterations=len(each[0]["times"]),
                wire_mb=max(rank["wire"] for rank in each) / 1e6 if is_shared else None,
                predicted_mb=predict.wire_bytes(model, placement) / 1e6 if is_shared else None,
            )


def training_rows(
    link: Link, backend: str, by_rank: list[dict[str, Any]], machine: PredictedMachine
) -> Iterator[TrainingRow]:
    """The rows of `measure.measure_training`; arguments as above."""
    machine, ways = _with_ranks(machine, by_rank), by_rank[0]["ways"]
    delay_s = predict.message_delay(backend, link.delay_s)
    cores = len(os.sched_getaffinity(0))

    def sum_loads(size: int) -> tuple[float, float]:
        model = predict.layered_rounds("all_reduce", len(by_rank), size, backend, **ways)
        pairs = list(predict.loads(model, link.placement, link.payload_bps, machine, delay_s))
        return sum(on_link for on_link, _ in pairs), sum(moving for _, moving in pairs)

    latency_s = max(0.0, by_rank[0]["latency_s"] - max(sum_loads(LATENCY_BYTES)))
    for net, first in by_rank[0]["nets"].items():
        each = [rank["nets"][net] for rank in by_rank]
        alone_s, packed_s = (slowest_quartiles(rank[way] for rank in each)[0] for way in ("alone", "packed"))
        step_s, low_s, high_s = slowest_quartiles(rank["together"] for rank in each)
        messages = []
        for number, size in enumerate(first["sizes"]):
            link_s, moving_s = sum_loads(size)
            ready_s = max(rank["ready"][number] for rank in each)
            messages.append(Message(ready_s, link_s + latency_s, moving_s))
        tail_s = packed_s - messages[-1].ready_s
        busy = min(1.0, sum(rank["cpu_s"] for rank in each) / packed_s / cores)
        predicted_s = predict.step_seconds(messages, tail_s, busy)
        free = [dataclasses.replace(message, moving_s=0.0) for message in messages]
        yield TrainingRow(
            **_name_link(link, backend, machine.across_bps),
            net=net,
            compute="measured" if NETS[net][1] is None else "emulated",
            parameters=first["parameters"],
            grad_mb=first["grad_bytes"] / 1e6,
            messages=len(messages),
            batch=NETS[net][0],
            samples_per_s=len(each) * NETS[net][0] / step_s,
            step_ms=step_s * 1e3,
            low_ms=low_s * 1e3,
            high_ms=high_s * 1e3,
            alone_ms=alone_s * 1e3,
            packed_ms=packed_s * 1e3,
            predicted_ms=predicted_s * 1e3,
            error=predicted_s / step_s - 1,
            link_ms=sum(message.link_s for message in messages) * 1e3,
            processor_ms=sum(message.moving_s for message in messages) * 1e3,
            efficiency=alone_s / step_s,
            predicted=alone_s / predicted_s,
            free_processor=alone_s / predict.step_seconds(free, tail_s, busy),
        )


def _with_ranks(machine: PredictedMachine, by_rank: list[dict[str, Any]]) -> PredictedMachine:
    """The machine with what these ranks moved, where a host has several."""
    moved_bps = by_rank[0]["moved_bps"] or machine.inside_bps
    return dataclasses.replace(machine, inside_bps=moved_bps)


def fusion_rows(link: Link, by_rank: list[list[dict[str, Any]]]) -> Iterator[FusionRow]:
    """The rows of `measure.measure_fusion`."""
    for cases in zip(*by_rank, strict=True):
        time_ms, low_ms, high_ms = (1e3 * value for value in slowest_quartiles(case["times"] for case in cases))
        same = {name: cases[0][name] for name in ("threshold", "messages", "chosen")}
        yield FusionRow(**_name_link(link, "gloo"), **same, time_ms=time_ms, low_ms=low_ms, high_ms=high_ms)
