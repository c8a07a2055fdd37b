"""A declaration that cannot be run is refused in one line that says what, where and what would be valid."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble import (
    Bootstrap,
    Ensemble,
    Folds,
    Member,
    Recipe,
    Resources,
    Search,
    SpecError,
    choice,
    integer,
    loguniform,
    uniform,
)
from ensemble.spec.fields import MEMBER_FIELDS
from ensemble.spec.options import OPTIMIZERS
from ensemble.spec.recipe import RECIPE_OPTIONS
from ensemble.spec.search_space import PROBES, sample_space
from pipelines import Pipeline, sources


def declared(**options: Any) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
    usual = {"name": "spec", "recipe": len, "train": train, "members": [{"lr": 0.1}]}
    return Ensemble(**{**usual, **options})


def test_numpy_integers_are_integers() -> None:
    resources = Resources(workers=np.int64(2), cpus_per_worker=np.float32(0.5))
    members = [Member({"lr": 0.1}, epochs=np.int16(2)), {"lr": 0.2}]
    options = {"epochs": np.int64(3), "batch_size": np.int32(4), "seed": np.uint8(7)}
    made = declared(resources=resources, members=members, **options)
    identities = [made.identify(number).as_dict() for number in range(2)]
    assert [(one["epochs"], one["seed"], one["workers"]) for one in identities] == [(2, 7, 2), (3, 8, 2)]
    assert json.loads(json.dumps(identities)) == identities
    for value in (np.float64(2.0), np.bool_(True)):
        with pytest.raises(SpecError, match=rf"epochs must be an integer, got {value}"):
            declared(epochs=value)


def test_members_override_the_defaults_and_have_seeds_of_their_own() -> None:
    members = [{"w": 1}, Member({"w": 2}, workers=2, precision="fp16", seed=99)]
    resources = Resources(threads=3, cpus_per_worker=0.5)
    made = declared(members=members, seed=10, precision="bf16", resources=resources)
    first, second = made.identify(0), made.identify(1)
    assert (first.member, first.seed, first.workers) == ("member-0", 10, 1)
    assert (first.precision, first.threads) == ("bf16", 3)
    assert (second.seed, second.workers, second.precision, second.cpus_per_worker) == (99, 2, "fp16", 0.5)
    assert first.first_epoch == second.first_epoch == 0
    with pytest.raises(AttributeError):
        made.epochs = 7  # type: ignore[misc]


def test_a_members_number_decides_its_weights_unless_it_says_otherwise() -> None:
    members = [{}, {}, {}, Member(weights="uniform"), Member(weights=Bootstrap(7)), Member(weights=Folds(2, 1, 9))]
    made = declared(members=members, seed=10, weights=Folds(2))
    folds = [{"kind": "fold", "k": 2, "held_out": at, "seed": seed} for at, seed in ((0, 10), (1, 10), (1, 9))]
    expected = [folds[0], folds[1], folds[0], None, {"kind": "bootstrap", "seed": 7}, folds[2]]
    assert [made.identify(number).weights for number in range(6)] == expected
    bagged = declared(members=[{}, {}], seed=10, weights="bootstrap")
    assert [bagged.identify(n).weights for n in (0, 1)] == [{"kind": "bootstrap", "seed": s} for s in (10, 11)]
    assert declared().identify(0).weights is None


@dataclass(frozen=True)
class Patient(Member):
    patience: int | None = 5


@pytest.mark.parametrize("member", [Member({"lr": 0.1}, epochs=3), Patient({"lr": 0.1}, patience=None), Patient()])
def test_a_copied_member_is_the_same(member: Member) -> None:
    for copied in (pickle.loads(pickle.dumps(member)), copy.deepcopy(member)):
        assert copied == member and repr(copied) == repr(member)


def test_a_space_is_drawn_once_and_a_small_data_set_is_warned_of_once() -> None:
    drawn = []

    def space(trial: Any) -> dict[str, Any]:
        drawn.append(trial)
        return {"lr": trial.suggest_float("lr", 0.1, 1.0), "batch_size": trial.suggest_categorical("b", [4, 32])}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        replace(declared(members=None, search=Search(space)), epochs=2)
    assert len(drawn) < 2 * PROBES
    (warning,) = caught
    assert "batch_size is 32, more than the 8 training samples" in str(warning.message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def an_ensemble(**options: Any) -> Ensemble:
    recipe = Recipe(model=print, loss=print, task="classification")
    return declared(**{"recipe": recipe, "members": None, **options})


#: Hyperparameters that set options, whose values are checked; hypothesis tries names of our own code, too.
CHECKED = {*OPTIMIZERS["sgd"], *MEMBER_FIELDS, *RECIPE_OPTIONS}
NAMES = st.text().filter(lambda name: name not in CHECKED)


@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_hyperparameters_come_back_from_json_as_they_were_declared(params: dict[str, Any]) -> None:
    known = an_ensemble(members=[params]).identify(0).params
    assert known == params and json.loads(json.dumps(known)) == known


def test_numpys_scalars_become_pythons_and_tuples_lists_wherever_they_are() -> None:
    sizes = [3, (np.int8(4),)]
    given_as = {"lr": np.float32(0.5), "width": np.int64(16), "on": np.bool_(True), "name": np.str_("a")}
    made = an_ensemble(members=[Member(given_as | {"sizes": sizes, "opt": {"betas": (0.9, 1)}})])
    sizes.append(5)  # what is changed after it was declared changes no member
    params = made.identify(0).params
    plain = {"lr": 0.5, "width": 16, "on": True, "name": "a"}
    assert params == plain | {"sizes": [3, [4]], "opt": {"betas": [0.9, 1]}}
    assert [type(params[name]) for name in given_as] == [float, int, bool, str]
    assert type(params["sizes"][1][0]) is int


NO_JSON: list[Any] = [({"act": print}, "params['act'] must be .* got <built-in function print>")]
NO_JSON += [({"w": 1j}, "['w'] must be .*complex"), ({"w": {1, 2}}, "['w'] must be .*set")]
NO_JSON += [({"lr": math.nan}, "params['lr'] must be a finite number.* got nan")]
NO_JSON += [({"opt": {"eps": [1, np.float32("inf")]}}, "params['opt']['eps'][1] must be a finite number")]
NO_JSON += [
    ({"opt": {1: 2}}, "params['opt'] must have str for keys, got 1"),
    ({"w": np.ones(3)}, "['w'] .*ndarray"),
]
NO_JSON += [({2: 2}, "params must have str for keys, got 2")]


@pytest.mark.parametrize(("params", "says"), NO_JSON)
def test_what_json_does_not_hold_is_refused_by_its_key(params: dict[Any, Any], says: str) -> None:
    pattern = says.replace("[", r"\[").replace("]", r"\]")
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
    for value in (choice("relu", b"x"), print, math.inf):
        with pytest.raises(SpecError, match=r"Search\.space\['act'\]"):
            Search({"act": value})


def test_a_searchs_draws_are_in_its_space_and_the_same_each_time() -> None:
    space = {"a": choice(1, 2), "b": uniform(0, 1), "c": loguniform(1e-3, 1), "d": integer(3, 5), "e": 7}
    drawn = list(sample_space(space, 4))
    assert drawn == list(sample_space(space, 4)) != list(sample_space(space, 5))
    assert all(d["a"] in (1, 2) and 0 <= d["b"] <= 1 and 1e-3 <= d["c"] <= 1 for d in drawn)
    assert {d["d"] for d in drawn} <= {3, 4, 5} and {d["e"] for d in drawn} == {7}


def test_of_a_search_the_common_part_is_that_of_its_draws_and_a_fixed_dict_a_hyperparameter_as_others() -> None:
    base = Pipeline(sources.arrays(x=np.zeros((4, 3))))

    def train(params: dict[str, Any]) -> Pipeline:
        return base.map(np.negative, field="x") if params["flip"] else base

    made = an_ensemble(train=train, search=Search({"flip": choice(True, False), "fixed": {"a": (1, 2)}}))
    assert made.samples == 4 and made.stream.token == base.token
    assert made.stream.begins(made.pipeline({"flip": True})) and not made.pipeline({"flip": True}).begins(base)
    assert made.as_declared({"fixed": {"a": [1, 2]}, "flip": True}) == {"fixed": {"a": (1, 2)}, "flip": True}


TYPE, MARKET = "ray.io/accelerator-type", "ray.io/market-type"


def declare(nodes: Any, *members: Any, **options: Any) -> Ensemble:
    train = Pipeline(sources.arrays(x=np.zeros((64, 2), np.float32)))
    resources = Resources(nodes=nodes, **options.pop("needs", {}))
    return Ensemble(name="s", recipe=len, train=train, members=members or [{}], resources=resources, **options)


def test_a_member_has_its_ensembles_selection_and_label_by_label_its_own_in_place_of_it() -> None:
    declared = declare(
        {"gpu_type": "in(H100, H200)", "spot": False, "team": "vision"},
        {},
        Member({}, nodes={"spot": True, "gpu_memory_gb": np.float32(40)}),
        Member({}, nodes={"gpu_type": None, TYPE.replace("accelerator-type", "node-group"): "!small"}),
        Member({}, nodes={"gpu_type": None, "spot": None, "team": None}, gpus_per_worker=0.0),
    )
    first, second, third, last = (declared.identify(number) for number in range(4))
    ensembles = {TYPE: "in(H100,H200)", MARKET: "!spot", "team": "vision"}
    assert first.nodes == ensembles
    assert second.nodes == ensembles | {MARKET: "spot", "gpu_memory_gb": 40.0}
    assert third.nodes == ensembles | {TYPE: None, "ray.io/node-group": "!small"}
    assert set((last.nodes or {}).values()) == {None}
    assert declare(None).identify(0).nodes is None
    assert declare({"slot": "a", "xray.io/node-groups": "b"}).identify(0).nodes, "these are no misspelt words"
    assert not first.list_differences(second.as_dict() | {"member": "member-0", "number": 0, "seed": 0})
