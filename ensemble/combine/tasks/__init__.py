"""The mathematics of each task: one module a kind, found by `find_math`."""

from __future__ import annotations

from ensemble.combine.tasks.base import Statistic as Statistic
from ensemble.combine.tasks.base import TaskMath
from ensemble.combine.tasks.classification import ClassificationMath
from ensemble.combine.tasks.free import FreeMath
from ensemble.combine.tasks.gaussian import GaussianMath
from ensemble.combine.tasks.multilabel import MultilabelMath
from ensemble.combine.tasks.quantiles import QuantilesMath
from ensemble.combine.tasks.regression import RegressionMath
from ensemble.spec.task import Kind, Task

__all__ = ["TaskMath", "find_math"]

_MATH: dict[Kind, type[TaskMath]] = {
    "classification": ClassificationMath,
    "multilabel": MultilabelMath,
    "regression": RegressionMath,
    "gaussian": GaussianMath,
    "quantiles": QuantilesMath,
    "free": FreeMath,
}


def find_math(task: Task) -> TaskMath:
    """The mathematics of a task."""
    return _MATH[task.kind](task)
