"""What is said of a run whose files were deleted or damaged, and what a refused one leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ensemble
from ensemble import Ensemble, Recipe, Resources
from ensemble.spec import SpecError
from ensemble.store import StoreError
from pipelines import Pipeline, sources


def declare(**more: Any) -> Ensemble:
    rng = np.random.default_rng(0)
    train = Pipeline(sources.arrays(x=rng.normal(size=(48, 4)).astype("float32"), y=rng.integers(0, 2, 48)))
    recipe = Recipe(model=lambda params: torch.nn.Linear(4, 2), loss="cross_entropy", inputs=("x",), target="y")
    members = [{"lr": 0.1}, {"lr": 0.2}]
    return Ensemble(
        **{
            "name": "d",
            "train": train,
            "recipe": recipe,
            "members": members,
            "epochs": 2,
            "batch_size": 16,
            **more,
        }
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ensemble.submit(declare(), tmp_path / "run", "inline").wait()
    return tmp_path / "run"


def test_a_member_without_its_checkpoint_is_said_to_start_again(run_dir: Path) -> None:
    for file in (run_dir / "members" / "member-1").glob("checkpoint*"):
        file.unlink()
    command = [sys.executable, "-m", "ensemble.cli", "resume", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("[") and "member-1: " in line]
    assert done.returncode == 0 and len(said) == 1 and "epoch 1" in said[0] and "checkpoint-" in said[0], done


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_run_without_its_log_does_not_begin_anew_in_silence(run_dir: Path, is_emptied: bool) -> None:
    log = run_dir / "events.jsonl"
    log.unlink()
    if is_emptied:
        log.touch()
    before = sorted(run_dir.rglob("*"))
    for begin in (lambda: ensemble.submit(declare(), run_dir, "inline"), lambda: ensemble.resume(run_dir)):
        with pytest.raises(StoreError, match=r"events\.jsonl.*--fresh"):
            begin()
    assert sorted(run_dir.rglob("*")) == before
    assert ensemble.submit(declare(), run_dir, "inline", fresh=True).wait().run_dir != run_dir


@pytest.mark.parametrize("executor", ["inline", "local"])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_refused_declaration_leaves_no_run_directory(tmp_path: Path, executor: str, has_folder: bool) -> None:
    run_dir = tmp_path / "run"
    if has_folder:
        run_dir.mkdir()
    with pytest.raises(SpecError, match=r"memory_gb|GiB"):
        ensemble.submit(declare(resources=Resources(memory_gb=1e6)), run_dir, executor)
    assert run_dir.exists() == has_folder and not list(run_dir.glob("*"))


def test_a_damaged_file_of_a_run_is_said_once(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "ensemble.cli", "resume", str(run_dir)], capture_output=True, text=True
    )
    assert (done.stdout + done.stderr).count("run.json is not used") == 1


@pytest.mark.parametrize("where", ["job", "cache"])
def test_a_run_directory_in_rays_copy_of_a_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    copy = tmp_path / ("copy" if where == "job" else "working_dir_files") / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    if where == "job":
        job = '{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}, "metadata": {}}'
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    with pytest.raises(StoreError, match="--run-dir /abs/path"):
        ensemble.submit(declare(), executor="inline")
    assert not list(copy.iterdir())
    assert ensemble.submit(declare(), tmp_path / "run", "inline").wait().members
