"""Computes metrics of a whole split that are no means over its samples, mostly by scikit-learn.

`ensemble.spec.split_metrics` has their names; this module is loaded where some are declared. Proper scores (nll,
brier, crps) are those of the task's own figures (`TaskMath.score_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from sklearn import metrics as sklearn_metrics

from ensemble.combine.metrics import Array, flatten
from ensemble.combine.tasks import find_math
from ensemble.spec.split_metrics import SplitMetricLike, check_metric, name_of
from ensemble.spec.task import IGNORED, Task, find_known
from ensemble.spec.validation import SpecError

PROPER_SCORES = ("nll", "brier", "crps")


def compute(
    metrics: Iterable[SplitMetricLike], values: Array, target: Array | None, task: Task
) -> dict[str, float]:
    """Metrics of the predictions on a whole split.

    Args:
        metrics: names of `KNOWN`, and functions.
        values: float [n, ...], laid out by the task.
        target: [n, ...]; may be None for functions of a free task.

    Returns:
        The metrics by name, without those that these samples leave undefined: the AUC of one class, the
        correlation with a constant, anything of predictions that are not finite.

    Raises:
        SpecError: a name is unknown, has no meaning for the task, or there is no target; a function failed, or
            returned no number.
    """
    figures: dict[str, float] = {}
    for metric in metrics:
        if isinstance(metric, str):
            check_metric("split_metrics", metric, task)
            if target is None:
                raise SpecError(f"split_metrics: {metric!r} needs a target, and the samples have none")
            value = _compute(metric, np.asarray(values), np.asarray(target), task)
        else:
            value = _call(metric, values, target)
        if np.isfinite(value):
            figures[name_of(metric)] = float(value)
    return figures


def _call(metric: Callable[..., float], values: Array, target: Array | None) -> float:
    """What a function of the user gives.

    Raises:
        SpecError: it failed, or gave no number; the message names it.
    """
    where = f"split_metrics: {name_of(metric)!r}"
    try:
        returned = metric(values, target)
    except Exception as error:  # whatever a user's function raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpecError(f"{where} failed for values {list(np.shape(values))}: {why}") from error
    number = np.asarray(returned)
    if number.size != 1 or number.dtype.kind not in "biuf":
        shown = f"an array of shape {list(number.shape)}" if number.size != 1 else f"a {type(returned).__name__}"
        raise SpecError(f"{where} must return a number, got {shown}")
    return float(number.reshape(()))


def _compute(name: str, values: Array, target: Array, task: Task) -> float:
    """A known metric; NaN where it is not defined."""
    has_classes, has_labels = task.kind == "classification", task.kind == "multilabel"
    if not has_classes and not has_labels and name not in PROPER_SCORES:
        values = task.take_point(values)
    takes_part = find_known(target, of_labels=has_classes or has_labels)
    if not takes_part.any() or not np.isfinite(values[takes_part]).all():
        return float("nan")
    if name in PROPER_SCORES:
        if has_classes or has_labels:
            target = np.where(takes_part, target if has_classes else target == 1, IGNORED).astype(np.int64)
        return float(find_math(task).score_rows(flatten(np.asarray(values, np.float64), target))[name].mean())
    if has_labels:
        return _of_labels(name, values, target, takes_part)
    rows, truth = values[takes_part], target[takes_part]
    if has_classes:
        return _of_classes(name, rows, truth.astype(np.int64))
    return _of_numbers(name, rows.astype(np.float64), truth.astype(np.float64))


def _of_classes(name: str, p: Array, t: Array) -> float:
    """A metric of probabilities [n, C] and classes [n]."""
    classes, predicted = p.shape[1], p.argmax(axis=1)
    base = name.removesuffix("_macro").removesuffix("_micro")
    if base in ("roc_auc", "average_precision"):
        columns = [1] if classes == 2 and not name.endswith("_macro") else range(classes)
        return _mean_defined(_rank(base, p[:, c], t == c) for c in columns)
    if base in ("f1", "precision", "recall", "jaccard"):
        average = "micro" if name == "f1_micro" else "binary"
        if name.endswith("_macro") or (average == "binary" and classes > 2):
            average = "macro"
        score = getattr(sklearn_metrics, f"{base}_score")
        labels = None if average == "binary" else np.arange(classes)
        return float(score(t, predicted, labels=labels, average=average, zero_division=0))
    if name == "top5_accuracy":
        score = sklearn_metrics.top_k_accuracy_score
        return 1.0 if classes <= 5 else float(score(t, p, k=5, labels=np.arange(classes)))
    if name == "balanced_accuracy":  # scikit-learn's, which warns of predicted classes that do not occur
        return float(np.mean([np.mean(predicted[t == c] == c) for c in np.unique(t)]))
    score = sklearn_metrics.matthews_corrcoef if name == "matthews" else sklearn_metrics.cohen_kappa_score
    return float(score(t, predicted))


def _of_labels(name: str, p: Array, t: Array, takes_part: Array) -> float:
    """A metric of the probabilities [n, L] of labels and targets [n, L], of those that take part."""
    base = name.removesuffix("_macro").removesuffix("_micro")
    columns = [(p[own, i], t[own, i] == 1) for i, own in enumerate(takes_part.T)]
    if base in ("roc_auc", "average_precision"):
        return _mean_defined(_rank(base, score, truth) for score, truth in columns)
    score: Any = getattr(sklearn_metrics, f"{base}_score")
    if name.endswith("_micro"):
        return float(score(t[takes_part] == 1, p[takes_part] >= 0.5, zero_division=0))
    return float(np.mean([score(truth, own >= 0.5, zero_division=0) for own, truth in columns if len(truth)]))


def _rank(name: str, score: Array, truth: Array) -> float:
    """ROC-AUC or average precision of scores [n] for bool [n]; NaN where only one of the two occurs."""
    if truth.all() or not truth.any():
        return float("nan")
    rank = sklearn_metrics.roc_auc_score if name == "roc_auc" else sklearn_metrics.average_precision_score
    return float(rank(truth, score))


def _mean_defined(values: Iterable[float]) -> float:
    """The mean of the numbers that are not NaN; NaN without one."""
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")


def _of_numbers(name: str, p: Array, t: Array) -> float:
    """A metric of predicted and true numbers, float64 [n]."""
    if name in ("pearson", "spearman"):
        from scipy import stats  # type: ignore[import-untyped]

        if len(t) < 2 or np.ptp(p) == 0 or np.ptp(t) == 0:
            return float("nan")
        return float((stats.pearsonr if name == "pearson" else stats.spearmanr)(p, t).statistic)
    if name in ("r2", "explained_variance") and np.ptp(t) == 0:
        return float("nan")
    functions = {
        "r2": "r2_score",
        "explained_variance": "explained_variance_score",
        "mse": "mean_squared_error",
        "rmse": "root_mean_squared_error",
        "mae": "mean_absolute_error",
        "medae": "median_absolute_error",
        "mape": "mean_absolute_percentage_error",
    }
    return float(getattr(sklearn_metrics, functions[name])(t, p))
