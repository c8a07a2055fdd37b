"""Runs whose members' files are packed: all that is done with a run is done as before."""

from __future__ import annotations

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

import ensemble
from ensemble import Ensemble, Recipe, Resources
from ensemble.cli.parser import main
from ensemble.controller import session_state
from ensemble.inspection import load_predictions
from ensemble.inspection.run_contents import find_foreign_files, list_contents
from ensemble.reporting.dashboard.member_log import read_chunk
from ensemble.store import RunDir, RunState
from ensemble.store.packs import measure
from ensemble.store.verification import verify

MEMBERS, EPOCHS = 5, 2


def model(params: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


def train(run_dir: Path, keep: str = "all", **options: Any) -> RunState:
    declared = Ensemble(
        name="packed",
        recipe=Recipe(model=model, optimizer=momentum, loss=loss),
        members=[{"lr": 0.1 / (1 + number)} for number in range(MEMBERS)],
        train=samples(96, 0),
        valid=samples(48, 1),
        keep_checkpoints=keep,
        combine="greedy",
        epochs=EPOCHS,
        resources=Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=1.0),
        **options,
    )
    ensemble.submit(declared, run_dir, "inline").wait()
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


@pytest.mark.parametrize("keep", ["all", "weights", "selected"])
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
    assert main(["verify", str(run_dir), "--repair"]) == 0
    assert np.array_equal(predict(run_dir), before)
    assert measure(RunDir(run_dir).predictions(member, "valid")) is not None


def test_less_is_kept_of_packed_checkpoints_after_another_start(tmp_path: Path, few_are_many: None) -> None:
    run_dir = tmp_path / "run"
    train(run_dir)
    before = predict(run_dir)
    state = train(run_dir, "weights")
    assert all(member.has_weights_only and member.is_packed for member in state.members.values())
    assert list_members(run_dir) == [] and np.array_equal(predict(run_dir), before)
    assert all(each.is_sound for each in verify(RunDir(run_dir)))


def test_a_run_of_few_members_has_no_packs(tmp_path: Path) -> None:
    state = train(tmp_path / "run")
    assert not (tmp_path / "run" / "packs").exists() and not state.packs
