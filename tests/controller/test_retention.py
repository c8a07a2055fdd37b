"""What is kept of the checkpoints of members that have ended, and what that takes away."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ensemble.events import Checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "executors"))
from kit.event_dicts import fold, read_events
from kit.execute_members import loss, momentum, samples

import ensemble
from ensemble import EarlyStopping, Ensemble, Member, Recipe, Resources, Search, uniform
from ensemble.cli.parser import main
from ensemble.combine.metrics import CombineError
from ensemble.controller import performer
from ensemble.controller.actions import ReduceCheckpoint
from ensemble.controller.retention import CheckpointReducer, list_unselected, plan_reduction
from ensemble.controller.session_state import SessionState
from ensemble.store import MemberState, RunDir, RunState, StoreError, load_checkpoint, load_predictions
from ensemble.store.verification import verify

EPOCHS = 3
# Weights that count are those in training, or those of the best epoch.
WHICH: dict[str, dict[str, Any]] = {"last": {}, "best": {"keep": "best", "early_stopping": EarlyStopping(1)}}


@pytest.fixture(autouse=True)
def _no_report_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    report = "ensemble.reporting.report.write_report"
    monkeypatch.setattr(report, lambda run, events: run.report.write_text("none"))


def model(params: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def declare(keep_checkpoints: str = "all", **options: Any) -> Ensemble:
    usual: dict[str, Any] = {} if "search" in options else {"members": [{"lr": lr} for lr in (0.1, 0.001, 0.0)]}
    return Ensemble(
        name="kept",
        recipe=Recipe(model=model, optimizer=momentum, loss=loss, task="classification"),
        train=samples(96, 0),
        valid=samples(48, 1),
        **{"epochs": EPOCHS, "keep_checkpoints": keep_checkpoints, "combine": "greedy", **usual, **options},
        resources=Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=1.0),
    )


def train(
    run_dir: Path, *args: Any, on_event: Callable[[dict[str, Any]], None] | None = None, **options: Any
) -> RunState:
    ensemble.submit(declare(*args, **options), run_dir, "inline", on_event=on_event).wait()
    return state_of(run_dir)


def state_of(run_dir: Path) -> RunState:
    return fold(read_events(run_dir / "events.jsonl"))


def count(run_dir: Path, kind: str) -> int:
    return sum(event["type"] == kind for event in read_events(run_dir / "events.jsonl"))


def list_files(run_dir: Path) -> dict[str, Path]:
    """The checkpoint of each member that has one; all have one at most."""
    found = list(run_dir.glob("members/*/checkpoint*"))
    assert len({path.parent for path in found}) == len(found)
    return {path.parent.name: path for path in sorted(found)}


def predict(run_dir: Path) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(ensemble.load(run_dir)({"x": torch.linspace(-1, 1, 20).reshape(5, 4)}))


def is_sound(run_dir: Path) -> bool:
    return all(found.is_sound for found in verify(RunDir(run_dir)))


@pytest.mark.parametrize("which", WHICH)
def test_weights_alone_are_not_trained_further(which: str, tmp_path: Path, capsys: Any) -> None:
    whole, reduced = tmp_path / "all", tmp_path / "weights"
    before, after = train(whole, **WHICH[which]), train(reduced, "weights", **WHICH[which])
    for member, path in list_files(reduced).items():
        state, other = load_checkpoint(path), load_checkpoint(list_files(whole)[member])
        assert not {"optimizer", "schedule"} & state.keys()
        assert path.stat().st_size < list_files(whole)[member].stat().st_size
        assert all(torch.equal(state["model"][name], other["model"][name]) for name in other["model"])
        assert after.members[member].weights_sha256 == before.members[member].weights_sha256
    assert len(list_files(reduced)) == 3 and is_sound(reduced)
    assert np.array_equal(predict(reduced), predict(whole))
    # Predictions that are damaged are made again, without training.
    path = RunDir(reduced).predictions("member-0")
    values, epochs = load_predictions(path, "valid").values, count(reduced, "epoch")
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["resume", str(reduced)]) == 0, capsys.readouterr()
    assert np.array_equal(load_predictions(path, "valid").values, values) and count(reduced, "epoch") == epochs
    assert is_sound(reduced) and "optimizer" not in load_checkpoint(list_files(reduced)["member-0"])
    assert "nothing was averaged" not in RunDir(reduced).log("member-0").read_text()
    kept, expected = ([m.kept for m in state.members.values()] for state in (state_of(reduced), before))
    assert kept == expected
    if which == "last":
        said = "member-0 cannot be trained further: the state of its optimizer was not kept"
        with pytest.raises(StoreError, match=said):
            ensemble.resume(reduced, "inline", epochs=EPOCHS + 1)
        assert count(reduced, "epoch") == epochs
        ensemble.resume(whole, "inline", epochs=EPOCHS + 1).wait()
        assert count(whole, "epoch") == 3 * (EPOCHS + 1)


def test_only_what_the_combination_has_selected_and_the_best_is_kept(tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "selected", tmp_path / "all"
    options: dict[str, Any] = {"search": Search({"lr": uniform(0.0, 0.3)}, trials=8, pruner="median"), "epochs": 5}
    state, reference = train(run_dir, "selected", **options), train(whole, **options)
    assert state.combined is not None and reference.combined is not None
    assert state.combined.weights == reference.combined.weights
    states = [member.state for member in state.members.values()]
    assert {*states} == {"finished", "pruned"}
    needed = {*state.combined.members, state.combined.best_member}
    assert set(list_files(run_dir)) == needed != {m.id for m in state.members.values() if m.state == "finished"}
    assert is_sound(run_dir) and np.array_equal(predict(run_dir), predict(whole))
    gone = next(m.id for m in state.members.values() if m.state == "finished" and m.id not in needed)
    with pytest.raises(CombineError, match=f"{gone}: its checkpoint was removed"):
        ensemble.load(run_dir, combine="average", members=[gone])
    with pytest.raises(StoreError, match=f"{gone}: its checkpoint was removed"):
        train(tmp_path / "other", members=[Member({"lr": 0.1}, start=f"{run_dir}/{gone}")])
    # Nothing is trained again for predictions that nobody needs; the same members are combined.
    path = RunDir(run_dir).predictions(gone)
    path.write_bytes(path.read_bytes()[:-5])
    epochs = count(run_dir, "epoch")
    assert main(["resume", str(run_dir)]) == 0
    after = state_of(run_dir)
    assert count(run_dir, "epoch") == epochs and after.combined is not None
    assert after.combined.weights == state.combined.weights and is_sound(run_dir)
    assert after.combined.left_out[gone].startswith("its checkpoint was removed")


@pytest.mark.parametrize("logged", [False, True])
def test_a_kill_during_a_reduction_loses_nothing(logged: bool, tmp_path: Path, monkeypatch: Any) -> None:
    expected, run_dir = train(tmp_path / "all"), tmp_path / "run"

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "checkpoint_reduced":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if not logged:
            patched.setattr(SessionState, "end_reduction", lambda state, event: stop(event))
        with pytest.raises(KeyboardInterrupt):
            train(run_dir, "weights", on_event=stop if logged else None)
    assert len(list(run_dir.glob("members/member-0/checkpoint*"))) == 2, "the old one and the new one"
    assert is_sound(run_dir)
    state = train(run_dir, "weights")
    trained = [e["member"] for e in read_events(run_dir / "events.jsonl") if e["type"] == "epoch"]
    assert trained.count("member-0") == EPOCHS, "it is not trained again"
    weights, undisturbed = ([m.weights_sha256 for m in each.members.values()] for each in (state, expected))
    assert weights == undisturbed and is_sound(run_dir)
    assert [path.stem.endswith("-weights") for path in list_files(run_dir).values()] == [True] * 3


def test_a_reduced_checkpoint_is_no_leftover_before_it_is_logged(tmp_path: Path, monkeypatch: Any) -> None:
    class Late(CheckpointReducer):
        def add(self, action: ReduceCheckpoint) -> None:
            super().add(action)
            self._pending[-1].result()

        def read(self) -> list[dict[str, Any]]:
            return super().read() if self._thread is None else []

    monkeypatch.setattr(performer, "CheckpointReducer", Late)
    train(tmp_path / "run", "weights")
    assert len(list_files(tmp_path / "run")) == 3 and is_sound(tmp_path / "run")


def test_a_run_that_has_ended_keeps_less_when_it_is_declared_to(tmp_path: Path) -> None:
    spec, run_dir = tmp_path / "spec.py", tmp_path / "run"
    text = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_retention\n"
    for keep, files in (("all", 3), ("weights", 3), ("selected", 1)):
        spec.write_text(f"{text}def spec():\n    return test_retention.declare({keep!r})\n")
        assert main(["run", str(spec), "--run-dir", str(run_dir), "--executor", "inline"]) == 0
        assert len(list_files(run_dir)) >= files and is_sound(run_dir)
        parts = [load_checkpoint(path).keys() for path in list_files(run_dir).values()]
        assert all(("optimizer" in each) == (keep == "all") for each in parts)
    state = state_of(run_dir)
    assert state.combined is not None
    assert set(list_files(run_dir)) == {*state.combined.members, state.combined.best_member}
    assert count(run_dir, "epoch") == 3 * EPOCHS


ENDED = ("finished", "pruned", "cancelled")
KEPT = [(state, None, keep, keep) for state in ENDED for keep in ("all", "weights")]
KEPT += [("finished", None, "selected", "weights")]  # until it is known what is selected
KEPT += [(state, None, "selected", "nothing") for state in ENDED[1:]]
# A later start may go on with these.
KEPT += [(state, None, "selected", "all") for state in ("waiting", "running", "paused", "stopped")]
KEPT += [("failed", reason, "selected", "all") for reason in ("nan", "error")]


@pytest.mark.parametrize(("state", "reason", "keep", "kept"), KEPT)
def test_nothing_is_taken_from_who_may_go_on(state: Any, reason: str | None, keep: str, kept: str) -> None:
    member = MemberState("member-0", 0, state=state, reason=reason)
    assert plan_reduction(member, keep) is None, "it has no checkpoint"
    path = "/run/members/member-0/checkpoint-0-1-0.safetensors"
    member.checkpoint = Checkpoint(member="member-0", epoch=1, step=0, path=path, digest="xxh3:0")
    found = plan_reduction(member, keep)
    assert ("all" if found is None else "weights" if found.keeps_weights else "nothing") == kept


@pytest.mark.parametrize(("method", "left"), [("greedy", ["c"]), ("stack", [])])
def test_a_stack_keeps_all_to_which_it_is_fitted_again(method: str, left: list[str]) -> None:
    members: Any = [SimpleNamespace(id=name, state="finished", checkpoint=1, outdated=None) for name in "abc"]
    combined: Any = SimpleNamespace(
        members=["a"], best_member="b", failed=None, method=method, candidates=["a", "c"]
    )
    assert [member.id for member in list_unselected(members, combined)] == left
