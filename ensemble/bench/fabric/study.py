"""Runs the parts of the fabric study, link by link and backend by backend, and makes a row of each case."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.predict import PredictedMachine
from ensemble.bench.launch import hosts
from ensemble.bench.launch.backends import LAYERS
from ensemble.bench.launch.ranks import run_ranks
from ensemble.bench.launch.scheduled import ScheduledJob
from ensemble.bench.results import Report, format_bytes, group_by

PLAIN = "plain"  # the layer that is the communicator itself
NETS = ("compute-heavy", "parameter-heavy")
PARTS = ("collectives", "training", "fusion")
SIZES = tuple(2**k for k in (12, 16, 20, 24))
ALL_SIZES = tuple(2**k for k in range(10, 27, 2))
_THRESHOLDS = (0, *(2**k for k in (16, 18, 20, 22, 24, 25, 26, 27)))
_ROUNDS = 4
_TIMEOUT_S = 3600.0
_MEASURE = "ensemble.bench.fabric.measure:"
Run = Callable[..., list[Any]]


@dataclass(frozen=True, kw_only=True)
class FabricStudy:
    """What is measured.

    Attributes:
        links: over which; emulated ones are left out where they cannot be made.
        backends: names of `ensemble.bench.launch.backends`.
        collectives: of `predict.COLLECTIVES`.  sizes: bytes.
        parts: of `PARTS`.
        iterations: of each case, at most; at least three, as many as fit into one second, or ten if `full`.
        full: also takes more turns, and runs the fusion sweep on all links, not only on the first.
        machine: for predictions; None measures it.
        job: this process as one rank of a scheduled job; None where the study starts the ranks.
        report: receives lines of progress.
    """

    links: Sequence[Link]
    backends: Sequence[str]
    collectives: Sequence[str] = predict.COLLECTIVES
    sizes: Sequence[int] = SIZES
    parts: Sequence[str] = PARTS
    iterations: int = 20
    full: bool = False
    machine: PredictedMachine | None = None
    job: ScheduledJob | None = None
    report: Report = lambda _: None

    def run(self) -> tuple[list[CollectiveRow], list[TrainingRow], list[FusionRow]]:
        """Measure; returns the rows of each part.

        Raises:
            RanksError: a rank failed.
        """
        links = possible_links(self.links, self.report)
        machine = self._measure_machine(links)
        collectives: list[CollectiveRow] = []
        training: list[TrainingRow] = []
        fusion: list[FusionRow] = []
        rounds = 5 if self.full else 3  # in which cases take turns
        for number, link in enumerate(links):
            with self._start(link) as run:
                if "collectives" in self.parts:
                    collectives += self._measure_collectives(link, run, machine)
                if "fusion" in self.parts and (self.full or number == 0):
                    self.report(f"fusion: {link.name}")
                    options = {"thresholds": list(_THRESHOLDS), "rounds": rounds, "steps": 2, "tune": True}
                    fusion += fusion_rows(link, run("measure_fusion", options))
        if "training" in self.parts:
            # Over each emulated link, and with as many ranks on one host; else over the first link.
            emulated = [link for link in links if link.is_emulated]
            for link in [Link(ranks=len(emulated[0].placement)), *emulated] if emulated else links[:1]:
                for backend in (name for name in self.backends if name != "nccl"):  # the nets are on the CPU
                    self.report(f"training: {link.name}, {backend}")
                    options = {"nets": list(NETS), "steps": 6, "rounds": rounds}
                    with self._start(link) as run:
                        by_rank = run("measure_training", options, backend)
                    training += training_rows(link, backend, by_rank, machine)
        return collectives, training, fusion

    @contextlib.contextmanager
    def _start(self, link: Link) -> Iterator[Run]:
        """A function that calls one of `measure` on all ranks of a link, and returns each rank's result."""
        with link.make_hosts() as made:

            def run(function: str, options: dict[str, Any], backend: str = "gloo") -> list[Any]:
                if self.job is not None:
                    return self.job.run(_MEASURE + function, options, backend=backend)
                where: dict[str, Any] = {"placement": link.placement, "hosts": made, "device": _device(backend)}
                return run_ranks(_MEASURE + function, options, backend=backend, timeout_s=_TIMEOUT_S, **where)

            yield run

    def _measure_machine(self, links: Sequence[Link]) -> PredictedMachine:
        """Bytes/s that two ranks on this machine move, on one host and between two whose link has no limit."""
        if self.machine is not None:
            return self.machine
        if self.job is not None or set(self.parts) == {"fusion"}:
            return PredictedMachine()  # on several machines the processors are not the limit
        self.report("what this machine's processor moves")
        between = [Link(hosts=2, ranks=1, mtu=link.mtu) for link in links if link.is_emulated][:1]
        moved: list[float | None] = []
        for link in (Link(ranks=2), *between):
            # A placement on one host, so that the ranks measure what they move.
            options = {**self._collective_options(link), "collectives": [], "placement": [0, 0]}
            with self._start(link) as run:
                moved.append(run("measure_collectives", options)[0]["moved_bps"])
        return PredictedMachine(*moved)

    def _measure_collectives(self, link: Link, run: Run, machine: PredictedMachine) -> Iterator[CollectiveRow]:
        """Layers over gloo take turns with it; each other backend is measured by itself."""
        layers = [name for name in self.backends if name in LAYERS]
        roots = {name: [PLAIN] for name in self.backends if name not in LAYERS}
        if layers:
            roots["gloo"] = [*roots.get("gloo", ()), *layers]
        for root, names in roots.items():
            self.report(f"collectives: {link.name}, {', '.join(names).replace(PLAIN, root)}")
            by_rank = run("measure_collectives", self._collective_options(link, root, names), root)
            # Measured with these ranks where a host has several.
            inside_bps = by_rank[0]["moved_bps"] or machine.inside_bps
            yield from collective_rows(link, root, by_rank, dataclasses.replace(machine, inside_bps=inside_bps))

    def _collective_options(self, link: Link, root: str = "gloo", layers: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "collectives": list(self.collectives),
            "sizes": sorted(self.sizes),
            "layers": list(layers),
            "iterations": self.iterations,
            "seconds": 10.0 if self.full else 1.0,
            "rounds": _ROUNDS,
            "placement": link.placement,
            "interface": link.interface,
            "device": _device(root),
        }


def _device(backend: str) -> str:
    return "cuda" if backend == "nccl" else "cpu"


def possible_links(links: Sequence[Link], report: Report) -> list[Link]:
    """The links without those that this machine cannot emulate; the loopback if none is left."""
    if any(link.is_emulated for link in links) and (reason := hosts.unavailable()) is not None:
        found = [link for link in links if not link.is_emulated]
        found = found or [Link(ranks=links[0].hosts * links[0].ranks)]
        report(f"{reason}; only {' and '.join(link.name for link in found)}")
        return found
    return list(links)


# --- rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """What rows of all parts have.

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
        samples_per_s: of all ranks.
        step_ms: the median step of the slowest rank; alone_ms: the same when all compute at once and none
            exchanges; backward_ms: of that, the backward pass, which the exchange overlaps.
        efficiency: alone_ms / step_ms: samples/s against as many ranks that need not exchange anything.
        predicted: the efficiency that was predicted.
        exchange_ms: the time of the exchange that was predicted.
    """

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


def _name_link(link: Link, backend: str) -> dict[str, Any]:
    ranks = len(link.placement)
    return {"link": link.name, "hosts": link.hosts, "ranks": ranks, "rate": link.rate, "backend": backend}


def _find_slowest(by_rank: Iterable[Sequence[float]]) -> tuple[float, float, float]:
    """The median and both quartiles of the rank whose median is the largest."""
    import numpy as np

    low, middle, high = np.quantile(max(by_rank, key=statistics.median), (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


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
    cases = zip(*(rank["cases"] for rank in by_rank), strict=True)
    groups = group_by(cases, lambda each: (each[0]["collective"], each[0]["layer"]))
    for (collective, layer), same in groups.items():
        ways = by_rank[0]["ways"][layer]
        models = [predict.layered_rounds(collective, ranks, each[0]["size"], root, **ways) for each in same]
        computed = [predict.seconds(model, placement, link.payload_bps, machine) for model in models]
        slowest = [_find_slowest(rank["times"] for rank in each) for each in same]
        predicted = predict.with_latency(computed, slowest[0][0])
        for each, model, times, predicted_s in zip(same, models, slowest, predicted, strict=True):
            time_us, low_us, high_us = (1e6 * value for value in times)
            size, algbw = each[0]["size"], each[0]["size"] / time_us / 1e3
            yield CollectiveRow(
                **_name_link(link, root if layer == PLAIN else layer),
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
    for net, first in by_rank[0]["nets"].items():
        each = [rank["nets"][net] for rank in by_rank]
        step_s = _find_slowest(rank["together"] for rank in each)[0]
        alone_s = _find_slowest(rank["alone"] for rank in each)[0]
        model = predict.layered_rounds("all_reduce", len(each), first["grad_bytes"], backend, **by_rank[0]["ways"])
        exchange_s = predict.seconds(model, link.placement, link.payload_bps, machine)
        exchange_s += first["messages"] * by_rank[0]["latency_s"]
        yield TrainingRow(
            **_name_link(link, backend),
            **{name: first[name] for name in ("parameters", "messages", "batch")},
            net=net,
            grad_mb=first["grad_bytes"] / 1e6,
            samples_per_s=len(each) * first["batch"] / step_s,
            step_ms=step_s * 1e3,
            alone_ms=alone_s * 1e3,
            backward_ms=first["backward_s"] * 1e3,
            exchange_ms=exchange_s * 1e3,
            efficiency=alone_s / step_s,
            predicted=alone_s / predict.step_seconds(alone_s, first["backward_s"], exchange_s),
        )


def fusion_rows(link: Link, by_rank: list[list[dict[str, Any]]]) -> Iterator[FusionRow]:
    """The rows of `measure.measure_fusion`."""
    for cases in zip(*by_rank, strict=True):
        time_ms, low_ms, high_ms = (1e3 * value for value in _find_slowest(case["times"] for case in cases))
        same = {name: cases[0][name] for name in ("threshold", "messages", "chosen")}
        yield FusionRow(**_name_link(link, "gloo"), **same, time_ms=time_ms, low_ms=low_ms, high_ms=high_ms)
