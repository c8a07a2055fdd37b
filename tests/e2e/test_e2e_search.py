"""Searches from end to end: killed and taken up again, sharing one stream, writing to a storage of the user's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kit.event_dicts import fold, read_events
from search_cases import declared

import ensemble

ROOT = Path(__file__).parents[2]
SAMPLES = 96
# Each trial by itself: its results are the same whenever it begins.
KILLED: dict[str, Any] = {"sampler": "tpe", "pruner": "hyperband", "objective": "gain", "trials": 16}
KILLED["sharing"] = "independent"


@pytest.mark.more
def test_trials_of_hyperband_share_one_stream_and_a_database_shows_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    made = declared(places=3, trials=9, samples=SAMPLES, batch_size=32, storage=url)
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
    ring = made.capacity or 0  # may have been filled in vain when all readers leave at once
    assert reuse["prepared"] <= SAMPLES * len(read) + ring * len(members), "each epoch once, for all that read it"
    assert reuse["prepared"] < reuse["consumed"]
    assert all(later.first_epoch > 0 for later in list(members)[3:]), "those in freed places joined where it was"

    trials = optuna.load_study(study_name="searched", storage=url).trials
    assert [trial.user_attrs["member"] for trial in trials] == [member.id for member in members]
    states = {"finished": "COMPLETE", "pruned": "PRUNED"}
    assert [trial.state.name for trial in trials] == [states[member.state] for member in members]
    assert [trial.value for trial in trials] == [member.metrics["accuracy"] for member in members]
