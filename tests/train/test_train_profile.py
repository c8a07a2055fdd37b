"""What is measured of a member before it is placed: its training steps, and nothing on top of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import train_child as cases  # noqa: E402

from ensemble.spec import Recipe  # noqa: E402
from ensemble.train import Inbox, profile  # noqa: E402
from ensemble.train.job import ProfileRequest  # noqa: E402


def test_evaluations_within_epochs_are_no_part_of_a_step(tmp_path: Path) -> None:
    calls = {True: 0, False: 0}  # of the loss, by whether the model was training

    def loss(model: Any, batch: Any) -> Any:
        calls[model.training] += 1
        return cases.loss(model, batch)

    ensemble = cases.declare(Recipe(model=cases.plain, loss=loss), 1, validate_every=1)
    request = ProfileRequest(members=[ensemble.identify(0)], known=[], steps_s=0.05)
    events: list[dict[str, Any]] = []
    job = replace(cases.make_job(tmp_path, ensemble), profile=request)
    assert profile.run(job, ensemble, events.append, Inbox()) == "finished", events
    assert calls[True] > 2 and calls[False] == 1, "one evaluation, after the steps, for its memory"
    assert [event["type"] for event in events if event["type"] == "profiled"] == ["profiled"]
