"""A controller in small, for tests of searches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

from kit.event_dicts import apply_event, fold, read_events

from ensemble import attach, submit
from ensemble.search.foreign import compute_constraints
from ensemble.search.searcher import Searcher
from ensemble.spec import Ensemble, Recipe, Resources, Search, choice, integer, loguniform, uniform
from ensemble.store import RunState
from pipelines import Pipeline, sources

SPACE = {"lr": loguniform(1e-4, 1.0), "act": choice("relu", "gelu"), "width": integer(4, 64), "epochs": 9}
SPACE |= {"p": uniform(0, 1)}
EPOCHS = 9


def accuracy(params: dict[str, Any], epoch: int) -> float:
    """A stand-in for training that a search can be good at: best at lr 0.01, wide, gelu."""
    peak = 1 - 0.1 * abs(math.log10(params["lr"]) + 2) - (params["act"] == "relu") * 0.05 - 1 / params["width"]
    return peak * (1 - 0.5 ** (epoch + 1))


def open_searcher(search: Search, storage: Any = None, **options: Any) -> Searcher:
    """The searcher of a run that begins."""
    searcher = Searcher(search, **{"direction": "max", "epochs": 3, "storage": storage, **options})
    searcher.open(RunState(name="s", run_id="r", objective="accuracy"))
    return searcher


class Run:
    """A controller in small: `parallel` members at once, each an epoch in turn, written in the order of a run."""

    epochs = EPOCHS

    def __init__(self, search: Search, storage: Any = None, events: list[dict[str, Any]] | None = None) -> None:
        self.search, self.events, self.state = search, [], RunState()
        self.journal = storage if isinstance(storage, Path) else None
        self.sizes: list[int] = []  # of the journal when each event was logged
        self.searcher = Searcher(search, direction="max", epochs=self.epochs, storage=storage)
        header = {"name": "s", "run_id": "r", "mode": "search", "objective": "accuracy", "direction": "max"}
        further = [{"name": each.name, "mode": each.mode} for each in search.objectives]
        header |= {"epochs": self.epochs, "further_objectives": further}
        for event in events or [{"t": 0.0, "type": "run_started", **header}]:
            self.log(**event)
        self.searcher.open(self.state)

    def log(self, **event: Any) -> None:
        event = {"v": 2, "t": float(len(self.events)), **event}
        self.events.append(event)
        self.sizes.append(self.journal.stat().st_size if self.journal is not None else 0)
        apply_event(self.state, event)

    def killed(self, at: int, journal: Path, *, is_logged: bool = True) -> Self:
        """The resume of this run, killed when its journal had so many bytes, and its log all or less of that.

        Of a member whose last epoch was logged, and not what follows from it, that epoch is trained again.
        """
        assert self.journal is not None
        journal.write_bytes(self.journal.read_bytes()[:at])
        events = [e for e, size in zip(self.events, self.sizes, strict=True) if size < at + is_logged]
        if events and events[-1]["type"] == "epoch":
            events = events[:-1]
        return type(self)(self.search, journal, events or self.events[:1])

    def step(self, parallel: int = 3) -> bool:
        """One thing happens; False when the search is over."""
        going = [m for m in self.state.members.values() if m.state not in ("finished", "pruned", "failed")]
        if len(going) < parallel and len(self.state.members) < self.searcher.trials:
            number = self.searcher.next_number
            self.log(type="member", member=f"member-{number}", number=number, params=self.searcher.ask(number))
            return True
        if not going:
            return False
        member = min(going, key=lambda m: (m.epoch, m.number))
        self.epoch(member.id)
        return True

    def epoch(self, id: str) -> None:
        member = self.state.members[id]
        epoch, value = member.epoch, accuracy(member.params, member.epoch)
        is_pruned = self.searcher.report(member.number, epoch, value)
        self.searcher.flush()
        self.log(type="epoch", member=id, attempt=0, epoch=epoch, metrics={"accuracy": value})
        if is_pruned:
            self.log(type="pruned", member=id, attempt=0, epoch=epoch + 1)
            self.searcher.tell(member.number, "pruned")
        elif epoch + 1 == EPOCHS:
            metrics = {"accuracy": value, "width": member.params["width"]}
            violated = compute_constraints(self.search, member.number, metrics)
            self.log(type="finished", member=id, attempt=0, epoch=epoch + 1, metrics=metrics, constraints=violated)
            self.searcher.tell(member.number, "finished", value, metrics=metrics, constraints=violated)

    def to_the_end(self) -> Self:
        while self.step():
            pass
        self.searcher.flush()
        return self

    @property
    def outcome(self) -> list[tuple[Any, ...]]:
        return [(m.params, m.state, m.epoch) for m in self.state.members.values()]


def run(path: Path, declared: Ensemble, on_event: Any = None) -> RunState:
    """The state of a run that has ended."""
    submit(declared, path, "inline", on_event=on_event).wait()
    return fold(read_events(path / "events.jsonl"))


def stop_at(path: Path, kind: str, member: str, verb: str, *named: str) -> Any:
    """Of `on_event`: ask the run once when a member's event comes."""
    asked: list[bool] = []

    def ask(event: dict[str, Any]) -> None:
        if not asked and (event["type"], event.get("member")) == (kind, member):
            asked.append(True)
            getattr(attach(path), verb)(*named)

    return ask


def _build(params: dict[str, Any]) -> Any:
    import torch

    return torch.nn.Linear(2, 2)


def loss(model: Any, batch: dict[str, Any]) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def declare(search: Search, **options: Any) -> Ensemble:
    """A search with real trials, on twelve samples."""
    import numpy as np

    rng = np.random.default_rng(0)
    data = Pipeline(sources.arrays(x=rng.normal(size=(12, 2)).astype("float32"), label=np.arange(12) % 2))
    declared = {"recipe": Recipe(model=_build, loss=loss), "train": data, "valid": data, "retries": 0, **options}
    declared.setdefault("checkpoint_every", 1)
    return Ensemble(name="small", search=search, resources=Resources(cpus_per_worker=0.5), **declared)
