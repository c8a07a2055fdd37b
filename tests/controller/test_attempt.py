"""Attempts: who waits for one, what is allowed in its phases, which clock limits it, what is done for it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.event_dicts import read_events
from kit.property_examples import examples
from test_controller import FAULTS_OF_ATTEMPTS, Simulated, an_ensemble, run, states

from ensemble.controller.actions import AppendMemberLog, RemoveAttemptFiles, RemoveCheckpoints
from ensemble.controller.attempt import Attempt, AttemptPhase, rendezvous_file
from ensemble.controller.controller import Controller
from ensemble.controller.performer import Performer, add_exit_notes
from ensemble.controller.starts import make_trials
from ensemble.controller.waiting_window import WaitingWindow
from ensemble.schedule.needs import Node, Placement, compute_need
from ensemble.schedule.placement import ClusterSnapshot, Start, decide_starts
from ensemble.spec import Search, uniform
from ensemble.store import EventLog, RunDir, RunState
from ensemble.train.job import Job
from ensemble.train.reporter import FailureNote

STARTING, RUNNING, STOPPING, EXITING = AttemptPhase


def an_attempt(phase: AttemptPhase = STARTING) -> Attempt:
    identity = an_ensemble().identify(0)
    start = Start(Placement(identity, "sim", (None,)), 0)
    return Attempt(start, identity, 0, "cpu", {0}, 0.0, cohort=0, target_cohort=0, phase=phase)


@pytest.mark.parametrize("asked_first", [True, False])
def test_who_writes_its_first_large_checkpoint_is_not_killed_within_it(asked_first: bool) -> None:
    """20 GB: 400 s at the least rate that is expected of a disk; nothing was measured before."""
    attempt = an_attempt(RUNNING)
    if not asked_first:
        attempt.note_life(95.0, 20e9)
    assert attempt.advance("stop")
    attempt.limit_stop(100.0, 160.0, 0.0, 300.0)
    if asked_first:
        assert attempt.deadline == 160.0
        attempt.note_life(110.0, 20e9)
    assert attempt.deadline == pytest.approx(510.0 if asked_first else 495.0)
    attempt.limit_stop(120.0, 0.0, 0.0, 300.0)  # at once
    assert attempt.deadline == 120.0


def test_a_move_that_is_overtaken_by_another_goes_on_to_the_last_target() -> None:
    attempt = an_attempt(RUNNING)
    assert attempt.request_move(1) and not attempt.request_move(1)
    assert attempt.feeder_keys == [("sim", 0), ("sim", 1)]
    assert attempt.request_move(2)
    attempt.record_move(1)
    assert attempt.feeder_keys == [("sim", 1), ("sim", 2)]
    attempt.record_move(2)
    assert attempt.feeder_keys == [("sim", 2)] and not attempt.request_move(2)
    attempt.record_move(None)  # its feeder was lost
    assert attempt.feeder_keys == [] and not attempt.request_move(None)


def test_an_attempt_without_a_checkpoint_exchanges_gradients_as_the_one_before(tmp_path: Path) -> None:
    ensemble, executor = an_ensemble(), Simulated()
    run_dir = RunDir.create(tmp_path / "run", ensemble)
    controller = Controller(run_dir, ensemble, executor, EventLog(run_dir.events), RunState())
    controller.open()
    controller.handle([])
    assert executor.jobs["member-0"].exchange_plan is None
    who = {"member": "member-0", "attempt": 0}
    plan = {"tuned": {"name": "hierarchical", "groups": [[0, 1], [2]]}, "rates": None}
    executor.scripts.clear()
    controller.handle([{"type": "plan", **who, **plan, "auto": []}])
    controller.handle([{"type": "failed", **who, "rank": 0, "error": "it broke", "reason": "error"}])
    executor.jobs.pop("member-0")
    controller.handle([{"type": "exited", **who, "rank": 0, "outcome": "failed", "detail": ""}])
    assert executor.jobs["member-0"].exchange_plan == plan
    controller.events.close()


def test_a_stall_of_the_reader_hardly_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.5, 104.0, 904.0, 905.0, 915.0, 925.0])
    passing = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("ensemble.controller.controller.time", passing)
    log = types.SimpleNamespace(read_clock=lambda: 0.0)
    reader: Any = types.SimpleNamespace(_limit_s=100.0, _read_at=100.0, events=log)
    assert [Controller.read_clock(reader)[0] for _ in range(3)] == [100.5, 104.0, 105.0]
    assert Controller.read_clock(reader)[0] == 106.0
    assert Controller.read_clock(reader) < Controller.read_clock(reader)


MANY = an_ensemble(members=[{"n": n} for n in range(120)])


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=120),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@examples(100)
def test_a_run_that_places_by_the_window_places_the_same_members_in_the_same_order(
    cpus: list[float], nodes: list[float], seed: int
) -> None:
    random, most = Random(seed), 32
    cluster = [Node(f"node-{n}", cores, (), 64.0, f"node-{n}") for n, cores in enumerate(nodes)]
    waiting = [replace(MANY.identify(number), cpus_per_worker=each) for number, each in enumerate(cpus)]
    window, running, last = WaitingWindow(waiting, compute_need), [], -1
    while waiting and last != len(waiting):
        last = len(waiting)
        of_all = decide_starts(ClusterSnapshot(nodes=cluster, waiting=waiting, running=running))
        head = window.head(most)
        of_some = decide_starts(ClusterSnapshot(nodes=cluster, waiting=head, running=running))
        if 2 * len(of_some) < most:
            assert of_some == of_all
        placed = {start.placement.member for start in of_all}
        window.remove(placed, most)
        waiting = [one for one in waiting if one.member not in placed]
        running += [start.placement for start in of_all]
        random.shuffle(running)
        del running[: 1 + len(running) // 2]
    assert window.head(10**6) == waiting and not window.hides(10**6)


@given(FAULTS_OF_ATTEMPTS, st.integers(0, 1000))
@settings(examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_done_before_the_log_says_why(tmp_path_factory: Any, faults: Any, seed: int) -> None:
    search = Search({"lr": uniform(0, 1)}, trials=4, sampler="random", pruner="median")
    executor = Simulated(2, faults, seed, several=True)  # which explains all that it does by the log
    run(tmp_path_factory.mktemp("run") / "r", an_ensemble(search=search, epochs=3), executor)
    assert executor.told


def test_a_launch_that_fails_comes_back_as_an_event_and_is_tried_again(tmp_path: Path) -> None:
    class Full(Simulated):
        def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
            if jobs[0].identity.member in ("member-0", "member-1") and jobs[0].attempt == 0:
                raise OSError("no process is left")
            super().launch(jobs, devices)

    state = run(tmp_path / "run", an_ensemble(), Full())
    assert set(states(state).values()) == {"finished"}
    assert [member.attempts for member in state.members.values()] == [2, 2, 1, 1]
    failed = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["type"] == "failed"]
    assert {e["error"] for e in failed} == {"could not be started on node sim: no process is left"}
    assert {e["reason"] for e in failed} == {"lost"}


@pytest.mark.parametrize("runs", [True, False])
def test_files_of_an_attempt_are_read_at_its_exit_and_removed(tmp_path: Path, runs: bool) -> None:
    run_dir = RunDir.create(tmp_path / "run", an_ensemble())
    FailureNote(run_dir, "member-0", 3).write("rank 1 broke", "error", True, 1)
    meeting = rendezvous_file(run_dir, "member-0", 3)
    meeting.touch()
    positions = ((2, 4, 0), (2, 5, 0), (3, 6, 0), (3, 7, 0))
    earlier, before, kept, unlogged = (run_dir.checkpoint("member-0", *position) for position in positions)
    for each in (earlier, before, kept, unlogged, run_dir.checkpoint("member-0", 2, 8, 0)):
        each.touch()
    run_dir.predictions("member-0", 3).touch()
    exited = {"type": "exited", "member": "member-0", "attempt": 3, "rank": 1, "outcome": "failed"}
    note = {"error": "rank 1 broke", "reason": "error", "retry": True, "rank": 1}
    assert add_exit_notes(exited, run_dir) == {**exited, "note": note, "preparing": []}
    assert add_exit_notes({**exited, "outcome": "finished"}, run_dir) == {**exited, "outcome": "finished"}
    named = ([kept.name, before.name], 3) if runs else ([kept.name],)
    ended = RemoveAttemptFiles("member-0", 3), AppendMemberLog("member-0", "attempt 3: failed")
    performed = [RemoveCheckpoints("member-0", *named), *ended]
    trials = make_trials(an_ensemble(), run_dir, RunState(), sharing=False)
    log = EventLog(run_dir.events)
    assert Performer(run_dir, Simulated(), log, trials).perform(performed) == []
    log.close()
    assert set(run_dir.member("member-0").glob("checkpoint-*")) == ({before, kept, unlogged} if runs else {kept})
    assert run_dir.predictions("member-0", 3).exists() == runs
    assert not meeting.exists()
    assert add_exit_notes(exited, run_dir)["note"] is None
    assert run_dir.log("member-0").read_text().endswith("attempt 3: failed\n")
