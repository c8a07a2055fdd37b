"""`train=` as a function of the hyperparameters, and what may be kept: mistakes are said when it is declared."""

from __future__ import annotations

from typing import Any

import numpy as np

from ensemble import Ensemble, Recipe, Search, choice, integer, loguniform, uniform
from ensemble.spec.search_space import sample_space
from pipelines import Pipeline, sources


def declared(train: Any, **options: Any) -> Ensemble:
    recipe = Recipe(model=lambda params: None, loss=lambda net, batch: None, task="classification")
    if "search" not in options:
        options.setdefault("members", [{"n": 8}, {"n": 8}, {"n": 9}])
    return Ensemble(name="x", recipe=recipe, train=train, **options)


def of_length(params: dict[str, Any]) -> Pipeline:
    return Pipeline(sources.arrays(x=np.zeros(params["n"])))


def nothing(params: dict[str, Any]) -> Any:
    return params["n"]


def test_a_searchs_draws_are_in_its_space_and_the_same_each_time() -> None:
    space = {"a": choice(1, 2), "b": uniform(0, 1), "c": loguniform(1e-3, 1), "d": integer(3, 5), "e": 7}
    drawn = list(sample_space(space, 4))
    assert drawn == list(sample_space(space, 4)) != list(sample_space(space, 5))
    assert all(d["a"] in (1, 2) and 0 <= d["b"] <= 1 and 1e-3 <= d["c"] <= 1 for d in drawn)
    assert {d["d"] for d in drawn} <= {3, 4, 5} and {d["e"] for d in drawn} == {7}


def test_of_a_search_the_common_part_is_that_of_its_draws() -> None:
    base = Pipeline(sources.arrays(x=np.zeros((4, 3))))

    def train(params: dict[str, Any]) -> Pipeline:
        return base.map(np.negative, field="x") if params["flip"] else base

    made = declared(train, search=Search({"flip": choice(True, False)}))
    assert made.samples == 4 and made.stream.token == base.token
    assert made.stream.begins(made.pipeline({"flip": True})) and not made.pipeline({"flip": True}).begins(base)


def test_a_searchs_fixed_dict_is_a_hyperparameter_as_others() -> None:
    train = Pipeline(sources.arrays(x=np.zeros((4, 3))))
    made = declared(train, search=Search({"fixed": {"a": (1, 2)}, "n": choice(1, 2)}))
    assert made.as_declared({"fixed": {"a": [1, 2]}, "n": 1}) == {"fixed": {"a": (1, 2)}, "n": 1}
