"""Calibrates a combined model: what is fitted on validation predictions, and applied to the model's values.

A calibrator is found by its name in `ensemble.spec.fields.CALIBRATORS`. `Ensemble(calibrate=True)` takes that of
the task: "temperature" of classes and labels, "variance_scale" of Gaussians. Another distribution adds one by an
entry point of the group `ray_ensemble.calibrators`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ensemble.combine import formulas
from ensemble.combine.formulas import Values
from ensemble.combine.metrics import EPSILON, Array, CombineError, fold
from ensemble.spec.fields import CALIBRATORS
from ensemble.spec.task import LABELS, Kind, Task
from pipelines.errors import PipelineError

OF_TASK: dict[Kind, str] = {
    "classification": "temperature",
    "multilabel": "temperature",
    "gaussian": "variance_scale",
}
"""The calibrator of each task unless another one is asked for."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
"""Bounds of T: beyond them a model is broken rather than badly calibrated."""

PRIOR = 0.5
"""Standard deviation of log T before any row is seen. In parts of the test NLL without a temperature, pools of 4
small networks have 3.7 times it with the temperature of least NLL on wine (34 rows to fit it on), 1.14 on 300
digits (75), 0.96 on breast cancer (107), but 1.02, 1.03 and 0.92 with the prior (means of 24 partitions)."""


class Calibrator:
    """What a calibrator derives from.

    Attributes:
        kinds: the tasks whose predictions it calibrates.
    """

    kinds: tuple[Kind, ...] = ()

    def fit(self, task: Task, values: Array, target: Array, per_sample: int) -> Any:
        """Fit to validation predictions.

        Args:
            values: float64 [k, ...], one row for each position (or label) that has a target.
            target: [k].
            per_sample: how many of the rows belong to one sample, for labels.

        Returns:
            The parameters as a JSON value; 1.0 where nothing is to be changed.
        """
        raise NotImplementedError

    def apply(self, task: Task, values: Values, parameters: Any) -> Values:
        """The calibrated values [b, ...], of an array or a tensor. A loaded model and an exported program call it
        with tensors, whose values it must not read.
        """
        raise NotImplementedError


def load_calibrator(name: str, task: Task | None) -> Calibrator:
    """The calibrator of this name; for a task of None, which is not known yet, any.

    Raises:
        CombineError: there is none, or it does not calibrate predictions of the task.
    """
    try:
        calibrator: Calibrator = CALIBRATORS.load(name, "there is no calibrator")()
    except PipelineError as error:
        raise CombineError(str(error)) from error
    if task is not None and task.kind not in calibrator.kinds:
        raise CombineError(f"the calibrator {name!r} is of {', '.join(calibrator.kinds)}, not of {task.kind}")
    return calibrator


def apply_calibration(task: Task, values: Values, parameters: Any, calibrator: str | None = None) -> Values:
    """Calibrated values [b, ...]; unchanged for parameters of 1, and for tasks without a calibrator.

    Args:
        calibrator: its name; None: the task's own.
    """
    name = calibrator or OF_TASK.get(task.kind)
    if name is None or parameters == 1.0:
        return values
    return load_calibrator(name, task).apply(task, values, parameters)


class Temperature(Calibrator):
    """Temperature scaling (Guo et al. 2017): divides the logits by T > 0 and takes the softmax again.

    T > 1 softens, T < 1 sharpens; the ranking of the classes stays. The logarithm of a probability is a logit up
    to a constant per row, which the softmax removes. The averaged probabilities are calibrated as a whole, after
    pooling (Rahaman and Thiery 2021: pooling calibrated members leaves the pool underconfident).
    """

    kinds = LABELS

    def fit(self, task: Task, values: Array, target: Array, per_sample: int) -> float:
        """The temperature; see `fit_temperature`."""
        both = values if task.kind == "classification" else np.stack([1 - values, values], axis=-1)
        return fit_temperature(np.log(np.maximum(both, EPSILON)), target.astype(np.int64), per_sample)

    def apply(self, task: Task, values: Values, parameters: float) -> Values:
        """softmax(log(values) / T), of labels sigmoid(logit(values) / T)."""
        if task.kind == "classification":
            return formulas.softmax(formulas.log(values) / parameters)
        return formulas.sigmoid(formulas.compute_logits(values) / parameters)


def fit_temperature(logits: Array, target: Array, rows_of_sample: int = 1) -> float:
    """The most probable temperature for these rows [k, C], or 1.0 where none is better than 1.

    It has the least NLL, summed over the rows, plus (log T)² / (2 `PRIOR`²): of few rows the NLL says little, and
    where nearly all are right it falls until the pool is far too sure. From some hundred rows on the second term
    does not count. T is 1.0 where all rows are right: nothing but a wrong row can tell how sure is too sure.

    The NLL is convex in 1/T (it is a log-sum-exp minus a linear term): a bounded one-dimensional minimisation over
    log T finds the minimum.

    NLL and ECE on the rows it was fitted on are a little optimistic, and more so when members or weights were
    chosen on the same rows.

    Args:
        rows_of_sample: rows of one sample, which count as one: the labels of a multi-label task.
    """
    from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]

    own = logits[np.arange(len(target)), target]
    true, step = own.mean(), max(1, formulas.CHUNK // logits.shape[1])
    chunks = [logits[start : start + step] for start in range(0, len(logits), step)]
    if ((own[:, None] > logits).sum(axis=1) == logits.shape[1] - 1).all():
        return 1.0

    def loss(log_temperature: float) -> float:
        beta, prior = math.exp(-log_temperature), rows_of_sample * log_temperature**2 / (2 * PRIOR**2)
        summed = sum(_log_sum_exp(chunk * beta).sum() for chunk in chunks)
        return float((summed + prior) / len(logits) - true * beta)

    least = minimize_scalar(
        loss,
        bounds=(math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return math.exp(least.x) if least.fun < loss(0.0) - 1e-9 else 1.0


def _log_sum_exp(logits: Array) -> Array:
    top = fold(np.maximum, logits)
    summed: Array = np.log(fold(np.add, np.exp(logits - top[:, None]))) + top
    return summed
