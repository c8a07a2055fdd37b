"""What is asked while a run goes on, against a simulated cluster: every request is heeded and answered."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import collect_notices, fold, read_events
from test_controller import Simulated, an_ensemble, run, states

from ensemble.spec import Ensemble, Search, uniform
from ensemble.store import RunDir, RunState, write_request
from ensemble.store import read_events as read_typed


@pytest.fixture(autouse=True)
def _nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("ensemble.controller.finalize.Finalizer.write_report", lambda *_: None)


def is_finished(state: RunState) -> bool:
    return set(states(state).values()) == {"finished"}


def perform(path: Path, ensemble: Ensemble, *at: Any, executor: Simulated | None = None) -> RunState:
    """A run that is asked what a script says, on one core unless there is an executor."""
    executor = executor or Simulated(1)
    executor.before = Script(path, *at)
    return run(path, ensemble, executor)


class Script:
    """Asks when something happens: `at` pairs (type, member), each heeded once, with what is asked then."""

    def __init__(self, path: Path, *at: tuple[tuple[str, str], list[tuple[str, dict[str, Any]]]]) -> None:
        self.path, self.at = path, list(at)

    def __call__(self, event: dict[str, Any]) -> None:
        for when in [when for when in self.at if when[0] == (event["type"], event.get("member"))]:
            self.at.remove(when)
            for verb, fields in when[1]:
                write_request(self.path, verb, **fields)


def asked(verb: str, number: int | None = None, **fields: Any) -> tuple[str, dict[str, Any]]:
    return verb, fields if number is None else {"member": f"member-{number}", **fields}


def answers(path: Path) -> list[tuple[str, bool, str]]:
    events = read_events(RunDir(path).events)
    return [(e["verb"], e["done"], e["message"]) for e in events if e["type"] == "request"]


def of_kind(path: Path, *kinds: str) -> list[tuple[str, str]]:
    return [(e["type"], e["member"]) for e in read_events(RunDir(path).events) if e["type"] in kinds]


def test_several_members_are_asked_of_at_once_and_one_answer_says_for_how_many(tmp_path: Path) -> None:
    path, several = tmp_path / "run", ["member-0", "member-1", "nobody"]
    at = [(("epoch", "member-1"), [asked("pause", members=several)])]
    later = [asked("resume", members=several[1:2]), asked("cancel", members=several[::2])]
    at += [(("finished", "member-2"), later), (("finished", "member-1"), [asked("pause", members="member-1")])]
    assert is_finished(perform(path, an_ensemble(epochs=3), *at))
    refused = "member-0 has ended already (finished); there is no member 'nobody'"
    done = [("pause", True, f"pausing 1 of 3; {refused}"), ("resume", True, "resuming 1 of 1")]
    no_list = ("pause", False, "`members` must be a list of names")
    assert answers(path) == [*done, ("cancel", False, refused), no_list]
    notices = [each.text for each in collect_notices(read_typed(RunDir(path).events)) if "asked for" in each.text]
    assert [text.partition(",")[0] for text in notices] == ["pause 3 members", "resume 1 member"]


def test_a_paused_member_frees_its_place_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    at = (("epoch", "member-0"), [asked("pause", 0)]), (("finished", "member-1"), [asked("resume", 0)])
    state = perform(path, an_ensemble(epochs=3), *at)
    assert is_finished(state)
    member = state.members["member-0"]
    assert member.attempts == 2 and [e.epoch for e in member.history] == [0, 1, 2]
    assert [span.outcome for span in member.spans] == ["paused", "finished"]
    assert answers(path) == [("pause", True, "pausing member-0"), ("resume", True, "resuming member-0")]
    order = [("paused", "member-0"), ("finished", "member-1"), ("resumed", "member-0")]
    assert of_kind(path, "paused", "resumed", "finished")[:3] == order


def test_the_last_member_that_is_paused_is_waited_for_without_a_feeder_or_worker(tmp_path: Path) -> None:
    path, idle = tmp_path / "run", []

    def watch(executor: Simulated) -> None:
        if fold(read_events(RunDir(path).events)).members["member-0"].state == "paused":
            idle.append((dict(executor.feeders), list(executor.feeders_stopped)))
            if len(idle) == 3:
                write_request(path, "resume")

    at = (("epoch", "member-0"), [asked("pause")])
    declared = an_ensemble(sharing="node", epochs=4, capacity=1)
    state = perform(path, declared, at, executor=Simulated(4, idle=watch))
    assert is_finished(state)
    assert idle[0] == ({0: 4}, [0]), "its feeder was stopped"
    assert {m.spans[-1].cohort for m in state.members.values()} == {1}, "those that return together share again"


def test_a_member_returns_to_its_cohort_while_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    at = (("epoch", "member-0"), [asked("pause", 0)]), (("exited", "member-0"), [asked("resume", 0)])
    state = perform(path, an_ensemble(sharing="node", epochs=30), *at, executor=Simulated(4, seed=5))
    assert [span.cohort for span in state.members["member-0"].spans] == [0, 0]


def test_a_run_that_was_paused_is_stopped_and_goes_on_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"

    script = Script(path, (("started", "member-0"), [asked("pause")]))
    executor = Simulated(before=script, idle=lambda executor: write_request(path, "stop"))
    state = run(path, an_ensemble(epochs=3), executor)
    assert state.ended is not None and state.ended.type == "run_stopped"
    assert set(states(state).values()) == {"paused"}
    assert set(states(run(path, an_ensemble(epochs=3), Simulated(after=executor))).values()) == {"finished"}


def test_what_is_cancelled_while_it_pauses_or_is_paused_stays_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "run"
    at = [(("epoch", "member-0"), [asked("pause", 0), asked("cancel", 0)])]
    at += [(("epoch", "member-1"), [asked("pause", 1)])]
    at += [(("exited", "member-1"), [asked("cancel", 1), asked("resume", 1)])]
    at += [(("started", "member-2"), [asked("pause", 3), asked("cancel", 3)])]
    state = perform(path, an_ensemble(epochs=4), *at, executor=Simulated())
    assert list(states(state).values()) == ["cancelled", "cancelled", "finished", "cancelled"]
    assert ("resume", False, "member-1 has ended already (cancelled)") in answers(path)


def test_a_failed_member_that_is_paused_waits_with_its_retry(tmp_path: Path) -> None:
    path = tmp_path / "run"
    at = (("failed", "member-0"), [asked("pause", 0)]), (("finished", "member-1"), [asked("resume", 0)])
    executor = Simulated(1, faults={("member-0", 0): "error"})
    assert is_finished(perform(path, an_ensemble(), *at, executor=executor))
    order = [("failed", "member-0"), ("paused", "member-0"), ("finished", "member-1")]
    assert of_kind(path, "failed", "paused", "resumed", "finished")[:3] == order


def test_no_trial_is_proposed_while_all_are_paused(tmp_path: Path) -> None:
    path, known = tmp_path / "run", []

    def watch(executor: Simulated) -> None:
        known.append(len(fold(read_events(RunDir(path).events)).members))
        if len(known) == 3:
            write_request(path, "resume")

    search = Search({"lr": uniform(0, 1)}, trials=6, sampler="random", pruner="none")
    script = Script(path, (("epoch", "member-0"), [asked("pause")]))
    state = run(path, an_ensemble(search=search, sharing="node"), Simulated(before=script, idle=watch))
    assert len(set(known[:3])) == 1 and known[0] < 6
    assert len(state.members) == 6 and set(states(state).values()) == {"finished"}


def test_what_cannot_be_done_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "run"
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("pause", {"member": "member-9"}, "there is no member 'member-9'"),
        ("resume", {"member": "member-3"}, "member-3 is not paused"),
        ("resume", {}, "nothing is paused"),
        ("pause", {"member": "member-0"}, "member-0 has ended already (finished)"),
        ("paws", {}, "there is no request 'paws' (valid: stop, cancel, pause, resume, add)"),
        ("add", {"declared": {"params": {"n": 1}, "workers": 64}}, "64 workers"),
        ("add", {"declared": {"params": {"n": 1}, "epochs": 0}}, "Member.epochs must be at least 1"),
        ("add", {"declared": {"params": {"n": 1}, "epoks": 1}}, "epoks"),
        ("add", {}, ""),
    ]
    asks = [(verb, fields) for verb, fields, _ in refused]
    state = perform(path, an_ensemble(), (("exited", "member-0"), asks))
    assert len(state.members) == 4 and is_finished(state)
    told = answers(path)
    assert len(told) == len(refused) and not any(done for _, done, _ in told)
    for verb, _, said in refused:
        assert any(verb == told_of and said in why for told_of, _, why in told), said


def test_a_member_is_added_to_the_stream_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "run"
    at = (("epoch", "member-0"), [asked("add", declared={"params": {"n": 9}, "epochs": 1})])
    declared = an_ensemble(members=[{"n": 0}, {"n": 1}], epochs=6, sharing="node")
    state = perform(path, declared, at, executor=Simulated(3))
    added = state.members["member-2"]
    assert (added.state, added.params, added.first_epoch) == ("finished", {"n": 9}, 5)
    assert added.spans[0].cohort == 0
    assert answers(path) == [("add", True, "member-2 is waiting")]


def test_a_member_added_as_the_last_one_ends_is_taken(tmp_path: Path) -> None:
    at = (("exited", "member-0"), [asked("add", declared={"params": {"n": 9}})])
    state = perform(tmp_path / "run", an_ensemble(members=[{"n": 0}], retries=0), at)
    assert states(state) == {"member-0": "finished", "member-1": "finished"}


def test_trials_are_added_to_a_search_and_those_from_outside_its_space_teach_it_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    search = Search({"lr": uniform(0, 1)}, trials=3, sampler="tpe", pruner="median")
    ask = [asked("add", declared={"params": {"lr": lr}}) for lr in (0.5, 7.0)]
    executor = Simulated(before=Script(path, (("epoch", "member-0"), [*ask, asked("stop")])))
    state = run(path, an_ensemble(search=search, epochs=3, sharing="node"), executor)
    added = {m.params["lr"]: m for m in state.members.values() if m.identity["added"]}
    assert set(added) == {0.5, 7.0}
    said = {words for _, done, words in answers(path) if done}
    outside = "the search does not learn from it: lr=7.0 is outside uniform(0, 1)"
    assert {f"{added[0.5].id} is waiting", f"{added[7.0].id} is waiting; {outside}"} <= said
    state = run(path, an_ensemble(search=search, epochs=3, sharing="node"), Simulated(after=executor))
    assert len(state.members) == 5, "on top of the three that were to be proposed"
    assert set(states(state).values()) <= {"finished", "pruned"}
    assert state.members[added[7.0].id].state == "finished", "nobody judges it"
