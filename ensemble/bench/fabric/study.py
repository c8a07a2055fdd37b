"""Runs the parts of the fabric study, link by link and backend by backend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.figures import FabricResults
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.rows import (
    NETS,
    PLAIN,
    CollectiveRow,
    FusionRow,
    TrainingRow,
    collective_rows,
    fusion_rows,
    training_rows,
)
from ensemble.bench.launch import hosts
from ensemble.bench.launch.backends import LAYERS
from ensemble.bench.launch.ranks import run_ranks
from ensemble.bench.launch.scheduled import ScheduledJob
from ensemble.bench.results import Report

PARTS = ("collectives", "training", "fusion")
SIZES = tuple(2**k for k in (12, 16, 20, 24))
ALL_SIZES = tuple(2**k for k in range(10, 27, 2))
_THRESHOLDS = (0, *(2**k for k in (16, 18, 20, 22, 24, 25, 26, 27)))
_ROUNDS = 4
_TIMEOUT_S = 3600.0
Run = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FabricPlan:
    """What is measured.

    Attributes:
        links: over which; emulated ones are left out where they cannot be made.
        backends: names of `ensemble.bench.launch.backends`.
        collectives: of `predict.COLLECTIVES`.  sizes: bytes, ascending.
        parts: of `PARTS`.
        iterations: of each case, at most; at least three, as many as fit into one second, or ten if `full`.
        full: also takes more turns, and runs the fusion sweep on all links, not only on the first.
        machine: for predictions; None measures it.
        job: this process as one rank of a scheduled job; None where the study starts the ranks.
    """

    links: Sequence[Link]
    backends: Sequence[str]
    collectives: Sequence[str] = predict.COLLECTIVES
    sizes: Sequence[int] = SIZES
    parts: Sequence[str] = PARTS
    iterations: int = 20
    full: bool = False
    machine: predict.PredictedMachine | None = None
    job: ScheduledJob | None = None

    @property
    def rounds(self) -> int:
        """How often cases take turns, in training and fusion."""
        return 5 if self.full else 3


def study(plan: FabricPlan, report: Report) -> FabricResults:
    """Measure what the plan lists.

    Raises:
        RanksError: a rank failed.
    """
    links = _possible_links(plan.links, report)
    collectives: list[CollectiveRow] = []
    training: list[TrainingRow] = []
    fusion: list[FusionRow] = []
    predicts = set(plan.parts) != {"fusion"}
    machine = _measure_machine(plan, links, report) if predicts else predict.PredictedMachine()
    for number, link in enumerate(links):
        with _runner(plan, link) as run:
            if "collectives" in plan.parts:
                collectives += _measure_collectives(plan, link, run, machine, report)
            if "fusion" in plan.parts and (plan.full or number == 0):
                report(f"fusion: {link.name}")
                options = {"thresholds": list(_THRESHOLDS), "rounds": plan.rounds, "steps": 2, "tune": True}
                fusion += fusion_rows(link, run("measure_fusion", options))
    if "training" in plan.parts:
        training += _measure_training(plan, links, machine, report)
    return FabricResults(collectives=collectives, training=training, fusion=fusion)


@contextlib.contextmanager
def _runner(plan: FabricPlan, link: Link) -> Iterator[Run]:
    """A function that calls one of `measure` on all ranks of a link, and returns each rank's result."""
    with link.make_hosts() as made:

        def run(function: str, options: dict[str, Any], backend: str = "gloo") -> list[Any]:
            where = f"ensemble.bench.fabric.measure:{function}"
            if plan.job is not None:
                return plan.job.run(where, options, backend=backend)
            return run_ranks(
                where,
                options,
                placement=link.placement,
                hosts=made,
                backend=backend,
                device=_device(backend),
                timeout_s=_TIMEOUT_S,
            )

        yield run


def _device(backend: str) -> str:
    return "cuda" if backend == "nccl" else "cpu"


def _possible_links(links: Sequence[Link], report: Report) -> list[Link]:
    """The links without those that this machine cannot emulate; the loopback if none is left."""
    if any(link.is_emulated for link in links) and (reason := hosts.unavailable()) is not None:
        found = [link for link in links if not link.is_emulated]
        found = found or [Link(ranks=links[0].hosts * links[0].ranks)]
        report(f"{reason}; only {' and '.join(link.name for link in found)}")
        return found
    return list(links)


def _measure_machine(plan: FabricPlan, links: Sequence[Link], report: Report) -> predict.PredictedMachine:
    """Bytes/s that two ranks on this machine move, on one host and between two whose link has no limit."""
    if plan.machine is not None:
        return plan.machine
    if plan.job is not None:
        return predict.PredictedMachine()  # on several machines the processors are not the limit
    report("what this machine's processor moves")
    moved: list[float | None] = []
    emulated = next((link for link in links if link.is_emulated), None)
    between = [] if emulated is None else [Link(hosts=2, ranks=1, mtu=emulated.mtu)]
    for link in (Link(ranks=2), *between):
        # A placement on one host, so that the ranks measure what they move.
        options = {**_collective_options(plan, link), "collectives": [], "placement": [0, 0]}
        with _runner(plan, link) as run:
            moved.append(run("measure_collectives", options)[0]["moved_bps"])
    return predict.PredictedMachine(*moved)


def _measure_collectives(
    plan: FabricPlan, link: Link, run: Run, machine: predict.PredictedMachine, report: Report
) -> Iterator[CollectiveRow]:
    """Layers over gloo take turns with it; each other backend is measured by itself."""
    layers = [name for name in plan.backends if name in LAYERS]
    roots = {name: [PLAIN] for name in plan.backends if name not in LAYERS}
    if layers:
        roots["gloo"] = [*roots.get("gloo", ()), *layers]
    for root, names in roots.items():
        report(f"collectives: {link.name}, {', '.join(names).replace(PLAIN, root)}")
        options = _collective_options(plan, link, root, names)
        by_rank = run("measure_collectives", options, backend=root)
        # Measured with these ranks where a host has several.
        inside_bps = by_rank[0]["moved_bps"] or machine.inside_bps
        yield from collective_rows(link, root, by_rank, dataclasses.replace(machine, inside_bps=inside_bps))


def _collective_options(
    plan: FabricPlan, link: Link, root: str = "gloo", layers: Sequence[str] = ()
) -> dict[str, Any]:
    return {
        "collectives": list(plan.collectives),
        "sizes": sorted(plan.sizes),
        "layers": list(layers),
        "iterations": plan.iterations,
        "seconds": 10.0 if plan.full else 1.0,
        "rounds": _ROUNDS,
        "placement": link.placement,
        "interface": link.interface,
        "device": _device(root),
    }


def _measure_training(
    plan: FabricPlan, links: Sequence[Link], machine: predict.PredictedMachine, report: Report
) -> Iterator[TrainingRow]:
    """The steps over each emulated link, and of as many ranks on one host; else over the first link."""
    emulated = [link for link in links if link.is_emulated]
    used = [Link(ranks=len(emulated[0].placement)), *emulated] if emulated else links[:1]
    options = {"nets": list(NETS), "steps": 6, "rounds": plan.rounds}
    for link in used:
        for backend in (name for name in plan.backends if name != "nccl"):  # the nets are on the CPU
            with _runner(plan, link) as run:
                report(f"training: {link.name}, {backend}")
                by_rank = run("measure_training", options, backend=backend)
                yield from training_rows(link, backend, by_rank, machine)
