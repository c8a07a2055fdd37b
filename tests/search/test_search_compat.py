"""The private API of Optuna in `ensemble/search/_compat.py`: what Optuna does without it, and with it.

That the pruner decides as Optuna's own is shown by `test_hyperband_decides_as_optuna_s_own`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.pruners import HyperbandPruner

from ensemble.search._compat import hyperband

TRIALS, EPOCHS = 20, 9
LOOK = "look at hyperband in ensemble/search/_compat.py"


def count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    """Has one entry for each call of a method of Optuna's pruner."""
    calls: list[None] = []
    usual: Callable[..., Any] = getattr(HyperbandPruner, name)

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return usual(*arguments)

    monkeypatch.setattr(HyperbandPruner, name, counted)
    return calls


def begin(pruner: optuna.pruners.BasePruner) -> tuple[optuna.Study, list[optuna.Trial]]:
    """A study and trials that run side by side."""
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=1)
    study = optuna.create_study(study_name="search", pruner=pruner, sampler=sampler)
    trials = [study.ask() for _ in range(TRIALS)]
    for trial in trials:
        trial.suggest_float("x", 0, 1)
    return study, trials


def train(trials: list[optuna.Trial]) -> None:
    """Ask the pruner about each trial at each epoch."""
    for epoch in range(1, EPOCHS + 1):
        for trial in trials:
            trial.report(trial.params["x"] / epoch, epoch)
            trial.should_prune()


def test_a_trial_s_bracket_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch, "_get_bracket_id")
    _, trials = begin(HyperbandPruner(1, EPOCHS, 3))
    calls.clear()
    train(trials)
    assert len(calls) > TRIALS * EPOCHS, "needed no longer? " + LOOK
    _, trials = begin(hyperband(1, EPOCHS, 3))
    calls.clear()
    train(trials)
    assert len(calls) == TRIALS, LOOK


def test_a_sampler_looks_at_the_trials_of_one_bracket(monkeypatch: pytest.MonkeyPatch) -> None:
    study, trials = begin(hyperband(1, EPOCHS, 3))
    train(trials)
    for trial in trials:
        study.tell(trial, 1.0)
    calls = count(monkeypatch, "_create_bracket_study")
    study.ask().suggest_float("x", 0, 1)
    assert calls, "a pruner of another class would do now? " + LOOK
