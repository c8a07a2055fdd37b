"""The task of an ensemble: what is accepted, and what is refused in one line."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402

from ensemble import Ensemble, Recipe, SpecError, Task, quantiles  # noqa: E402
from ensemble.spec.task import IGNORED, find_known  # noqa: E402
from pipelines import Pipeline, sources  # noqa: E402

CRITERION = torch.nn.CrossEntropyLoss(reduction="none")


def make_recipe(task: Any) -> Recipe:
    return Recipe(model=lambda params: None, loss=lambda model, batch: None, task=task)


@pytest.mark.parametrize("task", [Task("gaussian"), quantiles(0.1, 0.5, 0.9), Task("classification")])
def test_a_task_is_the_same_after_its_record(task: Task) -> None:
    assert Task.from_record(task.as_record()) == task
    assert make_recipe(task).task == task


def of_module(model: Any, batch: Any) -> Any:
    return CRITERION(model(batch["x"]), batch["label"])


def of_two_kinds(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch), batch) + functional.mse_loss(model(batch), batch)


def of_logits(model: Any, batch: Any) -> Any:
    hidden = model.encode(batch["x"])
    labels = functional.binary_cross_entropy_with_logits(model(hidden), batch["label"], reduction="none")
    return labels + 0.01 * functional.mse_loss(model.decode(hidden), batch["x"])


def of_margins(model: Any, batch: Any) -> Any:
    margins = torch.nn.MultiMarginLoss(reduction="none")(model(batch["x"]), batch["label"])
    return margins + functional.l1_loss(model.decode(batch["x"]), batch["x"])


def of_a_divergence(model: Any, batch: Any) -> Any:
    return functional.kl_div(model(batch), batch["soft"]) + functional.mse_loss(model(batch), batch["y"])


def my_loss(values: Any) -> Any:
    return values


def of_my_own(model: Any, batch: Any) -> Any:
    return my_loss(functional.mse_loss(model(batch), batch["y"], reduction="none"))


class Smoothed:
    def __call__(self, model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch), batch, label_smoothing=0.1)


def make_loss(name: str) -> Any:
    function = getattr(functional, name)
    return lambda model, batch: function(model(batch["x"]), batch["label"], reduction="none")


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        ("cross_entropy", "classification"),
        ("huber", "regression"),
        (make_loss("cross_entropy"), "classification"),
        (make_loss("l1_loss"), "regression"),
        (functools.partial(make_loss("gaussian_nll_loss")), "gaussian"),
        (of_module, "classification"),
        (of_my_own, "regression"),
        (Smoothed(), "classification"),
    ],
)
def test_the_task_follows_from_the_loss(loss: Any, task: str) -> None:
    assert Recipe(model=dict, loss=loss).known_task == Task(task)  # type: ignore[arg-type]
    assert Recipe(model=dict, loss=loss, task="free").known_task == Task("free"), "what is declared counts"


@pytest.mark.parametrize(
    "loss", ["binary_cross_entropy", len, of_two_kinds, of_logits, of_margins, of_a_divergence]
)
def test_a_task_that_the_loss_does_not_say_is_asked_for(loss: Any) -> None:
    with pytest.raises(SpecError, match=r"Recipe\(task=...\), one of classification, multilabel, regression"):
        Recipe(model=dict, loss=loss)
    assert Recipe(model=dict, loss=loss, task="multilabel").task == Task("multilabel")


def test_another_loss_implies_another_task() -> None:
    recipe = Recipe(model=dict, loss="mse")
    assert recipe.find_task() == Task("regression")
    pipe = Pipeline(sources.arrays(x=np.zeros((4, 2), np.float32), label=np.zeros(4, np.int64)))
    options: Any = {"name": "ranked", "train": pipe, "valid": pipe, "epochs": 1, "batch_size": 2, "members": [{}]}
    options |= {"allow_overlap": True, "optimizer": {"name": "sgd", "lr": 0.1}}
    assert str(Ensemble(recipe=recipe, **options).objective) == "loss"
    classes = Ensemble(recipe=dataclasses.replace(recipe, loss=of_module), **options)
    assert str(classes.objective) == "accuracy"
    assert dataclasses.replace(recipe, loss=of_module).find_task() == Task("classification")
    assert dataclasses.replace(recipe, loss=of_module, task="regression").find_task() == Task("regression")


def test_a_train_function_predicts_classes_unless_it_says_otherwise() -> None:
    recipe = Recipe(model=dict, train=lambda member: None)
    assert recipe.known_task is None and recipe.find_task() == Task("classification")


def test_what_is_predicted_is_laid_out_as_the_target() -> None:
    assert Task("classification").decide(np.array([[0.2, 0.8], [0.6, 0.4]])).tolist() == [1, 0]
    assert Task("multilabel").decide(np.array([[0.5, 0.4]])).tolist() == [[True, False]]
    assert Task("gaussian").decide(np.array([[1.5, 0.2], [2.5, 9.0]])).tolist() == [1.5, 2.5]
    assert quantiles(0.1, 0.4, 0.9).decide(np.array([[1.0, 2.0, 3.0]])).tolist() == [2.0]
    assert Task("regression").decide(np.array([4.0])).tolist() == [4.0]


@pytest.mark.parametrize(
    ("target", "of_labels", "known"),
    [
        (np.array([0, IGNORED, 3]), False, [True, False, True]),
        (np.array([0, IGNORED], np.int8), True, [True, False]),
        (np.array([156, 3], np.uint8), True, [True, True]),
        (np.array([True, False]), True, [True, True]),
        (np.array([1.0, np.nan, IGNORED]), False, [True, False, True]),
        (np.array([1.0, np.nan, IGNORED], np.float32), True, [True, False, False]),
    ],
)
def test_what_takes_part_is_the_same_of_arrays_and_tensors(target: Any, of_labels: bool, known: Any) -> None:
    assert find_known(target, of_labels=of_labels).tolist() == known
    found = find_known(torch.from_numpy(target), of_labels=of_labels)
    assert found.dtype == torch.bool and found.tolist() == known
