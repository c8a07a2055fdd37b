"""What members predict is compared with how they are declared to be combined, before they are trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ensemble import Ensemble, Recipe, Search, uniform
from ensemble.controller.uncombinable import explain_uncombinable
from ensemble.spec.task import CLASSIFICATION, Task, quantiles
from pipelines import Pipeline, sources

SHARES = np.full((4, 2), 0.5)


def explain(task: Task, values: Any, **options: Any) -> str | None:
    recipe = Recipe(model=print, loss=print, task=task, objective="loss")
    pipe = Pipeline(sources.arrays(label=np.arange(8)))
    members = {} if "search" in options else {"members": [{"lr": 0.1}, {"lr": 0.2}]}
    declared = Ensemble(name="tried", recipe=recipe, train=pipe, valid=pipe, **members, **options)
    return explain_uncombinable(declared, task, values)


def average(values: Any) -> Any:
    return values.mean(0)


@pytest.mark.parametrize("is_search", [False, True])
def test_outputs_of_a_free_task_are_combined_by_a_function_alone(is_search: bool) -> None:
    options: dict[str, Any] = {"search": Search({"lr": uniform(0, 1)}, trials=2)} if is_search else {}
    assert explain(Task("free"), np.ones((4, 1)), combine=average, **options) is None
    assert "declare Ensemble.combine as a function" in str(explain(Task("free"), np.ones((4, 1)), **options))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda values: values.mean(dim=1), "gives"),
        (lambda values: values[0] / 0, "NaN"),
        (lambda v: v.no, "failed"),
    ],
)
def test_a_function_that_does_not_combine_is_named(function: Any, reason: str) -> None:
    why = str(explain(CLASSIFICATION, SHARES, combine=function))
    assert "Ensemble.combine=" in why and reason in why


def test_a_combination_that_is_not_for_the_task_is_named() -> None:
    three = np.sort(np.random.default_rng(0).normal(size=(4, 3)))
    assert "'weighted' or 'gr" in str(explain(quantiles(0.1, 0.5, 0.9), three, combine="stack"))
    assert "sum to 1.2" in str(explain(CLASSIFICATION, SHARES + 0.1))
    assert explain(CLASSIFICATION, SHARES) is None
