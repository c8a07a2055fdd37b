"""Options that a search chooses, in real trials: each trains as a member that is declared with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import fold, read_events

import ensemble
from ensemble import Ensemble, Member, Recipe, Search, choice, loguniform
from ensemble.spec import SpecError
from ensemble.spec.search import PRUNER_TYPES, SAMPLER_TYPES
from ensemble.store import RunState
from pipelines import Pipeline, sources
from pipelines.providers import Provider


def model(params: dict[str, Any]) -> Any:
    from torch import nn

    if "sizes" in params:
        assert isinstance(params["sizes"], tuple), params
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2))


RECIPE = Recipe(model=model, loss="cross_entropy")


def declare(recipe: Recipe = RECIPE, **options: Any) -> Ensemble:
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(32, 3)).astype("float32"), rng.integers(0, 2, 32)
    train = Pipeline(sources.arrays(x=rows, label=labels), seed=0)
    return Ensemble(name="options", recipe=recipe, train=train, valid=train, **options)


def run(path: Path, declared: Ensemble) -> RunState:
    ensemble.submit(declared, path, "inline").wait()
    state = fold(read_events(path / "events.jsonl"))
    assert {member.state for member in state.members.values()} == {"finished"}, state
    return state


SPACE = {"batch_size": choice(8, 16), "epochs": choice(1, 3), "optimizer": choice("sgd", "adam")}
SPACE |= {"lr": choice(0.1, 0.01), "seed": choice(5, 6), "accumulate": choice(1, 2)}
SPACE |= {"precision": choice("fp32", "bf16"), "clip_norm": choice(None, 0.1)}
SPACE |= {"label_smoothing": choice(0.0, 0.2), "averaging": choice("none", "ema"), "sizes": choice((4, 4), (5,))}


def ask(trial: Any) -> dict[str, Any]:
    return {name: trial.suggest_categorical(name, SPACE[name].values) for name in SPACE if name != "sizes"}


@pytest.mark.parametrize("way", ["dict", "function"])
def test_a_trial_trains_as_a_member_that_is_declared_with_its_options(tmp_path: Path, way: str) -> None:
    search = Search(SPACE if way == "dict" else ask, trials=3, sampler="random", pruner="none", seed=1)
    state = run(tmp_path / "searched", declare(search=search))
    assert len({member.identity["batch_size"] for member in state.members.values()}) == 2
    for name, member in state.members.items():
        options = {key: value for key, value in member.params.items() if key not in ("lr", "sizes")}
        recipe = dataclasses.replace(RECIPE, **{key: options.pop(key) for key in ("clip_norm", "label_smoothing")})
        alone = run(tmp_path / name, declare(recipe, members=[Member({"lr": member.params["lr"]}, **options)]))
        assert alone.members["member-0"].weights_sha256 == member.weights_sha256 is not None
        assert member.epoch == member.params["epochs"]
    events = read_events(tmp_path / "searched" / "events.jsonl")
    assert "unused_hyperparameters" not in {event["type"] for event in events}
    ensemble.load(tmp_path / "searched")  # its models are made of recorded hyperparameters


def test_samplers_and_pruners_of_another_distribution_are_named_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for types, name, value in (
        (SAMPLER_TYPES, "theirs", "optuna.samplers:TPESampler"),
        (PRUNER_TYPES, "quarter", "optuna.pruners:PercentilePruner"),
    ):
        monkeypatch.setattr(types, "_foreign", ({name: Provider(types.kind, name, value, "theirs 1.0")}, []))
    space = {"lr": loguniform(1e-3, 1.0)}
    pruner = {"name": "quarter", "percentile": 25.0}
    search = Search(space, sampler={"name": "theirs", "multivariate": True}, pruner=pruner)
    assert type(search.sampler).__name__ == "TPESampler" and search.pruner_options == {"name": "PercentilePruner"}
    with pytest.raises(SpecError, match=r"Search.pruner: 'quarter' of theirs 1.0: .*percentile"):
        Search(space, pruner="quarter")
