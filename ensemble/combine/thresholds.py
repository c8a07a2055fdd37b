"""Decision thresholds: which classes or labels are predicted where the most probable ones are not what is wanted.

Where classes are rare, predicting the most probable one leaves them out. A classification with thresholds t
predicts the class with the largest p / t; of two classes that is the second one where its p is at least its t, as
thresholds sum to 1. Of several labels, each is predicted where its p is at least its t. They are fitted to the
calibrated predictions on the validation split, and may be a little too good there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ensemble.combine.formulas import LEAST, decide
from ensemble.combine.metrics import Array, CombineError, find_known
from ensemble.combine.split_metrics import compute
from ensemble.spec.task import Task

#: Above so many classes the search, which takes samples x classes^2 steps, is not begun.
MOST_CLASSES = 200
_SWEEPS = 5
_LEAST_GAIN = 1e-9


def fit_thresholds(task: Task, values: Array, target: Array, by: str) -> Array:
    """The thresholds, float64 [C], with which a metric is largest; never worse than without on the same samples.

    Args:
        task: classification or multilabel.
        values: calibrated probabilities [n, ..., C].
        target: [n, ...], or of labels [n, C].
        by: "f1" (with two classes that of the second, else as "f1_macro"), "f1_macro" or "balanced_accuracy".

    Raises:
        CombineError: for another task, or too many classes.
    """
    if task.kind == "multilabel":
        pairs = zip(np.asarray(values, np.float64).T, np.asarray(target).T, strict=True)
        return np.array(
            [_fit_label(p[takes_part], y[takes_part] != 0, by) for p, y in pairs for takes_part in [find_known(y)]]
        )
    if task.kind != "classification":
        raise CombineError(f"thresholds are for classes and labels, not for the task {task.kind}")
    takes_part = find_known(np.asarray(target))
    p = np.maximum(np.asarray(values, np.float64)[takes_part], LEAST)
    y = np.asarray(target)[takes_part].astype(np.int64)
    classes = p.shape[-1]
    if classes > MOST_CLASSES:
        raise CombineError(f"thresholds are fitted for at most {MOST_CLASSES} classes, there are {classes}")
    of = np.full(classes, 1 / classes)
    for _ in range(_SWEEPS if classes > 2 else 1):
        before = of.copy()
        for number in range(1 if classes == 2 else 0, classes):
            of[number] = _fit_class(p, y, of, number, "f1_macro" if by == "f1" and classes > 2 else by)
        of /= of.sum()
        if np.allclose(of, before, rtol=1e-12, atol=0):
            break
    return of


def describe(task: Task, thresholds: Array | None, by: str, values: Array, target: Array | None) -> dict[str, Any]:
    """The field `decision` of the `combined` event, measured on a split."""
    if thresholds is None or target is None:
        return {"by": by, "thresholds": None, "reason": "the predictions have no target"}
    chosen = {"thresholds": thresholds, "usual": None}
    metrics = {name: measure_decisions(task, values, target, at) for name, at in chosen.items()}
    return {"by": by, "thresholds": thresholds.tolist(), "metrics": metrics, "reason": None}


def measure_decisions(
    task: Task, values: Array, target: Array, thresholds: Array | None
) -> Mapping[str, float | None]:
    """Metrics of what is predicted: as `ensemble.combine.split_metrics` computes them, and the accuracy."""
    at = None if thresholds is None else np.asarray(thresholds, np.float32)  # as a loaded ensemble computes
    decided = np.asarray(decide(task, values if at is None else np.asarray(values, np.float32), at))
    if task.kind == "multilabel":
        sure, names = decided.astype(np.float64), ("f1_macro", "f1_micro", "precision_macro", "recall_macro")
    else:
        sure = np.eye(values.shape[-1])[decided]
        of_second = ("f1", "precision", "recall") if sure.shape[-1] == 2 else ()
        names = ("balanced_accuracy", "f1_macro", "matthews", *of_second)
    takes_part = find_known(np.asarray(target))
    truth = np.asarray(target)[takes_part]
    accuracy = float((decided[takes_part] == (truth != 0 if task.kind == "multilabel" else truth)).mean())
    return {"accuracy": accuracy, **compute(names, sure, target, task)}


def _fit_label(p: Array, y: Array, by: str) -> float:
    """The threshold of one label with the largest score; ties are decided by what is nearest to 0.5."""
    order = np.argsort(-p, kind="stable")
    hits, cuts = np.concatenate([[0], np.cumsum(y[order])]), np.arange(len(p) + 1)
    present, absent = y.sum(), len(y) - y.sum()
    score = 2 * hits / np.maximum(cuts + present, 1)
    if by == "balanced_accuracy":
        score = hits / max(present, 1) + (absent - (cuts - hits)) / max(absent, 1)
    ordered = np.concatenate([[1.0], p[order], [0.0]])
    at, allowed = (ordered[:-1] + ordered[1:]) / 2, ordered[:-1] > ordered[1:]  # which divide any
    best = allowed & (score >= score[allowed].max() - _LEAST_GAIN)
    nearest: float = at[best][np.abs(at[best] - 0.5).argmin()]
    return nearest


def _fit_class(p: Array, y: Array, of: Array, own: int, by: str) -> float:
    """The threshold of one class, those of the others given; the present one unless another is better."""
    classes = p.shape[-1]
    others = p / of
    others[:, own] = -1.0
    rival = others.argmax(axis=-1)
    ratio = p[:, own] / np.maximum(others[np.arange(len(p)), rival], LEAST)  # predicted where it is >= its own
    order = np.argsort(-ratio, kind="stable")
    y, rival, ratio = y[order], rival[order], ratio[order]
    mark = np.eye(classes)
    moved = np.concatenate([np.zeros((1, classes)), np.cumsum(mark[rival], axis=0)])
    moved_hits = np.concatenate([np.zeros((1, classes)), np.cumsum(mark[rival] * (rival == y)[:, None], axis=0)])
    predicted, hits = moved[-1] - moved, moved_hits[-1] - moved_hits
    predicted[:, own] = np.arange(len(p) + 1)
    hits[:, own] = np.concatenate([[0], np.cumsum(y == own)])
    score = _score(hits, predicted, np.bincount(y, minlength=classes), by)
    high, low = np.concatenate([[ratio[0] * 2], ratio]), np.concatenate([ratio, [ratio[-1] / 2]])
    at, allowed = np.exp((np.log(high) + np.log(low)) / 2), high > low * (1 + 1e-6)
    present = int(np.count_nonzero(ratio >= of[own]))
    if not allowed.any() or score[allowed].max() <= score[present] + _LEAST_GAIN:
        return float(of[own])
    best = allowed & (score >= score[allowed].max() - _LEAST_GAIN)
    return float(at[best][np.abs(np.log(at[best] / of[own])).argmin()])


def _score(hits: Array, predicted: Array, present: Array, by: str) -> Any:
    """The metric for each row of counts by class, [n]."""
    if by == "balanced_accuracy":
        return (hits / np.maximum(present, 1))[:, present > 0].mean(axis=1)
    f1 = 2 * hits / np.maximum(predicted + present, 1)
    return f1[:, 1] if by == "f1" else f1[:, present > 0].mean(axis=1)
