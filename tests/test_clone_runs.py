"""Clones of real members: the weights that they start with, and that nothing changes those that they end with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import optuna
import pytest
from kit.checkpoints import newest_checkpoint
from kit.execute_members import an_ensemble, faulty_model, loss, momentum
from kit.finished_runs import of_kind, read_state

import ensemble
from ensemble import Member, Recipe, Search, SpecError, uniform
from ensemble.store import RunDir, RunState, load_checkpoint, weights_sha256

pytestmark = pytest.mark.usefixtures("requests_are_seen_at_once", "no_report")
WIDE = {"lr": 0.1, "width": 8}


def make(members: list[Any], **options: Any) -> ensemble.Ensemble:
    recipe = Recipe(model=faulty_model, loss=loss, task="classification", optimizer=momentum)
    return an_ensemble(members, **{"recipe": recipe, "sharing": "independent", **options})


def run_inline(path: Path, made: ensemble.Ensemble, asks: dict[Any, Any], **options: Any) -> RunState:
    """Run in this process; `asks` has what to call with the run at the first event of a kind and a member."""

    def on_event(event: dict[str, Any]) -> None:
        ask = asks.pop((event["type"], event.get("member")), None)
        if ask is not None:
            ask(ensemble.attach(path))

    ensemble.submit(made, path, "inline", on_event=on_event, **options).wait()
    return read_state(path)


def answers(path: Path) -> list[tuple[bool, str]]:
    return [(event["done"], event["message"]) for event in of_kind(path, "request")]


def test_a_warm_clone_that_learns_nothing_ends_with_the_weights_it_began_with(tmp_path: Path) -> None:
    """Its parent goes on and replaces the checkpoint; at a learning rate of 0 what was loaded is left."""
    path, frozen = tmp_path, Member({"lr": 0.0}, seed=99)
    ask = {("checkpoint", "member-0"): lambda run: run.clone("member-0", frozen, warm=True)}
    parent, cloned = run_inline(path, make([{"lr": 0.1}], epochs=3), ask).members.values()
    lineage = cloned.identity["lineage"]
    place = lineage["epoch"], lineage["step"]
    checkpoints = of_kind(path, "checkpoint", "member-0")
    (checkpoint,) = [event for event in checkpoints if (event["epoch"], event["step"]) == place]
    assert lineage["weights_sha256"] == checkpoint["weights_sha256"] == cloned.weights_sha256
    assert (lineage["from"], lineage["warm"], lineage["code"]) == ("member-0", True, None)
    assert f"it starts with the weights of member-0 after {place[0]} epoch" in answers(path)[0][1]
    assert parent.state == "finished" and parent.weights_sha256 != cloned.weights_sha256
    assert "starts with the weights of member-0 at epoch" in RunDir(path).log("member-1").read_text()
    (row,) = [row for row in ensemble.attach(path).status() if "lineage" in row]
    assert row["member"] == "member-1" and row["lineage"] == lineage


def test_a_clone_that_is_stopped_ends_with_the_same_bits_without_its_parent(tmp_path: Path) -> None:
    def clone(run: ensemble.Run) -> None:
        for warm in (True, True, False):
            run.clone("member-0", Member({"lr": 0.05}, epochs=3), warm=warm)

    asks = {("finished", "member-0"): clone, ("started", "member-2"): ensemble.Run.stop}
    state = run_inline(tmp_path, make([WIDE]), asks)
    assert state.members["member-2"].state == "stopped"
    shutil.rmtree(RunDir(tmp_path).member("member-0"))
    ensemble.resume(tmp_path).wait()
    _, *clones = read_state(tmp_path).members.values()
    assert {clone.state for clone in clones} == {"finished"} and clones[1].attempts == 2
    first, stopped, cold = (clone.weights_sha256 for clone in clones)
    assert first == stopped != cold
    kept = RunDir(tmp_path).initial_weights("member-2")
    lineage = clones[1].identity["lineage"]
    assert weights_sha256(load_checkpoint(kept)["model"]) == lineage["weights_sha256"]
    assert lineage == clones[0].identity["lineage"] and lineage["epoch"] == 2


def test_what_does_not_fit_fails_at_once_for_good_and_names_what_differs(tmp_path: Path) -> None:
    ask = {("finished", "member-0"): lambda run: run.clone("member-0", {"width": 9}, warm=True)}
    state = run_inline(tmp_path, make([WIDE, {"lr": 0.1}]), ask)
    failed = state.members["member-2"]
    assert (failed.state, failed.reason, failed.attempts) == ("failed", "impossible", 1)
    assert failed.error is not None and "0.weight is [9, 4], in member-0 [8, 4]" in failed.error
    assert "1.bias is [9], in member-0 [8]; and 3 more." in failed.error
    assert read_state(tmp_path).members["member-1"].state == "finished"
    ensemble.resume(tmp_path).wait()
    assert read_state(tmp_path).members["member-2"].attempts == 1


@pytest.mark.more
def test_one_without_a_checkpoint_is_no_start_and_one_that_failed_later_is(tmp_path: Path) -> None:
    def clone(number: int) -> Any:
        return lambda run: run.clone(f"member-{number}", {"fault": "none"}, warm=True)

    fault = {"lr": 0.1, "fault": "nan"}
    asks = {("started", "member-0"): clone(0), ("failed", "member-1"): clone(1), ("failed", "member-2"): clone(2)}
    state = run_inline(tmp_path, make([{"lr": 0.1, "fault": "none"}, fault, fault | {"after": 8}]), asks)
    why = "no clone can start with the weights of {}: it has no checkpoint ({})"
    assert answers(tmp_path) == [
        (False, why.format("member-0", "running") + "; a pause makes it write one"),
        (False, why.format("member-1", "failed")),
        (True, "member-3 is waiting; it starts with the weights of member-2 after 1 epoch"),
    ]
    assert [member.state for member in state.members.values()] == ["finished", "failed", "failed", "finished"]
    assert state.members["member-2"].reason == "nan"


def test_a_clone_needs_no_change_to_start_warm_and_a_damaged_checkpoint_starts_none(tmp_path: Path) -> None:
    def damage(run: ensemble.Run) -> None:
        checkpoint = newest_checkpoint(RunDir(tmp_path), "member-0", 0)
        assert checkpoint is not None
        checkpoint.write_bytes(b"nothing")
        run.clone("member-0", warm=True)
        run.clone("member-0", {"lr": 0.2})

    asks = {("finished", "member-0"): lambda run: run.clone("member-0", warm=True)}
    state = run_inline(tmp_path, make([WIDE]), {**asks, ("finished", "member-1"): damage})
    (first, why), (second, _), (third, _) = sorted(answers(tmp_path), key=lambda each: "damaged" not in each[1])
    assert (first, second, third) == (False, True, True) and "is damaged" in why
    with pytest.raises(SpecError, match="did you mean 'member-0'"):
        ensemble.attach(tmp_path).clone("member-00", warm=True)
    cloned = state.members["member-1"]
    assert cloned.weights_sha256 != state.members["member-0"].weights_sha256, "two epochs more"
    assert list(state.members) == ["member-0", "member-1", "member-2"], "what was refused took no number"


def train(member: Any) -> None:
    """A training loop of the user's own."""
    import torch

    model = faulty_model(member.params)
    model, _ = member.prepare(model, momentum(model, member.params))
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none"))
            member.step()
        member.report(accuracy=0.5)


@pytest.mark.more
def test_a_train_functions_model_is_given_the_weights_when_it_is_prepared(tmp_path: Path) -> None:
    ask = {("finished", "member-0"): lambda run: run.clone("member-0", {"lr": 0.0}, warm=True)}
    state = run_inline(tmp_path, make([{"lr": 0.1}], recipe=train), ask)
    parent, cloned = state.members.values()
    assert parent.weights_sha256 == cloned.weights_sha256 is not None and cloned.epoch == 2


def test_a_clone_for_which_there_is_no_room_takes_its_number_with_it(tmp_path: Path) -> None:
    """Its number was used, so no later member gets it, and a resume counts on after it."""
    path = tmp_path / "run"
    in_the_way = RunDir(path).member("member-1")

    def clone(run: ensemble.Run) -> None:
        in_the_way.write_text("a file where its directory would be")
        run.clone("member-0", {"lr": 0.2}, warm=True)
        run.clone("member-0", {"lr": 0.2})
        run.stop()

    again = {("finished", "member-2"): lambda run: run.clone("member-0", {"lr": 0.05}, warm=True)}
    made = make([{"lr": 0.1}])
    run_inline(path, made, {("finished", "member-0"): clone})
    assert answers(path)[0][0] is False and "cannot write" in answers(path)[0][1]
    assert not [each for each in (path / "members").iterdir() if each.name.startswith(".")]
    state = run_inline(path, made, again)
    assert list(state.members) == ["member-0", "member-2", "member-3"]
    assert {member.state for member in state.members.values()} == {"finished"}


@pytest.mark.more
def test_weights_of_other_code_are_said(tmp_path: Path) -> None:
    def other_loss(model: Any, batch: Any) -> Any:
        return 2.0 * loss(model, batch)

    members = [WIDE | {"step_s": 0.01}]
    before = run_inline(tmp_path, make(members, epochs=4), {("checkpoint", "member-0"): ensemble.Run.stop})
    changed = Recipe(model=faulty_model, loss=other_loss, task="classification", optimizer=momentum)
    ask = {("started", "member-0"): lambda run: run.clone("member-0", {"lr": 0.2}, warm=True)}
    state = run_inline(tmp_path, make(members, epochs=4, recipe=changed), ask, accept_code=True)
    assert state.members["member-1"].state == "finished"
    assert state.members["member-1"].identity["lineage"]["code"] == before.header.code != state.header.code
    assert "trained with other code than the run has now" in answers(tmp_path)[-1][1]


def test_a_search_does_not_learn_from_a_warm_clone_and_the_study_says_why(tmp_path: Path) -> None:
    search = Search({"lr": uniform(0.01, 0.2), "width": 8}, trials=2, sampler="random", pruner="none")
    ask = {("finished", "member-0"): lambda run: run.clone("member-0", {"lr": 0.15}, warm=True)}
    state = run_inline(tmp_path, make([], search=search), ask)
    (cloned,) = [member for member in state.members.values() if member.identity["added"]]
    assert cloned.state == "finished"
    assert cloned.identity["outside"] == "it starts with the weights of another member"
    backend = optuna.storages.journal.JournalFileBackend(str(RunDir(tmp_path).journal))
    study = optuna.load_study(study_name="executed", storage=optuna.storages.JournalStorage(backend))
    trial = study.trials[cloned.number]
    assert trial.state.name == "FAIL" and trial.user_attrs["lineage"] == cloned.identity["lineage"]
    assert len(state.members) == 3, "on top of the trials"
