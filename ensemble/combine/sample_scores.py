"""How wrong, how unsure and how disputed the prediction of each sample is: by which samples can be ordered.

| task           | wrong: the loss of           | unsure               | disagreement of the members          |
| classification | log-likelihood               | entropy              | mutual information                   |
| multilabel     | log-likelihood, mean         | entropy, mean        | mutual information, mean             |
| regression     | root mean square error       |                      | standard deviation of the points     |
| gaussian       | log-likelihood               | standard deviation   | standard deviation of the means      |
| quantiles      | pinball                      | width of outer pair  | spread                               |
| free           |                              |                      | standard deviation of the outputs    |

Each is a mean over the positions of a sample whose target is known, NaN where none is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ensemble.combine.metrics import EPSILON, Array, find_known
from ensemble.combine.uncertainty import average_positions, decompose_positions
from ensemble.spec.task import Task

#: What is unsure of a prediction by itself, in words.
_NOT_UNSURE = {
    "regression": "a point says nothing of its own uncertainty; order by the members' disagreement",
    "free": "what a free task predicts has no uncertainty that is known here",
}


@dataclass(frozen=True)
class SampleScores:
    """One score of each sample.

    Attributes:
        what: the score in words, such as "log-likelihood loss".
        values: float64 [n]; the larger, the more of it; NaN where there is none.
        missing: why there are none at all; None where there are.
    """

    what: str
    values: Array | None
    missing: str | None = None


def measure_loss(task: Task, values: Array, target: Array | None) -> SampleScores:
    """How wrong one model is on each sample.

    Args:
        values: [n, ...] as the task lays them out.
        target: [n, ...]; None: not known.
    """
    if task.kind == "free":
        return SampleScores("loss", None, "a free task has no loss that saved predictions alone would give")
    if target is None:
        return SampleScores("loss", None, "no targets were saved")
    known = find_known(target)
    p = np.asarray(values, dtype=np.float64)
    if task.kind in ("classification", "multilabel"):
        if task.kind == "classification":
            true = np.take_along_axis(p, np.where(known, target, 0)[..., None], axis=-1)[..., 0]
        else:
            true = np.where(target == 1, p, 1 - p)
        return SampleScores("log-likelihood loss", average_positions(-np.log(np.maximum(true, EPSILON)), known))
    truth = np.where(known, target, 0.0)
    if task.kind == "regression":
        return SampleScores("error", np.sqrt(average_positions((p - truth) ** 2, known)))
    if task.kind == "gaussian":
        variance = p[..., 1]
        loss = 0.5 * (np.log(2 * math.pi * variance) + (p[..., 0] - truth) ** 2 / variance)
        return SampleScores("log-likelihood loss", average_positions(loss, known))
    levels, above = np.array(task.levels), p - truth[..., None]
    loss = np.maximum((1 - levels) * above, -levels * above).mean(axis=-1)
    return SampleScores("pinball loss", average_positions(loss, known))


def measure_doubt(task: Task, values: Array, target: Array | None) -> SampleScores:
    """How unsure one model is of each sample; arguments as of `measure_loss`."""
    p = np.asarray(values, dtype=np.float64)
    known = None if target is None else find_known(target)
    if task.kind == "classification":
        return SampleScores("entropy", average_positions(_entropy(p).sum(axis=-1), known))
    if task.kind == "multilabel":
        return SampleScores("entropy", average_positions(_entropy(p) + _entropy(1 - p), known))
    if task.kind == "gaussian":
        return SampleScores("standard deviation", np.sqrt(average_positions(p[..., 1], known)))
    if task.kind == "quantiles" and len(task.levels) > 1:
        return SampleScores("width", average_positions(p[..., -1] - p[..., 0], known))
    why = "a single quantile has no width" if task.kind == "quantiles" else _NOT_UNSURE[task.kind]
    return SampleScores("uncertainty", None, why)


def measure_disagreement(
    task: Task, values: Sequence[Array], weights: Array, target: Array | None
) -> SampleScores:
    """How far members disagree on each sample, before calibration.

    Args:
        values: of each of m members.
        weights: [m], as of `decompose_positions`.
    """
    if len(values) < 2:
        return SampleScores("disagreement", None, "one member alone disagrees with nobody")
    known = None if target is None or task.kind == "free" else find_known(target)
    if task.kind == "free":
        spread = average_positions(np.var(np.stack(values).astype(np.float64), axis=0), None)
        return SampleScores("standard deviation of the outputs", np.sqrt(spread))
    found = average_positions(decompose_positions(task, values, weights)["epistemic"], known)
    if task.kind in ("classification", "multilabel"):
        return SampleScores("mutual information", found)
    return SampleScores("spread of the members", found if task.kind == "quantiles" else np.sqrt(found))


def _entropy(p: Array) -> Array:
    """-p log p of each probability; 0 where it is 0."""
    part: Array = -p * np.log(np.maximum(p, np.finfo(np.float64).tiny))
    return np.maximum(part, 0.0)
