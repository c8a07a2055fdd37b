"""The words of a declaration, as the built-in loop obeys them: optimizer=, schedule=."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import train_child as cases  # noqa: E402

from ensemble.spec import Recipe  # noqa: E402
from ensemble.store import RunDir, load_checkpoint  # noqa: E402
from ensemble.train import Inbox, work  # noqa: E402

Events = list[dict[str, Any]]
PLAIN = Recipe(model=cases.noisy, loss=cases.loss)


def train(folder: Path, recipe: Any = PLAIN, inbox: Inbox | None = None, **options: Any) -> tuple[str, Events]:
    """The outcome and the events of a member of one worker."""
    ensemble = cases.declare(recipe, 1, **options)
    events: Events = []
    return work(cases.make_job(folder, ensemble), ensemble, events.append, inbox or Inbox()), events


def last(events: Events, type: str) -> dict[str, Any]:
    return [event for event in events if event["type"] == type][-1]


WORDS = [
    {"optimizer": "sgd", "schedule": "constant"},
    {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}, "schedule": "damped"},
    {"optimizer": "adam", "schedule": {"name": "capped_linear", "gamma": 0.9}},
    {"optimizer": {"name": "adamw", "decay_norm": False}, "schedule": {"name": "cosine", "warmup_epochs": 0.6}},
    {"optimizer": "lars", "schedule": {"name": "polynomial", "warmup_epochs": 1}, "params": {"lr": 5.0}},
    {"optimizer": {"name": "lars", "decay_norm": True}, "schedule": {"name": "step", "milestones": [0.4, 2]}},
]


@pytest.mark.parametrize("words", WORDS, ids=lambda w: f"{w['optimizer']}"[:20])
def test_a_declared_optimizer_and_schedule_resume_to_the_same_bits(tmp_path: Path, words: dict[str, Any]) -> None:
    whole = train(tmp_path / "whole", **words)[1]
    assert train(tmp_path / "cut", inbox=cases.Script(7, "stop"), **words)[0] == "stopped"
    outcome, events = train(tmp_path / "cut", **words)
    assert outcome == "finished" and last(events, "finished") == last(whole, "finished")
    rates = [e["lr"] for e in whole if e["type"] == "epoch"]
    assert rates[1:] == [e["lr"] for e in events if e["type"] == "epoch"]


def test_without_words_a_member_is_trained_by_sgd(tmp_path: Path) -> None:
    found = [last(train(tmp_path / f"{i}", **words)[1], "finished") for i, words in enumerate([{}, WORDS[0]])]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def test_the_declared_rate_is_the_one_that_is_used(tmp_path: Path) -> None:
    events = train(tmp_path, optimizer="sgd", schedule={"name": "step", "every_epochs": 1, "gamma": 0.5})[1]
    # told after the last step of an epoch, whose schedule is at the next epoch by then
    assert [e["lr"] for e in events if e["type"] == "epoch"] == pytest.approx([0.025, 0.0125, 0.00625])
    state = load_checkpoint(RunDir(tmp_path).checkpoint("member-0", 0))
    assert state["schedule"]["last_epoch"] == 15 and state["identity"]["schedule"]["gamma"] == 0.5


def test_a_recipes_function_needs_no_word(tmp_path: Path) -> None:
    outcome, events = train(tmp_path, cases.NOISY)
    assert outcome == "finished" and last(events, "finished")
