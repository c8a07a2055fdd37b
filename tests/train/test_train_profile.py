"""What is measured of a member before it is placed: its training steps, and nothing on top of them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit import train_child as cases

import ensemble
from ensemble.spec import Folds, Recipe
from ensemble.store import RunDir
from ensemble.train import Inbox, profile
from ensemble.train.job import ProfileRequest
from pipelines import weights


def test_evaluations_within_epochs_are_no_part_of_a_step(tmp_path: Path) -> None:
    calls = {True: 0, False: 0}  # of the loss, by whether the model was training

    def loss(model: Any, batch: Any) -> Any:
        calls[model.training] += 1
        return cases.loss(model, batch)

    events = measure(tmp_path, loss, validate_every=1)
    looks = 2  # at the first batch, and at its half
    assert calls[True] > 2 and calls[False] == 1 + looks, "one evaluation, after the steps, for its memory"
    assert [event["type"] for event in events if event["type"] == "profiled"] == ["profiled"]


def test_a_member_whose_loss_is_not_finite_is_measured_like_any_other(tmp_path: Path) -> None:
    (profiled,) = (event for event in measure(tmp_path, not_finite) if event["type"] == "profiled")
    assert profiled["of"] == ["member-0"] and profiled["measured"]["step_s"] > 0
    assert not RunDir(tmp_path).list_checkpoints("member-0"), "nothing is left behind"


def test_a_train_function_is_measured_by_a_few_steps_and_a_batch_of_its_own_fold(tmp_path: Path) -> None:
    """What follows in its evaluation is left out; a long one is measured once, however often it is asked for."""
    held_out = np.flatnonzero(weights.fold(cases.N, 3, 0, seed=0)(np.arange(cases.N)) == 0)
    seen: dict[str, list[int]] = {"train": [], "valid": []}

    def loop(member: Any) -> None:
        model, optimizer = cases.normed(member.params), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        member.prepare(model, optimizer)
        for _ in range(member.identity.epochs):
            for batch in member.dataloader("train"):
                seen["train"] += batch["index"].tolist()
                cases.loss(model, batch).mean().backward()
                optimizer.step()
            for batch in member.batches("valid"):
                seen["valid"] += batch["index"].tolist()
                time.sleep(0.06)  # longer than the steps that are to be measured
            raise AssertionError("the evaluation goes on")

    pipe = cases.data()
    options = {"weights": Folds(3), "out_of_fold": True, "train": pipe, "valid": pipe, "epochs": 1}
    request = {"evaluations": 4}
    (profiled,) = (e for e in measure(tmp_path, loop, request, 3, **options) if e["type"] == "profiled")
    assert profiled["measured"]["step_s"] > 0
    assert seen["valid"] == held_out[:5].tolist() and not set(seen["train"]) & set(held_out.tolist())


def not_finite(model: Any, batch: Any) -> Any:
    return cases.loss(model, batch) * float("nan")


def measure(
    run_dir: Path, loss: Any, asked: dict[str, Any] | None = None, members: int = 1, **options: Any
) -> list[dict[str, Any]]:
    own = {"train": loss} if members > 1 else {"loss": loss}
    declared = cases.declare(
        Recipe(model=cases.plain, task="classification", **own), 1, **{**options, "out_of_fold": False}
    )
    changed = replace(declared, members=list(declared.members) * members, **options)
    request = ProfileRequest(members=[changed.identify(0)], known=[], steps_s=0.05, **(asked or {}))
    events: list[dict[str, Any]] = []
    job = replace(cases.make_job(run_dir, changed), profile=request)
    assert profile.run(job, changed, events.append, Inbox()) == "finished", events
    return events


def test_a_dry_run_shows_the_sizes_of_a_member_whose_loss_is_not_finite() -> None:
    rows = []
    for loss in (cases.loss, not_finite):
        declared = cases.declare(Recipe(model=cases.normed, loss=loss, task="classification"), 1)
        rows += ensemble.dry_run(declared).members
    for name in ("parameters", "trainable", "checkpoint_bytes", "predictions_bytes"):
        assert rows[0][name] == rows[1][name] > 0
    assert rows[1]["evaluate_s"] is not None
