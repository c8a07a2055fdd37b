"""Members that start with declared weights: a file, or a member of another run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from kit.execute_members import an_ensemble, loss, model, momentum
from kit.finished_runs import of_kind, once, read_state

import ensemble
from ensemble import Member, Recipe, Search, uniform
from ensemble.cli.parser import main
from ensemble.store import RunDir, RunState, StoreError, load_checkpoint, weights_sha256

pytestmark = pytest.mark.usefixtures("requests_are_seen_at_once", "no_report")
WIDE = {"lr": 0.0, "width": 8}  # it learns nothing: its parameters are those that it starts with


def make(members: list[Any] | None, **options: Any) -> ensemble.Ensemble:
    recipe = Recipe(model=model, loss=loss, task="classification", optimizer=momentum)
    return an_ensemble(members, **{"recipe": recipe, "sharing": "independent", "epochs": 2, **options})


def train(path: Path, made: ensemble.Ensemble, executor: str = "inline", **options: Any) -> RunState:
    ensemble.submit(made, path, executor, **options).wait()
    return read_state(path)


def weights_of(path: Path, name: str = "member-0") -> dict[str, Any]:
    """What a member ended with, without what training without a learning rate changes."""
    file = RunDir(path).valid_checkpoint(read_state(path).members[name])
    found: dict[str, Any] = load_checkpoint(file, parts=("model",))["model"]
    return {key: value for key, value in found.items() if "running" not in key and "num_batches" not in key}


def save(path: Path, seed: int = 99, **params: Any) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    state = model(params or WIDE).state_dict()
    save_file(state, path)
    return state


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return weights_sha256(found) == weights_sha256({name: expected[name] for name in found})


@pytest.mark.parametrize(
    ("executor", "workers"), [("inline", 1), pytest.param("local", 2, marks=pytest.mark.more)]
)
def test_a_member_starts_with_the_weights_of_a_file_by_digest(executor: str, workers: int, tmp_path: Path) -> None:
    state = save(tmp_path / "weights.safetensors")
    members = [Member(WIDE, start=tmp_path / "weights.safetensors", workers=workers), WIDE]
    run = train(tmp_path / "run", make(members), executor)
    assert same(weights_of(tmp_path / "run"), state)
    assert not same(weights_of(tmp_path / "run", "member-1"), state)
    started, usual = run.members["member-0"], run.members["member-1"]
    expected = {"from": f"{tmp_path}/weights.safetensors", "warm": True, "weights_sha256": weights_sha256(state)}
    assert started.identity["lineage"] == expected | dict.fromkeys(("epoch", "step", "code"))
    assert usual.identity["lineage"] is None
    assert "starts with the weights of" in RunDir(tmp_path / "run").log("member-0").read_text()


def test_a_member_starts_with_the_weights_of_a_member_of_another_run(tmp_path: Path) -> None:
    train(tmp_path / "other", make([{"lr": 0.1, "width": 8}], epochs=3))
    starts = [tmp_path / "other" / below for below in ("member-0", "members/member-0")]
    starts.append(RunDir(tmp_path / "other").valid_checkpoint(read_state(tmp_path / "other").members["member-0"]))
    run = train(tmp_path / "run", make([Member(WIDE, start=start) for start in starts]))
    copies = [RunDir(tmp_path / "run").initial_weights(name) for name in run.members]
    assert not os.path.samefile(copies[2], starts[2]), "no link to a file that somebody may write"
    assert os.path.samefile(copies[1], starts[2]), "a checkpoint of a run is replaced, never written in place"
    for name, member in run.members.items():
        assert same(weights_of(tmp_path / "run", name), weights_of(tmp_path / "other"))
        lineage = member.identity["lineage"]
        assert lineage["weights_sha256"] == read_state(tmp_path / "other").members["member-0"].weights_sha256
        assert name == "member-2" or (lineage["epoch"], lineage["step"]) == (3, 0)


@pytest.mark.parametrize("then", [pytest.param("changed", marks=pytest.mark.more), "removed"])
def test_the_run_keeps_its_own_copy_so_that_a_resume_begins_with_the_same_weights(
    then: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What becomes of the file while the run is stopped, before the member has a checkpoint."""
    file, path = tmp_path / "weights.safetensors", tmp_path / "run"
    state = save(file)
    made = make([WIDE | {"lr": 0.1}, Member(WIDE, start=file)])
    stop = once("started", lambda: ensemble.attach(path).stop())
    assert train(path, made, on_event=stop).members["member-1"].checkpoint is None
    if then == "changed":
        with open(file, "r+b") as opened:  # in place
            opened.seek(-4, os.SEEK_END)
            opened.write(b"\0\0\0\0")
        train(path, made)
        assert f"{file} has other weights now than member-1 started with" in caplog.text
    else:
        file.unlink()
        ensemble.resume(path).wait()
    assert same(weights_of(path, "member-1"), state)
    declared = of_kind(path, "member", "member-1")
    assert {event["lineage"]["weights_sha256"] for event in declared} == {weights_sha256(state)}


def test_two_members_that_start_with_the_same_weights_are_equal_and_a_resume_changes_nothing(
    tmp_path: Path,
) -> None:
    save(tmp_path / "w.safetensors")
    member = Member({"lr": 0.1, "width": 8}, seed=1, start=str(tmp_path / "w.safetensors"))
    other = dataclasses.replace(member, start=None)
    run = train(tmp_path / "run", make([member, member, other], epochs=3))
    first, second, third = (m.weights_sha256 for m in run.members.values())
    assert first == second != third
    path = tmp_path / "stopped"
    train(path, make([member], epochs=3), on_event=once("checkpoint", lambda: ensemble.attach(path).stop()))
    save(tmp_path / "b.safetensors", seed=5)
    for declared in (dataclasses.replace(member, start=str(tmp_path / "b.safetensors")), other):
        with pytest.raises(StoreError, match="member-0 has lineage="):
            ensemble.submit(make([declared], epochs=3), path, "inline")
    ensemble.resume(path).wait()
    assert read_state(path).members["member-0"].weights_sha256 == first


def test_missing_weights_are_refused_before_anything_starts(tmp_path: Path) -> None:
    train(tmp_path / "other", make([WIDE], epochs=1))
    for start, why in (
        ("nothing.safetensors", r"members\[1\]: start='nothing.safetensors' is neither a file of weights"),
        (f"{tmp_path}/other", "is a whole run: name one of its members"),
        (f"{tmp_path}/other/member-7", r"has no member 'member-7'; did you mean 'member-0'"),
    ):
        with pytest.raises(StoreError, match=why):
            ensemble.submit(make([WIDE, Member(WIDE, start=start)]), tmp_path / "run", "inline")
        assert not (tmp_path / "run").exists()


def test_a_started_member_is_added_to_a_run_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    state, path = save(tmp_path / "here" / "w.safetensors"), tmp_path / "run"

    def add() -> None:
        monkeypatch.chdir(tmp_path / "here")
        run = ensemble.attach(path)
        run.add(Member(WIDE, start="w.safetensors"))
        run.add(Member(WIDE, start="absent.safetensors"))
        run.clone("member-0", Member({}, start="w.safetensors"))
        monkeypatch.chdir(tmp_path)

    run = train(path, make([WIDE | {"lr": 0.1}], epochs=3), on_event=once("started", add))
    answers = [(event["done"], event["message"]) for event in of_kind(path, "request")]
    assert [each for each, _ in sorted(answers)] == [False, False, True]
    said = " ".join(text for _, text in answers)
    assert f"it starts with the weights of {tmp_path}/here/w.safetensors" in said
    assert "absent.safetensors' is neither a file of weights" in said and "leave out start= or from=" in said
    assert same(weights_of(path, "member-1"), state)
    assert run.members["member-1"].identity["lineage"]["weights_sha256"] == weights_sha256(state)
    assert main(["status", str(path)]) == 0 and "w.safetensors (warm)" in capsys.readouterr().out


@pytest.mark.more
def test_weights_that_could_not_be_read_are_read_again_by_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the file is mended, and not before; the other members do not wait for that."""
    file, path = tmp_path / "w.safetensors", tmp_path / "run"
    file.write_text("no weights")
    made = make([WIDE, Member(WIDE, start=file)])
    for why in ("is not a safetensors file", "is not a safetensors file", "is neither a file of weights"):
        if "neither" in why:
            file.unlink()
        run = train(path, made)
        states = [(m.state, m.attempts) for m in run.members.values()]
        assert states == [("finished", 1), ("failed", 0)] and why in str(run.members["member-1"].error)
    state = save(file)
    ensemble.resume(path).wait()
    run = read_state(path)
    assert [(m.state, m.attempts) for m in run.members.values()] == [("finished", 1)] * 2
    assert same(weights_of(path, "member-1"), state)
    lineage = run.members["member-1"].identity["lineage"]
    assert lineage["weights_sha256"] == weights_sha256(state) and "has other weights now" not in caplog.text
    file.unlink()
    train(path, made)
    assert read_state(path).members["member-1"].attempts == 1, "the run has its copy"


def test_a_clone_of_a_started_member_starts_with_the_same_weights(tmp_path: Path) -> None:
    """They are the run's copy: the file is gone."""
    file, path = tmp_path / "w.safetensors", tmp_path / "run"
    state = save(file)

    def clone() -> None:
        file.unlink()
        run = ensemble.attach(path)
        run.clone("member-1", {"lr": 0.0})
        run.clone("member-1", Member({"lr": 0.0}, seed=7))

    members = [{"lr": 0.1, "width": 8}, Member(WIDE, start=file)]
    run = train(path, make(members), on_event=once("started", clone, "member-1"))
    assert [member.state for member in run.members.values()] == ["finished"] * 4, of_kind(path, "request")
    parent, *clones = (run.members[f"member-{number}"].identity["lineage"] for number in (1, 2, 3))
    assert clones == [parent] * 2 and parent["from"] == str(file)
    for name in ("member-1", "member-2", "member-3"):
        assert same(weights_of(path, name), state), name


@pytest.mark.more
def test_a_search_learns_nothing_from_a_member_that_was_added_with_weights(tmp_path: Path) -> None:
    save(tmp_path / "w.safetensors")
    member = Member({"lr": 0.1, "width": 8}, start=tmp_path / "w.safetensors")
    add = once("started", lambda: ensemble.attach(tmp_path / "run").add(member))
    search = Search({"lr": uniform(0.1, 0.2), "width": 8}, trials=2, sampler="random")
    run = train(tmp_path / "run", make(None, search=search), on_event=add)
    (added,) = [each for each in run.members.values() if each.identity["added"]]
    assert added.state == "finished" and added.identity["outside"] == "it starts with the declared weights"
