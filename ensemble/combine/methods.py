"""Computes weights of a mixture of members, float64 [m] of sum 1: equal, of least loss, or by greedy selection.

What a score needs of a member's predictions is its *view* [k, v], of which a mixture's is the weighted mean: for
the NLL of classes the probability of the true one, for squared errors the errors, for Gaussians their two moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ensemble.combine import formulas
from ensemble.combine.metrics import Array
from ensemble.spec.task import CLASSIFICATION, Task

Score = tuple[float, ...]

NEGLIGIBLE = 1e-4
"""Weights below this become 0: such a member costs a forward pass and moves no prediction by more."""

TIE = 1e-12
"""Scores closer than this are equal."""


@dataclass(frozen=True)
class Criterion:
    """A score of mixtures, lower is better.

    Attributes:
        view: a member's values to its view [k, v].
        score: a mixture's view to the score; what follows its first entry breaks ties.
        slope: the gradient of its first entry with respect to the view, [k, v]; None where it has none.
    """

    view: Callable[[Array], Array]
    score: Callable[[Array], Score]
    slope: Callable[[Array], Array] | None = None


def mix(values: Sequence[Array], weights: Array, task: Task = CLASSIFICATION) -> Array:
    """The members' mixture: float64 [n, ...]. They may stay float32 as they were saved."""
    used = [at for at, weight in enumerate(weights) if weight] or [0]
    own = np.asarray(weights)[used]
    return formulas.compute(lambda members: formulas.mix(task, members, own), [values[at] for at in used])


def average_weights(members: int) -> Array:
    """Returns equal weights (the deep ensemble of Lakshminarayanan et al. 2017)."""
    return np.full(members, 1.0 / members)


def minimize_loss(values: Sequence[Array], criterion: Criterion) -> Array:
    """The mixture weights of least score, by sequential least squares from equal weights on.

    Never worse on these rows than equal weights. Exact where the score is convex in the mixture (NLL of classes
    and labels, squared error); of Gaussians a local minimum.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    slope = criterion.slope
    assert slope is not None, "the criterion has no gradient"
    members = len(values)
    equal = average_weights(members)
    views = np.stack([criterion.view(own).astype(np.float64) for own in values])
    flat = views.reshape(members, -1)

    def loss(weights: Array) -> float:
        return criterion.score((weights @ flat).reshape(views.shape[1:]))[0]

    def gradient(weights: Array) -> Array:
        slopes: Array = flat @ slope((weights @ flat).reshape(views.shape[1:])).reshape(-1)
        return slopes

    optimum = minimize(
        loss,
        equal,
        jac=gradient,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * members,
        constraints=[{"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": lambda w: np.ones_like(w)}],
        options={"maxiter": 500, "ftol": 1e-10},
    )
    weights = np.where(np.isfinite(optimum.x) & (optimum.x > NEGLIGIBLE), optimum.x, 0.0)
    if not weights.sum():
        return equal
    weights /= weights.sum()
    return weights if loss(weights) <= loss(equal) else equal


def select_greedily(values: Sequence[Array], criterion: Criterion, rounds: int = 50) -> Array:
    """Forward selection with replacement (Caruana et al. 2004, "Ensemble selection from libraries of models").

    Sorted initialisation: the N best members, N chosen by the criterion. Then `rounds` times the member is added
    that makes the mean of all added so far best; the best ensemble met on the way is kept, the smaller one on a
    tie. Ties between members go to the earlier one. A member's weight is how often it was added.

    Returns:
        Weights that are never worse by the criterion, on these rows, than the best single member.
    """
    members, score = len(values), criterion.score
    views = [criterion.view(own) for own in values]
    alone = [score(view) for view in views]
    order = sorted(range(members), key=lambda i: (alone[i], i))

    counts = np.zeros(members, dtype=np.int64)
    total = np.zeros(views[0].shape, dtype=np.float64)
    best_counts, best_total, best_score = counts, total, None
    for size, i in enumerate(order, start=1):
        counts, total = _add_member(counts, i), total + views[i]
        reached = score(total / size)
        if best_score is None or _is_better(reached, best_score):
            best_counts, best_total, best_score = counts, total, reached
    assert best_score is not None

    counts, total = best_counts, best_total
    for size in range(int(counts.sum()) + 1, int(counts.sum()) + 1 + rounds):
        scores = [score((total + view) / size) for view in views]
        chosen = 0
        for i in range(1, members):
            if _is_better(scores[i], scores[chosen]):
                chosen = i
        counts, total = _add_member(counts, chosen), total + views[chosen]
        if _is_better(scores[chosen], best_score):
            best_counts, best_score = counts, scores[chosen]

    weights: Array = best_counts / best_counts.sum()
    # The weighted sum rounds otherwise than the running mean did, and a rounding can turn a tied argmax.
    if _is_better(alone[order[0]], score(mix(views, weights))):
        weights = np.eye(members)[order[0]]
    return weights


def is_at_least_best(values: Sequence[Array], weights: Array, criterion: Criterion) -> bool:
    """Whether the mixture is not worse by the criterion, on these rows, than the best single member."""
    views = [criterion.view(own) for own in values]
    # Of the score only the criterion itself counts here, not what breaks its ties.
    return criterion.score(mix(views, weights))[0] <= min(criterion.score(view)[0] for view in views) + TIE


def _is_better(score: Score, than: Score) -> bool:
    for a, b in zip(score, than, strict=True):
        if abs(a - b) > TIE:
            return a < b
    return False


def _add_member(counts: Array, member: int) -> Array:
    more = counts.copy()
    more[member] += 1
    return more


def list_representatives(groups: Sequence[int] | None, count: int) -> list[int]:
    """The position of the first member of each configuration; of all `count` members where there are none."""
    return list(range(count)) if groups is None else [groups.index(group) for group in dict.fromkeys(groups)]


def share_out(weights: Array, groups: Sequence[int] | None) -> Array:
    """Weights or coefficients of configurations, [..., c], as those of their members, [..., m]: equal in each."""
    if groups is None:
        return weights
    number = {group: at for at, group in enumerate(dict.fromkeys(groups))}
    of = np.array([number[group] for group in groups])
    shared: Array = weights[..., of] / np.bincount(of)[of]
    return shared
