"""The quality of runs of each task: figures, plots and disagreement follow from their saved predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_events as tasks
from event_dicts import fold

from ensemble.combine.tasks import find_math
from ensemble.reporting.dashboard.analysis import read_quality
from ensemble.store import RunDir

MEASURED = [kind for kind in tasks.TASKS if kind != "free"]


def quality_of(folder: Path, kind: str, events: list[tasks.Event] | None = None) -> dict[str, Any]:
    events = tasks.task_run(kind) if events is None else events
    document = read_quality(RunDir(tasks.write_task_run(folder, kind, events)), fold(events))
    json.dumps(document, allow_nan=False)
    assert document["missing"] is None
    return document


def plot_of(document: dict[str, Any], id: str, of: str) -> list[list[float]]:
    (plot,) = [plot for plot in document["plots"] if plot["id"] == id]
    (series,) = [series for series in plot["series"] if series["of"] == of]
    return series["points"]


def values_of(kind: str) -> tuple[list[np.ndarray], np.ndarray]:
    alone = [tasks.predict(tasks.TASKS[kind], number) for number in range(tasks.MEMBERS)]
    return [values for values, _, _ in alone], alone[0][2]


@pytest.mark.parametrize("kind", MEASURED)
def test_figures_of_each_member_are_those_of_the_task_in_the_order_that_says_most(
    kind: str, tmp_path: Path
) -> None:
    document = quality_of(tmp_path, kind)
    values, target = values_of(kind)
    task_math = find_math(tasks.TASKS[kind])
    assert document["task"] == kind and document["members"]["member-2"] == task_math.measure(values[2], target)
    names = [figure["name"] for figure in document["figures"]]
    assert sorted(names) == sorted(document["members"]["member-0"])
    assert names[0] == {"multilabel": "f1_macro", "quantiles": "pinball"}.get(kind, "rmse")
    assert all(figure["better"] in ("higher", "lower", "nominal") for figure in document["figures"])


@pytest.mark.parametrize("kind", tasks.TASKS)
def test_intervals_noise_and_tables_come_from_the_event(kind: str, tmp_path: Path) -> None:
    events = tasks.task_run(kind)
    document = quality_of(tmp_path, kind, events)
    event = next(e for e in events if e["type"] == "combined")
    assert document["combined"] == event["metrics"]["ensemble"]
    assert document["intervals"] == event["intervals"] and document["noise"] == event["noise"]
    tables = ["uncertainty", "conformal", "selective", "shifted", "shifted_metrics"]
    assert [table["id"] for table in document["tables"]] == tables


@pytest.mark.parametrize("kind", MEASURED)
def test_the_gain_curve_averages_the_members_added_so_far(kind: str, tmp_path: Path) -> None:
    document = quality_of(tmp_path, kind)
    values, target = values_of(kind)
    task_math = find_math(tasks.TASKS[kind])
    added = [int(point["added"][7:]) for point in document["gain"]]
    assert sorted(added) == list(range(tasks.MEMBERS)) and document["criterion"] == task_math.default_criterion
    for k, point in enumerate(document["gain"], start=1):
        mixed = task_math.mix([values[i] for i in added[:k]], np.full(k, 1 / k))
        expected = task_math.measure(mixed, target)
        assert {name: point[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_the_combined_model_is_mixed_again_from_the_weights_of_the_event(tmp_path: Path) -> None:
    values, target = values_of("gaussian")
    mixed = find_math(tasks.TASKS["gaussian"]).mix(values, np.full(len(values), 1 / len(values)))
    shown = dict(map(tuple, plot_of(quality_of(tmp_path, "gaussian"), "coverage", "combined")))
    distance = np.abs(mixed[:, 0] - target) / np.sqrt(mixed[:, 1])
    assert shown[0.9] == pytest.approx(np.mean(distance <= 1.6448536), abs=2e-3)
    assert shown[0.9] > dict(map(tuple, plot_of(quality_of(tmp_path, "gaussian"), "coverage", "best")))[0.9]


def test_the_calibration_of_the_event_is_applied(tmp_path: Path) -> None:
    scale = {"calibration": {"method": "variance_scale", "value": 4.0, "reason": None}}
    events = [e | scale if e["type"] == "combined" else e for e in tasks.task_run("gaussian")]
    wide, usual = quality_of(tmp_path, "gaussian", events), quality_of(tmp_path / "usual", "gaussian")
    assert plot_of(wide, "coverage", "best") == plot_of(usual, "coverage", "best")
    shares = [sum(y for _, y in plot_of(each, "pit", "combined")[4:6]) for each in (wide, usual)]
    assert shares[0] > 1.5 * shares[1]


def test_the_pit_of_the_true_distribution_is_even_and_of_one_that_is_too_sure_is_not(tmp_path: Path) -> None:
    from ensemble.reporting.dashboard.task_plots import plot_task

    rng = np.random.default_rng(0)
    mean = rng.normal(size=20_000)
    target = mean + rng.normal(0, 2, 20_000)
    models = {
        "best": np.stack([mean, np.full(20_000, 4.0)], 1),
        "combined": np.stack([mean, np.full(20_000, 1.0)], 1),
    }
    document = {"plots": plot_task(tasks.TASKS["gaussian"], models, target)}
    even, steep = ([y for _, y in plot_of(document, "pit", of)] for of in ("best", "combined"))
    assert max(abs(y - 0.1) for y in even) < 0.01 and steep[0] > 0.2 < steep[-1] and sum(steep) == pytest.approx(1)
    for level, share in plot_of(document, "coverage", "best"):
        assert share == pytest.approx(level, abs=0.015)


def test_quantiles_show_how_many_true_values_lie_below_each(tmp_path: Path) -> None:
    document = quality_of(tmp_path, "quantiles")
    values, target = values_of("quantiles")
    expected = [[0.05, 0.25, 0.5, 0.75, 0.95], (target[:, None] <= values[0]).mean(axis=0)]
    assert pytest.approx(np.array(expected)) == np.array(plot_of(document, "levels", "best")).T
    assert document["figures"][1]["label"] == "coverage of 90 % intervals"
    assert document["figures"][1]["nominal"] == 0.9


def test_labels_are_called_by_the_names_that_the_data_have_for_them(tmp_path: Path) -> None:
    names = ["cat", "dog", "horse", "tree"]
    events = [e | {"classes": names} if e["type"] == "combined" else e for e in tasks.task_run("multilabel")]
    document = quality_of(tmp_path, "multilabel", events)
    for plot in ("label_f1", "label_auc"):
        assert [x for x, _ in plot_of(document, plot, "combined")] == names


def test_labels_have_figures_of_their_own(tmp_path: Path) -> None:
    from sklearn.metrics import f1_score, roc_auc_score

    document = quality_of(tmp_path, "multilabel")
    values, target = values_of("multilabel")
    assert [x for x, _ in plot_of(document, "label_f1", "combined")] == [0, 1, 2, 3]
    assert plot_of(document, "label_f1", "best")[3][1] == pytest.approx(
        f1_score(target[:, 3], values[0][:, 3] > 0.5), rel=1e-5
    )
    assert plot_of(document, "label_auc", "best")[1][1] == pytest.approx(
        roc_auc_score(target[:, 1], values[0][:, 1]), rel=1e-5
    )
    assert document["curves"]["best"] and document["curves"]["combined"]
    assert document["disagreement"]["unit"] == "share"


def test_disagreement_of_numbers_is_their_root_mean_square_difference(tmp_path: Path) -> None:
    values, _ = values_of("regression")
    found = quality_of(tmp_path, "regression")["disagreement"]
    i, j = (int(name[7:]) for name in found["members"][:2])
    assert found["unit"] == "value"
    assert found["matrix"][0][1] == pytest.approx(np.sqrt(np.mean((values[i] - values[j]) ** 2)), rel=1e-4)


def test_of_a_free_task_only_what_the_run_measured_is_shown(tmp_path: Path) -> None:
    document = quality_of(tmp_path, "free")
    assert [figure["name"] for figure in document["figures"]] == ["angle"]
    assert document["figures"][0]["better"] == "lower", "as the run declares it"
    assert document["members"]["member-0"] == {"angle": 0.34} and document["members"]["member-1"] == {}
    assert document["plots"] == [] and document["gain"] == []


@pytest.mark.parametrize("kind", MEASURED)
def test_members_are_combined_so_far_while_the_run_goes_on(kind: str, tmp_path: Path) -> None:
    events = [e for e in tasks.task_run(kind) if e["type"] not in ("combined", "run_finished")]
    document = quality_of(tmp_path, kind, events)
    assert document["combination"]["so_far"] and document["combined"] and document["intervals"] is None


def test_targets_that_are_missing_take_no_part(tmp_path: Path) -> None:
    from ensemble.reporting.dashboard.task_plots import plot_task

    values, target = values_of("regression")
    target[::2] = np.nan
    plots = plot_task(tasks.TASKS["regression"], {"best": values[0]}, target)
    assert len(plot_of({"plots": plots}, "predicted", "best")) == tasks.ROWS // 2
