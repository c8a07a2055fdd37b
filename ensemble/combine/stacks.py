"""Stacking: a regression on the members' predictions (Wolpert 1992, "Stacked generalization").

- Classes: a multinomial logistic regression on log-probabilities, of (m·C + 1)·C parameters.
- Labels: a logistic regression for each label, on the members' logits of that label.
- Points: a ridge regression with coefficients not below 0 (Breiman 1996, "Stacked regressions").

The penalty is chosen by cross-validation over validation samples, on which the members never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

import numpy as np

from ensemble.combine import formulas
from ensemble.combine.formulas import Values
from ensemble.combine.methods import average_weights, share_out
from ensemble.combine.metrics import Array, CombineError, find_known, flatten
from ensemble.spec.fields import STACKED_ROWS
from ensemble.spec.task import Task

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


@dataclass(frozen=True)
class Stack:
    """A fitted regression on the members' predictions. `apply` takes arrays, or tensors with `Stack` of tensors.

    Attributes:
        coefficients: [..., m], of each member.
        needs_all: whether a member without a coefficient counts, too: in the average that takes the place of what
            validation has not shown.
    """

    coefficients: Array
    needs_all: ClassVar[bool] = True

    def apply(self, members: Sequence[Values]) -> Values:
        """One set of values [b, ...] of the members' [b, ...]."""
        raise NotImplementedError

    def predict(self, values: Sequence[Array]) -> Array:
        """One set of values float64 [n, ...] of the members' [n, ...]."""
        return formulas.compute(self.apply, values)

    def shares(self) -> Array:
        """How much each member weighs, float64 [m], sum 1: its part of the coefficients' absolute sum."""
        parts = np.abs(self.coefficients).reshape(-1, self.coefficients.shape[-1]).sum(axis=0)
        return np.asarray(parts / parts.sum() if parts.sum() else average_weights(len(parts)))

    def share_out(self: S, groups: Sequence[int]) -> S:
        """The stack of the members of configurations, from that of configurations; see `methods.share_out`."""
        return replace(self, coefficients=share_out(self.coefficients, groups))

    def select(self: S, members: Array) -> S:
        """The stack of some members, bool [m]; the others have no weight."""
        return replace(self, coefficients=self.coefficients[..., members])

    def list_arrays(self) -> dict[str, Array]:
        """Its arrays by name, which are tensors in a loaded ensemble."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, np.ndarray)}


S = TypeVar("S", bound=Stack)


@dataclass(frozen=True)
class ClassStack(Stack):
    """A fitted stack of classes.

    Attributes:
        coefficients: [K, C, m] of the K classes that were seen, for the log-probabilities of C classes.
        intercept: [K].
        seen: [K, C], 1 where the row's class is the column's. A class that no validation row has keeps the share
            that the plain average gives it, the others divide the rest.
    """

    intercept: Array
    seen: Array

    def apply(self, members: Sequence[Values]) -> Values:
        """Probabilities [b, ..., C] of the members' [b, ..., C]."""
        features = formulas.find_namespace(members[0]).concatenate([formulas.log(p) for p in members], axis=-1)
        by_member = self.coefficients.swapaxes(1, 2).reshape(len(self.intercept), -1)
        fitted = formulas.softmax(features @ by_member.T + self.intercept)
        if len(self.intercept) == self.seen.shape[1]:
            return fitted
        average = formulas.mean(members, [1 / len(members)] * len(members))
        is_seen = self.seen.sum(0)
        return average * (1 - is_seen) + (fitted * (average * is_seen).sum(-1)[..., None]) @ self.seen


@dataclass(frozen=True)
class LabelStack(Stack):
    """A fitted stack of labels.

    Attributes:
        coefficients: [L, m], on the members' logits of the label.
        intercept: [L].
        seen: bool [L]: whether validation has the label both present and absent; another one is averaged.
    """

    intercept: Array
    seen: Array

    def apply(self, members: Sequence[Values]) -> Values:
        """Probabilities [b, L] of the members' [b, L]."""
        logits = [formulas.compute_logits(p) for p in members]
        scores = self.intercept + formulas.mean(logits, self.coefficients.T)
        average = formulas.mean(members, [1 / len(members)] * len(members))
        return formulas.find_namespace(scores).where(self.seen, formulas.sigmoid(scores), average)


@dataclass(frozen=True)
class PointStack(Stack):
    """A fitted stack of points: a sum of the members' by coefficients [m], none below 0, and an `intercept`."""

    intercept: float
    needs_all: ClassVar[bool] = False

    def apply(self, members: Sequence[Values]) -> Values:
        """Points [b, ...] of the members' [b, ...]."""
        return formulas.mean(members, self.coefficients) + self.intercept


def fit_stack(task: Task, values: Sequence[Array], target: Array) -> tuple[Stack, Array]:
    """Fit the stack of a task on these rows.

    Returns:
        The stack, and out-of-fold predictions of the same rows: what it says of rows that it was not fitted on.
        Calibrate on those, never on its own fit, on which it is far too sure.

    Raises:
        CombineError: there are too few rows, or rows of one class or of equal targets only.
    """
    if task.kind == "classification":
        return _fit_class_stack(values, target)
    if len(target) < STACKED_ROWS:
        raise CombineError(f"stacking needs {STACKED_ROWS} validation rows, got {len(target)}")
    takes_part = find_known(target)
    if task.kind == "multilabel":

        def loss(held_out: Array) -> float:
            true = np.where(target != 0, held_out, 1 - held_out)[takes_part]
            return float(-formulas.log(true).mean())

        return _choose_penalty(values, target, PENALTIES, _fit_labels, loss)
    if not target[takes_part].std() > 0:
        raise CombineError("stacking needs validation targets that differ")

    def squared_error(held_out: Array) -> float:
        return float(np.mean((held_out[takes_part] - target[takes_part]) ** 2))

    return _choose_penalty(values, target, RIDGES, _fit_points, squared_error)


def _fit_class_stack(probabilities: Sequence[Array], target: Array) -> tuple[ClassStack, Array]:
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

    def fit(parts: Sequence[Array], of: Array, penalty: float) -> ClassStack | None:
        return None if len(np.unique(of[find_known(of)])) < 2 else _fit(parts, of, penalty)

    def loss(held_out: Array) -> float:
        kept = flatten(held_out, target)
        true = kept.values[np.arange(len(kept.target)), kept.target]
        return float(-formulas.log(true).mean())

    penalties = (DEFAULT_PENALTY,) if features * classes > LARGE else PENALTIES
    return _choose_penalty(probabilities, target, penalties, fit, loss)


def _choose_penalty(
    values: Sequence[Array],
    target: Array,
    penalties: Sequence[float],
    fit: Callable[[Sequence[Array], Array, float], S | None],
    loss: Callable[[Array], float],
) -> tuple[S, Array]:
    """The stack with the penalty of least out-of-fold loss, and its out-of-fold predictions."""

    def average(members: list[Array]) -> Array:
        return formulas.compute(lambda parts: formulas.mean(parts, average_weights(len(parts))), members)

    fold_of = np.random.default_rng(0).permutation(len(target)) % FOLDS
    best: tuple[float, float, Array] | None = None
    for penalty in penalties:
        held_out = np.empty(values[0].shape)
        for fold in range(FOLDS):
            out = fold_of == fold
            stack = fit([own[~out] for own in values], target[~out], penalty)
            parts = [own[out] for own in values]
            held_out[out] = average(parts) if stack is None else stack.predict(parts)
        reached = loss(held_out)
        if best is None or reached < best[0]:
            best = (reached, penalty, held_out)
    assert best is not None
    fitted = fit(values, target, best[1])
    assert fitted is not None
    return fitted, best[2]


def _fit(probabilities: Sequence[Array], target: Array, penalty: float) -> ClassStack:
    from sklearn.linear_model import LogisticRegression

    features = np.concatenate([formulas.log(p.astype(np.float64)) for p in probabilities], axis=-1)
    rows = flatten(features, target)
    model = LogisticRegression(C=penalty, max_iter=1000)
    model.fit(rows.values, rows.target)
    coefficients, intercept = np.asarray(model.coef_), np.asarray(model.intercept_)
    if len(model.classes_) == 2:  # one row, for the second class against the first
        coefficients = np.concatenate([np.zeros_like(coefficients), coefficients])
        intercept = np.concatenate([np.zeros_like(intercept), intercept])
    classes = probabilities[0].shape[-1]
    by_class = coefficients.reshape(len(intercept), len(probabilities), classes).swapaxes(1, 2)
    return ClassStack(by_class, intercept, np.eye(classes)[model.classes_])


def _fit_labels(probabilities: Sequence[Array], target: Array, penalty: float) -> LabelStack:
    from sklearn.linear_model import LogisticRegression

    labels, members = target.shape[1], len(probabilities)
    coefficients, intercept = np.zeros((labels, members)), np.zeros(labels)
    seen = np.zeros(labels, dtype=bool)
    logits = np.stack(
        [formulas.compute_logits(own.astype(np.float64)) for own in probabilities], axis=-1
    )  # [n, L, m]
    for label in range(labels):
        takes_part = find_known(target[:, label])
        own = target[takes_part, label] != 0
        seen[label] = own.any() and not own.all()
        if seen[label]:
            model = LogisticRegression(C=penalty, max_iter=1000).fit(logits[takes_part, label], own)
            coefficients[label], intercept[label] = model.coef_[0], model.intercept_[0]
    return LabelStack(coefficients, intercept, seen)


def _fit_points(points: Sequence[Array], target: Array, penalty: float) -> PointStack | None:
    from sklearn.linear_model import Ridge

    rows = flatten(np.stack(points, axis=-1).astype(np.float64), target)
    center, scale = rows.target.mean(), rows.target.std()
    if not scale > 0:
        return None
    model = Ridge(alpha=penalty * len(rows.target), positive=True)
    model.fit((rows.values - center) / scale, (rows.target - center) / scale)
    coefficients = np.asarray(model.coef_)
    intercept = float(model.intercept_) * scale + center * (1 - coefficients.sum())
    return PointStack(coefficients, float(intercept))
