"""Declarations: hyperparameters are JSON values from the moment they are declared."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble import Ensemble, Member, Recipe, Search, SpecError, choice, integer, uniform
from ensemble.spec.fields import MEMBER_FIELDS
from ensemble.spec.options import OPTIMIZERS
from ensemble.spec.recipe import RECIPE_OPTIONS
from pipelines import Pipeline, sources

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def an_ensemble(**options: Any) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.zeros((4, 1), np.float32)))
    return Ensemble(
        name="spec", recipe=Recipe(model=print, loss=print, task="classification"), train=train, **options
    )


#: Hyperparameters that set options, whose values are checked; hypothesis tries names of our own code, too.
CHECKED = {*OPTIMIZERS["sgd"], *MEMBER_FIELDS, *RECIPE_OPTIONS}
NAMES = st.text().filter(lambda name: name not in CHECKED)


@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_hyperparameters_come_back_from_json_as_they_were_declared(params: dict[str, Any]) -> None:
    known = an_ensemble(members=[params]).identify(0).params
    assert known == params and json.loads(json.dumps(known)) == known


def test_numpys_scalars_become_pythons_and_tuples_lists_wherever_they_are() -> None:
    given_as = {"lr": np.float32(0.5), "width": np.int64(16), "on": np.bool_(True), "name": np.str_("a")}
    params = (
        an_ensemble(members=[given_as | {"sizes": (3, (np.int8(4),)), "opt": {"betas": (0.9, 1)}}])
        .identify(0)
        .params
    )
    assert params == {
        "lr": 0.5,
        "width": 16,
        "on": True,
        "name": "a",
        "sizes": [3, [4]],
        "opt": {"betas": [0.9, 1]},
    }
    assert [type(params[name]) for name in given_as] == [float, int, bool, str]
    assert type(params["sizes"][1][0]) is int


def test_what_is_changed_after_it_was_declared_changes_no_member() -> None:
    sizes = [3, 4]
    ensemble = an_ensemble(members=[Member({"sizes": sizes})])
    sizes.append(5)
    assert ensemble.identify(0).params == {"sizes": [3, 4]}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"act": print}, "params['act'] must be .* got <built-in function print>"),
        ({"lr": math.nan}, "params['lr'] must be a finite number.* got nan"),
        ({"opt": {"eps": [1, np.float32("inf")]}}, r"params['opt']['eps'][1] must be a finite number"),
        ({"opt": {1: 2}}, "params['opt'] must have str for keys, got 1"),
        ({2: 2}, "params must have str for keys, got 2"),
        ({"w": np.zeros(3)}, "params['w'] must be .*ndarray"),
        ({"w": {1, 2}}, "params['w'] must be .*set"),
        ({"w": 1j}, "params['w'] must be .*complex"),
    ],
)
def test_what_json_does_not_hold_is_refused_by_its_key(params: dict[Any, Any], said: str) -> None:
    pattern = said.replace("[", r"\[").replace("]", r"\]")
    for declare in (Member, lambda given: an_ensemble(members=[{}, given])):
        with pytest.raises(SpecError, match=pattern) as caught:
            declare(params)
        assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("members[1]: ")
    with pytest.raises(SpecError, match=pattern):
        an_ensemble(search=Search({"lr": uniform(0, 1)})).identify(0, params)


def test_a_search_space_holds_what_members_may_have() -> None:
    low: Any = np.int64(1)
    space = Search({"sizes": choice((3, 4), np.int64(5)), "n": integer(low, 2), "mode": low}).space
    assert space["sizes"].values == ((3, 4), 5) and type(space["sizes"].values[1]) is int
    assert type(space["n"].values[0]) is int and type(space["mode"]) is int


@pytest.mark.parametrize("given_as", [choice("relu", b"x"), print, math.inf])
def test_a_search_space_names_the_key_of_what_is_no_json(given_as: Any) -> None:
    with pytest.raises(SpecError, match=r"Search\.space\['act'\]"):
        Search({"act": given_as})
