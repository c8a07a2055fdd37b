"""The *gain* of a member: by how much it improves the greedy ensemble of the others on the validation split.

It is mixed in with the best of a few shares, so that of a harmful one it is negative. Gains shrink as the ensemble
grows: those of all finished trials are computed anew before each proposal (Lévesque et al. 2016, UAI).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ensemble.combine.methods import Criterion, mix, select_greedily
from ensemble.combine.metrics import Array, CombineError
from ensemble.combine.prediction_matrix import align
from ensemble.combine.tasks import find_math
from ensemble.spec.task import Task

if TYPE_CHECKING:
    from ensemble.store import Predictions, RunDir, RunState

SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Shares of the mixture that a member may get when it is added."""

DEFAULT = "nll"
"""The metric unless another one is declared."""

ROUNDS = 20
"""Rounds of greedy selection; the combination at the run's end has more, which change little."""


@dataclass(frozen=True)
class Views:
    """Of each member what selection and metric need of its predictions (`Criterion.view`), and of a guess."""

    selection: Criterion
    metric: Criterion
    selected: list[Array]
    measured: list[Array]
    guess: Array

    @classmethod
    def of(cls, values: Sequence[Array], target: Array, metric: str, task: Task, guess: Array) -> Views:
        """Make those of the predictions [n, ...] of members, rows aligned, laid out by the task.

        Args:
            metric: a criterion of the task: of classes "nll" (nats), "brier", or "accuracy" (a fraction). "nll"
                stands for the own one of a task without.
        """
        task_math = find_math(task)
        selection = task_math.criterion(target, task_math.default_criterion)
        if metric not in (DEFAULT, *task_math.criteria):
            valid = ", ".join(task_math.criteria)
            raise CombineError(f"the gain in {metric!r} has no meaning for {task.kind} (it has: {valid})")
        name = metric if metric in task_math.criteria else task_math.default_criterion
        measure = task_math.criterion(target, name)
        views = [selection.view(own) for own in values]
        return cls(selection, measure, views, [measure.view(own) for own in values], measure.view(guess))


def compute_gains(views: Views, chosen: Sequence[int] | None = None) -> list[float]:
    """The gain of each member over the others; positive is better.

    Args:
        chosen: indices of the members whose gains are computed; None: all.
    """

    def score(view: Array) -> float:
        """More is better."""
        return -views.metric.score(view)[0]

    indices = range(len(views.measured)) if chosen is None else chosen
    if len(views.measured) == 1:
        return [score(views.measured[0]) - score(views.guess) for _ in indices]
    weights = _select(views.selected, views.selection)
    whole = mix(views.measured, weights)
    gains = []
    for i in indices:
        # The selection without a member that has no weight is the same.
        others = whole if not weights[i] else _mix_without(views, i)
        own = views.measured[i].astype(np.float64)
        gains.append(max(score(others + share * (own - others)) for share in SHARES) - score(others))
    return gains


def _mix_without(views: Views, left_out: int) -> Array:
    selected, measured = (
        [view for i, view in enumerate(all_views) if i != left_out]
        for all_views in (views.selected, views.measured)
    )
    return mix(measured, _select(selected, views.selection))


def _select(views: Sequence[Array], criterion: Criterion) -> Array:
    return select_greedily(views, replace(criterion, view=lambda view: view), ROUNDS)


ROWS = 2000
"""Evenly spread samples of the validation split that `Gains` uses at most, because a proposal waits for it."""


class Gains:
    """The gains of a run's finished members, from their saved predictions; each file is read once."""

    def __init__(self, run_dir: RunDir, metric: str, state: RunState) -> None:
        self._run_dir, self._metric, self._state = run_dir, metric, state
        self._known: dict[str, Views] = {}
        self._first: tuple[str, Predictions] | None = None

    def compute(self, member: str, finished: Sequence[str]) -> float:
        """The gain of a member over the finished members."""
        self._read(member)
        usable = [other for other in finished if other != member and self._is_usable(other)]
        return self._gains([*usable, member], [len(usable)])[0]

    def compute_all(self, finished: Sequence[str]) -> dict[str, float]:
        """The gain of each finished member over the others; members without usable predictions are left out."""
        usable = [member for member in finished if self._is_usable(member)]
        return dict(zip(usable, self._gains(usable, None), strict=True)) if usable else {}

    def _gains(self, members: Sequence[str], chosen: Sequence[int] | None) -> list[float]:
        views = [self._known[member] for member in members]
        selected, measured = ([own.selected[0] for own in views], [own.measured[0] for own in views])
        return compute_gains(replace(views[0], selected=selected, measured=measured), chosen)

    def _is_usable(self, member: str) -> bool:
        from ensemble.store import StoreError

        try:
            self._read(member)
        except (CombineError, StoreError):
            return False
        return True

    def _read(self, member: str) -> None:
        from ensemble.store import MemberState, read_predictions

        if member in self._known:
            return
        state = self._state.members.get(member) or MemberState(member, -1)
        saved = {member: read_predictions(self._run_dir, state, "valid")}
        if self._first is not None:
            saved = {self._first[0]: self._first[1], **saved}
        aligned = align("valid", saved)
        if aligned.left_out:
            raise CombineError(f"{member}: {aligned.left_out[member]}")
        if aligned.target is None:
            raise CombineError(f"{member} saved its predictions without the targets")
        target, values, task_math = aligned.target, aligned.values[-1], find_math(aligned.task)
        task_math.check_target(values, target)
        if self._first is None:
            self._first = (member, saved[member])
        rows = np.linspace(0, len(target) - 1, min(len(target), ROWS)).astype(np.int64)
        guess = task_math.guess(values, target)[rows]
        self._known[member] = Views.of([values[rows]], target[rows], self._metric, aligned.task, guess)
