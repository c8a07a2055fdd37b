"""Options of the training loop and losses by name: what is recorded, what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from ensemble import EMA, SWA, EarlyStopping, Ensemble, Member, Recipe, SpecError, quantiles
from ensemble.spec.identity import Identity, compute_cost_key, field_defaults
from ensemble.spec.losses import NamedLoss
from pipelines import Pipeline, sources

DATA = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32), label=np.zeros(8, np.int64)))
RECIPE = Recipe(model=len, loss=len, task="classification")


def declared(**options: Any) -> Ensemble:
    usual = {"name": "spec", "recipe": RECIPE, "train": DATA, "valid": DATA, "members": [{"lr": 0.1}]}
    return Ensemble(**{**usual, **options})


def test_nothing_is_recorded_of_a_plain_loop() -> None:
    own = declared().identify(0)
    loop = ("early_stopping", "keep", "averaging", "validate_every", "compile", "mixup", "selected_by")
    assert {name: getattr(own, name) for name in loop} == {name: field_defaults()[name] for name in loop}


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"early_stopping": EarlyStopping(2)}, {"early_stopping": {"patience": 2, "min_delta": 0.0}}),
        ({"early_stopping": EarlyStopping(2)}, {"selected_by": {"metric": "accuracy", "mode": "max"}}),
        ({"keep": "best", "objective": "loss"}, {"selected_by": {"metric": "loss", "mode": "min"}}),
        ({"averaging": "ema"}, {"averaging": {"name": "ema", "decay": 0.999}}),
        ({"averaging": EMA(0.9)}, {"averaging": {"name": "ema", "decay": 0.9}, "selected_by": None}),
        ({"averaging": "swa"}, {"averaging": {"name": "swa", "start": 0.75, "every_epochs": 1}}),
        ({"averaging": SWA(3, every_epochs=2)}, {"averaging": {"name": "swa", "start": 3, "every_epochs": 2}}),
        ({"compile": True}, {"compile": {"name": "default", "backend": "inductor"}}),
        ({"compile": False}, {"compile": None}),
        ({"compile": {"name": "max-autotune"}}, {"compile": {"name": "max-autotune", "backend": "inductor"}}),
        ({"validate_every": 5, "mixup": 1}, {"validate_every": 5, "mixup": 1.0}),
    ],
)
def test_options_are_recorded_with_their_defaults(options: dict[str, Any], recorded: dict[str, Any]) -> None:
    own = declared(epochs=9, **options).identify(0).as_dict()
    assert {name: own[name] for name in recorded} == recorded
    assert Identity(**json.loads(json.dumps(own))).as_dict() == own


def test_a_member_has_options_of_its_own() -> None:
    members = [
        Member({"lr": 0.1}),
        Member({"lr": 0.1}, early_stopping="none", averaging="none", compile=False, keep="last", mixup=0.0),
    ]
    made = declared(
        members=members, early_stopping=EarlyStopping(), averaging="ema", compile=True, keep="best", mixup=0.2
    )
    first, second = (made.identify(number) for number in range(2))
    assert first.early_stopping and first.averaging and first.compile and first.keep == "best" and first.mixup
    assert second == dataclasses.replace(declared().identify(0), member="member-1", number=1, seed=1)


def test_a_train_function_may_report_an_objective_without_a_validation_split() -> None:
    made = declared(recipe=len, keep="best", valid=None)
    assert made.identify(0).selected_by == {"metric": "accuracy", "mode": "max"}


def test_costs_are_told_apart_only_by_what_costs() -> None:
    plain = compute_cost_key(declared().identify(0))
    assert compute_cost_key(declared(early_stopping=EarlyStopping()).identify(0)) == plain
    for options in ({"averaging": "ema"}, {"compile": True}, {"keep": "best"}, {"mixup": 0.1}):
        assert compute_cost_key(declared(**options).identify(0)) != plain


def test_a_loss_is_a_name() -> None:
    recipe = Recipe(model=len, loss="cross_entropy", inputs="x", label_smoothing=0.1)
    assert recipe.loss == NamedLoss("cross_entropy", "label", ("x",), 0.1)
    assert recipe.task is None and recipe.find_task().kind == "classification"
    renamed = dataclasses.replace(recipe, target="y")
    assert renamed.loss == NamedLoss("cross_entropy", "y", ("x",), 0.1)
    assert pickle.loads(pickle.dumps(renamed)) == renamed
    assert Recipe(model=len, loss="pinball", task=quantiles(0.1, 0.9)).loss.levels == (0.1, 0.9)


def test_a_train_function_within_a_recipe_has_an_optimizer_of_its_own() -> None:
    with pytest.raises(SpecError, match="a train function gives its own"):
        declared(recipe=Recipe(model=len, train=len), optimizer="sgd")
    assert declared(recipe=Recipe(model=len, train=len), members=[{}]).identify(0).optimizer is None


def test_functions_with_more_arguments_of_their_own_are_taken() -> None:
    Recipe(
        model=lambda params, width=8: len,
        loss=lambda *given: None,
        task="classification",
        schedule=lambda optimizer, params, steps, *, steps_per_epoch: None,
    )
