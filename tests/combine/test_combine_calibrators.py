"""A calibrator of another distribution: found by its name, fitted, logged, loaded and exported like ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ensemble
from ensemble import Ensemble, Recipe, SpecError
from ensemble.combine import CombineError
from ensemble.combine.calibrators import load_calibrator
from ensemble.combine.combination import read_calibration
from ensemble.spec.fields import CALIBRATORS
from ensemble.spec.task import Task
from pipelines import Pipeline, sources
from pipelines.providers import Provider

SHRINK = """
class Shrink:
    '''Moves probabilities towards the uniform ones.'''

    kinds = ("classification",)

    def fit(self, task, values, target, per_sample):
        losses = {}
        for share in (0.05, 0.1, 0.2):
            true = self.apply(task, values, {"share": share})[range(len(target)), target]
            losses[share] = -float(__import__("numpy").log(true).mean())
        return {"share": min(losses, key=losses.get)}

    def apply(self, task, values, parameters):
        share = parameters["share"]
        return (1 - share) * values + share / values.shape[-1]
"""


def make_pipe(seed: int, n: int = 120) -> Pipeline:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5)).astype(np.float32)
    return Pipeline(sources.arrays(x=x, label=(x[:, :3] + rng.normal(size=(n, 3))).argmax(axis=1)))


def declare(**options: Any) -> Ensemble:
    recipe = Recipe(model=lambda params: torch.nn.Linear(5, 3), loss="cross_entropy", inputs=("x",))
    splits = {name: make_pipe(seed) for seed, name in enumerate(("train", "valid", "test"))}
    return Ensemble(name="e", recipe=recipe, members=[{"lr": 0.1}] * 2, epochs=2, **splits, **options)


@pytest.fixture
def shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    metadata = tmp_path / "site" / "shrinking-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shrinking\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ray_ensemble.calibrators]\nshrink = shrinking:Shrink\n")
    (tmp_path / "site" / "shrinking.py").write_text(SHRINK)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    CALIBRATORS.__dict__.pop("_foreign", None)
    yield
    CALIBRATORS.__dict__.pop("_foreign", None)
    sys.modules.pop("shrinking", None)


@pytest.mark.usefixtures("shrink")
def test_a_calibrator_of_another_distribution_calibrates_a_run_its_model_and_its_artifact(tmp_path: Path) -> None:
    result = ensemble.submit(declare(calibrate="shrink"), tmp_path / "run", "inline").wait()
    calibration = result.combined.calibration
    assert calibration["method"] == "shrink" and calibration["value"]["share"] in (0.05, 0.1, 0.2)
    model = ensemble.load(tmp_path / "run")
    assert f"calibration={calibration['value']}" in repr(model)
    batch = {"x": torch.from_numpy(np.random.default_rng(9).normal(size=(7, 5)).astype(np.float32))}
    values = model(batch)
    model.calibration = 1.0
    plain = model(batch)
    share = calibration["value"]["share"]
    torch.testing.assert_close(values, (1 - share) * plain + share / plain.shape[-1])
    made = ensemble.export(tmp_path / "run", tmp_path / "artifact", uncertainty=False)
    program = torch.export.load(made / "model.pt2").module()
    assert torch.equal(program(batch), values)


def test_an_unknown_calibrator_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(
        SpecError, match=r"calibrate must be True, False or one of 'temperature', 'variance_scale'"
    ):
        declare(calibrate="isotonic")
    with pytest.raises(CombineError, match="is of classification, multilabel, not of gaussian"):
        load_calibrator("temperature", Task("gaussian"))


def test_a_calibrator_changes_arrays_and_tensors_alike() -> None:
    values: Any = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    apply = load_calibrator("temperature", Task("classification")).apply
    of_arrays = apply(Task("classification"), values, 1.7)
    of_tensors = apply(Task("classification"), torch.from_numpy(values), 1.7)
    np.testing.assert_allclose(of_tensors.numpy(), of_arrays, rtol=1e-14)


def test_a_calibrator_of_another_task_or_that_cannot_be_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"calibrate: .*'variance_scale' is of gaussian, not of classification"):
        ensemble.submit(declare(calibrate="variance_scale"), tmp_path / "run", "inline")
    gone = Provider("calibrators", "gone", "no_such_module:Gone", "gone 1.0")
    monkeypatch.setattr(CALIBRATORS, "_foreign", ({"gone": gone}, []), raising=False)
    with pytest.raises(SpecError, match="no_such_module"):
        ensemble.submit(declare(calibrate="gone"), tmp_path / "run", "inline")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [0, {}, []])
def test_parameters_that_are_nothing_to_python_are_parameters(value: Any) -> None:
    assert read_calibration({"value": value, "method": "shift"}) == (value, "shift")
    assert read_calibration({"value": None, "method": None}) == read_calibration(None) == (1.0, None)
