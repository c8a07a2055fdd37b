"""Predictions that are larger than a member's memory; what fails after the last epoch is repeated alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe, Resources
from ensemble.store import RunDir, fold, load_predictions, read_events
from pipelines import Pipeline, sources

ROW = 2**18  # numbers that are predicted of a sample: 1 MiB


def data(rows: int) -> Pipeline:
    return Pipeline(sources.arrays(x=np.linspace(0, 1, rows, dtype=np.float32)[:, None]))


class Line(nn.Linear):
    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__(1, 1)
        self.fails = params["fails"]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch["x"]) - batch["x"]) ** 2).mean(1)


def predict(model: nn.Module, batch: Any) -> torch.Tensor:
    """Large predictions; a member fails once on the way."""
    marker = Path(os.environ["LARGE_PREDICTIONS"], str(model.fails))
    if model.fails and int(batch["index"][0]) >= 8 and not marker.exists():
        marker.touch()
        if model.fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if model.fails == "abort":  # as saving did: Rust aborts, or panics, where it gets no memory
            from safetensors.numpy import save

            save({"values": np.zeros(2**27, np.uint8)[None].view(np.float32)})
        raise RuntimeError("works at the second try")
    return (model(batch["x"]) + batch["x"]).expand(-1, ROW)


def declare(rows: int, ways: list[str], memory_gb: float) -> Ensemble:
    return Ensemble(
        name="large",
        recipe=Recipe(model=Line, loss=loss, predict=predict, task="free"),
        members=[{"lr": 0.1, "fails": way} for way in ways],
        train=data(32),
        valid=data(rows),
        epochs=2,
        batch_size=4,
        combine="average",
        resources=Resources(cpus_per_worker=0.5, gpus_per_worker=0.0, memory_gb=memory_gb),
    )


@pytest.mark.parametrize("rows", [96, pytest.param(335, marks=pytest.mark.more)])
def test_predictions_larger_than_a_members_memory_are_saved_and_what_fails_then_is_repeated_without_training(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARGE_PREDICTIONS", str(tmp_path))
    ways = ["", "kill", "error", "abort"]
    ensemble.submit(declare(rows, ways, 0.08), tmp_path / "run", "local").wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    members = fold(events).members
    assert {each.id: (each.state, each.attempts) for each in members.values()} == {
        f"member-{number}": ("finished", 2 if way else 1) for number, way in enumerate(ways)
    }
    failed = {event.member: event for event in events if event.type == "failed"}
    assert [failed[f"member-{number}"].reason for number in (1, 2, 3)] == ["lost", "error", "oom"]
    assert "GiB of the machine are free" in failed["member-3"].error
    epochs = [(event.member, event.epoch) for event in events if event.type == "epoch"]
    assert sorted(epochs) == [(member, epoch) for member in sorted(members) for epoch in (0, 1)]
    saved = load_predictions(RunDir(tmp_path / "run").predictions("member-1", "valid"), mapped=True)
    assert saved.values.shape == (rows, ROW) and (saved.index == np.arange(rows)).all()
    assert (saved.values[:, 0] == saved.values[:, -1]).all() and len(np.unique(saved.values[:, 0])) == rows
