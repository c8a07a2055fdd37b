"""Names that others use: the error says what to write here."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import ensemble
from ensemble import Ensemble, Member, Recipe, Search, SpecError, seeds, uniform
from ensemble.spec.validation import OF_A_START
from pipelines import Pipeline, sources


def declare(**options: Any) -> Ensemble:
    data = Pipeline(sources.arrays(x=np.zeros((40, 4), np.float32), label=np.zeros(40, np.int64)))
    recipe = Recipe(model=lambda params: None, loss="cross_entropy")
    return Ensemble(**{"name": "a", "recipe": recipe, "members": [{}], "train": data, **options})


@pytest.mark.parametrize(
    ("option", "value", "way"),
    [
        ("lr", 0.1, "optimizer="),
        ("learning_rate", 0.1, "optimizer="),
        ("weight_decay", 0.1, "optimizer="),
        ("warmup_epochs", 1, "schedule="),
        ("on_event", print, "submit"),
        ("executor", "local", "submit"),
        ("n_epochs", 3, "'epochs'"),
        ("devices", "gpu", "'cuda'"),
        ("precision", "float16", "'fp16'"),
        ("precision", "bfloat16", "'bf16'"),
        ("combine", "mean", "'average'"),
        ("combine", "stacking", "'stack'"),
        ("optimizer", "adm", "'adam'"),
    ],
)
def test_the_error_names_what_is_meant(option: str, value: Any, way: str) -> None:
    with pytest.raises(SpecError, match=way):
        declare(**{option: value})


def test_hyperparameters_of_members_go_into_params() -> None:
    for make in (lambda: seeds(3, width=32), lambda: Member(width=32)):
        with pytest.raises(SpecError, match=r"params=.*'width'"):
            make()


def test_the_error_of_a_search_names_what_is_meant() -> None:
    space = {"lr": uniform(0, 1)}
    with pytest.raises(SpecError, match=r"Ensemble\(objective='accuracy'\)"):
        Search(space, objective="accuracy")
    with pytest.raises(SpecError, match="'tpe'"):
        Search(space, sampler="bayes")
    with pytest.raises(SpecError, match="'trials'"):
        Search(space, n_trials=3)


def test_what_is_said_to_be_an_argument_of_submit_is_one() -> None:
    assert set(OF_A_START) <= set(inspect.signature(ensemble.submit).parameters)
