"""The formulas of a combined model, each written once for both kinds of arrays.

Fits and figures call them with numpy arrays in float64, a loaded ensemble and an exported program with tensors
in float32. Values are laid out by the task (`ensemble.spec.task`). Only `explain_invalid` reads those of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ensemble.combine.metrics import EPSILON, Array, fold
from ensemble.spec.task import Task

Values = Any
"""An array or a tensor; all of one call are of one kind."""

SUM_TOLERANCE = 0.02
"""How far a row's sum may be from 1: a softmax rounded to bfloat16 (8 bits) is off by up to about this much."""

LEAST = 1e-7
"""Probabilities below count as this where thresholds divide them, so that thresholds are numbers of float32."""

CHUNK = 2**20
"""Elements of an array that are worked on at once: temporaries stay in the processor's cache."""

CHUNK_OF_ALL = 2**23
"""Elements of all members' arrays that are worked on at once: 64 MiB."""


def find_namespace(values: Values) -> Any:
    """The module whose functions take these values: numpy or torch."""
    if isinstance(values, np.ndarray):
        return np
    import torch

    return torch


def sum_last(values: Values) -> Values:
    """The sum over the last axis."""
    return fold(np.add, values) if isinstance(values, np.ndarray) else values.sum(dim=-1)


def softmax(scores: Values) -> Values:
    """Scores [..., C] to probabilities; large scores do not overflow."""
    if not isinstance(scores, np.ndarray):
        return scores.softmax(dim=-1)
    powers = np.exp(scores - fold(np.maximum, scores)[..., None])
    powers /= fold(np.add, powers)[..., None]
    return powers


def sigmoid(scores: Values) -> Values:
    """Scores to probabilities."""
    return 1 / (1 + np.exp(-scores)) if isinstance(scores, np.ndarray) else scores.sigmoid()


def log(probabilities: Values) -> Values:
    """The logarithm of probabilities kept `EPSILON` away from 0."""
    return find_namespace(probabilities).log(probabilities.clip(min=EPSILON))


def compute_logits(probabilities: Values) -> Values:
    """log(p / (1 - p)) of probabilities kept `EPSILON` away from 0 and 1."""
    return log(probabilities) - log(1 - probabilities)


def mean(members: Sequence[Values], weights: Values) -> Values:
    """The members' sum by their weights [m]."""
    if isinstance(members[0], np.ndarray):
        total = weights[0] * members[0]
        for weight, values in zip(weights[1:], members[1:], strict=True):
            total += weight * values
        return total
    import torch

    return torch.stack([weight * values for weight, values in zip(weights, members, strict=True)]).sum(dim=0)


def spread(members: Sequence[Values], center: Values, weights: Values) -> Values:
    """The members' variance about their mean."""
    return mean([(values - center) ** 2 for values in members], weights)


def mix(task: Task, members: Sequence[Values], weights: Values) -> Values:
    """The members' mean by their weights [m]; of Gaussians the moments of their mixture (Lakshminarayanan et al.
    2017, section 2.4): [b, ...].
    """
    if task.kind != "gaussian":
        return mean(members, weights)
    means = [values[..., 0] for values in members]
    center = mean(means, weights)
    variance = mean([values[..., 1] for values in members], weights) + spread(means, center, weights)
    return find_namespace(center).stack([center, variance], -1)


def normalise(task: Task, values: Values) -> Values:
    """Values without what rounding did to them: probabilities of classes sum to 1, those of labels are 0 ... 1."""
    if task.kind == "classification":
        values = values.clip(min=0)
        return values / sum_last(values)[..., None]
    return values.clip(0, 1) if task.kind == "multilabel" else values


def decide(task: Task, values: Values, thresholds: Values | None) -> Values:
    """The classes that are predicted, int64 [b, ...], or the labels, bool [b, L]; without thresholds as usual."""
    if thresholds is None:
        return values >= 0.5 if task.kind == "multilabel" else values.argmax(-1)
    return values >= thresholds if task.kind == "multilabel" else (values.clip(min=LEAST) / thresholds).argmax(-1)


def explain_invalid(task: Task, values: Values, *, read: bool = True) -> str | None:
    """Returns why `values` [b, ...] are not what the task says; None where they are.

    Args:
        read: whether to look at the values, too, and not at their shape alone; on a GPU that waits for them.
    """
    shape, kind, wanted = list(values.shape), task.kind, None
    if kind == "classification" and (values.ndim < 2 or shape[-1] < 2):
        wanted = "probabilities [b, ..., classes] of two classes or more"
    elif kind == "multilabel" and values.ndim != 2:
        wanted = "probabilities [b, labels]"
    elif kind == "gaussian" and (values.ndim < 2 or shape[-1] != 2):
        wanted = "means and variances [b, ..., 2]"
    elif kind == "quantiles" and (values.ndim < 2 or shape[-1] != len(task.levels)):
        wanted = f"{len(task.levels)} quantiles [b, ..., {len(task.levels)}]"
    if wanted is None and read and 0 not in shape:
        if kind == "classification":
            sums = sum_last(values)
            if not (bool((abs(sums - 1) <= SUM_TOLERANCE).all()) and values.min() >= -1e-6):
                wanted = (
                    f"probabilities of classes (rows sum to {sums.min():.3g} ... {sums.max():.3g}): declare "
                    "Recipe(task='multilabel') where they are several labels a sample"
                )
        elif kind == "multilabel" and not (values.min() >= -1e-6 and values.max() <= 1 + 1e-6):
            wanted = f"probabilities of labels: they are {values.min():.3g} ... {values.max():.3g}"
        elif kind == "gaussian" and not values[..., 1].min() > 0:
            wanted = f"means and variances: a variance is {values[..., 1].min():.3g}, and must be above 0"
    return None if wanted is None else f"outputs of shape {shape}, not {wanted}"


def decompose(task: Task, members: Sequence[Values], weights: Values) -> dict[str, Values]:
    """The uncertainty of each position, [b, ...], by the parts that have a meaning for the task; see
    `ensemble.combine.uncertainty`.

    Args:
        weights: [m], sum 1.
    """
    if task.kind == "classification":
        return _decompose_classes(members, weights)
    if task.kind == "multilabel":
        stack = find_namespace(members[0]).stack
        return _decompose_classes([stack([1 - p, p], -1) for p in members], weights)
    if task.kind == "regression":
        return {"epistemic": spread(members, mean(members, weights), weights)}
    if task.kind == "gaussian":
        means = [values[..., 0] for values in members]
        epistemic = spread(means, mean(means, weights), weights)
        aleatoric = mean([values[..., 1] for values in members], weights)
        return {"total": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}
    if task.kind != "quantiles":
        return {}
    epistemic = spread(members, mean(members, weights), weights).mean(-1) ** 0.5
    if len(task.levels) == 1:
        return {"epistemic": epistemic}
    width = mean([values[..., -1] - values[..., 0] for values in members], weights)
    return {"aleatoric": width, "epistemic": epistemic}


def _decompose_classes(members: Sequence[Values], weights: Values) -> dict[str, Values]:
    """The parts of each position, [b, ...], of probabilities [b, ..., C]."""
    total = compute_entropy(mean(members, weights))
    aleatoric = mean([compute_entropy(p) for p in members], weights)
    votes = mean([_mark_largest(p) for p in members], weights)
    everyone = sum_last(votes) ** 2  # 1, rounded as the votes are: members that all agree disagree by 0
    differ = (everyone - sum_last(votes**2)).clip(min=0)
    pairs = everyone - (weights**2).sum()
    # Where one member has all the weight there are no pairs.
    disagreement = find_namespace(votes).where(pairs > 0, (differ / pairs).clip(max=1), 0.0)
    # By Jensen's inequality the difference is below 0 by rounding only.
    epistemic = (total - aleatoric).clip(min=0)
    return {"total": total, "aleatoric": aleatoric, "epistemic": epistemic, "disagreement": disagreement}


def compute_entropy(probabilities: Values) -> Values:
    """Shannon's entropy in nats over the last axis; what has probability 0 adds nothing."""
    if isinstance(probabilities, np.ndarray):
        logarithms = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
        return np.maximum(-np.einsum("...c,...c->...", probabilities, logarithms), 0.0)
    import torch

    return torch.special.entr(probabilities).sum(dim=-1).clip(min=0)


def _mark_largest(values: Values) -> Values:
    """1 where the last axis is largest, else 0."""
    largest = values.argmax(-1)[..., None]
    if isinstance(values, np.ndarray):
        return (np.arange(values.shape[-1]) == largest).astype(values.dtype)
    import torch

    return torch.zeros_like(values).scatter(-1, largest, 1.0)


def list_chunks(values: Array, arrays: int = 1) -> list[slice]:
    """Slices of the first axis, of about `CHUNK` elements each; fewer where several arrays go together."""
    step = max(1, min(CHUNK, CHUNK_OF_ALL // arrays) * len(values) // max(1, values.size))
    return [slice(start, start + step) for start in range(0, len(values), step)] or [slice(0)]


def compute(function: Callable[[list[Array]], Array], arrays: Sequence[Array]) -> Array:
    """What a formula gives for arrays [n, ...], float64, computed some rows at a time."""
    return compute_parts(lambda rows: {"": function(rows)}, arrays)[""]


def compute_parts(
    function: Callable[[list[Array]], Mapping[str, Array]], arrays: Sequence[Array]
) -> dict[str, Array]:
    """As `compute`, of a formula that gives several arrays by name."""
    made: dict[str, Array] = {}
    for rows in list_chunks(arrays[0], len(arrays)):
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = function([np.asarray(own[rows], dtype=np.float64) for own in arrays])
        for name, part in parts.items():
            if name not in made:
                made[name] = np.empty((len(arrays[0]), *part.shape[1:]))
            made[name][rows] = part
    return made
