"""What a member adds to the others: the gain in the ensemble's metric, as the objective of a search.

The *gain* of a member is how much better the ensemble of the finished members is with it than without: the others
are combined by greedy selection (`ensemble.combine.greedy_weights`), the member is mixed in with the best of a few
shares, and the metric after is held against the one before, on the validation split. It must take part, so the
gain of one that only does harm is negative and still tells how much. A member that has no others to be added to is
held against the frequencies of the classes.

What a member adds shrinks as the ensemble grows: of 60 random trials on handwritten digits, in their order, the
first three added 0.10, 0.02 and 1.23 nats, all but one of the next 57 0.02 or less. So gains that were taken at
different times cannot be compared: a sampler would take its first trials for the best for ever, and a pruner end
all later ones. Therefore the gains of *all* finished trials are computed anew against the present ensemble before
each proposal, as Lévesque et al. 2016 do ("Bayesian hyperparameter optimization for ensemble learning", UAI), and
the pruner goes by the metric. The gains follow from the predictions on disk and from who has finished, thus from
the log: a resumed search computes the same. 30 members take about 0.07 s with 270 samples, 0.5 s with 2000.

What it brought, on those digits: 30 trials of TPE, 4 seeds, mean NLL of the greedy ensemble. On the 270 samples of
validation 0.170 with the gain in NLL and 0.184 with the metric (with hyperband 0.204 and 0.215), on the 270 of the
test 0.218 and 0.206 (with hyperband 0.227 and 0.238): so few samples are fitted better, and no more than that. Use
it where the validation split is large. The gain in accuracy is exactly 0 for most members, and brought nothing
(0.219, with hyperband 0.222).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ensemble.combine.aligned import align
from ensemble.combine.errors import CombineError
from ensemble.combine.methods import Criterion, greedy_weights, mix
from ensemble.combine.metrics import Array, accuracy, brier, check_target, nll, target_column

if TYPE_CHECKING:
    from ensemble.store import Predictions, RunDir

SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Of the mixture, that a member may have when it is added."""

ROUNDS = 20
"""Of greedy selection: the combination at the run's end has more, which change little and cost as much again."""


def gains(
    probabilities: Sequence[Array],
    target: Array,
    metric: Criterion = "nll",
    of: Sequence[int] | None = None,
    nothing: Array | None = None,
) -> list[float]:
    """What each member, or each of some, adds to the others; positive is better, in the metric's unit.

    Args:
        probabilities: m arrays [n, C], rows aligned.
        target: int [n].
        metric: "nll" (nats), "brier", or "accuracy" (a fraction).
        of: whose gains; None: all.
        nothing: [n, C], what a lone member is held against; None: the frequencies of the classes.

    Raises:
        CombineError: the shapes do not fit, or a target is no class.
    """
    asked = range(len(probabilities)) if of is None else of

    def score(mixture: Array) -> float:
        """More is better."""
        if metric == "accuracy":
            return accuracy(mixture, target)
        return -(brier if metric == "brier" else nll)(mixture, target)

    if len(probabilities) == 1:
        before = score(frequencies(target, probabilities[0].shape[1]) if nothing is None else nothing)
        return [score(probabilities[0]) - before for _ in asked]
    weights = greedy_weights(probabilities, target, "nll", ROUNDS)
    whole = mix(probabilities, weights)
    found = []
    for i in asked:
        # Who was not selected is not missed: without it the selection is the same.
        others = whole if not weights[i] else _without(probabilities, target, i)
        own = probabilities[i].astype(np.float64)
        found.append(max(score(others + share * (own - others)) for share in SHARES) - score(others))
    return found


def frequencies(target: Array, classes: int) -> Array:
    """What can be said without a model: for each sample how frequent the classes are, [n, C]."""
    return np.tile(np.bincount(target, minlength=classes) / len(target), (len(target), 1))


def _without(probabilities: Sequence[Array], target: Array, left_out: int) -> Array:
    others = [p for i, p in enumerate(probabilities) if i != left_out]
    return mix(others, greedy_weights(others, target, "nll", ROUNDS))


ROWS = 2000
"""Of the validation split, spread evenly, that `Gains` looks at: a proposal waits for it."""


class Gains:
    """The gains of a run's finished members, from the predictions that they saved; reads each file once.

    Args:
        run_dir: where the predictions are.
        metric: see `gains`.
    """

    def __init__(self, run_dir: RunDir, metric: Criterion) -> None:
        self._run_dir, self._metric = run_dir, metric
        self._known: dict[str, Array] = {}
        self._first: tuple[str, Predictions] | None = None
        self._target = self._nothing = self._rows = np.empty(0, np.int64)

    def of(self, member: str, finished: Sequence[str]) -> float:
        """What a member adds to those that have finished.

        Raises:
            CombineError, StoreError: its predictions are missing, or are no class probabilities of these samples.
        """
        self._read(member)
        usable = [other for other in finished if other != member and self._usable(other)]
        return self._gains([*usable, member], [len(usable)])[0]

    def all(self, finished: Sequence[str]) -> dict[str, float]:
        """What each of the finished members adds to the others; without those whose predictions cannot be used."""
        usable = [member for member in finished if self._usable(member)]
        return dict(zip(usable, self._gains(usable, None), strict=True)) if usable else {}

    def _gains(self, members: Sequence[str], of: Sequence[int] | None) -> list[float]:
        probabilities = [self._known[member] for member in members]
        return gains(probabilities, self._target, self._metric, of, self._nothing)

    def _usable(self, member: str) -> bool:
        from ensemble.store import StoreError

        try:
            self._read(member)
        except (CombineError, StoreError):
            return False
        return True

    def _read(self, member: str) -> None:
        from ensemble.store import load_predictions

        if member in self._known:
            return
        saved = {member: load_predictions(self._run_dir.predictions(member, "valid"))}
        if self._first is not None:
            saved = {self._first[0]: self._first[1], **saved}
        aligned = align("valid", saved)
        if aligned.left_out:
            raise CombineError(f"{member}: {aligned.left_out[member]}")
        if aligned.target is None:
            raise CombineError(f"{member} saved its predictions without the targets")
        target, probabilities = aligned.target, aligned.probabilities[-1]
        check_target(probabilities.shape, target)
        if self._first is None:
            self._first = (member, saved[member])
            self._rows = np.linspace(0, len(target) - 1, min(len(target), ROWS)).astype(np.int64)
            self._nothing = self._seen(frequencies(target, probabilities.shape[1]), target)
            self._target = np.zeros(len(self._rows), np.int64) if self._metric == "nll" else target[self._rows]
        self._known[member] = self._seen(probabilities, target)

    def _seen(self, probabilities: Array, target: Array) -> Array:
        """What the metric looks at: the NLL at the true class alone, made the first of two."""
        if self._metric != "nll":
            return probabilities[self._rows]
        column = target_column(probabilities, target)[self._rows]
        return np.stack([column, 1 - column], axis=1)
