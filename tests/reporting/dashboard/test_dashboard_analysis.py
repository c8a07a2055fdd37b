"""Quality and importances of the live page: equal to what the combination code says, and never an exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import run_events as runs
from event_dicts import fold

from ensemble.combine import find_math
from ensemble.combine.methods import mix
from ensemble.events import Combined
from ensemble.reporting import evaluated
from ensemble.reporting.dashboard import analysis
from ensemble.reporting.dashboard.analysis import read_importances, read_quality
from ensemble.reporting.dashboard.tiles import describe_combined
from ensemble.search.importance import MOST_TRIALS, compute_importances
from ensemble.spec.task import CLASSIFICATION
from ensemble.store import MemberState, RunDir, RunState

Event = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[Event]]:
    events = runs.list_run()
    return RunDir(runs.write_run(tmp_path_factory.mktemp("run"), events, range(8))), events


MATH = find_math(CLASSIFICATION)


def quality_of(run: tuple[RunDir, list[Event]]) -> dict[str, Any]:
    run_dir, events = run
    document = read_quality(run_dir, fold(events))
    json.dumps(document, allow_nan=False)
    return document


def test_quality_has_the_metrics_of_each_finished_member_and_of_the_combined_event(run: Any) -> None:
    document = quality_of(run)
    assert document["missing"] is None and document["split"] == "test" and document["rows"] == 2000
    assert sorted(document["members"]) == [f"member-{i}" for i in (0, 1, 2, 3, 4, 5, 7)]
    p, _, target = runs.predictions(4)
    assert document["members"]["member-4"] == pytest.approx(MATH.measure(p, target))
    combined = next(e for e in run[1] if e["type"] == "combined")
    assert document["combined"] == combined["metrics"]["ensemble"]
    assert document["combination"]["so_far"] is False and document["combination"]["weights"] == combined["weights"]
    best = runs.predictions(int(document["best"][7:]))[0]
    assert document["best"] == combined["best_member"]
    assert document["curves"]["best"] == MATH.reliability(best, target)
    assert document["curves"]["combined"] == combined["reliability"]["ensemble"]


def test_the_gain_curve_is_the_average_of_the_members_added_so_far_each_added_once(run: Any) -> None:
    gain = quality_of(run)["gain"]
    added = [point["added"] for point in gain]
    assert [point["members"] for point in gain] == list(range(1, 8)) and len(set(added)) == 7
    _, _, target = runs.predictions(0)
    alone = {member: runs.predictions(int(member[7:]))[0] for member in added}
    assert added[0] == min(added, key=lambda m: MATH.measure(alone[m], target)["nll"])
    for k, point in enumerate(gain, start=1):
        expected = MATH.measure(mix([alone[m] for m in added[:k]], np.full(k, 1 / k)), target)
        assert {name: point[name] for name in expected} == pytest.approx(expected)
    second = {m: MATH.measure((alone[added[0]] + alone[m]) / 2, target)["nll"] for m in added[1:]}
    assert added[1] == min(second, key=lambda m: second[m])


def test_disagreement_is_the_share_of_samples_on_which_two_members_name_different_classes(run: Any) -> None:
    found = quality_of(run)["disagreement"]
    matrix = np.array(found["matrix"])
    assert matrix.shape == (7, 7) and (np.diag(matrix) == 0).all() and (matrix == matrix.T).all()
    a, b = (runs.predictions(int(found["members"][i][7:]))[0].argmax(axis=1) for i in (1, 4))
    assert matrix[1, 4] == pytest.approx((a != b).mean(), abs=1e-5) and matrix[1, 4] > 0


def test_before_the_run_combines_its_members_those_that_have_finished_are_combined_so_far(run: Any) -> None:
    run_dir, events = run
    before = [e for e in events if e["type"] not in ("combined", "run_finished")]
    document = quality_of((run_dir, before))
    assert document["combination"]["so_far"] is True and "Not the run's result" in document["combination"]["note"]
    assert document["combined"]["nll"] < document["members"][document["best"]]["nll"]
    assert sum(document["combination"]["weights"].values()) == pytest.approx(1)
    assert sum(n for _, _, n in document["curves"]["combined"]) == 2000


def test_the_reason_why_the_run_could_not_combine_is_kept(run: Any) -> None:
    run_dir, events = run
    refused = {"method": "greedy", "reason": "no member finished in time", "members": [], "weights": {}}
    nothing = dict.fromkeys(("metrics", "temperature", "split", "note", "best_member", "reliability"))
    changed = [e | refused | nothing if e["type"] == "combined" else e for e in events]
    document = quality_of((run_dir, changed))
    assert document["combined"] is None and document["combination"]["reason"] == "no member finished in time"
    assert document["members"] and "combined" not in document["curves"]


def test_members_whose_predictions_do_not_fit_in_memory_are_counted_not_hidden(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluated, "MOST_MEMBERS", 3)
    run_dir, events = run
    document = quality_of((run_dir, [e for e in events if e["type"] != "combined"]))
    assert len(document["members"]) == 3 and document["left_out"] == 4


def test_the_predictions_of_both_splits_count_as_memory(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, events = run
    size = run_dir.predictions("member-0").stat().st_size
    monkeypatch.setattr(evaluated, "MOST_BYTES", 2 * size + 1000)
    document = quality_of((run_dir, [e for e in events if e["type"] != "combined"]))
    assert len(document["members"]) == 2 and document["left_out"] == 5


def test_what_cannot_be_computed_is_said_in_one_line(run: Any) -> None:
    run_dir, events = run
    odd = [e | {"metrics": {"other": {}}} if e["type"] == "combined" else e for e in events]
    assert (
        quality_of((run_dir, odd))["missing"] == "The saved predictions cannot be compared: KeyError: 'ensemble'."
    )
    state = fold(events)
    state.members["member-0"].identity["params"] = 3
    missing = read_importances(run_dir, state)["missing"]
    assert missing.startswith("The importances cannot be computed: TypeError: ") and missing.endswith(".")


@pytest.mark.parametrize("damage", ["absent", "torn", "other samples"])
def test_predictions_that_cannot_be_read_give_a_reason(tmp_path: Path, damage: str) -> None:
    from ensemble.store import save_predictions

    events = runs.list_run()
    run_dir = RunDir(runs.write_run(tmp_path, events, range(0 if damage == "absent" else 8)))
    for split in ("valid", "test"):
        if damage == "torn":
            run_dir.predictions("member-0").write_bytes(b"\x00" * 40)
        elif damage == "other samples":
            p, index, target = runs.predictions(0)
            save_predictions(run_dir.predictions("member-0"), split, p[1:], index[1:], target[1:])
    document = quality_of((run_dir, events))
    assert document["members"] == {} and document["gain"] == [] and document["missing"]
    assert document["missing"].endswith(".") and "\n" not in document["missing"]


def test_a_run_that_has_just_started_says_what_is_missing(tmp_path: Path) -> None:
    state = fold(runs.just_started())
    assert read_quality(RunDir(tmp_path), state)["missing"]
    document = read_importances(RunDir(tmp_path), state)
    assert document["importances"] == [] and "there are 0" in document["missing"]


def test_predictions_of_hundreds_of_members_are_compared_in_seconds(tmp_path: Path) -> None:
    """At most 50 members are in the matrix, at most 40 on the curve."""
    run_dir = RunDir(runs.write_run(tmp_path, runs.just_started(), range(120)))
    state = fold(runs.just_started())
    state.members = {
        f"member-{i}": MemberState(f"member-{i}", i, state="finished", metrics={"accuracy": i / 200})
        for i in range(120)
    }
    document = read_quality(run_dir, state)
    assert len(document["members"]) == 120 and document["best"] == "member-119"
    assert len(document["gain"]) == analysis.MOST_ADDED
    assert document["disagreement"]["members"] == [f"member-{i}" for i in range(119, 69, -1)]


def searched(trials: int, **fixed: Any) -> RunState:
    """Finished trials whose accuracy follows from lr, a little from width, and from nothing else."""
    rng = np.random.default_rng(0)
    state = RunState(objective="accuracy", direction="max")
    for i in range(trials):
        lr, width = float(10 ** rng.uniform(-5, -1)), int(rng.choice([16, 32, 64]))
        params = {"lr": lr, "width": width, "act": str(rng.choice(["relu", "gelu"])), "wd": rng.uniform(), **fixed}
        accuracy = 0.9 - 0.1 * abs(np.log10(lr) + 3) + 0.0005 * width
        state.members[f"m{i}"] = MemberState(
            f"m{i}", i, {"params": params}, "finished", metrics={"accuracy": accuracy}
        )
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


@pytest.mark.parametrize(
    "odd", [None, True, [1, [2]], {"a": float("nan")}, 10**400, float("inf"), "x" * 10_000, "‮<b>"]
)
def test_odd_values_are_categories(odd: Any) -> None:
    state = searched(20)
    for i in range(0, 20, 2):
        state.members[f"m{i}"].identity["params"]["width"] = odd
    document = read_importances(RunDir("."), state)
    assert document["missing"] is None
    json.dumps(document, allow_nan=False)


def test_what_cannot_be_judged_is_said() -> None:
    state = searched(20)
    for member in state.members.values():
        member.metrics = {"accuracy": 0.5}
    assert "the same accuracy" in read_importances(RunDir("."), state)["missing"]
    state = searched(4)
    assert "need 5 finished members" in read_importances(RunDir("."), state)["missing"]


def test_the_tile_of_the_combined_model_says_where_it_was_measured_and_whether_it_is_one_member_alone() -> None:
    metrics = {"ensemble": {"nll": 0.3, "accuracy": 0.93}, "best": {"accuracy": 0.91}}
    combined = Combined(
        method="greedy", members=["m0", "m1"], split="test", metrics=metrics, weights={"m0": 0.6, "m1": 0.4}
    )
    tile = describe_combined(combined, ("accuracy", "max"))
    assert (tile.label, tile.figure, tile.tone) == ("Combined accuracy, on test", "0.9300", "good")
    assert tile.note == "+0.0200 to the best member, which has 0.9100 there"
    noisy = describe_combined(msgspec.structs.replace(combined, noise=["accuracy"]), ("accuracy", "max"))
    assert "within noise" in noisy.note and noisy.tone == ""
    alone = msgspec.structs.replace(combined, weights={"m0": 1.0, "m1": 0.0})
    assert describe_combined(alone, ("accuracy", "max")).note == "m0 alone: no other member is part of it"
