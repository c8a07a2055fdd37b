"""Stacking: a regression on the members' predictions (Wolpert 1992, "Stacked generalization").

The members' validation predictions are the held-out ones: the members never trained on those rows.

- Classes: a multinomial logistic regression on log-probabilities. With the weights of one member at the identity
  it is that member; with each at the identity times w it is their weighted geometric mean; beyond that it may
  correct classes that members confuse. It has (m·C + 1)·C parameters, so it wants many validation rows.
- Labels: a logistic regression for each label, on the members' logits of that label.
- Points: a ridge regression with coefficients not below 0 (Breiman 1996, "Stacked regressions": members agree so
  much that without that bound coefficients of opposite signs cancel), the same for all positions.

The penalty is chosen by cross-validation over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ensemble.combine.methods import average_weights, mix, share_out
from ensemble.combine.metrics import EPSILON, Array, CombineError, find_known, flatten
from ensemble.combine.tasks.temperature import softmax
from ensemble.spec.fields import STACKED_ROWS

PENALTIES = (0.001, 0.01, 0.1, 1.0)
"""Inverse L2 strengths tried (scikit-learn's C); only `DEFAULT_PENALTY` where a fit would take long."""

DEFAULT_PENALTY = 0.1
RIDGES = (1e-4, 1e-2, 1.0)
"""L2 strengths tried for points, in units of the targets' variance a row."""

FOLDS = 3
LARGE = 10**8
"""Rows x features x classes beyond which one fit takes seconds."""

LARGEST = 2 * 10**8
"""Rows x features beyond which a stack of classes is refused: as float64, some copies of them are made."""


S = TypeVar("S", "Stacker", "LabelStacker", "PointStacker")


@dataclass(frozen=True)
class Stacker:
    """A fitted stack of classes.

    Attributes:
        coefficients: [K, m*C] of the K classes that were seen; features are member by member, class by class.
        intercept: [K].
        seen: int [K], the classes. A class that no validation row has keeps the share that the plain average
            gives it, the others divide the rest.
        classes: C.
    """

    coefficients: Array
    intercept: Array
    seen: Array
    classes: int

    def predict(self, probabilities: Sequence[Array]) -> Array:
        """Probabilities float64 [n, ..., C] from the members' [n, ..., C]."""
        fitted = softmax(compute_features(probabilities) @ self.coefficients.T + self.intercept)
        if len(self.seen) == self.classes:
            return fitted
        out = mix(probabilities, average_weights(len(probabilities)))
        out[..., self.seen] = fitted * out[..., self.seen].sum(axis=-1, keepdims=True)
        return out

    def shares(self) -> Array:
        """How much each member weighs, float64 [m], sum 1: its part of the coefficients' absolute sum."""
        return _share(np.abs(self.coefficients).reshape(len(self.seen), -1, self.classes).sum(axis=(0, 2)))

    def share_out(self, groups: Sequence[int]) -> Stacker:
        """The stack of the members of configurations, from that of configurations; see `methods.share_out`."""
        by_class = self.coefficients.reshape(len(self.seen), -1, self.classes).swapaxes(1, 2)
        shared = share_out(by_class, groups).swapaxes(1, 2).reshape(len(self.seen), -1)
        return replace(self, coefficients=shared)


@dataclass(frozen=True)
class LabelStacker:
    """A fitted stack of labels.

    Attributes:
        coefficients: [L, m], on the members' logits of the label.
        intercept: [L].
        seen: bool [L]: whether validation has the label both present and absent; another one is averaged.
    """

    coefficients: Array
    intercept: Array
    seen: Array

    def predict(self, probabilities: Sequence[Array]) -> Array:
        """Probabilities float64 [n, L] from the members' [n, L]."""
        scores = self.intercept + sum(
            column * compute_logits(own) for column, own in zip(self.coefficients.T, probabilities, strict=True)
        )
        average = mix(probabilities, average_weights(len(probabilities)))
        return np.where(self.seen, 1 / (1 + np.exp(-scores)), average)

    def shares(self) -> Array:
        """How much each member weighs, float64 [m], sum 1: its part of the coefficients' absolute sum."""
        return _share(np.abs(self.coefficients).sum(axis=0))

    def share_out(self, groups: Sequence[int]) -> LabelStacker:
        """See `Stacker.share_out`."""
        return replace(self, coefficients=share_out(self.coefficients, groups))


@dataclass(frozen=True)
class PointStacker:
    """A fitted stack of points.

    Attributes:
        coefficients: [m], none below 0.
        intercept: of the sum.
    """

    coefficients: Array
    intercept: float

    def predict(self, points: Sequence[Array]) -> Array:
        """Points float64 [n, ...] from the members' [n, ...]."""
        return mix(points, self.coefficients) + self.intercept

    def shares(self) -> Array:
        """How much each member weighs, float64 [m], sum 1."""
        return _share(self.coefficients)

    def share_out(self, groups: Sequence[int]) -> PointStacker:
        """See `Stacker.share_out`."""
        return replace(self, coefficients=share_out(self.coefficients, groups))


def compute_features(probabilities: Sequence[Array]) -> Array:
    """Log-probabilities of all members side by side: float64 [n, ..., m*C]."""
    return np.concatenate([np.log(np.maximum(p.astype(np.float64), EPSILON)) for p in probabilities], axis=-1)


def compute_logits(probabilities: Array) -> Array:
    """log(p / (1 - p)), float64, of probabilities kept `EPSILON` away from 0 and 1."""
    p = np.clip(probabilities.astype(np.float64), EPSILON, 1 - EPSILON)
    logits: Array = np.log(p) - np.log1p(-p)
    return logits


def fit_class_stack(probabilities: Sequence[Array], target: Array) -> tuple[Stacker, Array]:
    """Fit the stack of classes on these rows.

    Returns:
        The stacker, and out-of-fold probabilities of the same rows: what it says of rows that it was not fitted
        on. Calibrate on those, never on its own fit, on which it is far too sure.

    Raises:
        CombineError: when there are too few rows, or rows of one class only.
    """
    rows, classes = len(target), probabilities[0].shape[-1]
    seen = len(np.unique(target[find_known(target)]))
    if rows < STACKED_ROWS or seen < 2:
        raise CombineError(
            f"stacking needs {STACKED_ROWS} validation rows and two classes among them, got {rows} rows and "
            f"{seen} class(es)"
        )
    features = target.size * len(probabilities) * classes
    if features > LARGEST:
        raise CombineError(
            f"stacking {target.size:,} positions by the {classes} classes of {len(probabilities)} members would "
            f"take {features * 8 / 2**30:.0f} GiB and more"
        )
    large = features * classes > LARGE

    def fit(parts: Sequence[Array], of: Array, penalty: float) -> Stacker | None:
        return None if len(np.unique(of[find_known(of)])) < 2 else _fit(parts, of, penalty)

    def loss(held_out: Array) -> float:
        kept = flatten(held_out, target)
        true = kept.values[np.arange(len(kept.target)), kept.target]
        return float(-np.log(np.maximum(true, EPSILON)).mean())

    return _choose_penalty(probabilities, target, (DEFAULT_PENALTY,) if large else PENALTIES, fit, loss)


def fit_label_stack(probabilities: Sequence[Array], target: Array) -> tuple[LabelStacker, Array]:
    """Fit the stack of labels on these rows; see `fit_class_stack`."""
    if len(target) < STACKED_ROWS:
        raise CombineError(f"stacking needs {STACKED_ROWS} validation rows, got {len(target)}")
    known = find_known(target)

    def loss(held_out: Array) -> float:
        true = np.where(target != 0, held_out, 1 - held_out)[known]
        return float(-np.log(np.maximum(true, EPSILON)).mean())

    return _choose_penalty(probabilities, target, PENALTIES, _fit_labels, loss)


def fit_point_stack(points: Sequence[Array], target: Array) -> tuple[PointStacker, Array]:
    """Fit the stack of points on these rows; see `fit_class_stack`."""
    if len(target) < STACKED_ROWS:
        raise CombineError(f"stacking needs {STACKED_ROWS} validation rows, got {len(target)}")
    known = find_known(target)
    if not target[known].std() > 0:
        raise CombineError("stacking needs validation targets that differ")

    def loss(held_out: Array) -> float:
        return float(np.mean((held_out[known] - target[known]) ** 2))

    return _choose_penalty(points, target, RIDGES, _fit_points, loss)


def _choose_penalty(
    values: Sequence[Array],
    target: Array,
    penalties: Sequence[float],
    fit: Callable[[Sequence[Array], Array, float], S | None],
    loss: Callable[[Array], float],
) -> tuple[S, Array]:
    """The stack with the penalty of least out-of-fold loss, and its out-of-fold predictions."""
    fold_of = np.random.default_rng(0).permutation(len(target)) % FOLDS
    best: tuple[float, float, Array] | None = None
    for penalty in penalties:
        held_out = np.empty(values[0].shape)
        for fold in range(FOLDS):
            out = fold_of == fold
            stacker = fit([own[~out] for own in values], target[~out], penalty)
            parts = [own[out] for own in values]
            held_out[out] = mix(parts, average_weights(len(parts))) if stacker is None else stacker.predict(parts)
        reached = loss(held_out)
        if best is None or reached < best[0]:
            best = (reached, penalty, held_out)
    assert best is not None
    fitted = fit(values, target, best[1])
    assert fitted is not None
    return fitted, best[2]


def _fit(probabilities: Sequence[Array], target: Array, penalty: float) -> Stacker:
    from sklearn.linear_model import LogisticRegression

    rows = flatten(compute_features(probabilities), target)
    model = LogisticRegression(C=penalty, max_iter=1000)
    model.fit(rows.values, rows.target)
    coefficients, intercept = np.asarray(model.coef_), np.asarray(model.intercept_)
    if len(model.classes_) == 2:  # one row, for the second class against the first
        coefficients = np.concatenate([np.zeros_like(coefficients), coefficients])
        intercept = np.concatenate([np.zeros_like(intercept), intercept])
    return Stacker(coefficients, intercept, np.asarray(model.classes_), probabilities[0].shape[-1])


def _fit_labels(probabilities: Sequence[Array], target: Array, penalty: float) -> LabelStacker:
    from sklearn.linear_model import LogisticRegression

    labels, members = target.shape[1], len(probabilities)
    coefficients, intercept = np.zeros((labels, members)), np.zeros(labels)
    seen = np.zeros(labels, dtype=bool)
    logits = np.stack([compute_logits(own) for own in probabilities], axis=-1)  # [n, L, m]
    for label in range(labels):
        known = find_known(target[:, label])
        own = target[known, label] != 0
        seen[label] = own.any() and not own.all()
        if seen[label]:
            model = LogisticRegression(C=penalty, max_iter=1000).fit(logits[known, label], own)
            coefficients[label], intercept[label] = model.coef_[0], model.intercept_[0]
    return LabelStacker(coefficients, intercept, seen)


def _fit_points(points: Sequence[Array], target: Array, penalty: float) -> PointStacker | None:
    from sklearn.linear_model import Ridge

    rows = flatten(np.stack(points, axis=-1).astype(np.float64), target)
    center, scale = rows.target.mean(), rows.target.std()
    if not scale > 0:
        return None
    model = Ridge(alpha=penalty * len(rows.target), positive=True)
    model.fit((rows.values - center) / scale, (rows.target - center) / scale)
    coefficients = np.asarray(model.coef_)
    intercept = float(model.intercept_) * scale + center * (1 - coefficients.sum())
    return PointStacker(coefficients, float(intercept))


def _share(parts: Array) -> Array:
    shares: Array = parts / parts.sum() if parts.sum() else average_weights(len(parts))
    return shares
