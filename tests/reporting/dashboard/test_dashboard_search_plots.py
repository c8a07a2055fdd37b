"""Figures of a search: pruning, Pareto fronts, the objective over two hyperparameters."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from ensemble.reporting.dashboard.search_plots import SearchInfo, Trial, plain_range, plot_search


def info(**changes: Any) -> SearchInfo:
    known = {
        "mode": "search",
        "objective": "accuracy",
        "direction": "max",
        "epochs": 8,
        "further": [],
        "origin": "measured",
    }
    return SearchInfo(**known | {"front": [], "important": []} | changes)


def trial(number: int, value: float | None, state: str = "finished", epoch: int = 8, **more: Any) -> Trial:
    return Trial(f"m{number}", number, state, epoch, value, more.pop("params", {}), **more)


def plot(trials: list[Trial], **changes: Any) -> dict[str, Any]:
    found = plot_search(trials, info(**changes))
    json.dumps(found, allow_nan=False)
    return {each["id"]: each for each in found}


def ids(series: dict[str, Any]) -> list[str]:
    return [more["member"] for *_, more in series["points"]]


def test_pruning_counts_who_got_there_and_takes_the_values_of_those_who_went_on() -> None:
    trials = [
        trial(0, 0.3, "pruned", 2),
        trial(1, 0.8, curve={2: 0.5, 8: 0.8}),
        trial(2, 0.4, "running", 2, curve={2: 0.4}),
    ]
    found = plot(trials)["pruning"]
    assert "1 of 3 after epoch 2" in found["reading"] and found["said"] == "1 of 3 after epoch 2"
    passed, pruned = found["series"]
    assert [point[:2] for point in passed["points"]] == [[2, 0.5]] and ids(passed) == ["m1"]
    assert [point[:2] for point in pruned["points"]] == [[2, 0.3]] and ids(pruned) == ["m0"]
    assert plot(trials[1:])["pruning"]["absent"] == "No trial has been pruned."
    assert "pruning" not in plot(trials, mode="list")
    both = [trial(0, 0.3, "pruned", 2, further=[1.0])]
    assert "pruning" not in plot(both, further=["cpu_s"])


def test_the_front_is_the_run_s_and_holds_only_trials_that_have_all_objectives() -> None:
    trials = [trial(i, 0.5, further=[cost, 1.0]) for i, cost in enumerate((5.0, 1.0, 3.0))]
    trials += [trial(3, 2.0, further=[None, 1.0]), trial(4, 2.0, "running", further=[0.1, 1.0])]
    found = plot(trials, further=["energy_j", "cpu_s"], origin="estimated", front=["m2", "m9", "m0"])
    others, front = found["front energy_j"]["series"]
    assert ids(front) == ["m2", "m0"] and ids(others) == ["m1"] and "front cpu_s" in found
    assert "not evidence of a saving" in found["front energy_j"]["reading"]
    assert found["front energy_j"]["table"]["rows"][0] == [
        "m1",
        ["1 J (estimated)", 1.0],
        ["1.0 s", 1.0],
        ["0.5000", 0.5],
        "",
    ]
    absent = plot([trial(0, None, further=[1.0])], further=["cpu_s"])["front cpu_s"]["absent"]
    assert absent == "No trial has finished with all objectives yet."


def test_a_contour_is_near_the_function_and_is_drawn_only_near_trials() -> None:
    rng = random.Random(0)
    points = [(10 ** rng.uniform(-4, -1), rng.uniform(0, 1)) for _ in range(120)]
    away = [point for point in points if not (point[0] > 1e-2 and point[1] > 0.6)]  # nobody was in this corner

    def true(lr: float, drop: float) -> float:
        return 1 - (math.log10(lr) + 2.5) ** 2 / 4 - (drop - 0.5) ** 2

    trials = [trial(i, true(a, b), params={"lr": a, "drop": b, "name": "x"}) for i, (a, b) in enumerate(away)]
    found = plot(trials, important=["lr", "name", "drop"])["contour lr drop"]
    ground, marks = found["series"]
    assert found["x"]["kind"] == "log" and found["y"]["kind"] == "linear" and "interpolation" in found["reading"]
    assert len(marks["points"]) == len(trials) and len(ground["points"]) > 200
    low, high = plain_range([each.value for each in trials])
    for x, y, more in ground["points"]:
        middle = math.sqrt(x * more["to"][0]), (y + more["to"][1]) / 2
        about = low + more["fill"] * (high - low)
        assert about == pytest.approx(true(*middle), abs=0.15)
        assert not (middle[0] > 5e-2 and middle[1] > 0.85), "far from all trials nothing is said"
    best = max(ground["points"], key=lambda point: point[2]["fill"])
    assert 10**-3.2 < best[0] < 10**-1.8
    lower = plot(trials, important=["lr", "drop"], direction="min")["contour lr drop"]["series"][0]["points"]
    assert all(
        a[2]["fill"] + b[2]["fill"] == pytest.approx(1) for a, b in zip(lower, ground["points"], strict=True)
    )


def test_a_contour_of_trials_on_one_line_or_of_few_says_what_it_needs() -> None:
    line = [trial(i, float(i), params={"a": float(i), "b": 2.0 * i}) for i in range(9)]
    for trials in (line, line[:5], [trial(i, 1.0, params={"a": i % 3, "b": i % 4}) for i in range(4)]):
        found = plot(trials, important=["a", "b"])["contour a b"]
        assert found["absent"] and found["series"][0]["points"] == []
