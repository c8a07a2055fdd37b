"""Trainings of one member in this process with options of the loop, and what they leave: for tests of loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_child as cases
from torch import nn

from ensemble.spec import EMA, SWA, EarlyStopping
from ensemble.spec.task import CLASSIFICATION
from ensemble.store import RunDir, load_checkpoint, load_predictions
from ensemble.train import Inbox, work

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
    return load_checkpoint(str(RunDir(folder).newest_checkpoint("member-0", attempt)))


def predictions(folder: Path, split: str = "valid") -> np.ndarray[Any, Any]:
    found = load_predictions(RunDir(folder).predictions("member-0", 0), split)
    assert found.task == CLASSIFICATION
    return found.values
