"""Trainings of one member in this process with options of the loop, and what they leave: for tests of loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ensemble.spec import EMA, SWA, EarlyStopping
from ensemble.spec.task import CLASSIFICATION
from ensemble.store import RunDir, load_checkpoint, load_predictions
from ensemble.train import Inbox, work
from kit import train_child as cases
from kit.checkpoints import newest_checkpoint

Events = list[dict[str, Any]]

STOPPING = {"epochs": 12, "objective": "loss", "early_stopping": EarlyStopping(2), "params": {"lr": 0.4}}
#: Each with what a checkpoint has to hold for a resume to reach the same bits.
LOOPS: dict[str, dict[str, Any]] = {
    "stopping": STOPPING,
    "best": {"epochs": 6, "keep": "best", "objective": "loss", "params": {"lr": 0.4}},
    "best of steps": {**STOPPING, "keep": "best", "validate_every": 2},
    "ema": {"epochs": 4, "averaging": EMA(0.8)},
    "swa": {"epochs": 5, "averaging": SWA(0.4), "keep": "best", "objective": "loss"},
    "mixup": {"epochs": 3, "mixup": 0.5, "accumulate": 2},
    "compiled": {"epochs": 3, "compile": {"name": "default", "backend": "aot_eager"}, "averaging": "ema"},
}


def train(
    folder: Path,
    recipe: Any = cases.NOISY,
    inbox: Inbox | None = None,
    attempt: int = 0,
    job: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[str, Events]:
    """The outcome and the events of a member of one worker; a later attempt is told what to go on from."""
    ensemble = cases.declare(recipe, 1, **options)
    events: Events = []
    given: dict[str, Any] = {"attempt": attempt, **(job or {})}
    return work(cases.make_job(folder, ensemble, **given), ensemble, events.append, inbox or Inbox()), events


class Killed(BaseException):
    """A process that is killed leaves what it has written."""


def kill(
    folder: Path, recipe: Any, at: int | Callable[[dict[str, Any]], bool], attempt: int = 0, **options: Any
) -> Events:
    """Train until the `at`-th time that commands are looked for, or until it tells such an event; what it told."""
    events: Events = []

    class Dying(Inbox):
        asked = 0

        def poll(self) -> Any:
            self.asked += 1
            if self.asked == at:
                raise Killed
            return super().poll()

    def emit(event: dict[str, Any]) -> None:
        events.append(event)
        if callable(at) and at(event):
            raise Killed

    declared = cases.declare(recipe, 1, **options)
    try:
        work(cases.make_job(folder, declared, attempt=attempt), declared, emit, Dying())
    except Killed:
        return events
    raise AssertionError("it has ended before")


def train_answered(
    folder: Path, recipe: Any, answer: Callable[[int], str], attempt: int = 0, **options: Any
) -> tuple[str, Events]:
    """A member whose epochs are answered as a pruner would."""
    inbox, events, declared = Inbox(), Events(), cases.declare(recipe, 1, **options)

    def emit(event: dict[str, Any]) -> None:
        events.append(event)
        if event["type"] == "epoch":
            inbox.put(answer(event["epoch"]))

    job = cases.make_job(folder, declared, awaits_pruner=True, attempt=attempt)
    return work(job, declared, emit, inbox), events


def give_more_epochs(folder: Path, recipe: Any, before: int, **options: Any) -> dict[str, Any]:
    """The end of a member that has finished after so many epochs, and now has those of the options."""
    declared, events = cases.declare(recipe, 1, **options), Events()
    identity = replace(declared.identify(0), epochs_before=before)
    job = cases.make_job(folder, declared, identity=identity, attempt=1)
    assert work(job, declared, events.append, Inbox()) == "finished"
    return of(events, "finished")[0]


def of(events: Events, type: str) -> Events:
    return [event for event in events if event["type"] == type]


def failed(outcome: str, events: Events) -> dict[str, Any]:
    """The event of a member that failed."""
    assert outcome == "failed", events[-1]
    (event,) = of(events, "failed")
    return event


def finished(folder: Path, recipe: Any = cases.NOISY, **options: Any) -> dict[str, Any]:
    outcome, events = train(folder, recipe, **options)
    assert outcome == "finished", of(events, "failed")
    return of(events, "finished")[0]


def nothing_more(*_: Any) -> None:
    """Do no more than train."""


def own_loop(
    after_epoch: Callable[[Any, int], None] = nothing_more,
    at_the_end: Callable[[Any], None] = nothing_more,
    make: Callable[[dict[str, Any]], nn.Module] = cases.plain,
    losses: Callable[[Any, nn.Module, Any], Any] = lambda member, model, batch: cases.loss(model, batch),
    measure: Callable[[nn.Module, Any], dict[str, Any]] | None = None,
) -> Callable[[Any], None]:
    """A train function that trains by SGD, and does something more after each epoch, or at the end.

    Args:
        losses: `losses(member, model, batch) -> [b]`.
        measure: by which it is validated.
    """

    def loop(member: Any) -> None:
        model = make(member.params)
        model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if measure is not None:
            member.validate_with(measure)
        for epoch in member.epochs():
            model.train()
            for batch in member.batches():
                member.backward(losses(member, model, batch))
                member.step()
            after_epoch(member, epoch)
        at_the_end(member)

    return loop


def checkpoint(folder: Path, attempt: int = 0) -> dict[str, Any]:
    return load_checkpoint(str(newest_checkpoint(RunDir(folder), "member-0", attempt)))


def predictions(folder: Path, split: str = "valid") -> np.ndarray[Any, Any]:
    found = load_predictions(RunDir(folder).predictions("member-0", 0), split)
    assert found.task == CLASSIFICATION
    return found.values


def read_weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The model of the newest checkpoint."""
    return {name: tensor.numpy() for name, tensor in checkpoint(folder)["model"].items()}
