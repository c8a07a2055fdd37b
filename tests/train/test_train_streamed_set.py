"""A member evaluates data that memory does not hold as it evaluates any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble

import ensemble
from ensemble.store import RunDir


def figures(path: Path) -> list[Any]:
    events = read_events(RunDir(path).events)
    members = fold(events).members.values()
    return [[each.weights_sha256, each.predictions, each.metrics] for each in members] + [
        event["metrics"] for event in events if event["type"] == "epoch"
    ]


def test_figures_and_predictions_are_the_same_of_streamed_validation_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = an_ensemble([{"lr": 0.1, "width": 4}], epochs=2, sharing="independent", batch_size=20, seed=3)
    ensemble.submit(made, tmp_path / "held", "inline").wait()
    monkeypatch.setattr("pipelines.environment.machine_limits.available_bytes", lambda: 0)
    with pytest.warns(UserWarning, match="'valid' is prepared anew at each pass"):
        ensemble.submit(made, tmp_path / "streamed", "inline").wait()
    assert figures(tmp_path / "streamed") == figures(tmp_path / "held")
    assert figures(tmp_path / "held")[0][1]
