"""Scales and the figures of a search, as the page's modules compute them: in a real browser, without a view."""

from __future__ import annotations

from typing import Any

import pytest
from documents import make_documents
from page_server import PageServer

pytestmark = pytest.mark.browser


@pytest.fixture
def call(tab: Any) -> Any:
    """Calls a function of one of the page's modules: `call("scales", "chooseKind", [1, 2])`."""
    with PageServer(make_documents(2)) as server:
        tab.goto(server.url)
        tab.wait_for_selector("[data-view]")
        script = "([name, what, given]) => import(`/static/${name}.js`).then(found => found[what](...given))"
        yield lambda name, what, *given: tab.evaluate(script, [name, what, given])


def trial(number: int, value: float | None, phase: str = "finished", **fields: Any) -> dict[str, Any]:
    base = {"id": f"m{number}", "number": number, "value": value, "phase": phase, "epoch": 4, "second": None}
    return {**base, "params": {}, **fields}


def test_the_scale_suits_the_values(call: Any) -> None:
    rates = [10 ** (-5 + 0.1 * i) for i in range(41)]
    assert call("scales", "chooseKind", rates) == "log"
    assert call("scales", "chooseKind", [0.5 * (i + 1) / 400 for i in range(400)]) == "linear", "even, not by log"
    assert call("scales", "chooseKind", [-1.0, 0.0, 1000.0]) == "linear"
    assert call("scales", "chooseKind", [16, 32, 64] * 5) == "category"
    assert call("scales", "chooseKind", ["a", 1, None]) == "category"
    assert call("scales", "possibleKinds", rates[:31]) == ["log", "linear"]
    assert call("scales", "possibleKinds", [0, 1, 2]) == ["linear", "category"]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"kind": "linear", "values": [0, 10]}, ["0", "2", "4", "6", "8", "10"]),
        ({"kind": "linear", "values": [1, 3], "whole": True}, ["1", "2", "3"]),
        ({"kind": "log", "values": [0.001, 10]}, ["0.001", "0.01", "0.1", "1", "10"]),
        ({"kind": "log", "values": [1, 9]}, ["1", "2", "5"]),
        ({"kind": "category", "values": ["b", 10, 9, "a"]}, ["9", "10", "a", "b"]),
        ({"kind": "linear", "values": [5]}, ["4.8", "4.9", "5", "5.1", "5.2"]),
        ({"kind": "linear", "values": []}, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_ticks_are_round_and_within_the_scale(call: Any, options: Any, labels: list[str]) -> None:
    ticks = call("scales", "makeScale", options, 100, 600)["ticks"]
    assert [tick["label"] for tick in ticks] == labels
    assert all(100 <= tick["at"] <= 600 for tick in ticks)


@pytest.mark.parametrize(("direction", "sign"), [("max", 1), ("min", -1)])
def test_the_front_holds_what_none_beats_and_equal_trials_alike(call: Any, direction: str, sign: int) -> None:
    points = [(5, 0.9), (1, 0.5), (3, 0.5), (3, 0.8), (3, 0.8), (9, 0.9), (2, 0.4)]
    trials = [trial(i, sign * value, second=cost) for i, (cost, value) in enumerate(points)]
    trials += [trial(7, sign * 2.0, second=None), trial(8, sign * 2.0, "running", second=0.1)]
    found = call("trial_data", "paretoFront", trials, direction)
    assert [each["id"] for each in found["front"]] == ["m1", "m3", "m4", "m0"]
    assert len(found["judged"]) == len(points)


def test_the_best_so_far_follows_the_numbers_of_finished_trials(call: Any) -> None:
    trials = [trial(3, 0.6), trial(0, 0.5), trial(1, 0.9, "pruned"), trial(2, 0.4), trial(4, None)]
    assert call("trial_data", "bestSoFar", trials, "max") == [[0, 0.5], [2, 0.5], [3, 0.6]]
    assert call("trial_data", "bestSoFar", trials, "min") == [[0, 0.5], [2, 0.4], [3, 0.4]]


def test_pruning_counts_who_got_there_and_takes_the_values_of_those_who_went_on(call: Any) -> None:
    trials = [trial(0, 0.3, "pruned", epoch=2), trial(1, 0.9, epoch=4), trial(2, 0.2, "running", epoch=1)]
    curve = {"epoch": [0, 1, 2, 3], "values": {"accuracy": [0.5, 0.7, 0.8, 0.9]}}
    found = call("trial_data", "pruningOf", trials, {"members": {"m1": curve}}, "accuracy")
    assert found["rungs"] == [{"epoch": 2, "reached": 2, "pruned": 1}]
    assert [(each["trial"]["id"], each["value"]) for each in found["passed"]] == [("m1", 0.7)]
    assert call("trial_data", "pruningOf", trials, None, "accuracy")["passed"] == []


def test_one_diverged_trial_does_not_flatten_the_others(call: Any) -> None:
    values = [0.8 + 0.01 * i for i in range(12)]
    assert call("trial_data", "plainRange", [*values, 1e9]) == [values[0], values[-1]]
    assert call("trial_data", "plainRange", values) == [values[0], values[-1]]


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("running", "running"),
        ("placed", "running"),
        ("paused", "standing"),
        ("stopped", "standing"),
        ("interrupted", "standing"),
        ("waiting", "waiting"),
    ],
)
def test_only_members_at_work_are_still_running(call: Any, state: str, phase: str) -> None:
    assert call("trial_data", "phaseOf", state) == phase
