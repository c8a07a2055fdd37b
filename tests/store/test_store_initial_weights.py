"""The copy of a checkpoint with which another member starts: whole, its own, and what the log says of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ensemble.events import Checkpoint
from ensemble.store import RunDir, StoreError, keep_checkpoint, load_initial_state, save_checkpoint, weights_sha256
from ensemble.store.file_checks import check_members
from ensemble.store.member import MemberState

#: What the log says of another step.
LOGGED = Checkpoint(member="member-0", path="", epoch=0, step=0)


def a_checkpoint(run_dir: RunDir, value: float) -> dict[str, Any]:
    tied = torch.full((2, 3), value)
    model = {"a.weight": tied, "b.weight": tied, "image": torch.arange(24.0).view(1, 2, 3, 4).permute(0, 2, 3, 1)}
    state = {"position": {"epoch": 4, "step": 7}, "model": model, "optimizer": {"state": {0: torch.ones(9)}}}
    save_checkpoint(run_dir.checkpoint("member-0", 1, 1, 0), state)
    return model


@pytest.mark.parametrize("has_links", [True, False])
def test_a_copy_stays_what_it_was_while_the_checkpoint_is_replaced_and_removed(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    run_dir = RunDir(tmp_path)
    model = a_checkpoint(run_dir, 1.0)
    source = run_dir.checkpoint("member-0", 1, 1, 0)
    keep_checkpoint(run_dir, source, LOGGED).give_to(run_dir, "member-5")  # by a controller that is then killed
    keep_checkpoint(run_dir, source, LOGGED)  # by one that was killed before
    kept = keep_checkpoint(run_dir, source, LOGGED)
    assert (kept.epoch, kept.step, kept.weights_sha256) == (4, 7, weights_sha256(model))
    assert os.path.samefile(kept.path, source) == has_links
    a_checkpoint(run_dir, 2.0)
    kept.give_to(run_dir, "member-5")
    source.unlink()
    found = load_initial_state(run_dir, "member-5", kept.weights_sha256)["model"]
    assert weights_sha256(found) == kept.weights_sha256 and found["a.weight"] is found["b.weight"]
    assert found["image"].stride() == model["image"].stride()
    assert not kept.path.exists() and os.listdir(run_dir.member("member-5")) == ["initial-weights.safetensors"]
    assert sorted(os.listdir(run_dir.path / "members")) == ["member-0", "member-5"]


def test_what_is_no_whole_checkpoint_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    a_checkpoint(run_dir, 1.0)
    source = run_dir.checkpoint("member-0", 1, 1, 0)
    source.write_bytes(source.read_bytes()[:-40])
    with pytest.raises(StoreError, match="damaged"):
        keep_checkpoint(run_dir, source, LOGGED)
    assert os.listdir(run_dir.path / "members") == ["member-0"]


def test_other_weights_than_the_log_names_are_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    a_checkpoint(run_dir, 1.0)
    kept = keep_checkpoint(run_dir, run_dir.checkpoint("member-0", 1, 1, 0), LOGGED)
    kept.give_to(run_dir, "member-5")
    a_checkpoint(run_dir, 2.0)
    lineage = {"warm": True, "weights_sha256": kept.weights_sha256}
    member = MemberState("member-5", 5, identity={"lineage": lineage}, state="stopped")
    assert [each.condition for each in check_members(run_dir, [member])] == ["whole"]
    os.replace(run_dir.checkpoint("member-0", 1, 1, 0), run_dir.initial_weights("member-5"))
    with pytest.raises(StoreError, match="other weights"):
        load_initial_state(run_dir, "member-5", kept.weights_sha256)["model"]
    (found,) = check_members(run_dir, [member])
    assert found.condition == "damaged" and "other weights" in found.detail


@pytest.mark.parametrize(("step", "is_of_the_log"), [(7, True), (6, False)])
def test_the_digest_is_the_logs_if_that_has_the_step(step: int, is_of_the_log: bool, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    model = a_checkpoint(run_dir, 1.0)
    logged = Checkpoint(member="member-0", path="", epoch=4, step=step, weights_sha256="of the log")
    kept = keep_checkpoint(run_dir, run_dir.checkpoint("member-0", 1, 1, 0), logged)
    assert kept.weights_sha256 == ("of the log" if is_of_the_log else weights_sha256(model)) and kept.step == 7
