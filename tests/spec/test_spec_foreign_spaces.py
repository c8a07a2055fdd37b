"""Entries of a search space as other libraries write them are refused with the line that was meant."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ensemble.spec import Search, SpecError, choice, loguniform

LR = loguniform(0.001, 1)


def check(given: Any, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        Search({"x": given, "y": choice(1, 2)})
    assert meant in str(caught.value) and str(caught.value).startswith("Search.space['x']")


def test_objects_of_other_libraries_are_answered_with_the_names_that_there_are() -> None:
    tune = pytest.importorskip("ray.tune")
    for given in (tune.choice([1, 2]), tune.loguniform(1e-4, 1), SimpleNamespace(name="hyperopt_param")):
        check(given, "give choice(...), uniform(low, high), loguniform(low, high), integer(low, high)")


def ask(trial: Any) -> dict[str, Any]:
    deep = trial.suggest_categorical("depth", [2, 4, 6]) == 6
    return {"width": trial.suggest_categorical("width", [32, 64] if deep else [8, 16])}


def ask_in_two_kinds(trial: Any) -> None:
    trial.suggest_float("width", 1, 2) if trial.suggest_int("n", 0, 1) else trial.suggest_int("width", 1, 2)


def ask_in_intervals(trial: Any) -> None:
    trial.suggest_int("width", 1, 8 if trial.suggest_int("n", 0, 1) else 4)


def test_choices_that_depend_on_another_choice_are_refused_with_the_way_out() -> None:
    way_out = "give the two different names, such as 'width_a' and 'width_b'"
    with pytest.raises(SpecError, match=rf"'width' is asked for as choice\(.*and as choice\(.*{way_out}"):
        Search(ask)
    with pytest.raises(SpecError, match=rf"'width' is asked for as .*{way_out}"):
        Search(ask_in_two_kinds)
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


def test_one_tuple_of_optunas_choices_stays_one_value() -> None:
    distributions = pytest.importorskip("optuna").distributions
    space = {"x": distributions.CategoricalDistribution(((3, 5),)), "y": choice(1, 2)}
    assert Search(space).space["x"].values == ((3, 5),)  # type: ignore[index]
