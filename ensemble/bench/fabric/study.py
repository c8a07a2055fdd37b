"""Runs the parts of the fabric study, link by link and backend by backend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.results import PLAIN, collective_rows, fusion_rows, training_rows
from ensemble.bench.fabric.rows import CollectiveRow, Found, FusionRow, TrainingRow
from ensemble.bench.fabric.shapes import NETS, resnet50
from ensemble.bench.launch import hosts
from ensemble.bench.launch.backends import LAYERS
from ensemble.bench.launch.ranks import run_ranks
from ensemble.bench.launch.scheduled import Launched
from ensemble.bench.results import Say
from ensemble.spec import SpecError, unknown_name

PARTS = ("collectives", "training", "fusion")
SIZES = tuple(2**k for k in (12, 16, 20, 24))
ALL_SIZES = tuple(2**k for k in range(10, 27, 2))
THRESHOLDS = (0, *(2**k for k in (16, 18, 20, 22, 24, 25, 26, 27)))
_ROUNDS = 4
_LONGEST_S = 3600.0
_ROOM = "ensemble.bench.fabric"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        links: over which; those that are emulated are left out where they cannot be made.
        backends: words of `ensemble.bench.launch.backends`.
        collectives: of `predict.COLLECTIVES`.  sizes: bytes, ascending.
        parts: of `PARTS`.
        iterations: of each case, at most; fewer, but three, where they take more than `seconds`.
        rounds: in which what is compared takes turns, in training and fusion.
        thresholds: of the fusion sweep, bytes.
        machine: for predictions; None measures it.
        launched: this process as one rank of a job on several machines; None where the study starts the ranks.
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
    machine: predict.Machine | None = None
    launched: Launched | None = None


def study(plan: Plan, say: Say = lambda _: None) -> Found:
    """Measure what the plan says.

    Raises:
        SpecError: there is no such backend, collective or part.
        RanksError: a rank failed.
    """
    check(plan.collectives, plan.parts)
    links = _possible(plan.links, say)
    collectives: list[CollectiveRow] = []
    training: list[TrainingRow] = []
    fusion: list[FusionRow] = []
    machine = _machine(plan, links, say) if {"collectives", "training"} & {*plan.parts} else predict.Machine()
    for number, link in enumerate(links):
        with _runner(plan, link) as run:
            if "collectives" in plan.parts:
                collectives += _collectives(plan, link, run, machine, say)
            if "fusion" in plan.parts and (plan.everywhere or number == 0):
                say(f"fusion: {link.name}")
                options = {"thresholds": list(plan.thresholds), "rounds": plan.rounds, "steps": 2, "tune": True}
                options["shapes"] = list(resnet50())
                fusion += fusion_rows(link, run(f"{_ROOM}.fusion:measure", options))
        if "training" in plan.parts and (link.emulated or len(links) == 1):
            one = link.with_one_rank()
            with _runner(plan, one) as run:
                say(f"training: {one.name}")
                options = {"nets": list(NETS), "steps": 6, "rounds": plan.rounds}
                training += training_rows(one, run(f"{_ROOM}.training:measure", options), machine)
    return Found(collectives, training, fusion)


def _machine(plan: Plan, links: Sequence[Link], say: Say) -> predict.Machine:
    """What two ranks on this machine move in a second, on one host and between two whose link has no limit."""
    if plan.machine is not None:
        return plan.machine
    if plan.launched is not None:
        return predict.Machine()  # several machines, whose processors are not what limits
    say("what this machine's processor moves")
    moved: list[float | None] = []
    emulated = next((link for link in links if link.emulated), None)
    between = [] if emulated is None else [Link(hosts=2, ranks=1, mtu=emulated.mtu)]
    for link in (Link(ranks=2), *between):
        options = _options(dataclasses.replace(plan, collectives=()), link)
        with _runner(plan, link) as run:
            # As if on one host: that is what is measured.
            by_rank = run(f"{_ROOM}.collectives:measure", {**options, "placement": [0, 0]})
        moved.append(by_rank[0]["moved_bps"])
    return predict.Machine(*moved)


def check(collectives: Sequence[str], parts: Sequence[str]) -> None:
    """Raises SpecError: there is no such collective or part."""
    for name, given, known in (
        ("collective", collectives, predict.COLLECTIVES),
        ("part", parts, PARTS),
    ):
        for word in given:
            if word not in known:
                raise SpecError(unknown_name(f"there is no {name}", word, list(known)))


class _Run(Protocol):
    def __call__(self, function: str, options: dict[str, Any], *, backend: str = "gloo") -> list[Any]:
        """What each rank's function returns."""


@contextlib.contextmanager
def _runner(plan: Plan, link: Link) -> Iterator[_Run]:
    """What runs a function on all ranks of a link."""
    if plan.launched is not None:
        yield plan.launched.run
        return
    with link.made() as made:

        def run(function: str, options: dict[str, Any], *, backend: str = "gloo") -> list[Any]:
            device = "cuda" if backend == "nccl" else "cpu"
            return run_ranks(
                function,
                options,
                placement=link.placement,
                hosts=made,
                backend=backend,
                device=device,
                timeout_s=_LONGEST_S,
            )

        yield run


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
            yield word, [PLAIN, *(layers if word == "gloo" else [])]
    if layers and "gloo" not in backends:
        yield "gloo", layers


def _collectives(plan: Plan, link: Link, run: _Run, machine: predict.Machine, say: Say) -> Iterator[CollectiveRow]:
    for root, layers in _roots(plan.backends):
        said = [root if layer == PLAIN else layer for layer in layers]
        say(f"collectives: {link.name}, {', '.join(said)}")
        by_rank = run(f"{_ROOM}.collectives:measure", _options(plan, link, root, layers), backend=root)
        # With as many ranks as there are, if they can be asked.
        inside_bps = by_rank[0]["moved_bps"] or machine.inside_bps
        yield from collective_rows(link, root, by_rank, dataclasses.replace(machine, inside_bps=inside_bps))


def _options(plan: Plan, link: Link, root: str = "gloo", layers: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "collectives": list(plan.collectives),
        "sizes": sorted(plan.sizes),
        "layers": list(layers),
        "iterations": plan.iterations,
        "seconds": plan.seconds,
        "rounds": _ROUNDS,
        "placement": link.placement,
        "interface": link.interface,
        "device": "cuda" if root == "nccl" else "cpu",
    }
