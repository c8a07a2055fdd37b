"""The phases of an attempt: what is allowed in which of them, and what follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_controller import Simulated, an_ensemble

from ensemble.controller.attempt import Attempt, AttemptPhase
from ensemble.controller.controller import Controller
from ensemble.schedule.needs import Placement
from ensemble.schedule.placement import Start
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
