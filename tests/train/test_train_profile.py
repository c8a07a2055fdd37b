"""What is measured of a member before it is placed: its training steps, and nothing on top of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import train_child as cases  # noqa: E402

from ensemble.spec import Recipe  # noqa: E402
from ensemble.store import RunDir  # noqa: E402
from ensemble.train import Inbox, profile  # noqa: E402
from ensemble.train.job import ProfileRequest  # noqa: E402


def test_evaluations_within_epochs_are_no_part_of_a_step(tmp_path: Path) -> None:
    calls = {True: 0, False: 0}  # of the loss, by whether the model was training

    def loss(model: Any, batch: Any) -> Any:
        calls[model.training] += 1
        return cases.loss(model, batch)

    events = measure(tmp_path, loss, validate_every=1)
    assert calls[True] > 2 and calls[False] == 1, "one evaluation, after the steps, for its memory"
    assert [event["type"] for event in events if event["type"] == "profiled"] == ["profiled"]


def test_a_member_whose_loss_is_not_finite_is_measured_like_any_other(tmp_path: Path) -> None:
    (profiled,) = (event for event in measure(tmp_path, not_finite) if event["type"] == "profiled")
    assert profiled["of"] == ["member-0"] and profiled["measured"]["step_s"] > 0
    assert not RunDir(tmp_path).list_checkpoints("member-0"), "nothing is left behind"


def not_finite(model: Any, batch: Any) -> Any:
    return cases.loss(model, batch) * float("nan")


def measure(run_dir: Path, loss: Any, **options: Any) -> list[dict[str, Any]]:
    """The events of a session that measures one member."""
    ensemble = cases.declare(Recipe(model=cases.plain, loss=loss), 1, **options)
    request = ProfileRequest(members=[ensemble.identify(0)], known=[], steps_s=0.05)
    events: list[dict[str, Any]] = []
    job = replace(cases.make_job(run_dir, ensemble), profile=request)
    assert profile.run(job, ensemble, events.append, Inbox()) == "finished", events
    return events
