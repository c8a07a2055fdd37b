"""`train=` as a function of the hyperparameters, and what may be kept: mistakes are said when it is declared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ensemble import Ensemble, Recipe, Search, SpecError, choice, integer, loguniform, uniform
from ensemble.spec.search_space import sample_space
from pipelines import Pipeline, sources


def declared(train: Any, **options: Any) -> Ensemble:
    recipe = Recipe(model=lambda params: None, loss=lambda net, batch: None)
    if "search" not in options:
        options.setdefault("members", [{"n": 8}, {"n": 8}, {"n": 9}])
    return Ensemble(name="x", recipe=recipe, train=train, **options)


def of_length(params: dict[str, Any]) -> Pipeline:
    return Pipeline(sources.arrays(x=np.zeros(params["n"])))


def nothing(params: dict[str, Any]) -> Any:
    return params["n"]


@pytest.mark.parametrize(
    ("train", "options", "said"),
    [
        (7, {}, r"Ensemble.train must be a pipelines.Pipeline or a function train\(params\) of one, got 7"),
        (of_length, {}, r"as many samples for every member, has \[8, 9\]"),
        (nothing, {}, r"Ensemble.train\({'n': 8}\) must return a pipelines.Pipeline, got 8"),
        (of_length, {"members": [{}]}, r"Ensemble.train\({}\) raised KeyError: 'n'"),
        (of_length, {"members": [{"n": 4}], "cache": "ram"}, "Ensemble.cache cannot be 'ram'"),
        (of_length, {"members": [{"n": 4}], "cache_bytes": 0}, "Ensemble.cache_bytes must be at least 1"),
        (of_length, {"members": [{"n": 4}], "cache": "disk"}, "Ensemble.cache_dir is needed with cache='disk'"),
        (of_length, {"members": [{"n": 4}], "cache_dir": "x"}, "and only with that"),
        (of_length, {"members": [{"n": 4}], "cache_size": 64}, "Ensemble.cache_size is given without a cache"),
        (
            of_length,
            {"members": [{"n": 4}], "cache": "memory", "cache_size": 64},
            "Ensemble.cache_size=64: there are no images to make smaller: .* no stage decode_jpeg",
        ),
        (
            of_length,
            {"members": [{"n": 4}], "cache": "memory", "cache_format": "raw"},
            "of images that cache_size=",
        ),
        (
            of_length,
            {"members": [{"n": 4}], "cache": "memory", "cache_size": 64, "sharing": "independent"},
            "cache_size is for shared pipelines",
        ),
        (of_length, {"members": [{"n": 4}], "drop_last": True}, "an epoch of 4 samples has no whole batch of 32"),
    ],
)
def test_mistakes_are_said_at_once(train: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        declared(train, **options)


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
