"""Quality, importances and figures of a search: equal to what the code of combination says."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import run_events as runs
from kit import task_events as tasks
from kit.event_dicts import fold, ledger
from kit.kept_predictions import save_predictions

from ensemble.combine.tasks import find_math
from ensemble.events import Combined, Epoch, Objective, RunStarted
from ensemble.reporting.dashboard import analysis
from ensemble.reporting.dashboard.analysis import read_importances, read_quality
from ensemble.reporting.dashboard.plots import plot_numbers
from ensemble.reporting.dashboard.search_plots import plot_search
from ensemble.reporting.dashboard.tiles import list_tiles
from ensemble.reporting.run_projection import RunProjection
from ensemble.search.importance import MOST_TRIALS, compute_importances
from ensemble.spec.task import CLASSIFICATION
from ensemble.store import MemberState, RunDir, RunState

Event = dict[str, Any]
MATH = find_math(CLASSIFICATION)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[Event]]:
    events = runs.list_run()
    return RunDir(runs.write_run(tmp_path_factory.mktemp("run"), events, range(8))), events


def quality_of(run: tuple[RunDir, list[Event]]) -> dict[str, Any]:
    document = read_quality(run[0], fold(run[1]))
    json.dumps(document, allow_nan=False)
    return document


def task_quality(folder: Path, kind: str, events: list[tasks.Event]) -> dict[str, Any]:
    document = quality_of((RunDir(tasks.write_task_run(folder, kind, events)), events))
    assert document["missing"] is None
    return document


def table_of(document: dict[str, Any], id: str) -> dict[str, dict[str, Any]]:
    """The rows of a table by their first cells without "(best)": what the cells are sorted by, by head."""
    (table,) = [table for table in document["tables"] if table["id"] == id]
    names = [name for name, _ in table["head"]]
    rows = [[cell[1] if isinstance(cell, list) else cell for cell in row] for row in table["rows"]]
    return {row[0].removesuffix(" (best)"): dict(zip(names, row, strict=True)) for row in rows}


def points_of(plots: list[dict[str, Any]], id: str, of: str) -> list[list[float]]:
    (plot,) = (plot for plot in plots if plot["id"] == id)
    (points,) = (series["points"] for series in plot["series"] if series["of"] == of)
    return list(points)


def test_quality_has_the_metrics_of_each_finished_member_and_of_the_combined_event(run: Any) -> None:
    document = quality_of(run)
    assert document["missing"] is None and "same 2,000 samples of the test split" in document["origin"]
    rows = table_of(document, "models")
    combined = next(e for e in run[1] if e["type"] == "combined")
    best = combined["best_member"]
    assert set(rows) == {"combined", *(f"member-{i}" for i in (*range(6), 7))}
    assert f"{best} (best)" in str(document["tables"])
    p, _, target = runs.predictions(4)
    measured, shown = MATH.measure(p, target), rows["member-4"]
    assert (shown["accuracy ↑"], shown["NLL ↓"]) == pytest.approx((measured["accuracy"], measured["nll"]))
    assert rows["combined"]["NLL ↓"] == combined["metrics"]["ensemble"]["nll"]
    assert shown["weight"] == combined["weights"].get("member-4")
    assert document["names"]["best"] == f"best member ({best})"
    curve = MATH.reliability(runs.predictions(int(best[7:]))[0], target)
    points = points_of(document["plots"], "calibration", "best")
    assert [point[:2] for point in points] == [pytest.approx(bin[:2], rel=1e-5) for bin in curve]
    assert len(points_of(document["plots"], "calibration", "combined")) == len(combined["reliability"]["ensemble"])


REFUSED = {"method": "greedy", "reason": "no member finished in time", "members": [], "weights": {}}
REFUSED |= dict.fromkeys(("metrics", "temperature", "split", "note", "best_member", "reliability"))


def test_a_run_that_was_not_combined_says_why(run: Any) -> None:
    run_dir, events = run
    document = quality_of((run_dir, [e for e in events if e["type"] not in ("combined", "run_finished")]))
    assert document["missing"] == "The run combines its members at its end." and document["tiles"] == []
    document = quality_of((run_dir, [e | REFUSED if e["type"] == "combined" else e for e in events]))
    assert "None: no member finished in time." in document["origin"]
    assert "combined" not in table_of(document, "models")
    odd = [e | {"reliability": {"other": []}} if e["type"] == "combined" else e for e in events]
    missing = quality_of((run_dir, odd))["missing"]
    assert missing == "The saved predictions cannot be compared: KeyError: 'ensemble'."


def test_members_whose_predictions_do_not_fit_in_memory_are_counted_not_hidden(run: Any) -> None:
    size = run[0].predictions("member-0").stat().st_size  # of both splits
    for limit, most, members in (("MOST_MEMBERS", 5, 5), ("MOST_BYTES", 4 * size + 1000, 4)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(analysis, limit, most)
            document = quality_of(run)
        assert len(table_of(document, "models")) == 1 + members
        assert f"{7 - members} finished members not compared" in document["origin"]


@pytest.mark.parametrize("damage", ["absent", "torn", "other samples", "an unknown class"])
def test_predictions_that_cannot_be_read_give_a_reason(tmp_path: Path, damage: str) -> None:
    events = runs.list_run()
    run_dir = RunDir(runs.write_run(tmp_path, events, range(0 if damage == "absent" else 8)))
    p, index, target = runs.predictions(0)
    other, unknown = ((p[1:], index[1:], target[1:]), 1), ((p, index, target + 7), 8)
    saved, members = {"other samples": other, "an unknown class": unknown}.get(damage, ((), 0))
    if damage == "torn":
        run_dir.predictions("member-0").write_bytes(b"\x00" * 40)
    for member, split in product(range(members), ("valid", "test")):
        save_predictions(run_dir.predictions(f"member-{member}"), split, *saved)
    document = quality_of((run_dir, events))
    assert document["plots"] == [] and document["missing"]
    assert document["missing"].endswith(".") and "\n" not in document["missing"]
    assert damage != "an unknown class" or "targets must be classes 0 ... 9, found 16" in document["missing"]


def test_what_cannot_be_judged_is_said(run: Any) -> None:
    fresh, odd, alike = fold(runs.just_started()), fold(run[1]), searched(20)
    assert read_quality(run[0], fresh)["missing"]
    odd.members["member-0"].identity["params"] = 3
    for member in alike.members.values():
        member.metrics = {"accuracy": 0.5}
    typed = "The importances cannot be computed: TypeError: "
    few = "need 5 finished members"
    for state, says in ((fresh, "there are 0"), (odd, typed), (alike, "the same accuracy"), (searched(4), few)):
        document = read_importances(run[0], state)
        assert says in document["missing"] and document["importances"] == []
        assert document["plots"] == [] or state is not odd


def values_of(kind: str) -> tuple[list[np.ndarray], np.ndarray]:
    alone = [tasks.predict(tasks.TASKS[kind], number) for number in range(tasks.MEMBERS)]
    return [values for values, _, _ in alone], alone[0][2]


@pytest.mark.parametrize("kind", tasks.TASKS)
def test_figures_and_tables_are_those_of_the_task(kind: str, tmp_path: Path) -> None:
    events = tasks.task_run(kind)
    document = task_quality(tmp_path, kind, events)
    event = next(e for e in events if e["type"] == "combined")
    *keys, last = [tile["key"] for tile in document["tiles"]]
    assert set(keys) <= set(event["metrics"]["ensemble"]) and last not in event["metrics"]["ensemble"]
    shown = [table["id"] for table in document["tables"] if table["id"] not in ("models", "per-class")]
    assert shown == ["uncertainty", "conformal"]
    if kind != "free":
        values, target = values_of(kind)
        measured = find_math(tasks.TASKS[kind]).measure(values[2], target)
        known = {value for value in table_of(document, "models")["member-2"].values() if isinstance(value, float)}
        assert {float(value) for value in measured.values()} <= known


def test_quantiles_show_how_many_true_values_lie_below_each(tmp_path: Path) -> None:
    document = task_quality(tmp_path, "quantiles", tasks.task_run("quantiles"))
    values, target = values_of("quantiles")
    best = int(document["names"]["best"].partition("member-")[2].rstrip(")"))
    shares = (target.ravel()[:, None] <= values[best].reshape(-1, values[best].shape[-1])).mean(axis=0)
    points = points_of(document["plots"], "levels", "best")
    assert [point[1] for point in points] == pytest.approx(shares.tolist(), rel=1e-5)
    assert [point[0] for point in points] == pytest.approx(list(tasks.TASKS["quantiles"].levels))


def test_intervals_of_the_true_distribution_cover_as_they_should_and_those_that_are_too_sure_do_not() -> None:
    rng = np.random.default_rng(0)
    mean = rng.normal(size=20_000)
    truth = mean + rng.normal(size=20_000)
    right, sure = (np.stack([mean, np.full_like(mean, scale)], axis=1) for scale in (1.0, 0.25))
    plots = list(plot_numbers(tasks.TASKS["gaussian"], {"best": right, "combined": sure}, truth))
    assert all(abs(x - y) < 0.01 for x, y, *_ in points_of(plots, "coverage", "best"))
    assert all(y < x for x, y, *_ in points_of(plots, "coverage", "combined"))


def test_targets_that_are_missing_take_no_part() -> None:
    values, target = values_of("regression")
    target[::2] = np.nan
    plots = list(plot_numbers(tasks.TASKS["regression"], {"best": values[0]}, target))
    assert len(points_of(plots, "predicted", "best")) == tasks.ROWS // 2


def test_labels_are_called_by_the_names_that_the_data_have_for_them(tmp_path: Path) -> None:
    events = tasks.task_run("multilabel")
    count = values_of("multilabel")[1].shape[1]
    names = [f"label {number}" for number in range(count)]
    events = [e | {"classes": names} if e["type"] == "combined" else e for e in events]
    assert set(table_of(task_quality(tmp_path, "multilabel", events), "per-class")) == set(names)


def searched(trials: int, **fixed: Any) -> RunState:
    """Finished trials whose accuracy follows from lr, a little from width, and from nothing else."""
    rng = np.random.default_rng(0)
    state = RunState(objective="accuracy", direction="max")
    for i in range(trials):
        lr, width = float(10 ** rng.uniform(-5, -1)), int(rng.choice([16, 32, 64]))
        params = {"lr": lr, "width": width, "act": str(rng.choice(["relu", "gelu"])), "wd": rng.uniform(), **fixed}
        metrics = {"accuracy": 0.9 - 0.1 * abs(np.log10(lr) + 3) + 0.0005 * width}
        state.members[f"m{i}"] = MemberState(f"m{i}", i, {"params": params}, "finished", metrics=metrics)
    return state


@pytest.mark.parametrize("trials", [40, 400])
def test_the_hyperparameter_that_decides_is_the_most_important_one(trials: int) -> None:
    shares, method, spread = compute_importances(searched(trials, momentum=0.9))
    assert next(iter(shares)) == "lr" and shares["lr"] > 0.7 and sum(shares.values()) == pytest.approx(1)
    assert set(shares) == {"lr", "width", "act", "wd"} and "fANOVA" in method
    assert f"{min(trials, MOST_TRIALS)}" in method
    assert compute_importances(searched(trials, momentum=0.9)) == (shares, method, spread)
    assert all(0 <= low <= high <= 1 for low, high in spread.values()) and spread["lr"][0] > spread["act"][1]


def test_pruned_and_failed_members_do_not_count_and_partial_hyperparameters_are_named() -> None:
    state = searched(40)
    state.members["m0"].state = "pruned"
    state.members["m1"].metrics = {"accuracy": float("nan")}
    del state.members["m2"].identity["params"]["wd"]
    shares, method, _ = compute_importances(state)
    assert "38 finished members" in method and "wd" not in shares
    assert method.endswith("not all members have it: wd.")


ODD = (None, True, [1, [2]], {"a": float("nan")}, 10**400, float("inf"), "x" * 10**4, "‮<b>")


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_are_categories(odd: Any) -> None:
    state = searched(12)
    for i in range(0, 12, 2):
        state.members[f"m{i}"].identity["params"]["width"] = odd
    document = read_importances(RunDir("."), state)
    assert document["missing"] is None
    assert {"slice lr", "slice width"} <= {plot["id"] for plot in document["plots"]}
    json.dumps(document, allow_nan=False)


def test_the_tile_of_the_combined_model_says_where_it_was_measured_and_whether_it_is_one_member_alone() -> None:
    def tile_of(weights: dict[str, float], **more: Any) -> Any:
        metrics = {"ensemble": {"nll": 0.3, "accuracy": 0.93}, "best": {"accuracy": 0.91, "nll": 0.4}}
        given = {"metrics": metrics, "weights": weights, "split": "test", **more}
        combined = Combined(method="greedy", members=["m0", "m1"], **given)
        state = RunState(objective="accuracy", direction="max", combined=combined)
        return next(tile for tile in list_tiles(RunProjection(state, ledger([]))) if tile.key == "combined")

    tile = tile_of({"m0": 0.6, "m1": 0.4})
    assert (tile.label, tile.figure, tile.tone) == ("Combined accuracy, on test", "0.9300", "good")
    assert tile.note == "+0.0200 to the best member's 0.9100" and "−0.1000 to" in tile.about
    noisy = tile_of({"m0": 0.6, "m1": 0.4}, noise=["accuracy"])
    assert "within noise" in noisy.note and noisy.tone == ""
    assert tile_of({"m0": 1.0, "m1": 0.0}).note == "it is m0 alone"


def trial(number: int, value: float | None, state: str = "finished", epoch: int = 8, **more: Any) -> MemberState:
    member = MemberState(f"m{number}", number, {"params": more.get("params", {})}, state)  # type: ignore[arg-type]
    member.epoch, member.metrics = epoch, more.get("further", {}) | ({} if value is None else {"accuracy": value})
    for at, value in more.get("curve", {}).items():
        member.history.append(Epoch(t=1.0, member=member.id, epoch=at - 1, metrics={"accuracy": value}))
    return member


def plot(trials: list[MemberState], *important: str, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"mode": "search", "objective": "accuracy", "direction": "max", "epochs": 8}
    state = RunState(**given | fields, members={member.id: member for member in trials})
    plots = plot_search(state, important)
    json.dumps(plots, allow_nan=False)
    return {plot["id"]: plot for plot in plots}


def ids(series: dict[str, Any]) -> list[str]:
    return [more["member"] for *_, more in series["points"]]


def test_the_history_has_every_trial_and_the_best_after_each_finished_one() -> None:
    trials = [trial(0, 0.5), trial(1, 0.9, "pruned", 2), trial(2, 0.4), trial(3, 0.7), trial(4, None, "waiting")]
    finished, pruned, best = plot(trials)["history"]["series"]
    assert ids(finished) == ["m0", "m2", "m3"] and ids(pruned) == ["m1"]
    assert best["points"] == [[0, 0.5], [2, 0.5], [3, 0.7], [3, 0.7]] and best["line"] == "steps"
    assert plot([trial(0, None)])["history"]["absent"] == "No trial has reported the objective yet."
    diverged = [*(trial(i, 0.5 + i / 100) for i in range(20)), trial(20, -1e6)]  # it does not flatten the others
    low, high = plot(diverged)["history"]["y"]["range"]
    assert 0.4 < low < 0.5 and 0.69 < high < 0.75


def test_a_hyperparameter_has_the_axis_that_suits_its_values() -> None:
    given = [{"lr": 10.0 ** -(i % 5), "act": "relu", "drop": i / 9, "width": 8 << i % 3} for i in range(9)]
    trials = [trial(i, 0.5, params=params) for i, params in enumerate(given)]
    found = plot(trials, *given[0])
    kinds = {id: found[f"slice {id}"]["x"]["kind"] for id in given[0]}
    assert kinds == {"lr": "log", "act": "category", "drop": "linear", "width": "category"}
    (series,) = found["slice act"]["series"]
    assert len({more["aside"] for *_, more in series["points"]}) > 5, "equal values lie beside each other"


def test_pruning_counts_who_got_there_and_takes_the_values_of_those_who_went_on() -> None:
    trials = [trial(0, 0.3, "pruned", 2), trial(1, 0.8, curve={2: 0.5, 8: 0.8})]
    trials.append(trial(2, 0.4, "running", 2, curve={2: 0.4}))
    pruning = plot(trials)["pruning"]
    assert "1 of 3 after epoch 2" in pruning["reading"] and pruning["said"] == "1 of 3 after epoch 2"
    passed, pruned = pruning["series"]
    assert [point[:2] for point in passed["points"]] == [[2, 0.5]] and ids(passed) == ["m1"]
    assert [point[:2] for point in pruned["points"]] == [[2, 0.3]] and ids(pruned) == ["m0"]
    assert plot(trials[1:])["pruning"]["absent"] == "No trial has been pruned."
    assert "pruning" not in plot(trials, mode="list")


def test_the_front_is_the_run_s_and_holds_only_trials_that_have_all_objectives() -> None:
    header = RunStarted(further_objectives=[Objective("latency_ms", "min"), Objective("model_mb", "min")])
    costs = ((0, 1.0, 5.0), (1, 0.6, 1.0), (2, 0.8, 3.0), (5, 0.4, 4.0))
    trials = [trial(i, value, further={"latency_ms": ms, "model_mb": 1.0}) for i, value, ms in costs]
    trials.append(trial(3, 2.0, further={"model_mb": 1.0}))
    trials.append(trial(4, 2.0, "running", further={"latency_ms": 0.1, "model_mb": 1}))
    plots = plot(trials, header=header)
    others, front = plots["front latency_ms"]["series"]
    assert ids(front) == ["m1", "m2", "m0"] and ids(others) == ["m5"] and "front model_mb" in plots
    row = plots["front latency_ms"]["table"]["rows"][0]
    assert (row[0], row[-1]) == ("m1", "on the front")
    empty = plot([trial(0, None)], header=header)["front latency_ms"]
    assert empty["absent"] == "No trial has finished with all objectives yet."
