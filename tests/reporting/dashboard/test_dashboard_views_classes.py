"""Classes in the view "Ensemble": the confusion matrix and figures of each class are those of the predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import run_events
from kit.event_dicts import fold, read_events
from kit.kept_predictions import save_predictions
from sklearn.metrics import confusion_matrix, f1_score

from ensemble.combine.per_class import compute_per_class
from ensemble.reporting.dashboard.analysis import read_quality
from ensemble.reporting.report import write_report
from ensemble.spec.task import CLASSIFICATION
from ensemble.store import RunDir

ANIMALS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "<b>truck</b>"]
ROWS = 1500


def predict(member: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that take each class for its neighbour at times, and the true classes."""
    target, rng = np.random.default_rng(0).integers(0, classes, ROWS), np.random.default_rng(member + 1)
    logits, every = rng.normal(size=(ROWS, classes)), np.arange(ROWS)
    logits[every, target] += 2
    logits[every, (target + 1) % classes] += 4 * (np.random.default_rng(1).random(ROWS) < 0.3)
    values = np.exp(logits)
    return (values / values.sum(axis=1, keepdims=True)).astype(np.float32), target


def write_run(folder: Path, classes: int, names: list[str] | None) -> RunDir:
    events = [e | {"classes": names} if e["type"] == "combined" else e for e in run_events.list_run()]
    run = RunDir(run_events.write_run(folder, events))
    for member in range(8):
        values, target = predict(member, classes)
        for split in ("valid", "test"):
            save_predictions(run.predictions(f"member-{member}"), split, values, np.arange(ROWS), target)
    return run


def quality_of(run: RunDir) -> dict[str, Any]:
    document = read_quality(run, fold(read_events(run.events)))
    json.dumps(document, allow_nan=False)
    return document


def test_the_document_has_the_confusions_of_the_combined_model_and_of_the_best_member(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10, ANIMALS)
    document = quality_of(run)
    combined = fold(read_events(run.events)).combined
    assert combined is not None
    mixed = np.mean([predict(int(name[7:]), 10)[0].astype(float) for name in combined.members], axis=0)
    best, target = predict(int(combined.best_member[7:]), 10)
    for matrix, values in zip(document["matrices"], (mixed, best), strict=True):
        found = np.zeros((10, 10), int)
        for true, predicted, count, share in matrix["cells"]:
            found[true, predicted] = count
            assert share == pytest.approx(count / (target == true).sum(), abs=1e-5)
        assert np.array_equal(found, confusion_matrix(target, values.argmax(axis=1)))
        assert matrix["names"] == ANIMALS
    (table,) = (table for table in document["tables"] if table["id"] == "per-class")
    f1 = f1_score(target, mixed.argmax(axis=1), average=None)
    assert [row[0] for row in table["rows"]] == [ANIMALS[i] for i in np.argsort(f1, kind="stable")]


def test_of_a_thousand_classes_the_worst_and_the_most_frequent_confusions_are_listed(tmp_path: Path) -> None:
    document = quality_of(write_run(tmp_path / "run", 1000, None))
    assert document["matrices"] == []
    classes, confusions = (table for table in document["tables"] if table["id"] in ("per-class", "confusions"))
    assert len(classes["rows"]) == 30 and "30 worst of 1000" in classes["text"]
    counts = [row[2] for row in confusions["rows"]]
    assert len(counts) == 30 and counts == sorted(counts, reverse=True)


def test_a_matrix_has_names_on_both_axes_as_text() -> None:
    figures = compute_per_class(CLASSIFICATION, np.eye(2)[[1] * 5], np.array([0, 0, 1, 1, 1]), ["cat", "dog"])
    rows = ["true \\ predicted  cat  dog", "cat                 0    2", "dog                 0    3"]
    assert str(figures).split("\n\n")[1].splitlines() == rows


@pytest.mark.browser
@pytest.mark.more
def test_the_matrix_shows_each_model_in_any_width(tab: Any, tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path / "run", 10, ANIMALS))
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.goto(f"file://{report}#ensemble")
    tab.wait_for_selector("[data-view=ensemble]:not([data-drawn='0'])")
    card = tab.locator("figure", has=tab.locator("h3", has_text="Confusion of classes")).first
    assert card.locator("svg rect").count() == 100
    for axis in ("true", "predicted"):
        shown = card.locator(f"[data-axis={axis}]")
        assert shown.evaluate_all("all => all.map((each) => each.lastChild.textContent)") == ANIMALS
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    matrices = quality_of(RunDir(report.parent))["matrices"]
    for name, matrix in (("best member", matrices[1]), ("combined model", matrices[0])):
        button = card.get_by_role("button", name=name)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        true, predicted, count, _ = matrix["cells"][1]
        title = card.locator(f"g:has([data-mark='{true},{predicted}']) title").first.text_content()
        assert f"{count} sample" in title and ANIMALS[true] in title
    card.get_by_role("button", name="as a table").click()
    assert card.locator("tbody tr").count() == 10 and "<b>truck</b>" in card.inner_text()
    assert "Figures of each class" in tab.inner_text("[data-view=ensemble]")
