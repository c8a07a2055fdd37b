"""Stacking: a multinomial logistic regression on the members' log-probabilities.

Wolpert 1992 ("Stacked generalization"), with the members' validation predictions as the held-out ones: the members
never trained on those rows. With the weights of one member at the identity it is that member; with each at the
identity times w it is their weighted geometric mean; beyond that it may correct classes that members confuse. It
has (m·C + 1)·C parameters, so it wants many validation rows; the L2 penalty is chosen by cross-validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ensemble.combine.calibrate import softmax
from ensemble.combine.methods import average_weights, check_targets, mix
from ensemble.combine.metrics import EPSILON, Array, CombineError, nll

PENALTIES = (0.001, 0.01, 0.1, 1.0)
"""Inverse L2 strengths tried (scikit-learn's C); only `DEFAULT_PENALTY` where a fit would take long."""

DEFAULT_PENALTY = 0.1
FOLDS = 3
LARGE = 10**8
"""Rows x features x classes beyond which one fit takes seconds."""


@dataclass(frozen=True)
class Stacker:
    """A fitted stack.

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
        """Probabilities float64 [n, C] from the members' [n, C]."""
        fitted = softmax(compute_features(probabilities) @ self.coefficients.T + self.intercept)
        if len(self.seen) == self.classes:
            return fitted
        out = mix(probabilities, average_weights(len(probabilities)))
        out[:, self.seen] = fitted * out[:, self.seen].sum(axis=1, keepdims=True)
        return out

    def shares(self) -> Array:
        """How much each member weighs, float64 [m], sum 1: its part of the coefficients' absolute sum."""
        by_member = np.abs(self.coefficients).reshape(len(self.seen), -1, self.classes).sum(axis=(0, 2))
        if not by_member.sum():
            return average_weights(len(by_member))
        shares: Array = by_member / by_member.sum()
        return shares


def compute_features(probabilities: Sequence[Array]) -> Array:
    """Log-probabilities of all members side by side: float64 [n, m*C]."""
    return np.concatenate([np.log(np.maximum(p.astype(np.float64), EPSILON)) for p in probabilities], axis=1)


def fit_stack(probabilities: Sequence[Array], target: Array) -> tuple[Stacker, Array]:
    """Fit the stack on these rows.

    Returns:
        The stacker, and out-of-fold probabilities [n, C] of the same rows: what it says of rows that it was not
        fitted on. Calibrate on those, never on its own fit, on which it is far too sure.

    Raises:
        CombineError: when there are too few rows, or rows of one class only.
    """
    check_targets(probabilities, target)
    rows, classes = probabilities[0].shape
    if rows < 2 * FOLDS or len(np.unique(target)) < 2:
        raise CombineError(
            f"stacking needs {2 * FOLDS} validation rows and two classes among them, got {rows} rows and "
            f"{len(np.unique(target))} class(es)"
        )
    large = rows * len(probabilities) * classes**2 > LARGE
    fold_of = np.random.default_rng(0).permutation(rows) % FOLDS
    best: tuple[float, float, Array] | None = None
    for penalty in (DEFAULT_PENALTY,) if large else PENALTIES:
        held_out = np.empty((rows, classes))
        for fold in range(FOLDS):
            out = fold_of == fold
            if len(np.unique(target[~out])) < 2:
                held_out[out] = mix([p[out] for p in probabilities], average_weights(len(probabilities)))
                continue
            stacker = _fit([p[~out] for p in probabilities], target[~out], penalty)
            held_out[out] = stacker.predict([p[out] for p in probabilities])
        loss = nll(held_out, target)
        if best is None or loss < best[0]:
            best = (loss, penalty, held_out)
    assert best is not None
    return _fit(probabilities, target, best[1]), best[2]


def _fit(probabilities: Sequence[Array], target: Array, penalty: float) -> Stacker:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=penalty, max_iter=1000)
    model.fit(compute_features(probabilities), target)
    coefficients, intercept = np.asarray(model.coef_), np.asarray(model.intercept_)
    if len(model.classes_) == 2:  # one row, for the second class against the first
        coefficients = np.concatenate([np.zeros_like(coefficients), coefficients])
        intercept = np.concatenate([np.zeros_like(intercept), intercept])
    return Stacker(coefficients, intercept, np.asarray(model.classes_), probabilities[0].shape[1])
