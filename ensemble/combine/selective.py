"""Measures selective prediction: how much less a model errs where it answers only what it is surest of.

Samples are ordered by how sure the model is of them. The **risk** at a coverage of k / n is the mean loss of the
k surest samples of n; as a function of the coverage it is the risk-coverage curve (El-Yaniv and Wiener 2010).

- **AURC**: the area under it, the mean of the risks at 1 / n, 2 / n, ..., 1 (Geifman, Uziel and El-Yaniv 2019,
  "Bias-reduced uncertainty estimation for deep classifiers", section 2). Lower is better; it falls with losses.
- **Excess AURC**: the AURC less that of the same losses in ascending order, which no score can beat. It is of the
  order alone: 0 is perfect.

| task           | a sample is surer by        | loss                                             |
| classification | a larger probability        | 1 where the most probable class is wrong, else 0 |
| multilabel     | the same, of yes and no     | the fraction of its labels that are wrong        |
| gaussian       | a smaller variance          | the squared error of the mean                    |
| regression     | a smaller epistemic part    | the squared error of the point                   |
| quantiles      | a narrower outermost pair   | the absolute error of the middle quantile        |

A sample is answered as a whole: score and loss are means over its positions that take part. A single member's
points, a single quantile and a free task have no score, and no figures.

**Ties** have no order, and their rows are not to choose one: the AURC is its mean over all orders of samples with
equal scores, for which each has their mean loss. A threshold keeps equal samples together: at a coverage of 0.8 it
is the strictest that leaves a fraction of 0.8 at least, and `coverage_80` is the fraction that it leaves.
The threshold is found without targets; on another split it has another coverage.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ensemble.combine.metrics import Array, find_known
from ensemble.combine.uncertainty import average_positions
from ensemble.spec.task import Task

COVERAGES = (0.8, 0.9)
"""At which the risk is told."""

_ROUNDING = 1e-9
"""Of a coverage times the number of samples: 0.8 * 10 is to be 8, and not a hair more."""


def measure_selective(
    task: Task, values: Array, target: Array, epistemic: Array | None = None
) -> dict[str, Any] | None:
    """The figures of selective prediction; None where no score orders the samples.

    Args:
        values: predictions as the task lays them out.
        target: as the task lays it out; positions that take no part are left out.
        epistemic: float64 [n]: the members' variance of each sample, by which points are ordered.

    Returns:
        `score`: "probability", "variance", "epistemic" or "width"; `loss`: "error", "squared_error" or
        "absolute_error"; `risk` of all samples, `aurc`, `eaurc`; of each of `COVERAGES`, in percent, `risk_80`,
        `threshold_80`, the least probability or the largest variance or width that is answered, and `coverage_80`.
    """
    values, target = np.asarray(values, dtype=np.float64), np.asarray(target)
    part = find_known(target)
    found = _score(task, values, part, epistemic)
    if found is None:
        return None
    name, score = found
    loss_name, losses = _measure_losses(task, values, target, part)
    known = part.reshape(len(part), -1).any(axis=1)
    sign, score, losses = 1.0 if name == "probability" else -1.0, score[known], losses[known]
    aurc, least = measure_area(sign * score, losses), measure_area(-losses, losses)
    # No order has a smaller area than that of ascending losses, but for rounding.
    figures = {"risk": float(losses.mean()), "aurc": aurc, "eaurc": max(aurc - least, 0.0)}
    for coverage in COVERAGES:
        at = find_answer_threshold(sign * score, coverage)
        answered, percent = sign * score >= at, f"{coverage:.0%}"[:-1]
        figures |= {
            f"risk_{percent}": float(losses[answered].mean()),
            f"threshold_{percent}": float(sign * at),
            f"coverage_{percent}": float(answered.mean()),
        }
    return {"score": name, "loss": loss_name, **figures}


def measure_area(confidence: Array, losses: Array) -> float:
    """The area under the risk-coverage curve, its mean over all orders of equal samples.

    Args:
        confidence: [n], n > 0, higher for what is answered first.
        losses: float64 [n].
    """
    _, group, count = np.unique(-confidence, return_inverse=True, return_counts=True)
    mean = np.bincount(group, weights=losses) / count
    risks = np.cumsum(np.repeat(mean, count)) / np.arange(1, len(losses) + 1)
    return float(risks.mean())


def find_answer_threshold(confidence: Array, coverage: float) -> float:
    """The largest confidence that leaves this fraction of the samples [n] at least on or above it."""
    count = max(1, math.ceil(len(confidence) * coverage - _ROUNDING))
    return float(np.sort(confidence)[len(confidence) - count])


def _score(task: Task, values: Array, part: Array, epistemic: Array | None) -> tuple[str, Array] | None:
    """What orders the samples: its name, and float64 [n]."""
    if task.kind == "classification":
        return "probability", average_positions(values.max(axis=-1), part)
    if task.kind == "multilabel":
        return "probability", average_positions(np.maximum(values, 1 - values), part)
    if task.kind == "gaussian":
        return "variance", average_positions(values[..., 1], part)
    if task.kind == "quantiles" and len(task.levels) > 1:
        return "width", average_positions(values[..., -1] - values[..., 0], part)
    if task.kind == "regression" and epistemic is not None and np.nan_to_num(epistemic).any():
        return "epistemic", epistemic
    return None


def _measure_losses(task: Task, values: Array, target: Array, part: Array) -> tuple[str, Array]:
    """What a wrong answer costs: its name, and float64 [n]."""
    points = task.decide(values)
    if task.kind in ("classification", "multilabel"):
        return "error", average_positions((points != target).astype(np.float64), part)
    away = np.abs(points - target)
    if task.kind == "quantiles":
        return "absolute_error", average_positions(away, part)
    return "squared_error", average_positions(away**2, part)
