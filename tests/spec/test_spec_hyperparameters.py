"""Hyperparameters with the names of options: they set these options, or are refused. None is without effect."""

from __future__ import annotations

import dataclasses
import json
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ensemble import EMA, SWA, EarlyStopping, Ensemble, Member, Recipe, SpecError, quantiles
from ensemble.spec import Search, choice, loguniform
from ensemble.spec.identity import Identity, compute_cost_key
from ensemble.spec.losses import NamedLoss
from ensemble.spec.options import COMPRESSIONS, OPTIMIZERS, resolve
from pipelines import Pipeline, sources

SETS: dict[str, Any] = {"seed": 77, "precision": "bf16", "epochs": 2, "batch_size": 8, "weights": "bootstrap"}
SETS |= {"loss_scale": 8.0, "accumulate": 2, "optimizer": "adam", "schedule": "cosine", "compression": "qsgd4"}
SETS |= {"communicator": "hybrid", "early_stopping": {"patience": 2}, "keep": "best", "averaging": "ema"}
SETS |= {"validate_every": 3, "compile": True, "mixup": 0.2}
REFUSED: dict[str, Any] = {"workers": 2, "cpus_per_worker": 2, "gpus_per_worker": 0, "threads": 2, "memory_gb": 1}
REFUSED |= {"span_nodes": False, "nodes": {"spot": False}, "start": "weights.safetensors"}
BF16 = {"precision": "bf16"}  # that loss_scale may be set


class Split:
    random_stage = None

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def loader(self) -> None: ...


def test_every_option_of_a_member_is_placed() -> None:
    assert {field.name for field in dataclasses.fields(Member)} == {"params", "callbacks", *SETS, *REFUSED}


@pytest.mark.parametrize("name", SETS)
def test_a_hyperparameter_with_the_name_of_an_option_sets_it(name: str) -> None:
    given, value = {"lr": 0.1, name: SETS[name]}, SETS[name]
    options = {"valid": Split(), "epochs": 4, **(BF16 if name == "loss_scale" else {})}
    by_option = declare(members=[Member({"lr": 0.1}, **{name: value})], **options).identify(0)
    listed = declare(members=[given], **options).identify(0)
    searched = declare(members=None, search=Search({"lr": choice(0.1, 0.2), name: choice(value, None)}), **options)
    assert getattr(by_option, name) != getattr(declare(**options).identify(0), name)
    for made in (listed, searched.identify(0, given)):
        assert dataclasses.replace(made, params={"lr": 0.1}) == by_option
        assert made.params == given


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_hyperparameter_sets_is_refused_with_the_line_to_write(name: str) -> None:
    says = rf"^members\[0\]: '{name}' is not a hyperparameter .*Member\({{...}}, {name}="
    with pytest.raises(SpecError, match=says):
        declare(members=[{"lr": 0.1, name: REFUSED[name]}])
    way_out = "does not choose" if name.startswith("start") else rf"give it as resources=Resources\({name}=...\)"
    with pytest.raises(SpecError, match=rf"^Search.space: '{name}' is not a hyperparameter .*{way_out}"):
        declare(members=None, search=Search({"lr": choice(0.1, 0.2), name: choice(REFUSED[name], None)}))
    assert declare(members=[{"lr": 0.1, "nodes": 64}]).identify(0).params["nodes"] == 64  # of a layer


def test_what_is_planned_for_all_trials_goes_by_the_largest_that_is_searched() -> None:
    searched = declare(members=None, search=Search({"lr": choice(0.1, 0.2), "epochs": choice(3, 9, 5)}), epochs=4)
    assert (searched.largest("epochs"), searched.largest("batch_size")) == (9, 32)
    with pytest.raises(SpecError, match=r"min_resource'\] is 4 epochs, but a trial has 3"):
        dataclasses.replace(
            searched, search=Search(searched.search.space, pruner={"name": "asha", "min_resource": 4})
        )


def test_options_that_need_each_other_are_checked_together_and_choices_may_be_a_list() -> None:
    space = {"lr": choice(0.1, 0.2), "precision": choice("bf16", "fp16"), "loss_scale": choice(8.0, 16.0)}
    made = declare(members=None, search=Search(space)).identify(0, {"precision": "fp16", "loss_scale": 8.0})
    assert (made.precision, made.loss_scale) == ("fp16", 8.0)
    ensemble = declare(members=None, search=Search({"lr": choice(0.1, 0.2)}, trials=2), optimizer="sgd")
    assert ensemble.identify(0, {"lr": 0.2}).optimizer is not None
    assert choice([8, 16]) == choice((8, 16)) == choice(8, 16) and choice("(a)", "[a]").values == ("(a)", "[a]")


@pytest.mark.parametrize("recipe", [print, Recipe(model=dict, train=print)])
def test_a_train_function_has_hyperparameters_of_its_own_with_names_of_options(recipe: Any) -> None:
    own = {"weights": "imagenet", "early_stopping": 5, "workers": 4, "start": "imagenet", "epochs": "many"}
    made = declare(recipe=recipe, members=[{**own, "batch_size": 8}], epochs=3).identify(0)
    assert made.params == {**own, "batch_size": 8} and (made.batch_size, made.epochs, made.workers) == (8, 3, 1)
    assert made.weights is made.early_stopping is made.lineage is None
    searched = declare(recipe=recipe, members=None, search=Search({"weights": choice("imagenet", "random")}))
    assert searched.identify(0, {"weights": "random"}).weights is None


def test_a_population_keeps_what_its_state_depends_on() -> None:
    def search(name: str, *values: int, **more: Any) -> Ensemble:
        space = {"lr": loguniform(0.1, 0.2), name: choice(*values)}
        sampler = {"name": "pbt", "population": 2, **more}
        return declare(members=None, search=Search(space, sampler=sampler), epochs=4)

    search("batch_size", 8, 16, inherit=["batch_size"])
    for name in ("batch_size", "epochs", "seed"):
        way_out = "name it in 'inherit'" if name == "batch_size" else rf"give Ensemble\({name}="
        with pytest.raises(SpecError, match=way_out):
            search(name, 4, 8)


def declare(**options: Any) -> Ensemble:
    recipe = options.pop("recipe", Recipe(model=dict, loss=dict, task="classification"))
    options.setdefault("members", [{"lr": 0.1}])
    return Ensemble(name="e", recipe=recipe, train=Split(100), **options)  # type: ignore[arg-type]


def test_a_word_is_recorded_with_all_its_options_unless_it_changes_nothing() -> None:
    identity = declare(optimizer={"name": "lars", "momentum": 0.95}, compression="qsgd4").identify(0)
    assert identity.optimizer == {**resolve("", "lars", OPTIMIZERS), "momentum": 0.95}
    assert identity.optimizer["trust"] == 0.001
    quantized = {"name": "qsgd4", "bucket": 512, "norm": "max", "error_feedback": False, "min_size": 10_000}
    assert identity.compression == quantized
    identity = declare(compression="none", communicator="torch").identify(0)
    assert (identity.compression, identity.communicator, identity.optimizer) == (None, None, None)
    assert (identity.loss_scale, identity.accumulate) == ("dynamic", 1)
    for name in COMPRESSIONS:
        assert resolve("c", resolve("c", name, COMPRESSIONS), COMPRESSIONS) == resolve("c", name, COMPRESSIONS)
    declare(compression={"name": "qsgd8", "norm": "l2", "error_feedback": True})  # whose residuals stay small


def test_a_member_departs_from_the_ensembles_words() -> None:
    other = Member({"lr": 1}, compression="none", accumulate=4, loss_scale=128.0, precision="fp16")
    ensemble = declare(members=[Member({"lr": 1}), other], compression="onebit")
    first, second = ensemble.identify(0), ensemble.identify(1)
    assert first.compression is not None and first.compression["name"] == "onebit"
    assert (second.compression, second.accumulate, second.loss_scale) == (None, 4, 128.0)


DATA = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32), label=np.zeros(8, np.int64)))
RECIPE = Recipe(model=len, loss=len, task="classification")


def declared(**options: Any) -> Ensemble:
    usual = {"name": "spec", "recipe": RECIPE, "train": DATA, "valid": DATA, "members": [{"lr": 0.1}]}
    return Ensemble(**{**usual, **options})


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
    own = Member({"lr": 0.1}, early_stopping="none", averaging="none", compile=False, keep="last", mixup=0.0)
    options = {"early_stopping": EarlyStopping(), "averaging": "ema", "compile": True, "keep": "best"}
    made = declared(members=[Member({"lr": 0.1}), own], mixup=0.2, **options)
    first, second = (made.identify(number) for number in range(2))
    assert first.early_stopping and first.averaging and first.compile and first.keep == "best" and first.mixup
    assert second == dataclasses.replace(declared().identify(0), member="member-1", number=1, seed=1)


def test_a_train_function_has_an_objective_and_an_optimizer_of_its_own() -> None:
    made = declared(recipe=len, keep="best", valid=None)
    assert made.identify(0).selected_by == {"metric": "accuracy", "mode": "max"}
    with pytest.raises(SpecError, match="a train function gives its own"):
        declared(recipe=Recipe(model=len, train=len), optimizer="sgd")
    assert declared(recipe=Recipe(model=len, train=len), members=[{}]).identify(0).optimizer is None


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


def test_an_option_is_given_once_and_a_function_of_the_users_reads_the_hyperparameter_itself() -> None:
    assert declare(members=[Member({"lr": 0.1, "batch_size": 8}, batch_size=8)]).identify(0).batch_size == 8
    with pytest.raises(SpecError, match=r"given twice: 8 as a hyperparameter and Member\(batch_size=16\)"):
        declare(members=[Member({"lr": 0.1, "batch_size": 8}, batch_size=16)])
    recipe = Recipe(model=dict, loss=dict, task="classification", optimizer=dict)
    assert declare(recipe=recipe, members=[{"optimizer": "mine"}]).identify(0).optimizer is None
    assert declare(recipe=print, members=[{"optimizer": "mine", "batch_size": 8}]).identify(0).batch_size == 8
    more = {"schedule": lambda optimizer, params, steps, *, steps_per_epoch: None}  # functions may take more
    Recipe(model=lambda params, width=8: len, loss=lambda *given: None, task="classification", **more)


def test_objects_of_other_libraries_are_answered_with_the_names_that_there_are() -> None:
    tune = pytest.importorskip("ray.tune")
    for given in (tune.choice([1, 2]), tune.loguniform(1e-4, 1), SimpleNamespace(name="hyperopt_param")):
        with pytest.raises(SpecError, match=r"^Search.space\['x'\] .*give choice\(...\), uniform\(low, high\)"):
            Search({"x": given, "y": choice(1, 2)})
    one_tuple = pytest.importorskip("optuna").distributions.CategoricalDistribution(((3, 5),))
    assert Search({"x": one_tuple, "y": choice(1, 2)}).space["x"].values == ((3, 5),)


def test_choices_that_depend_on_another_choice_are_refused_with_the_way_out() -> None:
    def ask(trial: Any) -> dict[str, Any]:
        deep = trial.suggest_categorical("depth", [2, 4, 6]) == 6
        return {"width": trial.suggest_categorical("width", [32, 64] if deep else [8, 16])}

    def ask_in_two_kinds(trial: Any) -> None:
        trial.suggest_float("width", 1, 2) if trial.suggest_int("n", 0, 1) else trial.suggest_int("width", 1, 2)

    way_out = "give the two different names, such as 'width_a' and 'width_b'"
    with pytest.raises(SpecError, match=rf"'width' is suggested as choice\(.*and as choice\(.*{way_out}"):
        Search(ask)
    with pytest.raises(SpecError, match=rf"'width' is suggested as .*{way_out}"):
        Search(ask_in_two_kinds)

    def ask_in_intervals(trial: Any) -> None:
        trial.suggest_int("width", 1, 8 if trial.suggest_int("n", 0, 1) else 4)

    Search(ask_in_intervals)  # Optuna takes that


def test_what_is_not_searched_is_said_when_it_is_declared() -> None:
    for nothing in ({"x": choice(8), "lr": 0.1}, {"lr": 0.1}, lambda trial: {"lr": 0.1}):
        with pytest.warns(UserWarning, match=r"Search.space draws nothing, .* members=seeds\(n, "):
            Search(nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Search(lambda trial: {"lr": trial.suggest_float("lr", 0.1, 1.0)})
        Search({"x": choice([[8, 8]]), "y": choice(1, 2), "z": choice({"a": 1})})
    with pytest.raises(SpecError, match=r"choice\(\[\[8, 8\]\]\) is this one fixed value"):
        Search({"x": [8, 8]})
    with pytest.raises(SpecError, match="is there twice"):
        choice([1, 2], (1, 2))
