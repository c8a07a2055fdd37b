"""Out-of-fold predictions merged, and weights of configurations shared out to their members."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from kit.task_members import TASKS, make_members

from ensemble.combine.combination import fit_held_out
from ensemble.combine.methods import share_out
from ensemble.combine.metrics import CombineError
from ensemble.combine.out_of_fold import merge_folds
from ensemble.combine.tasks import find_math
from ensemble.spec.task import Task
from ensemble.store import Predictions


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_folds_are_merged_by_sample_and_repeats_are_mixed(task: Task) -> None:
    values, target = make_members(task, seed=3, members=2, n=30)
    rng = np.random.default_rng(1)
    saved = []
    for own in values:  # two partitions: one of all samples, one of the first 20
        order = rng.permutation(30 if own is values[0] else 20)
        for start, stop in pairwise((0, 7, 13, len(order))):
            index = np.sort(order[start:stop])
            saved.append(Predictions(own[index], index, target[index], task))
    found = merge_folds([f"member-{at}" for at in range(6)], saved)
    assert np.array_equal(found.index, np.arange(30)) and np.array_equal(found.target, target, equal_nan=True)
    both = find_math(task).mix([values[0][:20], values[1][:20]], np.array([0.5, 0.5]))
    assert np.allclose(found.values[:20], both, atol=1e-6) and np.array_equal(found.values[20:], values[0][20:])


def test_folds_that_do_not_fit_are_refused() -> None:
    one = Predictions(np.full((2, 2), 0.5, np.float32), np.arange(2), np.array([0, 1]))
    other = Predictions(one.values[:1], np.array([1]), np.array([0]))
    with pytest.raises(CombineError, match="a, b saw different targets for one sample"):
        merge_folds(["a", "b"], [one, other])
    three = Predictions(np.full((1, 3), 1 / 3, np.float32), np.array([2]), np.array([0]))
    with pytest.raises(CombineError, match="a and b, of one configuration, predict values of different kinds"):
        merge_folds(["a", "b"], [one, three])
    without = Predictions(one.values[:1], np.array([2]), None)
    with pytest.raises(CombineError, match="one saved targets"):
        merge_folds(["a", "b"], [one, without])


@pytest.mark.parametrize("method", ["average", "weighted", "greedy", "stack"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_a_fit_by_configurations_is_that_of_their_rows_alone(task: Task, method: str) -> None:
    values, target = make_members(task, seed=5, members=3, n=80)
    groups = (0, 0, 0, 1, 1, 2)
    rows = [values[group] for group in groups]
    try:
        alone, expected = fit_held_out(method, values, target, task=task)
    except CombineError:
        with pytest.raises(CombineError):
            fit_held_out(method, rows, target, task=task, groups=groups)
        return
    found, held_out = fit_held_out(method, rows, target, task=task, groups=groups)
    assert found.method == alone.method and found.calibration == pytest.approx(alone.calibration, rel=1e-6)
    assert np.allclose(held_out, expected, atol=1e-6)
    assert np.allclose(found.predict(rows), alone.predict(values), atol=1e-6)
    shares = np.bincount(groups, weights=found.weights)
    assert np.allclose(shares, alone.weights, atol=1e-9) and np.ptp(found.weights[:3]) < 1e-12


def test_coefficients_are_shared_within_a_configuration_wherever_its_members_are() -> None:
    shared = share_out(np.array([[6.0, 1.0]]), (4, 2, 4, 4))
    assert shared.tolist() == [[2.0, 1.0, 2.0, 2.0]]
