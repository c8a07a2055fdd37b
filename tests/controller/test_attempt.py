"""Members that wait for their attempts, what is allowed in which phase of one, and the clock that limits it."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from test_controller import Simulated, an_ensemble

from ensemble.controller.attempt import Attempt, AttemptPhase
from ensemble.controller.controller import Controller
from ensemble.controller.waiting_window import WaitingWindow
from ensemble.schedule.needs import Node, Placement, compute_need
from ensemble.schedule.placement import ClusterSnapshot, Start, decide_starts
from ensemble.store import EventLog, RunDir, RunState

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
