"""The mathematics of one task: how predictions are checked, mixed, measured, calibrated and selected.

Predictions are numpy arrays; what a loaded model computes as well is in `formulas`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ensemble.combine import formulas, methods
from ensemble.combine.calibrators import OF_TASK, apply_calibration, load_calibrator
from ensemble.combine.methods import Criterion
from ensemble.combine.metrics import (
    Array,
    CombineError,
    Curve,
    Figures,
    MetricSums,
    Positions,
    compute_defined,
    find_known,
    flatten,
)
from ensemble.spec.objectives import infer_mode
from ensemble.spec.positions import list_pieces, take_positions
from ensemble.spec.split_metrics import SplitMetricLike, name_of
from ensemble.spec.task import Task
from pipelines.providers import import_object

Model = Callable[[Sequence[Array]], Array]
"""What a model predicts, [n, ...], of arrays [n, ...] for the same positions, or labels."""

Statistic = Callable[[Array | None], Figures]
"""Figures of d resamples, float64 [d] each, of how often each holds each sample, [d, n]; None: once, d = 1."""


@dataclass(frozen=True)
class TaskMath(ABC):
    """What can be done with predictions of one task; `values` and `target` as `ensemble.spec.task` lays them out.

    Attributes:
        task: the task.
        criteria: names by which greedy selection may choose; the first is the default, and what `weighted`
            minimizes.
        tail: how many axes of `values` come after those of `target`; `axes`: their names.
        no_stack: why members of this task cannot be stacked; None where they can.
        no_calibration: why predictions of this task are not calibrated; None where they are.
        center: of numbers, from which sums are taken that are added up; None: the mean of the numbers at hand.
    """

    task: Task
    center: float | None = None
    criteria: ClassVar[tuple[str, ...]] = ()
    tail: ClassVar[int] = 0
    axes: ClassVar[tuple[str, ...]] = ()
    no_stack: ClassVar[str | None] = None
    no_calibration: ClassVar[str | None] = None

    @property
    def default_criterion(self) -> str:
        """The criterion by which members are selected unless another one is the objective."""
        return self.criteria[0]

    # Checks

    def explain_invalid(self, values: Array) -> str | None:
        """Returns why `values` are no predictions of this task; None where they are."""
        why = formulas.explain_invalid(self.task, values, read=False)
        if why is None and not values.size:
            return "there are no samples"
        if why is None and not np.isfinite(values).all():
            return f"outputs of shape {list(values.shape)} hold NaN or infinity"
        return why or formulas.explain_invalid(self.task, values)

    def normalise(self, values: Array) -> Array:
        """Values without what rounding to a half precision did to them, which is up to a hundredth; the same array
        where it did nothing.
        """
        if self.task.kind == "classification":
            is_exact = values.min() >= 0 and np.abs(formulas.sum_last(values) - 1).max() < 1e-4
        else:
            is_exact = self.task.kind != "multilabel" or (values.min() >= 0 and values.max() <= 1)
        if is_exact:
            return values
        return formulas.compute(lambda rows: formulas.normalise(self.task, rows[0]), [values]).astype(np.float32)

    def check_target(self, values: Array, target: Array) -> None:
        """Raise `CombineError` unless `target` [n, ...] fits `values`, with n > 0."""
        if target.shape != values.shape[: values.ndim - self.tail] or not len(target):
            axes = "".join(f", {name}" for name in self.axes)
            raise CombineError(
                f"expected {self.task.kind} values [n, ...{axes}] and targets [n, ...] with n > 0, got "
                f"{list(values.shape)} and {list(target.shape)}"
            )
        if not find_known(target).any():
            raise CombineError(f"no target can be used: all {target.size} are ignored")

    # Metrics

    @abstractmethod
    def statistics(self, values: Array, target: Array) -> list[Statistic]:
        """The task's own figures, as functions of resamples."""

    def score_rows(self, rows: Positions) -> dict[str, Array]:
        """The proper scores that the task has, float64 [k] each, of positions (or labels) by themselves."""
        raise NotImplementedError

    def measure(
        self, values: Array, target: Array, split_metrics: Sequence[SplitMetricLike] = ()
    ) -> dict[str, float]:
        """The task's figures and the `split_metrics`; without those that are undefined for these samples, or whose
        function fails.

        Raises:
            CombineError: the target does not fit.
            SpecError: a split metric has no meaning for the task.
        """
        values, target = np.asarray(values), np.asarray(target)
        self.check_target(values, target)
        return self.finish(self.statistics(values, target), lambda: values, target, split_metrics)

    def finish(
        self, statistics: Sequence[Statistic], values: Callable[[], Array], target: Array, split_metrics: Any
    ) -> dict[str, float]:
        """What `measure` returns, of the task's own figures; `values` are asked for where others are wanted."""
        figures = {name: float(value[0]) for statistic in statistics for name, value in statistic(None).items()}
        if more := [metric for metric in split_metrics if name_of(metric) not in figures]:
            figures |= compute_defined(more, values(), target, self.task)[0]
        return {name: value for name, value in figures.items() if math.isfinite(value)}

    def statistics_of(self, model: Model, arrays: Sequence[Array], target: Array) -> list[Statistic]:
        """`statistics` of a model that predicts each position, or sample, by itself: of some at a time, so that
        mapped `arrays` [n, ...], which it is given, are never held as a whole.
        """
        pieces = list_pieces(self.task, arrays[0].shape)
        if len(pieces) == 1:
            self.check_target(arrays[0], target)
            return self.statistics(model(arrays), target)
        own, total = self, None
        for rows, at in pieces:
            part = take_positions(target[rows], at, 0)
            takes_part = find_known(part)
            if not takes_part.any():
                continue
            if own.center is None and part.dtype.kind == "f":
                own = replace(self, center=float(part[takes_part].mean()))
            values = [take_positions(own_array[rows], at, self.tail) for own_array in arrays]
            own.check_target(values[0], part)
            [statistic] = own.statistics(model(values), part)
            assert isinstance(statistic, MetricSums)
            if total is None:
                total = replace(statistic, columns=np.zeros((len(statistic.columns), len(target))))
            total.columns[:, rows] += statistic.columns
        if total is None:
            raise CombineError(f"no target can be used: all {target.size} are ignored")
        return [total]

    def reliability(self, values: Array, target: Array) -> Curve | None:
        """The reliability curve: (mean confidence, accuracy, rows) of each bin; None unless of probabilities."""
        return None

    # Combination

    def mix(self, values: Sequence[Array], weights: Array) -> Array:
        """One prediction, float64 [n, ...], of the members' by their weights [m]."""
        return methods.mix(values, weights, self.task)

    def criterion(self, target: Array, name: str) -> Criterion:
        """The criterion of that name, one of `criteria`, for these targets."""
        raise NotImplementedError

    def guess(self, values: Array, target: Array) -> Array:
        """What who knows only the targets predicts for each sample, in the shape of `values`."""
        raise NotImplementedError

    def choose_criterion(self, objective: str | None, mode: str | None) -> str:
        """Returns the criterion of greedy selection: the objective where it is one, else the default.

        The root of a mean of squares ranks as the mean does.
        """
        objective = "rmse" if objective == "mse" else objective
        if objective in self.criteria and infer_mode(objective) == mode:
            return objective
        return self.default_criterion

    def weighted_weights(self, values: Sequence[Array], target: Array) -> Array:
        """The weights of least default criterion (see `methods.minimize_loss`)."""
        return methods.minimize_loss(values, self._check(values, target, None))

    def greedy_weights(
        self, values: Sequence[Array], target: Array, criterion: str | None = None, rounds: int = 50
    ) -> Array:
        """Weights never worse by the criterion than the best member (see `methods.select_greedily`)."""
        return methods.select_greedily(values, self._check(values, target, criterion), rounds)

    def is_at_least_best(self, values: Sequence[Array], target: Array, weights: Array, criterion: str) -> bool:
        """Whether the mixture is not worse by the criterion, on these rows, than the best single member."""
        return methods.is_at_least_best(values, weights, self._check(values, target, criterion))

    def _check(self, values: Sequence[Array], target: Array, criterion: str | None) -> Criterion:
        for own in values:
            self.check_target(own, target)
        name = self.default_criterion if criterion is None else criterion
        if name not in self.criteria:
            raise CombineError(f"{name!r} is no criterion of {self.task.kind} (valid: {', '.join(self.criteria)})")
        return self.criterion(np.asarray(target), name)

    def fit_stack(self, values: Sequence[Array], target: Array) -> tuple[Any, Array]:
        """Fit a stack (`ensemble.combine.stacks`) on these rows.

        Returns:
            The stack, and its out-of-fold predictions of the same rows, to calibrate on.

        Raises:
            CombineError: the task has none, or there are too few rows.
        """
        if self.no_stack is not None:
            raise CombineError(self.no_stack)
        for own in values:
            self.check_target(own, target)
        stack, held_out = import_object("ensemble.combine.stacks:fit_stack")(self.task, values, target)
        return stack, held_out

    # Calibration

    @property
    def calibrator(self) -> str | None:
        """The name of the task's own calibrator; None for tasks without one."""
        return OF_TASK.get(self.task.kind)

    def fit_calibration(self, values: Array, target: Array, calibrator: str | None = None) -> Any:
        """The parameters of a calibrator, by default the task's own, fitted to these rows; 1.0 for none."""
        name = calibrator or self.calibrator
        if name is None:
            return 1.0
        values, target = np.asarray(values, dtype=np.float64), np.asarray(target)
        self.check_target(values, target)
        rows = flatten(values, target)
        per_sample = target.shape[-1] if self.task.kind == "multilabel" else 1
        return load_calibrator(name, self.task).fit(self.task, rows.values, rows.target, per_sample)

    def calibrate(self, values: Array, parameters: Any, calibrator: str | None = None) -> Array:
        """Calibrated values, float64; unchanged for parameters of 1."""
        if parameters == 1.0:
            return np.asarray(values, dtype=np.float64)
        return formulas.compute(
            lambda rows: apply_calibration(self.task, rows[0], parameters, calibrator), [values]
        )
