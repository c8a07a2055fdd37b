"""A search ends when its budget is used, with a combined model, and goes on with a larger one."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch  # before a run is charged for it
from kit.event_dicts import fold, read_events
from small_run import declare

import ensemble
from ensemble import store
from ensemble.meter.ledger_rows import Total
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import status_notes
from ensemble.search.budget import explain_end, measure_budget, sum_work_s
from ensemble.spec import Search, SpecError, loguniform
from ensemble.store.member import Span

SPACE = {"lr": loguniform(0.01, 0.1)}


def slow(search: Search, seconds: float = 0.04, **options: Any) -> Any:
    """A search of which each step takes so many seconds of processor time."""

    def loss(model: Any, batch: Any) -> Any:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

    declared = declare(search, **options)
    return dataclasses.replace(declared, recipe=dataclasses.replace(declared.recipe, loss=loss))


def names(path: Path) -> list[str]:
    return [event["type"] for event in read_events(path / "events.jsonl")]


@pytest.mark.parametrize("budget", [None, {"trials": 2}])
def test_limits_of_a_resume_are_apart_from_the_budget(budget: dict[str, float] | None, tmp_path: Path) -> None:
    search = Search(SPACE, pruner="none", **({"trials": 2} if budget is None else {"budget": budget}))
    ensemble.submit(declare(search, epochs=1), tmp_path, executor="inline").wait()
    options: dict[str, Any] = {"budget": {"trials": 3}} if budget else {"epochs": 2}
    ensemble.resume(tmp_path, limits={"cpus": 3.0}, **options).wait()
    last = [event for event in read_events(tmp_path / "events.jsonl") if event["type"] == "run_started"][-1]
    assert last["limits"] == {"cpus": 3.0}
    assert last["budget"] == ({"trials": 3} if budget else None)


def test_hours_of_work_are_those_in_which_a_member_has_a_place() -> None:
    def span(placed: float, ended: float | None) -> Span:
        return Span(0, "n", [], None, placed, ended=ended)

    assert sum_work_s([], 9.0) == 0.0
    assert sum_work_s([span(1, 4), span(2, 3), span(3, 6), span(8, None)], 10.0) == 5 + 2
    used = Total(cpu_s=7200.0, energy_j=None, origin="unavailable")
    shares = measure_budget({"cpu_hours": 2, "energy_kj": 1, "trials": 1}, fold([]), used, 0.0)
    shown = [("2 of 2 CPU-hours", True), ("unknown of 1 kJ", False), ("0 of 1 trials", False)]
    assert [(str(share), share.is_used) for share in shares] == shown


def test_processor_time_ends_a_search_with_a_combined_model_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    search = Search(SPACE, budget={"cpu_hours": 2 / 3600}, pruner="none")
    result = ensemble.submit(slow(search, epochs=4), tmp_path, executor="inline").wait()
    states = [row["state"] for row in result.members]
    assert states.count("finished") >= 2 and result.combined is not None
    assert names(tmp_path)[-1] == "run_stopped" and "combined" in names(tmp_path)
    run = RunProjection.from_events(store.read_events(tmp_path / "events.jsonl"))
    assert 1.96 <= run.used.cpu_s < 7
    assert "of 0.0005556 CPU-hours" in next(note for note in status_notes(run) if note.startswith("budget: "))
    again = ensemble.resume(tmp_path, executor="inline").wait()
    assert len(again.members) == len(result.members), "nothing is left of it"
    more = ensemble.resume(tmp_path, executor="inline", budget={"trials": len(states) + 2}).wait()
    assert [row["state"] for row in more.members] == ["finished"] * (len(states) + 2)
    assert names(tmp_path)[-1] == "run_finished"


def test_a_budget_of_hours_has_no_usual_number_of_trials() -> None:
    assert (Search(SPACE).trials, Search(SPACE, budget={"hours": 1}).trials) == (20, 10_000)
    assert Search(SPACE, trials=5, budget={"hours": 1}).trials == 5
    assert Search(SPACE, trials=5, budget={"trials": 7}).trials == 7


def test_the_time_in_which_a_killed_run_lay_idle_is_no_work() -> None:
    events: list[dict[str, Any]] = [
        {"type": "run_started", "t": 0.0, "mode": "search"},
        {"type": "member", "t": 1.0, "member": "member-0", "number": 0},
        {"type": "placed", "t": 2.0, "member": "member-0", "attempt": 0, "node": "n", "devices": [None]},
        {"type": "started", "t": 3.0, "member": "member-0", "attempt": 0},
        {"type": "epoch", "t": 600.0, "member": "member-0", "attempt": 0, "epoch": 0, "metrics": {}},
        {"type": "run_started", "t": 36_000.0, "mode": "search", "resumed": True},
    ]
    used = Total(cpu_s=0.0, energy_j=None, origin="unavailable")
    (hours,) = measure_budget({"hours": 2}, fold(events), used, 36_000.0)
    assert hours.used == pytest.approx(598 / 3600)


def test_a_budget_below_what_was_trained_ends_at_once_and_joules_that_nobody_measures_too(tmp_path: Path) -> None:
    ensemble.submit(declare(Search(SPACE, trials=3, pruner="none"), epochs=1), tmp_path, executor="inline").wait()
    fewer = ensemble.resume(tmp_path, executor="inline", budget={"trials": 2}).wait()
    assert len(fewer.members) == 3
    used = Total(cpu_s=0.0, energy_j=None, origin="unavailable")
    state = fold(read_events(tmp_path / "events.jsonl"))
    assert explain_end({"energy_kj": 5}, state, used, state.updated or 0.0) is None
    assert "is not measured" in str(explain_end({"energy_kj": 5}, state, used, (state.updated or 0.0) + 99))
    with pytest.raises(SpecError, match="one or more of trials"):
        ensemble.resume(tmp_path, budget={})


def test_the_command_takes_limits_by_name() -> None:
    from argparse import ArgumentTypeError

    from ensemble.cli.arguments import budget as read

    assert read("trials=3,hours=1.5") == {"trials": 3, "hours": 1.5}
    for text, says in (
        ("days=3", "cannot be 'days'"),
        ("hours", "as in hours=2"),
        ("trials=1.5", "as in hours=2"),
    ):
        with pytest.raises(ArgumentTypeError, match=says):
            read(text)
