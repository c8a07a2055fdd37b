"""Runs the parts of the fabric study, link by link and backend by backend, and has a row made of each case."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.bench.fabric import predict
from ensemble.bench.fabric.links import Link
from ensemble.bench.fabric.predict import PredictedMachine
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

USUAL_NETS = ("compute-heavy", "parameter-heavy", "resnet50", "vgg16")
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
        nets: of `NETS`, for training.
        iterations: of each case, at most; at least three, as many as fit into one second, or ten if `full`.
        full: also takes more turns, and runs the fusion sweep on all links, not only on the first, and emulated
            accelerators with all backends, not only with the first.
        machine: for predictions; None measures it.
        job: this process as one rank of a scheduled job; None where the study starts the ranks.
        report: receives lines of progress.
    """

    links: Sequence[Link]
    backends: Sequence[str]
    collectives: Sequence[str] = predict.COLLECTIVES
    sizes: Sequence[int] = SIZES
    parts: Sequence[str] = PARTS
    nets: Sequence[str] = USUAL_NETS
    iterations: int = 20
    full: bool = False
    machine: PredictedMachine | None = None
    job: ScheduledJob | None = None
    report: Report = lambda _: None
    _lost: dict[str, int] = dataclasses.field(default_factory=dict)
    _moved: dict[tuple[Link, str], float] = dataclasses.field(default_factory=dict)

    def run(self) -> tuple[list[CollectiveRow], list[TrainingRow], list[FusionRow], dict[str, int]]:
        """Measure; returns the rows of each part, and by the link's name the frames that a relay has lost.

        Raises:
            RanksError: a rank failed.
        """
        links = possible_links(self.links, self.report)
        collectives: list[CollectiveRow] = []
        training: list[TrainingRow] = []
        fusion: list[FusionRow] = []
        rounds = 5 if self.full else 3  # in which cases take turns
        for number, link in enumerate(links):
            with self._start(link) as run:
                if "collectives" in self.parts:
                    collectives += self._measure_collectives(link, run)
                if "fusion" in self.parts and (self.full or number == 0):
                    self.report(f"fusion: {link.name}")
                    options = {"thresholds": list(_THRESHOLDS), "rounds": rounds, "steps": 2, "tune": True}
                    fusion += fusion_rows(link, run("measure_fusion", options))
        if "training" in self.parts:
            # Over each emulated link, and between the same hosts without a limit, with what delays.
            emulated = [link for link in links if link.is_emulated]
            free = [dataclasses.replace(link, rate=None, delay_ms=link.delay_ms and 0.0) for link in emulated]
            for link in dict.fromkeys(free + emulated) or links[:1]:
                for backend in (name for name in self.backends if name != "nccl"):  # the nets are on the CPU
                    training += self._measure_training(link, backend, rounds)
        return collectives, training, fusion, self._lost

    def _measure_training(self, link: Link, backend: str, rounds: int) -> Iterator[TrainingRow]:
        """The nets that are computed, and with fewer steps, since theirs are long, those that are emulated."""
        for is_emulated in (False, True):
            nets = {name: NETS[name][1] for name in self.nets if (NETS[name][1] is not None) == is_emulated}
            if not nets or (is_emulated and not self.full and backend != self.backends[0]):
                continue
            machine = self._measure_machine(link, _root(backend))
            self.report(f"training: {link.name}, {backend}, {', '.join(nets)}")
            many = {"steps": 2, "rounds": 1 + self.full} if is_emulated else {"steps": 6, "rounds": rounds}
            with self._start(link) as run:
                options = {"nets": nets, "placement": link.placement, **many}
                yield from training_rows(link, backend, run("measure_training", options, backend), machine)

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
            lost = None if made is None else made.lost_frames()
            if lost is not None:
                self._lost[link.name] = self._lost.get(link.name, 0) + lost

    def _measure_machine(self, link: Link, root: str) -> PredictedMachine:
        """Bytes/s that two ranks on this machine move, on one host and between two whose link has no limit."""
        if self.machine is not None:
            return self.machine
        if self.job is not None or root == "nccl":
            return PredictedMachine()  # on several machines, and where GPUs copy, the processor is not the limit
        if not link.is_emulated:
            return PredictedMachine(self._measure_moved(Link(ranks=2), root))
        # With what delays, but without the delay.
        across = Link(hosts=2, ranks=1, mtu=link.mtu, delay_ms=None if link.delay_ms is None else 0.0)
        return PredictedMachine(*(self._measure_moved(each, root) for each in (Link(ranks=2), across)))

    def _measure_moved(self, link: Link, root: str) -> float:
        """Bytes/s that two ranks move over this link, measured once."""
        if (link, root) not in self._moved:
            self.report(f"what this machine's processor moves: {link.name}, {root}")
            # A placement on one host, so that the ranks measure what they move.
            options = {**self._collective_options(link, root), "collectives": [], "placement": [0, 0]}
            with self._start(link) as run:
                self._moved[link, root] = run("measure_collectives", options, root)[0]["moved_bps"]
        return self._moved[link, root]

    def _measure_collectives(self, link: Link, run: Run) -> Iterator[CollectiveRow]:
        """Layers over gloo take turns with it; each other backend is measured by itself."""
        layers = [name for name in self.backends if name in LAYERS]
        roots = {name: [PLAIN] for name in self.backends if name not in LAYERS}
        if layers:
            roots["gloo"] = [*roots.get("gloo", ()), *layers]
        for root, names in roots.items():
            self.report(f"collectives: {link.name}, {', '.join(names).replace(PLAIN, root)}")
            by_rank = run("measure_collectives", self._collective_options(link, root, names), root)
            yield from collective_rows(link, root, by_rank, self._measure_machine(link, root))

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


def _root(backend: str) -> str:
    return "gloo" if backend in LAYERS else backend


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
