"""The task of an ensemble: what is accepted, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ensemble import Recipe, SpecError, Task, quantiles
from ensemble.spec.task import IGNORED, find_known


def make_recipe(task: Any) -> Recipe:
    return Recipe(model=lambda params: None, loss=lambda model, batch: None, task=task)


@pytest.mark.parametrize("task", [Task("gaussian"), quantiles(0.1, 0.5, 0.9), Task("classification")])
def test_a_task_is_the_same_after_its_record(task: Task) -> None:
    assert Task.from_record(task.as_record()) == task
    assert make_recipe(task).task == task


def test_a_recipe_takes_a_word_or_nothing() -> None:
    assert make_recipe("multilabel").task == Task("multilabel")
    assert make_recipe(None).task is None


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("gausian", "did you mean 'gaussian'"),
        ("quantiles", "need their levels"),
        (7, "must be one of"),
    ],
)
def test_an_unknown_task_is_refused(task: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make_recipe(task)


@pytest.mark.parametrize("levels", [(), (0.5, 0.1), (0.0, 0.5), (0.5, 0.5)])
def test_levels_ascend_between_0_and_1(levels: tuple[float, ...]) -> None:
    with pytest.raises(SpecError, match="levels"):
        quantiles(*levels)


def test_only_quantiles_have_levels() -> None:
    with pytest.raises(SpecError, match="only for them"):
        Task("gaussian", (0.5,))


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
def test_what_takes_part_is_the_same_of_arrays_and_tensors(
    target: np.ndarray, of_labels: bool, known: list[bool]
) -> None:
    torch = pytest.importorskip("torch")
    assert find_known(target, of_labels=of_labels).tolist() == known
    found = find_known(torch.from_numpy(target), of_labels=of_labels)
    assert found.dtype == torch.bool and found.tolist() == known
