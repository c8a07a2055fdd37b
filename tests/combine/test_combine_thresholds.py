"""Thresholds: never worse than none where they were fitted, the best for two classes; in load() and artifacts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from sklearn import metrics
from torch import nn

import ensemble
from ensemble import Ensemble, Member, Recipe, SpecError
from ensemble.combine import CombineError
from ensemble.combine.calibrators import load_calibrator
from ensemble.combine.combination import read_calibration
from ensemble.combine.thresholds import decide, fit_thresholds, measure_decisions
from ensemble.spec.fields import CALIBRATORS
from ensemble.spec.task import Task
from pipelines import Pipeline, sources
from pipelines.providers import Provider

CLASSES, LABELS = Task("classification"), Task("multilabel")
SCORES = {
    "f1": lambda y, of: metrics.f1_score(y, of),
    "f1_macro": lambda y, of: metrics.f1_score(y, of, average="macro", labels=np.unique(y)),
    "balanced_accuracy": lambda y, of: metrics.recall_score(y, of, average="macro", labels=np.unique(y)),
}


def draw_classes(seed: int, n: int, classes: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(classes, 0.7))
    y = rng.choice(classes, n, p=shares)
    logits = rng.normal(size=(n, classes)) + 1.5 * np.eye(classes)[y] + np.log(shares + 1e-3)
    p = np.exp(logits)
    return p / p.sum(axis=1, keepdims=True), y


@given(seed=st.integers(0, 10**6), n=st.integers(2, 80), by=st.sampled_from(sorted(SCORES)))
@examples(10)
def test_of_two_classes_no_other_threshold_is_better(seed: int, n: int, by: str) -> None:
    p, y = draw_classes(seed, n, 2)
    found = fit_thresholds(CLASSES, p, y, by)
    assert found.sum() == pytest.approx(1)
    score = SCORES[by](y, decide(CLASSES, p, found))
    np.testing.assert_array_equal(decide(CLASSES, p, found), p[:, 1] >= found[1])
    others = [SCORES[by](y, p[:, 1] >= at) for at in (*p[:, 1], 1.1)]
    assert score >= max(others) - 1e-9


@given(
    seed=st.integers(0, 10**6), classes=st.integers(3, 6), by=st.sampled_from(["f1_macro", "balanced_accuracy"])
)
@examples(6)
def test_of_more_classes_they_are_never_worse_than_without(seed: int, classes: int, by: str) -> None:
    p, y = draw_classes(seed, 120, classes)
    found = fit_thresholds(CLASSES, p, y, by)
    assert SCORES[by](y, decide(CLASSES, p, found)) >= SCORES[by](y, p.argmax(axis=1)) - 1e-9
    assert found.min() > 0 and found.sum() == pytest.approx(1)


@pytest.mark.parametrize("by", ["f1", pytest.param("balanced_accuracy", marks=pytest.mark.more)])
def test_each_label_has_its_best_threshold_and_unknown_ones_take_no_part(by: str) -> None:
    rng = np.random.default_rng(0)
    y = (rng.random((200, 3)) < [0.5, 0.1, 0.02]).astype(float)
    p = np.clip(0.1 + 0.2 * y + 0.1 * rng.normal(size=y.shape), 0, 1)
    y[:20, 0] = np.nan
    found = fit_thresholds(LABELS, p, y, by)
    score = metrics.f1_score if by == "f1" else metrics.balanced_accuracy_score
    for label in range(3):
        known = ~np.isnan(y[:, label])
        mine, truth = p[known, label], y[known, label]
        best = max(score(truth, mine >= at) for at in (*mine, 1.1))
        assert score(truth, decide(LABELS, p, found)[known, label]) >= best - 1e-9
    assert measure_decisions(LABELS, p, y, found)["f1_macro"] > measure_decisions(LABELS, p, y, None)["f1_macro"]


@pytest.mark.parametrize("by", ["f1", "balanced_accuracy"])
def test_sure_probabilities_have_thresholds_that_float32_holds(by: str) -> None:
    for p, y in (
        ([1, 1, 1, 0.999999, 0.9999, 0.999, 0, 0, 0.5], [1, 1, 1, 0, 0, 0, 0, 0, 0]),
        ([1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 1, 1]),
    ):
        both = np.stack([1 - np.array(p, np.float64), np.array(p, np.float64)], axis=1)
        found = fit_thresholds(CLASSES, both, np.array(y), by)
        assert np.isfinite(found).all() and (found.astype(np.float32) > 0).all()
        one = decide(CLASSES, both.astype(np.float32), found.astype(np.float32))
        other = decide(CLASSES, torch.tensor(both).float(), torch.tensor(found).float())
        np.testing.assert_array_equal(one, other.numpy())
        assert SCORES[by](np.array(y), one) >= SCORES[by](np.array(y), both.argmax(axis=1)) - 1e-9


def test_positions_count_like_samples_and_ignored_ones_not() -> None:
    p, y = draw_classes(1, 90, 3)
    steps, target = p.reshape(30, 3, 3), y.reshape(30, 3)
    flat = fit_thresholds(CLASSES, p, y, "f1_macro")
    np.testing.assert_allclose(fit_thresholds(CLASSES, steps, target, "f1_macro"), flat)
    more = np.concatenate([steps, steps]), np.concatenate([target, np.full_like(target, -100)])
    np.testing.assert_allclose(fit_thresholds(CLASSES, *more, "f1_macro"), flat)


def declare(**options: Any) -> Ensemble:
    rng = np.random.default_rng(0)
    label = (rng.random(900) < 0.06).astype(np.int64)
    x = (rng.normal(size=(900, 4)) + label[:, None] * 0.8).astype(np.float32)
    parts = sources.arrays(x=x, label=label).split((0.6, 0.2, 0.2), seed=0, stratify="label")
    splits = dict(zip(("train", "valid", "test"), map(Pipeline, parts), strict=True))
    recipe = Recipe(model=lambda params: nn.Linear(4, 2), loss="cross_entropy")
    members = [Member({"lr": 0.5}), Member({"lr": 0.1})]
    return Ensemble(name="rare", recipe=recipe, members=members, epochs=3, batch_size=32, **splits, **options)


def run(declared: Ensemble, folder: Path) -> Any:
    return ensemble.submit(declared, folder, "inline").wait()


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("decided") / "run"
    return path, run(declare(thresholds="f1"), path)


def test_a_run_decides_by_them_and_so_does_load(decided: tuple[Path, Any]) -> None:
    path, result = decided
    decision = result.combined["decision"]
    assert decision["metrics"]["thresholds"]["f1"] > decision["metrics"]["usual"].get("f1", 0)
    assert "decides by thresholds for f1" in result.summary(everything=True)
    rows = next(iter(declare().test.loader(200, epochs=1)))
    found = ensemble.load(path)({"x": rows["x"]})
    at = decision["thresholds"][1]
    torch.testing.assert_close(found["decision"], (found["values"][:, 1] >= at).long())
    assert found["decision"].sum() > found["values"].argmax(1).sum()


@pytest.mark.more
def test_an_artifact_decides_by_them(decided: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = decided
    rows = next(iter(declare().test.loader(200, epochs=1)))
    found = ensemble.load(path)({"x": rows["x"]})
    ensemble.export(path, tmp_path / "made")
    program = torch.export.load(tmp_path / "made" / "model.pt2").module()
    torch.testing.assert_close(program({"x": rows["x"]})["decision"], found["decision"])
    np.savez(tmp_path / "new.npz", x=rows["x"].numpy())
    for model in (path, tmp_path / "made"):
        ensemble.predict(model, tmp_path / "new.npz", tmp_path / "found.parquet")
        table = pq.read_table(tmp_path / "found.parquet")
        assert table["class"].to_pylist() == found["decision"].tolist()
    assert "threshold" in (tmp_path / "made" / "README.md").read_text()


def test_a_resume_that_asks_for_them_combines_anew(tmp_path: Path) -> None:
    before = run(declare(), tmp_path / "run")
    assert before.combined["decision"] is None
    after = run(declare(thresholds="balanced_accuracy"), tmp_path / "run")
    assert after.combined["decision"]["by"] == "balanced_accuracy"
    assert [row["attempts"] for row in after.members] == [1, 1]


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


def declare_calibrators(**options: Any) -> Ensemble:
    def make_pipe(seed: int) -> Pipeline:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(120, 5)).astype(np.float32)
        return Pipeline(sources.arrays(x=x, label=(x[:, :3] + rng.normal(size=(120, 3))).argmax(axis=1)))

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
    result = ensemble.submit(declare_calibrators(calibrate="shrink"), tmp_path / "run", "inline").wait()
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


def test_thresholds_and_calibrators_that_a_task_has_not_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    points = Recipe(model=len, loss="mse", inputs=("x",))
    with pytest.raises(SpecError, match="thresholds are for classes and labels, not for the task regression"):
        Ensemble(name="a", recipe=points, members=[{"lr": 1}], train=declare().train, thresholds="f1")
    with pytest.raises(SpecError, match="True, False or one of 'temperature', 'variance_scale'"):
        declare_calibrators(calibrate="isotonic")
    with pytest.raises(CombineError, match="is of classification, multilabel, not of gaussian"):
        load_calibrator("temperature", Task("gaussian"))
    gone = Provider("calibrators", "gone", "no_such_module:Gone", "gone 1.0")
    monkeypatch.setattr(CALIBRATORS, "_foreign", ({"gone": gone}, []), raising=False)
    other_task = r"calibrate: .*'variance_scale' is of gaussian, not of classification"
    for name, says in (("variance_scale", other_task), ("gone", "no_such_module")):
        with pytest.raises(SpecError, match=says):
            ensemble.submit(declare_calibrators(calibrate=name), tmp_path / "run", "inline")
    assert not (tmp_path / "run").exists()


def test_a_calibrator_changes_arrays_and_tensors_alike_and_may_have_any_parameters() -> None:
    values: Any = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    apply = load_calibrator("temperature", CLASSES).apply
    of_tensors = apply(CLASSES, torch.from_numpy(values), 1.7)
    np.testing.assert_allclose(of_tensors.numpy(), apply(CLASSES, values, 1.7), rtol=1e-14)
    for value in (0, {}, []):  # which are nothing to Python
        assert read_calibration({"value": value, "method": "shift"}) == (value, "shift")
    assert read_calibration({"value": None, "method": None}) == read_calibration(None) == (1.0, None)
