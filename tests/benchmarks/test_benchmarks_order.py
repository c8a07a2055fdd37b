"""`python -m benchmarks order`: what is compared is what a run trains, and the command writes rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.finished_runs import read_state

import ensemble
from benchmarks.__main__ import main
from benchmarks.order.measure import build, describe, train_members, variance_ratio
from benchmarks.what_it_buys.tasks import TASKS, make_pipelines, read_pool, split
from ensemble import Ensemble, Folds, Member, Recipe
from ensemble.store import RunDir, load_checkpoint
from pipelines import weights

TASK = dataclasses.replace(TASKS["digits"], epochs=2)


@pytest.mark.parametrize("has_own_order", [False, True])
def test_members_have_the_weights_that_a_run_gives_them(tmp_path: Path, has_own_order: bool) -> None:
    arrays, seeds = split(TASK, read_pool(TASK, None), 0), [0, 1]
    orders = [7, 8] if has_own_order else [7]
    valid, n = make_pipelines(TASK, arrays)["valid"], len(arrays["train"][1])
    declared = Ensemble(
        name="order",
        recipe=Recipe(model=lambda params: build(TASK), loss="cross_entropy"),
        members=[Member({"order": orders[k % len(orders)]}, seed=k, weights=Folds(5, held_out=k)) for k in seeds],
        train=lambda params: make_pipelines(TASK, arrays, params["order"])["train"],
        valid=valid,
        optimizer={"name": "adamw", "lr": 3e-3},
        epochs=TASK.epochs,
        batch_size=TASK.batch_size,
        allow_overlap=True,
    )
    ensemble.submit(declared, tmp_path, executor="inline").wait()
    states = read_state(tmp_path).members.values()
    runs = [
        load_checkpoint(RunDir(tmp_path).valid_checkpoint(state), parts=("model",))["model"] for state in states
    ]
    kept = np.stack([weights.fold(n, 5, k)(np.arange(n)) > 0 for k in seeds])
    alike = train_members(TASK, seeds, [(arrays, order) for order in orders], kept)
    for theirs, ours in zip(runs, alike, strict=True):
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5)


def test_figures_of_members_that_err_together_and_apart() -> None:
    label = np.zeros(4, np.int64)
    right, wrong = [0.9, 0.1], [0.2, 0.8]
    together = np.array([[wrong, right, right, right]] * 2)
    apart = np.array([[wrong, right, right, right], [right, wrong, right, right]])
    assert describe(together, label)["correlation of errors"] == pytest.approx(1)
    assert describe(together, label)["disagreement, %"] == 0
    found = describe(apart, label)
    assert found["correlation of errors"] == pytest.approx(-1 / 3)
    assert (found["disagreement, %"], found["member accuracy, %"], found["ensemble accuracy, %"]) == (50, 75, 100)


def test_the_variance_ratio_is_one_of_independent_members_and_their_number_of_equal_ones() -> None:
    drawn = np.random.default_rng(0).random((1, 20_000, 5)) < 0.4
    assert variance_ratio(drawn) == pytest.approx(1, abs=0.05)
    assert variance_ratio(np.repeat(drawn[..., :1], 5, 2)) == pytest.approx(5)


@pytest.mark.more
def test_the_command_writes_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert main(["order", "--quick", "--tasks", "rare,cancer", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert {row["task"] for row in rows} == {"cancer", "rare"} and len({row["figure"] for row in rows}) == len(
        rows
    )
    assert all(row["shared_low"] <= row["shared"] <= row["shared_high"] for row in rows)
