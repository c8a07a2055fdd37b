"""The words of a declaration, as the built-in loop obeys them: optimizer=, schedule=."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import train_child as cases
from kit.loop_cases import checkpoint, finished, of, train

from ensemble.spec import Recipe

PLAIN = Recipe(model=cases.noisy, loss=cases.loss, task="classification")


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
    whole = train(tmp_path / "whole", PLAIN, **words)[1]
    assert train(tmp_path / "cut", PLAIN, cases.Script(7, "stop"), **words)[0] == "stopped"
    outcome, events = train(tmp_path / "cut", PLAIN, **words)
    assert outcome == "finished" and of(events, "finished") == of(whole, "finished")
    assert [e["lr"] for e in of(whole, "epoch")][1:] == [e["lr"] for e in of(events, "epoch")]


def test_without_words_a_member_is_trained_by_sgd(tmp_path: Path) -> None:
    found = [finished(tmp_path / f"{i}", PLAIN, **words) for i, words in enumerate([{}, WORDS[0]])]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def test_the_declared_rate_is_the_one_that_is_used(tmp_path: Path) -> None:
    schedule = {"name": "step", "every_epochs": 1, "gamma": 0.5}
    events = train(tmp_path, PLAIN, optimizer="sgd", schedule=schedule)[1]
    # told after the last step of an epoch, whose schedule is at the next epoch by then
    assert [e["lr"] for e in of(events, "epoch")] == pytest.approx([0.025, 0.0125, 0.00625])
    state = checkpoint(tmp_path)
    assert state["schedule"]["last_epoch"] == 15 and state["identity"]["schedule"]["gamma"] == 0.5
