"""Searches from end to end: trials that share one stream, and write to a storage of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from kit.event_dicts import fold, read_events
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe, Resources, Search, integer, loguniform
from pipelines import Pipeline, sources

SAMPLES, BATCH, SIZE = 96, 32, 16
SPACE = {"lr": loguniform(1e-3, 1.0), "width": integer(4, 32)}


def model(params: dict[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, params["width"]), nn.ReLU(), nn.Linear(params["width"], 4))


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + rng.normal(0, 0.1, SIZE).astype(np.float32)}


@pytest.mark.more
def test_trials_of_hyperband_share_one_stream_and_a_database_shows_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    x = np.random.default_rng(0).normal(size=(SAMPLES + 60, SIZE)).astype(np.float32)
    parts = (slice(SAMPLES), slice(SAMPLES, None))
    train, valid = (sources.arrays(x=x[part], label=x[part, :4].argmax(1)) for part in parts)
    options: dict[str, Any] = {"epochs": 3, "batch_size": BATCH, "capacity": 3 * BATCH, "gate_timeout_s": 300}
    options |= {"checkpoint_every": 1, "search": Search(SPACE, seed=5, trials=9, storage=url)}
    options |= {"resources": Resources(cpus_per_worker=len(os.sched_getaffinity(0)) / 3)}
    options |= {"train": Pipeline(train, seed=0).map(noise), "valid": Pipeline(valid)}
    recipe = Recipe(model=model, loss="cross_entropy", inputs=("x",))
    made = Ensemble(name="searched", recipe=recipe, optimizer={"name": "sgd", "momentum": 0.9}, **options)
    result = ensemble.submit(made, tmp_path / "run", executor="local").wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    members = fold(events).members.values()
    assert {member.state for member in members} == {"finished", "pruned"}
    told = [event for event in events if event["type"] == "epoch"]
    assert not any(event["private_batches"] for event in told), "no trial prepares for itself"
    read = {member.first_epoch + epoch for member in members for epoch in range(member.epoch)}
    assert result.ledger is not None
    reuse = result.ledger["reuse"]
    assert reuse["consumed"] == SAMPLES * len(told)
    # The ring may have been filled in vain when all readers leave at once.
    most = SAMPLES * len(read) + 3 * BATCH * len(members)
    assert reuse["prepared"] <= most, "each epoch once, for all that read it"
    assert reuse["prepared"] < reuse["consumed"]
    assert all(later.first_epoch > 0 for later in list(members)[3:]), "those in freed places joined where it was"

    trials = optuna.load_study(study_name="searched", storage=url).trials
    assert [trial.user_attrs["member"] for trial in trials] == [member.id for member in members]
    states = {"finished": "COMPLETE", "pruned": "PRUNED"}
    assert [trial.state.name for trial in trials] == [states[member.state] for member in members]
    assert [trial.value for trial in trials] == [member.metrics["accuracy"] for member in members]
