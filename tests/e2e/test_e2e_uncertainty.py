"""How sure a combined model is, from end to end: members predict samples of another kind, too."""

from __future__ import annotations

import collections
import csv
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_dicts import fold, read_events
from saved_splits import drop_split

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.combine import combine
from ensemble.controller.finalize import Finalizer
from ensemble.store import (
    RunDir,
    RunState,
    load_predictions,
    save_predictions,
)
from ensemble.store.digests import digest_file
from pipelines import Pipeline, sources

CENTERS = np.array([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])


def samples(seed: int, n: int) -> Pipeline:
    """Three overlapping clouds of points."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n)
    x = CENTERS[label] + rng.normal(size=(n, 2))
    return Pipeline(sources.arrays(x=x.astype(np.float32), label=label))


def shifted_samples() -> Pipeline:
    """Points between the clouds, of no class."""
    x = 0.3 * np.random.default_rng(3).normal(size=(200, 2))
    return Pipeline(sources.arrays(x=x.astype(np.float32)))


def declare() -> Ensemble:
    def model(params: Any) -> Any:
        import torch

        return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def loss(model: Any, batch: Any) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

    def optimizer(model: Any, params: Any) -> Any:
        import torch

        return torch.optim.SGD(model.parameters(), lr=params["lr"])

    return Ensemble(
        name="unsure",
        recipe=Recipe(model=model, loss=loss, optimizer=optimizer),
        train=samples(0, 256),
        valid=samples(1, 300),
        test=samples(2, 400),
        shifted=shifted_samples(),
        members=[{"lr": lr} for lr in (0.1, 0.3, 0.5)],
        epochs=3,
        batch_size=32,
        coverage=COVERAGE,
    )


COVERAGE = 0.7


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Ensemble, ensemble.Result]:
    run, declared = RunDir(tmp_path_factory.mktemp("trained") / "run"), declare()
    return run, declared, ensemble.submit(declared, run.path, "inline").wait()


@pytest.fixture
def copied(trained: tuple[RunDir, Ensemble, ensemble.Result], tmp_path: Path) -> tuple[RunDir, Ensemble, RunState]:
    """A copy of that run, to be changed."""
    run = RunDir(shutil.copytree(trained[0].path, tmp_path / "run"))
    return run, trained[1], fold(read_events(run.events))


def test_a_run_says_how_sure_its_combined_model_is(trained: tuple[RunDir, Ensemble, ensemble.Result]) -> None:
    run, _, result = trained
    saved = load_predictions(run.predictions("member-0"), "shifted")
    assert saved.values.shape == (200, 3) and saved.target is None and saved.index.tolist() == list(range(200))

    combined = result.combined
    assert combined is not None and combined["split"] == "test"
    assert combined["shifted_metrics"] is None and combined["note"] == (
        "how good the model is on the shifted samples is not measured: they have no targets of the task"
    )
    parts = combined["uncertainty"]
    assert parts["total"] == pytest.approx(parts["aleatoric"] + parts["epistemic"])
    assert combined["shifted"]["total"]["auroc"] > 0.9, "between the clouds the model is least sure"
    for method in ("thr", "aps", "raps"):
        found = combined["conformal"][method]
        assert found["level"] == COVERAGE
        assert COVERAGE - 0.07 < found["coverage"] <= 1, "a deviation of 0.035: of 300 and 400 samples"

    with run.uncertainty_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert collections.Counter(row["split"] for row in rows) == {"valid": 300, "test": 400, "shifted": 200}
    test = [row for row in rows if row["split"] == "test"]
    for name, mean in parts.items():
        assert np.mean([float(row[name]) for row in test]) == pytest.approx(mean)
    right = np.mean([row["target"] == row["prediction"] for row in test])
    assert right == pytest.approx(combined["metrics"]["ensemble"]["accuracy"])
    selective = combined["selective"]["ensemble"]
    assert selective["risk"] == pytest.approx(1 - right) and selective["risk_80"] < selective["risk"]
    assert {row["target"] for row in rows if row["split"] == "shifted"} == {""}


def test_shifted_samples_that_cannot_be_measured_hinder_nothing_else(
    copied: tuple[RunDir, Ensemble, RunState],
) -> None:
    run, declared, state = copied
    path, member = run.predictions("member-1"), state.members["member-1"]
    drop_split(path, "shifted")
    member.predictions = dict.fromkeys(member.predictions or (), digest_file(path))
    combined = combine(run, state, declared)
    assert combined["shifted"] is None and combined["metrics"]["ensemble"]["accuracy"] > 0.6
    assert combined["note"].startswith("the shifted samples are not measured: ")
    assert "member-1/predictions.safetensors has no predictions on 'shifted'" in combined["note"]


class Named:
    """Samples with the names of their classes, as torchvision's data sets have them."""

    classes = ("red", "green", "blue")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.zeros(2, np.float32), index % 3


def test_the_event_has_the_names_that_the_data_have_for_classes(
    copied: tuple[RunDir, Ensemble, RunState],
) -> None:
    run, declared, state = copied
    assert state.combined is not None and state.combined.classes is None
    for names, found in ((Named.classes, ["red", "green", "blue"]), (("red", "green"), None)):
        data = Named()
        data.classes = names  # type: ignore[assignment]
        named = dataclasses.replace(declared, valid=Pipeline(sources.dataset(data, names=("x", "label"))))
        combined = Finalizer(run, named).combine_members(state)
        assert combined is not None and combined["classes"] == found


def test_a_combination_that_fails_says_so_and_replaces_that_of_an_earlier_session(
    copied: tuple[RunDir, Ensemble, RunState],
) -> None:
    run, declared, state = copied
    saved = load_predictions(run.predictions("member-1"), "valid")
    digest = save_predictions(run.predictions("member-1"), "valid", saved.values, saved.index + 1, saved.target)
    state.members["member-1"].predictions = dict.fromkeys(("valid", "test", "shifted"), digest)
    for earlier in (True, False):
        state.combined = state.combined if earlier else None
        finalizer = Finalizer(run, declared)
        combined = finalizer.combine_members(state)
        assert "predicted different valid samples" in finalizer.notes[0]
        assert combined is not None and combined["failed"]
        assert (combined["members"], combined["metrics"]) == ([], None)
    assert not run.uncertainty_csv.exists()


def test_a_table_of_an_earlier_combination_does_not_outlive_it(copied: tuple[RunDir, Ensemble, RunState]) -> None:
    run, declared, state = copied
    finalizer = Finalizer(run, dataclasses.replace(declared, valid=None))
    combined = finalizer.combine_members(state)
    assert combined is not None and combined["reason"] and not finalizer.notes
    assert not run.uncertainty_csv.exists()
