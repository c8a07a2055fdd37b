"""Library settings of a run, such as torch's default dtype: all that computes for it has them, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit.event_dicts import fold, read_events
from kit.finished_runs import read_state

import ensemble
from ensemble.spec import Ensemble, Recipe
from ensemble.store import RunDir, read_predictions
from pipelines import Pipeline
from pipelines.environment.library_settings import keep_settings
from pipelines.sources import arrays

VALUES = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
DOUBLE = {"torch.set_default_dtype": "torch.float64"}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype) @ torch.eye(4))


def loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def take_default_dtype(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": torch.tensor(sample["x"].tolist()).numpy()}


def declare(*, has_stage: bool = True) -> Ensemble:
    halves = arrays(x=VALUES, label=(VALUES[:, 0] > 0).astype(int)).split(0.5)
    train, valid = (Pipeline(half).map(take_default_dtype) if has_stage else Pipeline(half) for half in halves)
    options: dict[str, Any] = {"batch_size": 16, "calibrate": False, "members": [{"lr": 0.1}, {"lr": 0.2}]}
    recipe = Recipe(model=lambda params: Net(), loss=loss)
    return Ensemble(name="settings", recipe=recipe, train=train, valid=valid, **options)


@pytest.fixture(autouse=True)
def _settings_are_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A framework that another test of this process has used may have made torch deterministic."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    with keep_settings():
        torch.use_deterministic_algorithms(False)
        yield


def check_finished(state: Any) -> None:
    assert {member.state for member in state.members.values()} == {"finished"}
    assert torch.get_default_dtype() == torch.float32


def run_in(dtype: torch.dtype, path: Path, executor: str = "inline", *, has_stage: bool = True) -> None:
    with keep_settings():
        torch.set_default_dtype(dtype)
        run = ensemble.submit(declare(has_stage=has_stage), path, executor, accept_code=True)
    run.wait()
    check_finished(run.state)


def check_predictions(path: Path, dtype: torch.dtype) -> None:
    run = RunDir(path)
    saved = read_predictions(run, fold(read_events(run.events)).members["member-0"], "valid")
    model = ensemble.load(path, members=["member-0"], combine="average")
    assert {each.dtype for each in model.parameters()} == {dtype} and torch.get_default_dtype() == torch.float32
    source = declare().valid.source
    predicted = model({"x": torch.tensor(np.array([source[index]["x"] for index in saved.index]))})
    torch.testing.assert_close(predicted, torch.from_numpy(saved.values).float(), rtol=1e-6, atol=1e-7)
    assert torch.get_default_dtype() == torch.float32


def test_an_inline_run_has_its_settings_and_the_process_keeps_its_own(tmp_path: Path) -> None:
    for name, dtype in {"double": torch.float64, "single": torch.float32}.items():
        run_in(dtype, tmp_path / name)
        RunDir(tmp_path / name).load_ensemble()
        check_predictions(tmp_path / name, dtype)
        run = ensemble.resume(tmp_path / name, "inline", epochs=2)
        thread = threading.Thread(target=run.wait)
        thread.start()
        thread.join()
        check_finished(run.state)
        check_predictions(tmp_path / name, dtype)
    assert [read_state(tmp_path / name).header.settings for name in ("double", "single")] == [DOUBLE, {}]


@pytest.mark.more
def test_members_that_were_trained_with_other_settings_are_loaded_with_these(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float32):  # in which no sample is made: the data are the same
        run_in(dtype, tmp_path / "run", has_stage=False)
    assert read_state(tmp_path / "run").header.settings == {}
    check_predictions(tmp_path / "run", torch.float64)


@pytest.mark.more
def test_a_feeder_has_the_settings_of_the_run_whatever_the_process_has_that_drives_it(tmp_path: Path) -> None:
    run_in(torch.float64, tmp_path, "local")
    run = ensemble.resume(tmp_path, "local", epochs=2)
    run.wait()
    check_finished(run.state)
    epochs = [event for event in read_events(tmp_path / "events.jsonl") if event["type"] == "epoch"]
    assert len(epochs) == 4 and all(event["shared_batches"] for event in epochs)
    check_predictions(tmp_path, torch.float64)
