"""Actions are performed in one place, when the log has what they follow from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.event_dicts import read_events
from kit.property_examples import examples
from test_controller import FAULTS_OF_ATTEMPTS, Simulated, an_ensemble, run, states
from test_queue import _nothing_is_waited_for  # noqa: F401

from ensemble.controller.actions import AppendMemberLog, RemoveAttemptFiles, RemoveCheckpoints
from ensemble.controller.attempt import rendezvous_file
from ensemble.controller.performer import Performer, add_exit_notes
from ensemble.controller.starts import make_trials
from ensemble.spec import Search, uniform
from ensemble.store import EventLog, RunDir, RunState
from ensemble.train.job import Job
from ensemble.train.reporter import FailureNote


class LogReader(Simulated):
    """Notes what the log, as it is on the disk, does not explain; hands over several events at once."""

    path: Path
    refused: list[tuple[str, str]]

    def _explain(self, member: str, what: str, *kinds: str) -> None:
        attempt = self.jobs[member].attempt if member in self.jobs else None
        logged = [e for e in read_events(self.path / "events.jsonl") if e.get("member") == member]
        if not any(e["type"] in kinds and (attempt is None or e["attempt"] == attempt) for e in logged):
            self.refused.append((member, what))

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        several = sum(map(len, self.scripts.values())) // 2
        return [event for _ in range(max(1, several)) for event in super(LogReader, self).events(timeout_s)]

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        super().launch(jobs, devices)
        self._explain(jobs[0].identity.member, "launch", "placed")

    def send(self, member: str, command: str, **fields: Any) -> None:
        self._explain(member, command, "epoch" if command in ("continue", "prune") else "placed")
        super().send(member, command, **fields)

    def kill(self, member: str) -> None:
        self._explain(member, "kill", "failed", "cancelled", "stopped", "paused")
        super().kill(member)


@given(FAULTS_OF_ATTEMPTS, st.integers(0, 1000))
@settings(examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_done_before_the_log_says_why(tmp_path_factory: Any, faults: Any, seed: int) -> None:
    search = Search({"lr": uniform(0, 1)}, trials=4, sampler="random", pruner="median")
    executor = LogReader(2, faults, seed)
    executor.path, executor.refused = tmp_path_factory.mktemp("run") / "r", []
    run(executor.path, an_ensemble(search=search, epochs=3), executor)
    assert executor.told and not executor.refused


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
