"""Where the members of a run come from: a fixed list here, or a search (`ensemble.search.trials`).

Both are `Trials`, so that the controller does not ask which it is.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ensemble.spec import Ensemble, Identity, Member, SpecError
from ensemble.spec.objectives import describe_missing_objective

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState

_log = logging.getLogger(__name__)

PruneDecision = Literal["continue", "prune"]

#: A run is given up when so many of its first members say nothing by which they could be ranked, or fail.
FIRST_TRIALS = 10


class NoObjectiveError(Exception):
    """An epoch of a member did not report the objective; the message names the metrics that it reported."""


class ImpossibleError(Exception):
    """A search proposed hyperparameters with which no member can be trained; the message says why.

    Attributes:
        identity: of that member, with the proposed hyperparameters.
    """

    def __init__(self, identity: Identity, why: str) -> None:
        super().__init__(why)
        self.identity = identity


class Trials:
    """Proposes members, and decides after each epoch whether to continue them.

    Attributes:
        awaits_pruner: whether a member waits for a prune_decision after each epoch.
        streaming: whether members join a running stream as soon as they fit.
        constraints: *member*: how a trial that has finished keeps the constraints of the search, computed anew.
    """

    awaits_pruner: bool = False
    streaming: bool = False
    constraints: Mapping[str, Mapping[str, float]] = {}

    @property
    def abort_reason(self) -> str | None:
        """Why the run is given up; None while it is not."""
        raise NotImplementedError

    def left(self) -> int:
        """Number of members that have not been proposed yet."""
        raise NotImplementedError

    def ready(self) -> int:
        """How many of those that are left may be proposed before any further member has ended."""
        return self.left()

    def next(self) -> Identity:
        """The next member.

        Raises:
            ImpossibleError: the proposal cannot be trained; the next one may be possible.
        """
        raise NotImplementedError

    def listed(self, number: int) -> Identity | None:
        """The identity of a member by the present declaration; None for one that was added.

        A trial has the hyperparameters that were proposed.
        """
        raise NotImplementedError

    def add(self, given: Member | Mapping[str, Any], lineage: dict[str, Any] | None = None) -> Identity:
        """Add a member to the run, in addition to those that are declared; `left` does not count it.

        A search proposes the hyperparameters that are missing, and learns from the member if it lies inside the
        space; else `outside` says why, and it is never pruned.

        Args:
            given: as in `Ensemble.members`.
            lineage: of a clone, see `Identity`. A search learns nothing from one that is warm.

        Raises:
            SpecError: no such member can be trained; nothing has changed.
        """
        raise NotImplementedError

    def prune_decision(self, number: int, epoch: int, metrics: Mapping[str, Any]) -> PruneDecision:
        """Whether a member continues after its own epoch `epoch` (from 0), which the run's state may lack yet.

        Raises:
            NoObjectiveError: the metrics lack the objective, and the member never reported it.
        """
        raise NotImplementedError

    def final(self, number: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `finished` to record for a member with these metrics; `ended` gets the `metrics` in it."""
        return {"metrics": metrics}

    def ended(self, number: int, state: str, metrics: Mapping[str, Any]) -> None:
        """Note that a member has ended in a state: "finished", "pruned", "failed" or "cancelled"."""

    def flush(self) -> None:
        """Write what has changed of a search to its storage, before the log has what follows from it."""


class ListedTrials(Trials):
    """The members of a list, which are known from the start and never pruned.

    Where the objective is declared, a member whose first report lacks it fails, because it could not be ranked.
    Later reports may lack it, because a train function need not measure it in each epoch.
    """

    def __init__(self, ensemble: Ensemble, state: RunState, *, sharing: bool) -> None:
        self._ensemble = ensemble
        self._state = state
        self._declared = 1 + max((member.number for member in state.members.values()), default=-1)
        self._sharing = sharing
        self._unranked: int | None = 0  # members that did not report the objective; None once one did
        # A Recipe without a validation set reports nothing at all.
        self._strict = ensemble.has_declared_objective and (
            callable(ensemble.recipe) or ensemble.valid is not None
        )
        # Members of a run that started before this was checked.
        self._excused = {m.number for m in state.members.values() if len(m.history) > 1 and not self._ranked(m)}

    def _ranked(self, member: MemberState) -> bool:
        """Whether a member has reported the objective in any of its epochs."""
        return any(self._ensemble.objective in (epoch.metrics or {}) for epoch in member.history)

    @property
    def abort_reason(self) -> str | None:
        """The first members all failed to report the objective."""
        if self._unranked is None or self._unranked < FIRST_TRIALS:
            return None
        return (
            f"none of the first {self._unranked} members reported {self._ensemble.objective!r}, which ranks them"
        )

    def left(self) -> int:
        return max(0, len(self._ensemble.members or ()) - self._declared)

    def next(self) -> Identity:
        self._declared += 1
        return self._ensemble.identify(self._declared - 1)

    def listed(self, number: int) -> Identity | None:
        return self._ensemble.identify(number) if number < len(self._ensemble.members or ()) else None

    def add(self, given: Member | Mapping[str, Any], lineage: dict[str, Any] | None = None) -> Identity:
        if self.left():
            raise SpecError("members are added to a run that has begun: its list is not declared yet")
        identity = self._ensemble.identify(self._declared, given)
        self._declared += 1
        first_epoch = None if self._sharing else 0
        lineage = lineage or identity.lineage
        return dataclasses.replace(identity, added=True, first_epoch=first_epoch, lineage=lineage)

    def prune_decision(self, number: int, epoch: int, metrics: Mapping[str, Any]) -> PruneDecision:
        if not self._strict or number in self._excused:
            return "continue"
        if self._ensemble.objective not in metrics and not self._ranked(self._state.members[f"member-{number}"]):
            if self._unranked is not None:
                self._unranked += 1
            raise NoObjectiveError(describe_missing_objective(str(self._ensemble.objective), metrics))
        self._unranked = None
        return "continue"

    def ended(self, number: int, state: str, metrics: Mapping[str, Any]) -> None:
        objective = str(self._ensemble.objective)
        if state == "finished" and self._strict and as_finite(metrics.get(objective)) is None:
            warn_unranked(number, objective)


def warn_unranked(number: int, objective: str | None) -> None:
    """Warn that a member has ended without the objective; the run goes on."""
    _log.warning("member-%d ended without a value of %r, so it is not ranked", number, objective)


def as_finite(value: Any) -> float | None:
    """A metric as a finite number; None for NaN and infinities, which the log stores as None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
