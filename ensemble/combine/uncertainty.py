"""Decomposes the uncertainty of an ensemble's prediction into its sources.

A member m with weight w_m predicts a distribution p_m; the ensemble predicts the mixture p = sum_m w_m p_m. How
uncertain p is has two sources: **aleatoric** uncertainty is in the data (each member is unsure by itself), and
**epistemic** uncertainty is in the model (each may be sure, but of something else); it shrinks with more
training data and grows away from them. Together they are the **total**.

| task                       | total           | aleatoric           | epistemic              | unit            |
| classification, multilabel | H[p]            | sum_m w_m H[p_m]    | total - aleatoric      | nats            |
| gaussian                   | the sum of both | sum_m w_m var_m     | variance of the means  | of target^2     |
| regression                 |                 |                     | variance of the points | of target^2     |
| quantiles                  |                 | width of outer pair | spread of the members  | of target       |
| free                       |                 |                     |                        |                 |

- Entropies: H is Shannon's entropy; total - aleatoric is the mutual information of the label and the member,
  never negative (Jensen). Depeweg et al. 2018, "Decomposition of uncertainty in Bayesian deep learning"; Smith
  and Gal 2018. A label of a multilabel task is a distribution over two classes.
- Variances: the law of total variance (Lakshminarayanan et al. 2017, section 2.4; Depeweg et al. 2018). A point
  forecast says nothing of the noise in its target, so its epistemic part has no total.
- Quantiles are averaged, level by level: the width of the mean's outermost pair is the mean of the members'
  widths and knows nothing of their disagreement; a single quantile has none. The spread is the root of the
  members' variance, averaged over levels (their 2-Wasserstein distance to the mean, at these levels). Both have no
  sum.
- **Disagreement**, of tasks with classes: the probability that two different members, drawn by their weights,
  name different classes: (1 - sum_c W_c^2) / (1 - sum_m w_m^2), where W_c is the weight of the members whose
  most probable class is c. For equal weights it is the fraction of pairs that disagree (Fort, Hu and
  Lakshminarayanan 2019, "Deep ensembles: a loss landscape perspective"); it is 0 for a single member.

What a task has no meaning for is absent, never 0. All is of the weighted mixture before calibration: a
temperature applied to p alone would break the sums. Of a stack, the weights are its members' shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ensemble.combine.metrics import Array, CombineError
from ensemble.spec.task import Task

#: What `decompose` may return, in this order.
PARTS = ("total", "aleatoric", "epistemic", "disagreement")

_CHUNK = 2**20
"""Elements of a member's values that are worked on at once: temporaries stay in the processor's cache."""

_CHUNK_OF_ALL = 2**24
"""Elements of all members' values that are in memory at once: 128 MiB."""


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
    found = decompose_positions(task, values, weights)
    return {name: average_positions(one, part) for name, one in found.items()}


def decompose_positions(task: Task, values: Sequence[Array], weights: Array) -> dict[str, Array]:
    """The uncertainty of each position: as `decompose`, without the mean.

    Returns:
        Name to float64 [n, ...]: a value for each position, target or label.
    """
    members, w = _drop_weightless(values, weights)
    if task.kind in ("classification", "multilabel"):
        return _decompose_classes(members, w, binary=task.kind == "multilabel")
    if task.kind == "regression":
        return {"epistemic": _variance(members, w)}
    if task.kind == "gaussian":
        epistemic = _variance([v[..., 0] for v in members], w)
        aleatoric = _mean([v[..., 1] for v in members], w)
        return {"total": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}
    if task.kind == "quantiles":
        epistemic = np.sqrt(_variance(members, w).mean(axis=-1))
        if len(task.levels) == 1:
            return {"epistemic": epistemic}
        width = _mean((v[..., -1].astype(np.float64) - v[..., 0] for v in members), w)
        return {"aleatoric": width, "epistemic": epistemic}
    return {}


def average(parts: Mapping[str, Array]) -> dict[str, float]:
    """The mean of each part over the samples of a split; a part without any value is left out."""
    known = {name: one[~np.isnan(one)] for name, one in parts.items()}
    return {name: float(one.mean()) for name, one in known.items() if len(one)}


def _drop_weightless(values: Sequence[Array], weights: Array) -> tuple[list[Array], Array]:
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != (len(values),) or not len(values):
        raise CombineError(f"{len(values)} members need as many weights, got {list(w.shape)}")
    if not np.isfinite(w).all() or w.min() < 0 or not w.sum():
        raise CombineError("weights must be finite and not negative, and one above 0")
    kept = w > 0
    return [v for v, keep in zip(values, kept, strict=True) if keep], w[kept] / w.sum()


def _decompose_classes(values: Sequence[Array], weights: Array, *, binary: bool) -> dict[str, Array]:
    shape = values[0].shape if binary else values[0].shape[:-1]
    classes = 1 if binary else values[0].shape[-1]
    rows = [v.reshape(-1, classes) for v in values]
    parts = {name: np.empty(len(rows[0])) for name in PARTS}
    step = max(1, min(_CHUNK, _CHUNK_OF_ALL // len(rows)) // classes)
    for start in range(0, len(rows[0]), step):
        at = slice(start, start + step)
        chunk = [row[at].astype(np.float64) for row in rows]
        if binary:
            chunk = [np.concatenate([1 - p, p], axis=1) for p in chunk]
        for name, one in zip(PARTS, _decompose_rows(chunk, weights), strict=True):
            parts[name][at] = one
    return {name: one.reshape(shape) for name, one in parts.items()}


def _decompose_rows(members: Sequence[Array], weights: Array) -> tuple[Array, Array, Array, Array]:
    """The parts of rows of probabilities [r, C], each [r]."""
    total = _entropy(_mean(members, weights))
    aleatoric = _mean((_entropy(p) for p in members), weights)
    votes, rows = np.zeros(members[0].shape), np.arange(len(members[0]))
    everyone = own = 0.0
    for p, weight in zip(members, weights, strict=True):
        votes[rows, p.argmax(axis=1)] += weight
        everyone, own = everyone + weight, own + weight**2
    # `everyone` is 1, rounded as the votes are: members that all agree then disagree by 0 and not by a rounding.
    differ = np.maximum(everyone**2 - np.einsum("rc,rc->r", votes, votes), 0.0)
    pairs = everyone**2 - own
    disagreement = np.minimum(differ / pairs, 1.0) if len(members) > 1 else np.zeros(len(rows))
    # By Jensen's inequality the difference is below 0 by rounding only.
    return total, aleatoric, np.maximum(total - aleatoric, 0.0), disagreement


def _entropy(probabilities: Array) -> Array:
    """Shannon's entropy in nats of rows [r, C]; what has probability 0 adds nothing."""
    logarithms = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    entropy: Array = -np.einsum("rc,rc->r", probabilities, logarithms)
    return np.maximum(entropy, 0.0)


def _mean(values: Iterable[Array], weights: Array) -> Array:
    mean: Array | None = None
    for one, weight in zip(values, weights, strict=True):
        if mean is None:
            mean = np.zeros(one.shape)
        mean += weight * one.astype(np.float64)
    assert mean is not None, "there are no members"
    return mean


def _variance(values: Sequence[Array], weights: Array) -> Array:
    center = _mean(values, weights)
    return _mean(((one - center) ** 2 for one in values), weights)


def average_positions(values: Array, part: Array | None) -> Array:
    """The mean over all axes but the first, NaN where no position takes part: [n, ...] -> [n]."""
    flat = values.reshape(len(values), -1) if values.size else values.reshape(len(values), 0)
    known = np.ones(flat.shape, dtype=bool) if part is None else np.asarray(part, dtype=bool).reshape(flat.shape)
    count = known.sum(axis=1)
    total = np.where(known, flat, 0.0).sum(axis=1)
    mean: Array = np.divide(total, count, out=np.full(len(flat), np.nan), where=count > 0)
    return mean
