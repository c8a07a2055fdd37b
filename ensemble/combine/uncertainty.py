"""Decomposes the uncertainty of an ensemble's prediction into its sources.

The ensemble predicts the mixture p = sum_m w_m p_m of its members' distributions. **Aleatoric** uncertainty is in
the data (each member is unsure by itself), **epistemic** in the model (each may be sure, but of something else).

| task                       | total           | aleatoric           | epistemic              | unit            |
| classification, multilabel | H[p]            | sum_m w_m H[p_m]    | total - aleatoric      | nats            |
| gaussian                   | the sum of both | sum_m w_m var_m     | variance of the means  | of target^2     |
| regression                 |                 |                     | variance of the points | of target^2     |
| quantiles                  |                 | width of outer pair | spread of the members  | of target       |

- H is Shannon's entropy (Depeweg et al. 2018; Smith and Gal 2018); variances by the law of total variance
  (Lakshminarayanan et al. 2017, section 2.4). The spread is the root of the members' variance, a mean over levels.
- **Disagreement**, of tasks with classes: the probability that two different members, drawn by their weights, name
  different classes; for equal weights the fraction of pairs that disagree (Fort, Hu and Lakshminarayanan 2019).

What a task has no meaning for is absent, never 0. All is of the weighted mixture before calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ensemble.combine import formulas
from ensemble.combine.metrics import Array, CombineError, find_known
from ensemble.combine.tasks import find_math
from ensemble.spec.task import Task

if TYPE_CHECKING:
    from ensemble.combine.combination import Combination
    from ensemble.combine.prediction_matrix import PredictionMatrix

#: What `decompose` may return, in this order.
PARTS = ("total", "aleatoric", "epistemic", "disagreement")


def decompose(task: Task, values: Sequence[Array], weights: Array, part: Array | None = None) -> dict[str, Array]:
    """The uncertainty of each sample: those of `PARTS` that have a meaning for the task.

    Args:
        values: of each of m members, [n, ...] as the task lays them out.
        weights: [m], not negative; they are scaled to sum 1.
        part: bool [n, ...], which positions (or labels) take part (see `metrics.find_known`); None: all.

    Returns:
        Name to float64 [n]: the mean over a sample's positions or labels, NaN where none takes part.

    Raises:
        CombineError: the weights do not fit the members.
    """
    means: dict[str, Array] = {}
    for name, one in decompose_positions(task, values, weights).items():
        flat = one.reshape(len(one), -1) if one.size else one.reshape(len(one), 0)
        counted = np.ones(flat.shape, bool) if part is None else np.asarray(part, bool).reshape(flat.shape)
        count, total = counted.sum(axis=1), np.where(counted, flat, 0.0).sum(axis=1)
        means[name] = np.divide(total, count, out=np.full(len(flat), np.nan), where=count > 0)
    return means


def decompose_positions(task: Task, values: Sequence[Array], weights: Array) -> dict[str, Array]:
    """The uncertainty of each position, target or label, float64 [n, ...]; else as `decompose`."""
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != (len(values),) or not len(values):
        raise CombineError(f"{len(values)} members need as many weights, got {list(w.shape)}")
    if not np.isfinite(w).all() or w.min() < 0 or not w.sum():
        raise CombineError("weights must be finite and not negative, and one above 0")
    members = [own for own, weight in zip(values, w, strict=True) if weight > 0]
    shares = w[w > 0] / w.sum()
    return formulas.compute_parts(lambda rows: formulas.decompose(task, rows, shares), members)


def average(parts: Mapping[str, Array]) -> dict[str, float]:
    """The mean of each part over the samples of a split; a part without any value is left out."""
    defined = {name: one[~np.isnan(one)] for name, one in parts.items()}
    return {name: float(one.mean()) for name, one in defined.items() if len(one)}


@dataclass(frozen=True)
class Quantified:
    """The combined model's predictions on a split, and how sure they are.

    Attributes:
        split: "valid" or "test".
        task: what is predicted.
        index: int64 [n].
        target: [n, ...] or None.
        values: combined and calibrated, float64 [n, ...] as the task lays them out.
        parts: uncertainty of each sample by its parts, float64 [n] each.
        best: what the best member alone predicts, uncalibrated; None where none is known to be the best.
    """

    split: str
    task: Task
    index: Array
    target: Array | None
    values: Array
    parts: dict[str, Array]
    best: Array | None = None


def quantify(
    split: str, aligned: PredictionMatrix, combination: Combination, best: str | None = None
) -> Quantified:
    """Predict a split's samples with a combination of its members, and decompose their uncertainty.

    Args:
        best: the best member, if known.

    Raises:
        CombineError: the user's function gives something else than predictions.
    """
    first, target = aligned.values[0], aligned.target
    has_positions = target is not None and target.shape == first.shape[: first.ndim - find_math(aligned.task).tail]
    takes_part = find_known(target) if has_positions else None
    parts = decompose(aligned.task, aligned.values, combination.weights, takes_part)
    alone = None if best is None else aligned.values[aligned.members.index(best)]
    values = combination.predict(aligned.values)
    return Quantified(split, aligned.task, aligned.index, target, values, parts, alone)
