"""Hyperparameters with the names of options: they set these options, or are refused. None is without effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_spec_options import declare

from ensemble.spec import Member, Recipe, Search, SpecError, choice, loguniform

SETS: dict[str, Any] = {
    "seed": 77,
    "precision": "bf16",
    "epochs": 2,
    "batch_size": 8,
    "weights": "bootstrap",
    "loss_scale": 8.0,
    "accumulate": 2,
    "optimizer": "adam",
    "schedule": "cosine",
    "compression": "qsgd4",
    "communicator": "hybrid",
    "early_stopping": {"patience": 2},
    "keep": "best",
    "averaging": "ema",
    "validate_every": 3,
    "compile": True,
    "mixup": 0.2,
}
REFUSED: dict[str, Any] = {
    "workers": 2,
    "cpus_per_worker": 2,
    "gpus_per_worker": 0,
    "threads": 2,
    "memory_gb": 1,
    "span_nodes": False,
    "nodes": {"spot": False},
    "start": "weights.safetensors",
}
BF16 = {"precision": "bf16"}  # that loss_scale may be set


class Split:
    random_stage = None

    def __len__(self) -> int:
        return 10

    def loader(self) -> None: ...


def test_every_option_of_a_member_is_placed() -> None:
    assert {field.name for field in dataclasses.fields(Member)} == {"params", "callbacks", *SETS, *REFUSED}


@pytest.mark.parametrize("name", SETS)
def test_a_hyperparameter_with_the_name_of_an_option_sets_it(name: str) -> None:
    given = {"lr": 0.1, name: SETS[name]}
    usual = BF16 if name == "loss_scale" else {}
    options = {"valid": Split(), "epochs": 4, **usual}
    by_option = declare(members=[Member({"lr": 0.1}, **{name: SETS[name]})], **options).identify(0)
    listed = declare(members=[given], **options).identify(0)
    searched = declare(
        members=None, search=Search({"lr": choice(0.1, 0.2), name: choice(SETS[name], None)}), **options
    )
    assert getattr(by_option, name) != getattr(declare(**options).identify(0), name)
    for made in (listed, searched.identify(0, given)):
        assert dataclasses.replace(made, params={"lr": 0.1}) == by_option
        assert made.params == given


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_hyperparameter_sets_is_refused_with_the_line_to_write(name: str) -> None:
    with pytest.raises(
        SpecError, match=rf"^members\[0\]: '{name}' is no hyperparameter .*Member\({{...}}, {name}="
    ):
        declare(members=[{"lr": 0.1, name: REFUSED[name]}])
    said = "does not choose" if name.startswith("start") else rf"give it as resources=Resources\({name}=...\)"
    with pytest.raises(SpecError, match=rf"^Search.space: '{name}' is no hyperparameter .*{said}"):
        declare(members=None, search=Search({"lr": choice(0.1, 0.2), name: choice(REFUSED[name], None)}))
    assert declare(members=[{"lr": 0.1, "nodes": 64}]).identify(0).params["nodes"] == 64  # of a layer


def test_what_is_planned_for_all_trials_goes_by_the_largest_that_is_searched() -> None:
    searched = declare(members=None, search=Search({"lr": choice(0.1, 0.2), "epochs": choice(3, 9, 5)}), epochs=4)
    assert (searched.largest("epochs"), searched.largest("batch_size")) == (9, 32)
    with pytest.raises(SpecError, match=r"min_resource'\] is 4 epochs, but a trial has 3"):
        dataclasses.replace(
            searched, search=Search(searched.search.space, pruner={"name": "asha", "min_resource": 4})
        )


def test_options_that_need_each_other_are_checked_together() -> None:
    space = {"lr": choice(0.1, 0.2), "precision": choice("bf16", "fp16"), "loss_scale": choice(8.0, 16.0)}
    made = declare(members=None, search=Search(space)).identify(0, {"precision": "fp16", "loss_scale": 8.0})
    assert (made.precision, made.loss_scale) == ("fp16", 8.0)
    assert choice("(a)", "[a]").values == ("(a)", "[a]")


def test_an_option_is_given_once() -> None:
    assert declare(members=[Member({"lr": 0.1, "batch_size": 8}, batch_size=8)]).identify(0).batch_size == 8
    with pytest.raises(
        SpecError, match=r"batch_size is given twice: 8 as a hyperparameter and Member\(batch_size=16\)"
    ):
        declare(members=[Member({"lr": 0.1, "batch_size": 8}, batch_size=16)])


def test_a_function_of_the_users_reads_the_hyperparameter_itself() -> None:
    recipe = Recipe(model=dict, loss=dict, task="classification", optimizer=dict)
    assert declare(recipe=recipe, members=[{"optimizer": "mine"}]).identify(0).optimizer is None
    assert declare(recipe=print, members=[{"optimizer": "mine", "batch_size": 8}]).identify(0).batch_size == 8


@pytest.mark.parametrize("recipe", [print, Recipe(model=dict, train=print)])
def test_a_train_function_has_hyperparameters_of_its_own_with_names_of_options(recipe: Any) -> None:
    own = {"weights": "imagenet", "early_stopping": 5, "workers": 4, "start": "imagenet", "epochs": "many"}
    made = declare(recipe=recipe, members=[{**own, "batch_size": 8}], epochs=3).identify(0)
    assert made.params == {**own, "batch_size": 8} and (made.batch_size, made.epochs, made.workers) == (8, 3, 1)
    assert made.weights is made.early_stopping is made.lineage is None
    searched = declare(recipe=recipe, members=None, search=Search({"weights": choice("imagenet", "random")}))
    assert searched.identify(0, {"weights": "random"}).weights is None


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("batch_size", (8, 16), "name it in 'inherit'"),
        ("epochs", (4, 8), r"give Ensemble\(epochs=...\)"),
        ("seed", (1, 2), r"give Ensemble\(seed=...\)"),
    ],
)
def test_a_population_keeps_what_its_state_depends_on(name: str, values: Any, said: str) -> None:
    space, sampler = {"lr": loguniform(0.1, 0.2), name: choice(*values)}, {"name": "pbt", "population": 2}
    with pytest.raises(SpecError, match=said):
        declare(members=None, search=Search(space, sampler=sampler), epochs=4)
    if name == "batch_size":
        declare(members=None, search=Search(space, sampler={**sampler, "inherit": [name]}), epochs=4)
