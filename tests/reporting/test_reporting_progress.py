"""Live progress: calm, complete and cheap, on a terminal and in a file."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kit import run_events as runs
from kit.event_dicts import apply_event, fold

from ensemble.reporting import Progress
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.time_left import TimeLeftEstimator, count_epochs, member_epochs, member_left_s
from ensemble.store import MemberState, RunState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Watch:
    def __init__(self, events: Sequence[dict[str, Any]] = (), stream: io.StringIO | None = None) -> None:
        self.stream, self.now, self.state = stream or io.StringIO(), 0.0, fold(events)
        self.progress = Progress(self.stream, clock=lambda: self.now)

    def apply(self, **event: Any) -> None:
        apply_event(self.state, {"v": 2, "t": runs.START + self.now, **event})

    def update(self, at: float) -> str:
        self.now = at
        self.progress.update(self.state)
        return self.stream.getvalue()

    def close(self) -> str:
        self.progress.close()
        return self.stream.getvalue()


def played(events: list[dict[str, Any]], stream: io.StringIO) -> str:
    watch = Watch(stream=stream)
    for event in events:
        watch.apply(**event)
        watch.update(event["t"])
    return watch.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Terminal]:
    def make(columns: int, lines: int = 40) -> Terminal:
        for name, size in {"COLUMNS": columns, "LINES": lines}.items():
            monkeypatch.setenv(name, str(size))
        return Terminal()

    return make


BEGUN = runs.list_run(until=0.3)


def test_lines_tell_the_start_failures_and_how_far_the_run_is() -> None:
    shown = played(runs.list_run(), io.StringIO())
    assert shown.startswith("[0:00] digits: 8 members, 6 epochs, executor local\n")
    assert "member-3 failed (lost): killed by signal 9 (SIGKILL); it will be tried again" in shown
    assert "member-6 failed (nan): loss is nan at epoch 5" in shown and "left" in shown
    assert " 5/8 finished" in shown and "epoch 6/6" not in shown
    assert "run finished, with failures · digits · 7/8 finished, 1 failed" in shown.splitlines()[-1]


def test_lines_become_fewer_with_the_age_of_a_run_however_many_members_there_are() -> None:
    watch = Watch(BEGUN)
    done = {"metrics": {"accuracy": 0.5}, "wall_s": 1.0, "samples_per_s": 100.0}
    for minute in range(600):
        who = {"member": f"member-{minute}", "attempt": 0}
        watch.now = 60.0 * minute
        watch.apply(type="placed", node="n", cohort=0, **who)
        watch.apply(type="started", epoch=0, step=0, **who)
        watch.apply(type="epoch", epoch=0, **who, **done)
        watch.update(60.0 * minute)
        if minute:
            watch.apply(type="finished", epoch=1, metrics={}, member=f"member-{minute - 1}", attempt=0)
    lines = watch.close().splitlines()
    times = [line.split("]")[0] for line in lines[-3:]]
    assert len(lines) < 70 and times == ["[9:19:00", "[9:34:00", "[9:49:00"], "one in 15 minutes"


def test_a_failure_is_announced_as_one_that_is_tried_again_though_the_next_attempt_has_begun() -> None:
    events = runs.list_run()
    failed = next(i for i, e in enumerate(events) if e["type"] == "failed" and e["retry"])
    again = next(i for i, e in enumerate(events) if e.get("attempt") == 1 and e["type"] == "placed")
    assert events[again]["member"] == "member-3" and again > failed
    watch = Watch(events[:failed])
    watch.update(0.0)
    for event in events[failed : again + 1]:
        watch.apply(**event)
    assert "it will be tried again" in watch.update(60.0)


def test_of_many_failures_at_once_the_first_are_told_with_their_cause() -> None:
    watch = Watch(BEGUN)
    watch.update(0.0)
    for number in range(5):
        why = {"error": f"KeyError: {number}", "reason": "error", "retry": False}
        watch.apply(type="failed", member=f"member-{number}", attempt=0, **why)
    shown = watch.update(60.0)
    assert "member-2 failed (error): KeyError: 2\n" in shown and "failed, too: member-3, member-4\n" in shown


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
def test_a_reason_is_said_once_and_without_a_model_no_run_has_finished(is_terminal: bool, terminal: Any) -> None:
    begun = [e for e in runs.list_run(members=2, until=0.3) if e["type"] != "placed"]
    watch = Watch(begun, terminal(200) if is_terminal else None)
    for number, (member, retry) in enumerate((("member-0", True), ("member-0", False), ("member-1", False))):
        who = {"member": member, "attempt": number % 2}
        watch.apply(type="placed", node="local", cohort=0, **who)
        watch.apply(type="failed", error="ValueError: no file w.bin", reason="error", retry=retry, **who)
        watch.update(watch.now + 9.0)
    watch.apply(type="run_finished")
    said = watch.close()
    assert said.count("no file w.bin") == 1
    assert "member-0 failed (error): the same again" in said and "member-1 failed (error): as member-0 did" in said
    assert "run finished" not in said
    assert "run failed · digits · 0/2 finished" in said or is_terminal


def test_the_last_line_of_a_run_that_was_stopped_says_why_and_how_it_goes_on(terminal: Any) -> None:
    events = runs.list_run(until=9.0)
    events.append({"v": 2, "t": events[-1]["t"], "type": "run_stopped", "reason": "WriteError: disk full"})
    last = played(events, io.StringIO()).splitlines()[-1]
    assert "run stopped (WriteError: disk full) · digits" in last and last.endswith("`ensemble resume` goes on")
    last = "".join(played(events, terminal(120)).splitlines()[-2:])  # the very last shows the cursor again
    assert "run stopped (WriteError: disk full) · `ensemble resume` goes on" in last


def test_what_was_held_back_is_told_on_closing() -> None:
    watch = Watch()
    for until in (0.3, 4.5, 60.0):
        watch.progress.update(fold(runs.list_run(until=until)))
    assert "member-0" not in watch.stream.getvalue()
    assert "run finished" in (closed := watch.close()) and watch.close() == closed


def test_table_shows_members_and_totals_on_a_terminal(terminal: Any) -> None:
    shown = played(runs.list_run(until=14.0), terminal(120))
    last = shown[shown.rindex("digits ·") :]
    words = ("0/8 finished", "left", "best member-", "state", "epoch", "accuracy", "samples/s", "member-3")
    assert [word for word in words if word not in last] == []
    assert "member-3 failed (lost): killed by signal 9 (SIGKILL); it will be tried again" in shown
    assert "running (2)" in last, "the second attempt is marked"
    shown = played(runs.list_run(), terminal(120))
    assert "(2) beside a state: started twice" in shown and shown.count("(2)") > 1
    shown = played(runs.search_run(), terminal(100, 16))
    last = shown[shown.rindex("sweep ·") :]
    assert len(last.splitlines()) <= 16 and "(2)" not in shown, "it fits the terminal"
    assert "and " in last and "pruned" in last, "what it leaves out is counted"
    assert "member-23" in last, "the one that runs is never left out"


def test_redraws_are_limited_so_that_watching_costs_little() -> None:
    watch = Watch(runs.list_run(until=9.0), Terminal())
    shown = [watch.update(update / 400) for update in range(2000)][-1]
    watch.close()
    assert 5 < shown.count("digits ·") <= 2 + 5 / 0.25


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_that_members_are_combined_is_shown_when_it_begins_for_no_event_comes_until_its_end(stream: Any) -> None:
    events = runs.list_run()
    watch = Watch(events[:-2], stream())
    watch.update(0.0)
    for event in ({"type": "combining", "t": events[-2]["t"], "members": 7}, events[-2], events[-1]):
        watch.apply(**event)
        assert "combining 7 members" in watch.update(0.0)  # all at once, by the clock
        assert watch.state.combining == (7 if event["type"] == "combining" else 0)
    assert "run finished" in watch.close() or stream is Terminal


def estimates(events: list[dict[str, Any]]) -> list[tuple[RunState, float]]:
    estimator, state, found = TimeLeftEstimator(), RunState(), []
    for event in events:
        apply_event(state, event)
        if (left := estimator.estimate(state)) is not None:
            found.append((copy.deepcopy(state), left))
    return found


def test_what_was_trained_before_the_first_look_does_not_count_as_pace() -> None:
    estimator = TimeLeftEstimator()
    early, late = fold(runs.list_run(until=5.0)), fold(runs.list_run(until=12.0))
    assert estimator.estimate(early) is None
    pace = (count_epochs(late).done - count_epochs(early).done) / (late.updated - early.updated)
    assert estimator.estimate(late) == pytest.approx(count_epochs(late).left / pace)
    ended = [e for e in runs.list_run() if e["type"] != "run_finished"]  # of its members, all have
    assert "0:00 left" not in played(ended, io.StringIO())
    assert TimeLeftEstimator((runs.START, 0.0)).estimate(fold(ended)) is None


def test_time_left_is_never_below_that_of_the_slowest_member_that_runs() -> None:
    events = [e for e in runs.list_run() if e.get("member") in (None, "member-0", "member-3")]
    bounds = estimates([events[0] | {"members": 2}, *events[1:]])
    assert len(bounds) > 20
    for state, left in bounds:
        assert left >= max(member_left_s(state, member) or 0.0 for member in state.members.values())


def test_start_up_does_not_count_as_pace_and_nothing_is_said_of_time_left_before_anything_was_trained() -> None:
    late = 100.0  # seconds that a start takes, before a second or so of training
    events = [e | {"t": e["t"] + late} if e["t"] > runs.START + 0.3 else e for e in runs.list_run()]
    bounds = estimates(events)
    assert all(any(m.step or m.epoch for m in state.members.values()) for state, _ in bounds)
    assert bounds[0][1] < late


def test_work_left_counts_members_not_yet_placed_and_nothing_of_those_that_ended() -> None:
    assert count_epochs(fold(runs.list_run())) == (7 * 6 + 4, 0)
    assert count_epochs(fold(runs.just_started())) == (0, 4 * 3)
    identity = {"epochs": 9, "lineage": {"epoch": 4, "whole": True}}
    clone = MemberState("clone", 0, identity, state="running", epoch=6)
    assert count_epochs(RunState(members={"clone": clone})) == (2, 3), "without those that it has inherited"
    state = fold(runs.list_run(until=9.0))
    assert member_left_s(state, state.members["member-0"]) > 0
    assert member_left_s(state, state.members["member-7"]) is None
    member = next(m for m in state.members.values() if m.state == "running")
    member.history, member.epoch, member.steps, member.samples_per_s = [], 0, 100, 2.0
    member.step = 1
    assert member_left_s(state, member) is None, "the first step is no pace"
    member.step = 50
    left = (member_epochs(state, member) - 0.5) * 100 * member.identity["batch_size"] / 2.0
    assert member_left_s(state, member) == pytest.approx(left)


def make_search(declared: int, epochs: int, *trials: tuple[str, int]) -> RunState:
    made = [MemberState(f"t{n}", n, {"epochs": epochs}, s, epoch=e) for n, (s, e) in enumerate(trials)]  # type: ignore[arg-type]
    return RunState(mode="search", epochs=epochs, declared=declared, members={trial.id: trial for trial in made})


def test_trials_to_come_are_not_taken_to_be_as_short_as_those_that_were_pruned_first() -> None:
    pruned, failed, open_trials = [("pruned", 1)] * 6, [("failed", 0), ("cancelled", 0)], [("running", 2)] * 4
    assert count_epochs(make_search(8, 9, *failed, *open_trials)) == (8, 4 * 7 + 2 * 9)
    assert count_epochs(make_search(12, 9, *pruned, *open_trials)) == (14, pytest.approx(4 * 7 + 2 * 14 / 6))
    early = RunProjection(make_search(20, 200, ("failed", 0), ("pruned", 1), ("running", 1), ("running", 1)))
    assert early.done < 0.01
