"""Computes the weights of a mixture of members: equal, of least NLL, or by greedy selection.

`probabilities` is a sequence of m arrays [n, C], one per member, rows aligned; the result is float64 [m] on the
simplex (no entry negative, sum 1). The arrays may stay float32 as they were saved: sums are taken in float64, one
member at a time, so that m members are never copied at once.

Weights are fitted to the rows they are given, the validation set. Scores on those same rows are therefore
optimistic: a little for `average` (nothing is fitted), more the more members there are to choose from and the
fewer rows there are. The honest figure needs rows that took no part: a test split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ensemble.combine.metrics import EPSILON, Array, check_target, nll_of_target, target_column

Criterion = Literal["nll", "accuracy", "brier"]
Score = tuple[float, ...]

NEGLIGIBLE = 1e-4
"""Weights below this become 0: such a member costs a forward pass and moves no probability by more."""

TIE = 1e-12
"""Scores closer than this are equal."""


def mix(probabilities: Sequence[Array], weights: Array) -> Array:
    """The weighted mean of the members' probabilities: float64 [n, C]."""
    mixed = np.zeros(probabilities[0].shape, dtype=np.float64)
    for p, weight in zip(probabilities, weights, strict=True):
        if weight:
            mixed += float(weight) * p.astype(np.float64)
    return mixed


def average_weights(members: int) -> Array:
    """Returns equal weights (the deep ensemble of Lakshminarayanan et al. 2017)."""
    return np.full(members, 1.0 / members)


def weighted_weights(probabilities: Sequence[Array], target: Array) -> Array:
    """The mixture weights of least NLL: a convex problem on the simplex, solved by sequential least squares.

    Never worse on these rows than equal weights.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    check_targets(probabilities, target)
    members = len(probabilities)
    equal = average_weights(members)
    # The NLL of a mixture needs only what each member gives to the true class.
    columns = np.stack([target_column(p, target) for p in probabilities])  # [m, n]

    def loss(weights: Array) -> float:
        return nll_of_target(weights @ columns)

    def gradient(weights: Array) -> Array:
        slope: Array = -(columns / np.maximum(weights @ columns, EPSILON)).mean(axis=1)
        return slope

    found = minimize(
        loss,
        equal,
        jac=gradient,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * members,
        constraints=[{"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": lambda w: np.ones_like(w)}],
        options={"maxiter": 500, "ftol": 1e-10},
    )
    weights = np.where(np.isfinite(found.x) & (found.x > NEGLIGIBLE), found.x, 0.0)
    if not weights.sum():
        return equal
    weights /= weights.sum()
    return weights if loss(weights) <= loss(equal) else equal


def greedy_weights(
    probabilities: Sequence[Array], target: Array, criterion: Criterion = "nll", rounds: int = 50
) -> Array:
    """Forward selection with replacement (Caruana et al. 2004, "Ensemble selection from libraries of models").

    Sorted initialisation: the N best members, N chosen by the criterion. Then `rounds` times the member is added
    that makes the mean of all added so far best; the best ensemble met on the way is kept, the smaller one on a
    tie. Ties between members go to the earlier one. A member's weight is how often it was added.

    Args:
        criterion: `"nll"`, `"brier"` (both least) or `"accuracy"` (highest, ties by NLL).

    Returns:
        Weights that are never worse by the criterion, on these rows, than the best single member.
    """
    check_targets(probabilities, target)
    members = len(probabilities)
    views, score = _make_score(probabilities, target, criterion)
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


def is_at_least_best(probabilities: Sequence[Array], target: Array, weights: Array, criterion: Criterion) -> bool:
    """Whether the mixture is not worse by the criterion, on these rows, than the best single member."""
    views, score = _make_score(probabilities, target, criterion)
    # Of the score only the criterion itself counts here, not what breaks its ties.
    return score(mix(views, weights))[0] <= min(score(view)[0] for view in views) + TIE


def _make_score(
    probabilities: Sequence[Array], target: Array, criterion: Criterion
) -> tuple[list[Array], Callable[[Array], Score]]:
    """Returns the part of each member's probabilities that the criterion needs, [n, C] or [n, 1], and the score
    function (lower is better).
    """
    if criterion == "nll":
        columns = [target_column(p, target)[:, None] for p in probabilities]
        return columns, lambda mean: (nll_of_target(mean[:, 0]),)
    views = list(probabilities)
    if criterion == "accuracy":
        return views, lambda mean: (
            -float(np.mean(mean.argmax(axis=1) == target)),
            nll_of_target(target_column(mean, target)),
        )
    return views, lambda mean: (
        float(np.mean(np.einsum("nc,nc->n", mean, mean, dtype=np.float64) - 2 * target_column(mean, target))),
    )


def _is_better(score: Score, than: Score) -> bool:
    for a, b in zip(score, than, strict=True):
        if abs(a - b) > TIE:
            return a < b
    return False


def _add_member(counts: Array, member: int) -> Array:
    more = counts.copy()
    more[member] += 1
    return more


def check_targets(probabilities: Sequence[Array], target: Array) -> None:
    """Raise `CombineError` unless `target` [n] names a class of each of the probabilities [n, C]."""
    for p in probabilities:
        check_target(p.shape, target)
