"""What comes back from a run: attributes, frames, histories, predictions and figures of each class."""

from __future__ import annotations

import csv
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import inspected_runs
import numpy as np
import pytest
from kit.event_dicts import fold, read_events
from kit.kept_predictions import save_predictions
from sklearn.metrics import confusion_matrix, multilabel_confusion_matrix, precision_recall_fscore_support

import ensemble
from ensemble import Member
from ensemble.combine import CombineError
from ensemble.combine.per_class import compute_per_class
from ensemble.combine.tasks import find_math
from ensemble.reporting.dashboard.projection import RunView
from ensemble.result import make_result
from ensemble.spec.task import CLASSIFICATION, IGNORED, Task
from ensemble.store import RunDir
from ensemble.store.follower import LogFollower


def test_rows_are_dicts_whose_keys_and_metrics_are_attributes(trained: Path) -> None:
    result = make_result(RunDir(trained))
    best = result.best
    assert best is not None and isinstance(best, dict)
    assert best.metric == best["metric"] == best.accuracy and best.params == {"width": 8, "lr": 0.2}
    assert result.members[1].seed == 1 and result.combined is not None
    assert result.combined.accuracy == result.combined["metrics"]["ensemble"]["accuracy"]
    with pytest.raises(AttributeError, match="did you mean 'metric'"):
        _ = best.metrik
    assert pickle.loads(pickle.dumps(best)) == best and "accuracy" in dir(best)
    assert json.loads(json.dumps(result.members)) == result.members == ensemble.attach(trained).status()


def test_a_result_is_a_frame_of_hyperparameters_and_metrics(trained: Path, monkeypatch: Any) -> None:
    result = make_result(RunDir(trained))
    frame = result.to_frame()
    assert frame["member"].tolist() == ["member-0", "member-1"] and frame["seed"].tolist() == [0, 1]
    assert frame["lr"].tolist() == [0.2, 0.2]
    assert frame["accuracy"].tolist() == [row["metrics"]["accuracy"] for row in result.members]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"ray-ensemble\[notebook\]"):
        result.to_frame()


def test_the_history_is_what_metrics_csv_has(trained: Path) -> None:
    rows = ensemble.attach(trained).history()
    with open(trained / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table) == 4
    for row, cells in zip(rows, table, strict=True):
        assert {name: str(value) for name, value in row.items()} == {k: v for k, v in cells.items() if v}
    assert rows.to_frame()["valid/accuracy"].tolist() == [row["valid/accuracy"] for row in rows]


@pytest.mark.parametrize("executor", ["inline", "local"])
def test_an_evaluation_within_an_epoch_is_seen_while_the_epoch_lasts(tmp_path: Path, executor: str) -> None:
    seen: list[tuple[float, ...]] = []

    def look(event: dict[str, Any]) -> None:
        if event["type"] == "progress" and event["metrics"] and event["epoch"] == 1:
            name, value = event["member"], event["metrics"]["accuracy"]
            view = RunView(run_dir)
            for events, offset in LogFollower(run_dir).read():
                view.apply(events, offset)
            rows = view.state_document()["members"]
            shown = dict(zip(rows["columns"], rows["rows"][name], strict=True))
            curve = view.curves_document()["members"][name]
            at = curve["epoch"].index(event["step"] / event["steps"])  # the second epoch is between 0 and 1
            (row,) = [row for row in run.status() if row["member"] == name]
            history = [(r["epoch"], r["step"], r["valid/accuracy"]) for r in run.history() if r["member"] == name]
            if executor == "inline":  # else it trains on meanwhile
                assert row["metric"] == value and history[-1] == (1, event["step"], value)
            assert (1, event["step"], value) in history and shown["metrics"]["accuracy"] is not None
            seen.append((curve["values"]["accuracy"][at], pytest.approx(value, rel=1e-5)))

    run_dir = RunDir(tmp_path / "run")
    declared = inspected_runs.declare(validate_every=4, members=ensemble.seeds(1, {"width": 8, "lr": 0.2}))
    run = ensemble.submit(declared, run_dir.path, executor, on_event=look)
    result = run.wait()
    assert [shown for shown, _ in seen] == [value for _, value in seen] and len(seen) == 2
    with open(run_dir.path / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["epoch"], row["step"]) for row in table] == [
        ("0", "4"), ("0", "8"), ("0", "10"), ("1", "2"), ("1", "6"), ("1", "10")
    ]  # fmt: skip
    assert [bool(row["samples"]) for row in table] == [False, False, True] * 2, "those of a whole epoch"
    assert float(table[-1]["valid/accuracy"]) == result.members[0].metric
    again = ensemble.submit(
        inspected_runs.declare(members=declared.members), tmp_path / "plain", executor="inline"
    ).wait()
    assert again.members[0].metrics == result.members[0].metrics, "it changes no weight"


def test_seeds_differ_in_their_seed_only_and_are_recorded(trained: Path) -> None:
    members = ensemble.seeds(3, {"width": 8, "lr": 0.1}, start=5, precision="bf16", epochs=1)
    assert members == [Member({"width": 8, "lr": 0.1}, seed=s, precision="bf16", epochs=1) for s in (5, 6, 7)]
    state = fold(read_events(RunDir(trained).events))
    one, other = (dict(member.identity) for member in state.members.values())
    assert (one.pop("seed"), other.pop("seed")) == (0, 1)
    names = {"member", "number"}
    assert {k: v for k, v in one.items() if k not in names} == {k: v for k, v in other.items() if k not in names}
    digests = {member.weights_sha256 for member in state.members.values()}
    assert len(digests) == 2, "other seeds train other weights"
    # The ensemble's seed and the place in the list do not count.
    declared = inspected_runs.declare(seed=9, members=[{"width": 8, "lr": 0.1}, *members])
    assert [declared.identify(number).seed for number in (1, 2)] == [5, 6]


def test_combined_predictions_are_those_that_the_figures_are_of(trained: Path) -> None:
    result = make_result(RunDir(trained))
    assert result.combined is not None
    for split in ("test", "valid"):
        found = ensemble.load_predictions(trained, split)
        assert found.values.shape == (len(found), inspected_runs.CLASSES) and found.member is None
        assert found.targets is not None
        begin, end = (400, 600) if split == "test" else (300, 400)
        assert np.array_equal(found.targets, inspected_runs.make_data()[1][begin:end])
    found = ensemble.load_predictions(trained, "valid", member="member-1")
    assert not found.values.flags.writeable and np.array_equal(found.index, np.arange(100))
    assert found.values.dtype == np.float32 and np.allclose(found.values.sum(axis=1), 1, atol=1e-5)
    found = ensemble.load_predictions(trained)
    measured = find_math(CLASSIFICATION).measure(found.values, found.targets)
    assert measured == {name: result.combined["metrics"]["ensemble"][name] for name in measured}


def take_median(values: Any) -> Any:
    middle = values.median(dim=0).values
    return middle / middle.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("combine", ["stack", pytest.param(take_median, marks=pytest.mark.more)])
def test_predictions_of_other_combinations_are_made_again_bit_by_bit(tmp_path: Path, combine: Any) -> None:
    result = inspected_runs.train(tmp_path / "run", combine=combine)
    found = ensemble.load_predictions(tmp_path / "run")
    measured = find_math(CLASSIFICATION).measure(found.values, found.targets)
    assert measured == {name: result.combined["metrics"]["ensemble"][name] for name in measured}


def check_against_sklearn(found: Any, target: np.ndarray, predicted: np.ndarray, labels: list[int]) -> None:
    options = {"labels": labels, "zero_division": 0}
    precision, recall, f1, support = precision_recall_fscore_support(target, predicted, **options)
    assert np.array_equal(found.precision, precision) and np.array_equal(found.recall, recall)
    assert np.allclose(found.f1, f1, rtol=1e-15, atol=0) and np.array_equal(found.support, support)


def test_figures_of_each_class_are_scikit_learns(trained: Path) -> None:
    per_class = make_result(RunDir(trained)).per_class
    assert list(per_class) == ["ensemble", "best"]
    saved = json.loads((trained / "results.json").read_text())["per_class"]
    assert saved["split"] == "test" and saved["classes"] is None
    labels = list(range(inspected_runs.CLASSES))
    for of, member in (("ensemble", None), ("best", make_result(RunDir(trained)).combined.best_member)):
        predictions = ensemble.load_predictions(trained, member=member)
        predicted = predictions.values.argmax(axis=1)
        check_against_sklearn(per_class[of], predictions.targets, predicted, labels)
        expected = confusion_matrix(predictions.targets, predicted, labels=labels)
        assert np.array_equal(per_class[of].confusion, expected)
        assert saved["models"][of] == per_class[of].as_record()
        wrong = per_class[of].list_confusions()
        assert sum(each["count"] for each in wrong) == (predicted != predictions.targets).sum()
        assert per_class[of].rows()[2]["recall"] == per_class[of].recall[2]
    assert per_class["ensemble"].to_frame()["support"].sum() == 200


def test_figures_of_each_class_leave_ignored_steps_out_and_hold_for_classes_that_nobody_has() -> None:
    rng = np.random.default_rng(1)
    values = rng.dirichlet(np.ones(7), size=(40, 5))
    target = rng.integers(0, 5, size=(40, 5))
    target[rng.random(target.shape) < 0.3] = IGNORED
    found = compute_per_class(CLASSIFICATION, values, target)
    known = target != IGNORED
    check_against_sklearn(found, target[known], values.argmax(axis=-1)[known], list(range(7)))
    expected = confusion_matrix(target[known], values.argmax(-1)[known], labels=range(7))
    assert np.array_equal(found.confusion, expected)


def test_figures_of_each_label_are_scikit_learns_and_leave_unknown_ones_out() -> None:
    rng = np.random.default_rng(2)
    values, target = rng.random((300, 6)), (rng.random((300, 6)) < 0.3).astype(np.int64)
    found = compute_per_class(Task("multilabel"), values, target, list("abcdef"))
    check_against_sklearn(found, target, (values >= 0.5).astype(np.int64), list(range(6)))
    expected = multilabel_confusion_matrix(target, (values >= 0.5).astype(np.int64))
    assert np.array_equal(found.confusion, expected) and found.rows()[1]["name"] == "b"
    target[:100, 3] = IGNORED
    found = compute_per_class(Task("multilabel"), values, target)
    one = multilabel_confusion_matrix(target[100:, 3:4], values[100:, 3:4] >= 0.5)
    assert np.array_equal(found.confusion[3], one[1] if len(one) > 1 else one[0])


def test_a_run_without_a_combined_model_says_why(tmp_path: Path) -> None:
    result = inspected_runs.train(tmp_path / "run", valid=None, test=None)
    for read in (lambda: ensemble.load_predictions(tmp_path / "run"), lambda: result.per_class):
        with pytest.raises(CombineError, match="has no combined model: there is no validation split"):
            read()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["per_class"] is None


def test_mapped_predictions_hold_no_descriptor_and_memory_for_as_long_as_they_are_used(tmp_path: Path) -> None:
    from ensemble.store import load_predictions

    path = tmp_path / "predictions.safetensors"
    save_predictions(path, "valid", np.full((20_000, 2), 0.5), np.arange(20_000), None)
    open_before = len(os.listdir("/proc/self/fd"))
    held = [load_predictions(path, "valid", mapped=True).values for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert Path("/proc/self/maps").read_text().count(str(path)) >= 1
    assert all((values == 0.5).all() for values in held)
    with pytest.raises(ValueError, match="WRITEABLE"):
        held[0].flags.writeable = True
    del held
    assert str(path) not in Path("/proc/self/maps").read_text()
    program = """import atexit, sys; from ensemble.store import load_predictions
atexit.register(lambda: print(held.values.sum()))  # before: it is called after all that a finalizer registers
held = load_predictions(sys.argv[1], 'valid', mapped=True)"""
    shown = subprocess.check_output([sys.executable, "-c", program, path], text=True)
    assert shown == "20000.0\n", "it is there until the process is gone"
