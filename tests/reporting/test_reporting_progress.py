"""Live progress: calm, complete and cheap, on a terminal and in a file."""

from __future__ import annotations

import copy
import io
import itertools
import random
from typing import Any

import pytest
import run_events as runs
from event_dicts import apply_event, fold

from ensemble.reporting import Progress
from ensemble.reporting.progress import table
from ensemble.reporting.time_left import (
    TimeLeft,
    TimeLeftEstimator,
    count_epochs,
    expect_epochs,
    fraction_done,
    member_epochs,
    member_left_s,
)
from ensemble.store import RunState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Stands at the time of the event that was last applied."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def played(events: list[dict[str, Any]], stream: io.StringIO) -> str:
    """What a progress shows of these events when they come at their own times."""
    clock, state = Clock(), RunState()
    with Progress(stream, clock=clock) as progress:
        for event in events:
            clock.now = event["t"]
            apply_event(state, event)
            progress.update(state)
    return stream.getvalue()


def test_lines_tell_every_end_of_an_epoch_and_every_change_of_state() -> None:
    shown = played(runs.list_run(), io.StringIO())
    assert shown.startswith("[0:00] digits: 8 members, 6 epochs, executor local\n")
    for member in range(8):
        assert (
            f"member-{member} 6/6" in shown or f"member-{member} epoch 6/6: accuracy 0.9" in shown or member == 6
        )
    assert "member-3 failed (lost): killed by signal 9 (SIGKILL); it will be tried again" in shown
    assert "member-6 failed (nan): loss is nan at epoch 5" in shown
    assert "left" in shown
    assert "run finished, with failures · digits · 7/8 finished, 1 failed" in shown.splitlines()[-1]


def test_the_first_line_says_how_many_epochs_the_members_train() -> None:
    def first_line(epochs: list[int]) -> str:
        state = RunState()
        for event in runs.list_run(members=4, until=0.3):
            if event["type"] == "member":
                count = epochs[int(event["member"][-1]) % len(epochs)]
                event = event | {"epochs": count}
            apply_event(state, event)
        stream = io.StringIO()
        with Progress(stream) as progress:
            progress.update(state)
        return stream.getvalue().splitlines()[0]

    assert "members, 7 epochs, executor" in first_line([7])
    assert "members, 1 epoch, executor" in first_line([1])
    assert "members, 5 to 20 epochs, executor" in first_line([20, 5])


def test_lines_are_never_more_than_a_few_a_second_however_many_members_there_are() -> None:
    state = fold(runs.list_run(members=8, until=0.3))
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    for second in range(20):
        for i in range(500):
            name = f"member-{i}"
            where = {"v": 2, "t": runs.START + second + i / 1000, "member": name, "attempt": 0}
            apply_event(state, where | {"type": "placed", "node": "n", "cohort": 0})
            apply_event(state, where | {"type": "started", "epoch": second, "step": 0})
            done = {"epoch": second, "metrics": {"accuracy": 0.5}, "wall_s": 1.0, "samples_per_s": 100.0}
            apply_event(state, where | {"type": "epoch", **done})
            clock.now = second + i / 1000
            progress.update(state)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 20 * 4
    assert all(len(line) < 400 for line in lines)
    assert any("and 49" in line for line in lines), "the rest is counted"


def test_a_failure_is_announced_as_one_that_is_tried_again_though_the_next_attempt_has_begun() -> None:
    events = runs.list_run()
    failed = next(i for i, e in enumerate(events) if e["type"] == "failed" and e["retry"])
    placed = (i for i, e in enumerate(events) if e["type"] == "placed" and e["member"] == "member-3")
    again = next(i for i in placed if i > failed)
    stream, clock, state = io.StringIO(), Clock(), fold(events[:failed])
    with Progress(stream, clock=clock) as progress:
        progress.update(state)
        for event in events[failed : again + 1]:
            apply_event(state, event)
        clock.now = 60.0
        progress.update(state)
    assert "it will be tried again" in stream.getvalue()


def test_of_many_failures_at_once_the_first_is_told_with_its_cause() -> None:
    state, stream, clock = fold(runs.list_run(members=8, until=0.3)), io.StringIO(), Clock()
    with Progress(stream, clock=clock) as progress:
        progress.update(state)
        for number in range(5):
            event = {"v": 2, "t": runs.START + 9, "type": "failed", "member": f"member-{number}", "attempt": 0}
            apply_event(state, event | {"error": f"KeyError: {number}", "reason": "error", "retry": False})
        clock.now = 60.0
        progress.update(state)
    assert "member-0 failed (error): KeyError: 0\n" in stream.getvalue() and "KeyError: 1" not in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_a_reason_is_said_once_and_a_run_without_a_member_that_finished_has_not_finished(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    begun = [e for e in runs.list_run(members=2, until=0.3) if e["type"] != "placed"]
    state, clock = fold(begun), Clock()
    with Progress(stream, clock=clock) as progress:
        for number, (member, retry) in enumerate((("member-0", True), ("member-0", False), ("member-1", False))):
            event = {"v": 2, "t": runs.START + number, "member": member, "attempt": number % 2}
            apply_event(state, event | {"type": "placed", "node": "local", "cohort": 0})
            failed = {"error": "ValueError: no file w.bin", "reason": "error", "retry": retry}
            apply_event(state, event | {"type": "failed", **failed})
            clock.now += 9.0
            progress.update(state)
        apply_event(state, {"v": 2, "t": runs.START + 9.0, "type": "run_finished"})
    said = stream.getvalue()
    assert said.count("no file w.bin") == 1
    assert "member-0 failed (error): the same again" in said and "member-1 failed (error): as member-0 did" in said
    assert "run finished" not in said
    assert "run failed · digits · 0/2 finished" in said or isinstance(stream, Terminal)


def test_the_last_line_of_a_run_that_was_stopped_says_why_and_how_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    events = runs.list_run(until=9.0)
    events.append({"v": 2, "t": events[-1]["t"], "type": "run_stopped", "reason": "WriteError: disk full"})
    last = played(events, io.StringIO()).splitlines()[-1]
    assert "run stopped (WriteError: disk full) · digits" in last and last.endswith("`ensemble resume` goes on")
    last = "".join(played(events, Terminal()).splitlines()[-2:])  # the very last shows the cursor again
    assert "run stopped (WriteError: disk full) · `ensemble resume` goes on" in last


def test_what_was_held_back_is_told_on_closing() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    for until in (0.3, 4.5, 60.0):
        progress.update(fold(runs.list_run(until=until)))
    assert "member-0" not in stream.getvalue()
    progress.close()
    told = stream.getvalue()
    progress.close()
    assert "run finished" in told and stream.getvalue() == told


def test_table_shows_members_and_totals_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    shown = played(runs.list_run(until=14.0), Terminal())
    last = shown[shown.rindex("digits ·") :]
    assert "0/8 finished" in last and "left" in last and "best member-" in last
    for column in ("member", "state", "epoch", "accuracy", "samples/s"):
        assert column in last
    assert "member-3 failed (lost): killed by signal 9 (SIGKILL); it will be tried again" in shown
    assert "member-3" in last and "running (2)" in last, "the second attempt is marked"


def test_table_fits_the_terminal_and_counts_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "16")
    shown = played(runs.search_run(), Terminal())
    last = shown[shown.rindex("sweep ·") :]
    assert len(last.splitlines()) <= 16
    assert "and " in last and "pruned" in last
    assert "member-23" in last, "the one that runs is never left out"


def test_members_that_run_stand_above_those_that_failed() -> None:
    state = fold(runs.list_run(members=18, until=3.0))
    for member in state.members.values():
        member.state = "running" if member.number >= 15 else "failed"
    found = [line.split()[1] for line, _ in table(state, None, rows=16) if line.startswith("member-")]
    assert found == ["running"] * 3 + ["failed"] * 13


def test_redraws_are_limited_so_that_watching_costs_little() -> None:
    state = fold(runs.list_run(until=9.0))
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock)
    for update in range(2000):
        clock.now = update / 400
        progress.update(state)
    draws = stream.getvalue().count("digits ·")
    progress.close()
    assert 5 < draws <= 2 + 5 / 0.25


def estimates(events: list[dict[str, Any]]) -> list[tuple[RunState, TimeLeft]]:
    """The state after each event, where time left is estimated then, with the bounds."""
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
    left = estimator.estimate(late)
    pace = (count_epochs(late).done - count_epochs(early).done) / (late.updated - early.updated)
    assert left is not None and left.least_s < count_epochs(late).left / pace < left.most_s


def test_time_left_is_never_below_that_of_the_slowest_member_that_runs() -> None:
    events = [e for e in runs.list_run() if e.get("member") in (None, "member-0", "member-3")]
    bounds = estimates([events[0] | {"members": 2}, *events[1:]])
    assert len(bounds) > 20
    for state, left in bounds:
        assert left.most_s >= max(member_left_s(state, member) or 0.0 for member in state.members.values())


def test_start_up_does_not_count_as_pace_and_nothing_is_said_of_time_left_before_anything_was_trained() -> None:
    late = 100.0  # seconds that a start takes, before a second or so of training
    events = [e | {"t": e["t"] + late} if e["t"] > runs.START + 0.3 else e for e in runs.list_run()]
    bounds = estimates(events)
    assert all(any(m.step or m.epoch for m in state.members.values()) for state, _ in bounds)
    assert bounds[0][1].most_s < late


def test_no_time_left_is_told_of_a_run_whose_members_have_all_ended() -> None:
    events = [e for e in runs.list_run() if e["type"] != "run_finished"]
    assert "0:00 left" not in played(events, io.StringIO())
    assert TimeLeftEstimator((runs.START, 0.0, 0)).estimate(fold(events)) is None


def test_bounds_of_the_end_only_narrow_until_something_happens() -> None:
    """Members of ten epochs, two at a time, whose epochs take 0.7 to 1.3 s: what is shown never rises."""
    state, estimator, rng = fold(runs.list_run(until=9.0)), TimeLeftEstimator(), random.Random(0)
    work = list(state.members.values())
    for member in work:
        member.state, member.epoch, member.step, member.history = "waiting", 0, 0, []
        member.identity["epochs"] = 10
    shown, now = [], float(state.updated or 0.0)
    while running := [member for member in work if member.epoch < 10][:2]:
        now += rng.uniform(0.7, 1.3)
        for member in running:
            member.samples_per_s, member.epoch = 100.0, member.epoch + 1
            member.state = "finished" if member.epoch == 10 else "running"
        state.updated = now
        shown.append((now, estimator.estimate(state)))
    bounds = [(at, left) for at, left in shown if left is not None]
    assert all(later.most_s <= earlier.most_s for (_, earlier), (_, later) in itertools.pairwise(bounds))
    assert all(left.least_s <= now - at <= left.most_s for at, left in bounds)
    assert str(bounds[0][1]).endswith(" left") and " to " in str(bounds[0][1])


def test_a_members_first_step_is_no_pace() -> None:
    state = fold(runs.list_run(until=9.0))
    member = next(m for m in state.members.values() if m.state == "running")
    member.history, member.epoch, member.steps, member.samples_per_s = [], 0, 100, 2.0
    member.step = 1
    assert member_left_s(state, member) is None
    member.step = 50
    left = (member_epochs(state, member) - 0.5) * 100 * member.identity["batch_size"] / 2.0
    assert member_left_s(state, member) == pytest.approx(left)


def test_work_left_counts_members_not_yet_placed_and_nothing_of_those_that_ended() -> None:
    assert count_epochs(fold(runs.list_run())) == (7 * 6 + 4, 0, 0)
    assert count_epochs(fold(runs.just_started())) == (0, 4 * 3, 4 * 3)
    running = fold(runs.list_run(until=9.0))
    assert all(0 <= fraction_done(running, member) <= 1 for member in running.members.values())
    assert member_left_s(running, running.members["member-0"]) > 0
    assert member_left_s(running, running.members["member-7"]) is None


def test_trials_to_come_are_not_taken_to_be_as_short_as_those_that_were_pruned_first() -> None:
    """Of ten trials six last one epoch, two three and two nine: three in the mean."""
    pruned = [(1.0, True)] * 6
    early = [*pruned, *[(2.0, False)] * 4]  # the mean of those that have ended is one
    assert expect_epochs(early, [0.0, 2.0], 9.0) == pytest.approx([1 + 0.4 * 8, 7.0])
    late = [*pruned, (3.0, True), (3.0, True), (5.0, False), (9.0, True)]
    assert expect_epochs(late, [0.0, 3.0, 5.0], 9.0) == pytest.approx([3.0, 6.0, 4.0])
    assert expect_epochs([], [0.0], 9.0) == [9.0]


def test_work_left_of_a_search_counts_trials_to_come() -> None:
    events = runs.search_run(trials=24)
    left = count_epochs(fold(events)).left
    events[0] = events[0] | {"members": 34}
    more = count_epochs(fold(events)).left
    lasted = [m.epoch for m in fold(events).members.values() if m.state in ("finished", "pruned")]
    assert more - left == pytest.approx(10 * sum(lasted) / len(lasted), rel=0.1)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_that_members_are_combined_is_shown_when_it_begins_for_no_event_comes_until_it_is_done(
    stream: Any,
) -> None:
    events = runs.list_run()
    state, shown, clock = fold(events[:-2]), stream(), Clock()
    progress = Progress(shown, clock=clock)
    progress.update(state)
    for event in ({"type": "combining", "t": events[-2]["t"], "members": 7}, events[-2], events[-1]):
        apply_event(state, event)
        progress.update(state)  # all at once, by the clock
        assert ("combining 7 members" in shown.getvalue()) and state.combining == (
            7 if event["type"] == "combining" else 0
        )
    progress.close()
    assert "run finished" in shown.getvalue() or stream is Terminal


def test_the_number_beside_a_state_is_explained() -> None:
    shown = played(runs.list_run(), Terminal())
    assert "(2) beside a state: started twice" in shown and shown.count("(2)") > 1
    once = [event for event in runs.list_run(members=2) if event.get("member") != "member-1"]
    assert "(2)" not in played(once, Terminal())
