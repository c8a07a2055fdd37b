"""Runs whose members' files are packed: all that is done with a run is done as before."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "executors"))
from event_dicts import fold, read_events
from execute_members import loss, momentum, samples
from leftovers import wait_until

import ensemble
from ensemble import Ensemble, Member, Recipe, Resources
from ensemble.cli.parser import main
from ensemble.controller import session_state
from ensemble.inspection import load_predictions
from ensemble.inspection.run_contents import find_foreign_files, list_contents
from ensemble.reporting.dashboard.member_log import read_chunk
from ensemble.store import RunDir, RunState
from ensemble.store.packs import measure, remove_packed, write_packs
from ensemble.store.verification import verify

MEMBERS, EPOCHS = 5, 2


def model(params: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


def train(run_dir: Path, keep: str = "all", start: Path | None = None, on_event: Any = None) -> RunState:
    declared = Ensemble(
        name="packed",
        recipe=Recipe(model=model, optimizer=momentum, loss=loss),
        members=[Member({"lr": 0.1 / (1 + number)}, start=None if number else start) for number in range(MEMBERS)],
        train=samples(96, 0),
        valid=samples(48, 1),
        keep_checkpoints=keep,
        combine="greedy",
        epochs=EPOCHS,
        resources=Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=1.0),
    )
    ensemble.submit(declared, run_dir, "inline", on_event=on_event).wait()
    return state_of(run_dir)


def state_of(run_dir: Path) -> RunState:
    return fold(read_events(run_dir / "events.jsonl"))


def predict(run_dir: Path) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(ensemble.load(run_dir)({"x": torch.linspace(-1, 1, 20).reshape(5, 4)}))


def list_members(run_dir: Path) -> list[str]:
    """The directories of members that are there."""
    return sorted(path.name for path in (run_dir / "members").iterdir())


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_state, "MANY", 2)


@pytest.mark.parametrize(
    "keep", ["selected", *(pytest.param(each, marks=pytest.mark.more) for each in ("all", "weights"))]
)
def test_a_packed_run_is_the_same_run(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, run_dir = tmp_path / "plain", tmp_path / "packed"
    train(plain, keep)
    monkeypatch.setattr(session_state, "MANY", 2)
    state = train(run_dir, keep)
    assert len(list_members(plain)) == MEMBERS and list_members(run_dir) == []
    assert all(member.is_packed for member in state.members.values())
    assert np.array_equal(predict(run_dir), predict(plain))
    found = verify(RunDir(run_dir))
    assert all(each.is_sound for each in found) and {"pack", "checkpoint", "predictions"} <= {
        e.kind for e in found
    }
    saved = load_predictions(run_dir, "valid", member="member-1")
    assert np.array_equal(saved.values, load_predictions(plain, "valid", member="member-1").values)
    assert find_foreign_files(RunDir(run_dir)) == []
    assert any(
        row["file"].startswith("packs/") and "not known" not in row["holds"]
        for row in list_contents(RunDir(run_dir))
    )
    chunk = read_chunk(RunDir(run_dir), "member-3", None)
    assert chunk is not None and "finished" in chunk.text
    assert main(["logs", str(run_dir), "member-3"]) == 0 and "finished" in capsys.readouterr().out


def test_packed_members_go_on_with_more_epochs_and_keep_their_logs(tmp_path: Path, few_are_many: None) -> None:
    run_dir = tmp_path / "run"
    train(run_dir)
    ensemble.resume(run_dir, "inline", epochs=EPOCHS + 1).wait()
    state, log = state_of(run_dir), ensemble.attach(run_dir).logs("member-2")
    assert {member.epoch for member in state.members.values()} == {EPOCHS + 1}
    assert log.count("epoch epoch=") == EPOCHS + 1, log
    assert list_members(run_dir) == [] and all(each.is_sound for each in verify(RunDir(run_dir)))
    assert len(list((run_dir / "packs").iterdir())) == len(state.packs) > 2


def test_what_is_damaged_in_a_pack_is_said_and_made_again(
    tmp_path: Path, few_are_many: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(run_dir)
    before, path = predict(run_dir), sorted((run_dir / "packs").iterdir())[0]
    with zipfile.ZipFile(path) as archive:
        entry = next(each for each in archive.infolist() if "predictions-valid" in each.filename)
    member = entry.filename.partition("/")[0]
    content = bytearray(path.read_bytes())
    content[entry.header_offset + 90] ^= 255
    path.write_bytes(content)
    assert main(["verify", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert "predictions" in said and member in said
    assert main(["resume", str(run_dir)]) == 0
    assert np.array_equal(predict(run_dir), before)
    assert measure(RunDir(run_dir).predictions(member, "valid")) is not None


@pytest.mark.more
def test_less_is_kept_of_packed_checkpoints_after_another_start(tmp_path: Path, few_are_many: None) -> None:
    run_dir = tmp_path / "run"
    train(run_dir)
    before = predict(run_dir)
    state = train(run_dir, "weights")
    assert all(member.has_weights_only and member.is_packed for member in state.members.values())
    assert list_members(run_dir) == [] and np.array_equal(predict(run_dir), before)
    assert all(each.is_sound for each in verify(RunDir(run_dir)))


@pytest.mark.more
def test_members_start_with_packed_weights_and_are_cloned_when_theirs_are_packed(
    tmp_path: Path, few_are_many: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.controller.controller.TICK_S", 0.0)
    parent = RunDir(tmp_path / "parent")
    start = parent.valid_checkpoint(train(parent.path).members["member-0"])
    assert not start.exists()
    run = RunDir(tmp_path / "run")

    def clone(event: dict[str, Any]) -> None:
        if (event["type"], event.get("member")) == ("started", "member-4"):
            wait_until(lambda: (run.path / "packs/000001.zip").exists(), "a pack")
        elif event["type"] == "packed" and "member-0" in event["members"]:
            ensemble.attach(run.path).clone("member-0", {"lr": 0.2})

    members = train(run.path, start=start, on_event=clone).members
    assert {member.state for member in members.values()} == {"finished"} and len(members) == MEMBERS + 1
    begun, cloned = (members[name].identity["lineage"] for name in ("member-0", "member-5"))
    assert begun["weights_sha256"] == cloned["weights_sha256"] and begun["from"] == str(start)


@pytest.mark.more
def test_a_pack_that_the_log_has_lost_is_named_anew(tmp_path: Path, few_are_many: None) -> None:
    run_dir = tmp_path / "run"
    state, log = train(run_dir), run_dir / "events.jsonl"
    before = predict(run_dir)
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if json.loads(line)["type"] == "packed")
    lines[at] = b"\0" * (len(lines[at]) - 1) + b"\n"
    log.write_bytes(b"".join(lines))
    (run_dir / "snapshot.msgpack").unlink(missing_ok=True)
    lost = state_of(run_dir)
    assert lost.packs != state.packs and not lost.members["member-0"].is_packed
    ensemble.resume(run_dir, "inline").wait()
    now = state_of(run_dir)
    assert now.packs == state.packs and all(member.is_packed for member in now.members.values())
    assert np.array_equal(predict(run_dir), before)
    assert not [each for each in verify(RunDir(run_dir)) if each.kind != "log" and not each.is_sound]


@pytest.mark.more
def test_the_last_line_of_a_packed_log_is_shown_though_it_has_no_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.member("member-0").mkdir(parents=True)
    run.log("member-0").write_text("a line\nkilled he")
    for _, _, files, _ in write_packs(run.path, ["member-0"]):
        remove_packed(files)
    lines = read_chunk(run, "member-0", None, whole_lines=True)
    rest = read_chunk(run, "member-0", lines.end if lines else 0, whole_lines=True)
    assert lines and rest and (lines.text, rest.text) == ("a line\n", "killed he")


def test_a_torn_pack_is_of_the_run_and_is_removed_by_the_next_start(tmp_path: Path, few_are_many: None) -> None:
    run_dir = tmp_path / "run"
    train(run_dir)
    torn = run_dir / "packs" / f".000009.zip.{'0' * 32}.tmp"
    torn.write_bytes(b"PK")
    assert find_foreign_files(RunDir(run_dir)) == []
    ensemble.resume(run_dir, "inline").wait()
    assert not torn.exists()


def test_a_run_of_few_members_has_no_packs(tmp_path: Path) -> None:
    state = train(tmp_path / "run")
    assert not (tmp_path / "run" / "packs").exists() and not state.packs
