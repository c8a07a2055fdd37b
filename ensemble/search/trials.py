"""Where the members of a run come from: a fixed list, or the trials that a search proposes.

Both are `Trials`, so that the controller does not ask which it is.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ensemble.combine.metrics import CombineError
from ensemble.search.foreign import ForeignError
from ensemble.search.space import check_kind
from ensemble.spec import Ensemble, Identity, Member, SpecError
from ensemble.spec.identity import select_warm
from ensemble.spec.objectives import describe_missing_objective
from ensemble.spec.population import identify_trial
from ensemble.spec.search import FOOTPRINTS
from ensemble.spec.search_space import sample_space
from ensemble.store import StoreError

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunDir, RunState

_log = logging.getLogger(__name__)

PruneDecision = Literal["continue", "prune"]

#: A search is given up when its first so many trials fail and none has finished an epoch.
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


class Trials(Protocol):
    """Proposes members, and decides after each epoch whether to continue them.

    Attributes:
        awaits_pruner: whether a member waits for a prune_decision after each epoch.
        streaming: whether members join a running stream as soon as they fit.
    """

    awaits_pruner: bool = False
    streaming: bool = False

    @property
    def abort_reason(self) -> str | None:
        """Why the run is given up; None while it is not."""

    def left(self) -> int:
        """Number of members that have not been proposed yet."""

    def ready(self) -> int:
        """How many of those that are left may be proposed before any further member has ended."""
        return self.left()

    def next(self) -> Identity:
        """The next member.

        Raises:
            ImpossibleError: the proposal cannot be trained; the next one may be possible.
        """

    def listed(self, number: int) -> Identity | None:
        """The identity of a member by the present declaration; None for one that was added.

        A trial has the hyperparameters that were proposed.
        """

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

    def prune_decision(self, number: int, epoch: int, metrics: Mapping[str, Any]) -> PruneDecision:
        """Whether a member continues after its own epoch `epoch` (from 0), which the run's state may lack yet.

        Raises:
            NoObjectiveError: the metrics lack the objective, and the member never reported it.
        """

    def final(self, number: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `finished` to record for a member with these metrics; `ended` gets the `metrics` in it."""
        return {"metrics": metrics}

    def ended(self, number: int, state: str, metrics: Mapping[str, Any]) -> None:
        """Note that a member has ended in a state: "finished", "pruned", "failed" or "cancelled"."""
        return

    def flush(self) -> None:
        """Write what has changed of a search to its storage, before the log has what follows from it."""
        return


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
        if state == "finished" and self._strict and _number(metrics.get(str(self._ensemble.objective))) is None:
            _warn_unranked(number, self._ensemble)


class SearchTrials(Trials):
    """The trials of a search, each proposed when resources are free, so that it uses the results before it."""

    streaming = True

    def __init__(self, ensemble: Ensemble, run_dir: RunDir, state: RunState, *, sharing: bool) -> None:
        from ensemble.search.marginal_gain import Gains
        from ensemble.search.population import Population
        from ensemble.search.prior import load_prior
        from ensemble.search.searcher import Searcher

        assert ensemble.search is not None
        self._ensemble = ensemble
        self._search = ensemble.search
        self._sharing = sharing
        self._proposed = sum(not member.identity.get("added") for member in state.members.values())
        self.awaits_pruner = self._search.prunes
        self._searcher = Searcher(
            self._search,
            direction=ensemble.mode or "max",
            epochs=_find_judged_epochs(ensemble, state),
            storage=self._search.storage or str(run_dir.journal),
            prior=load_prior(run_dir, self._search, ensemble.mode or "max"),
        )
        self._searcher.open(state)
        self._state = state
        self._population = None if self._search.population is None else Population(ensemble, state, self._searcher)
        if self._population is not None:
            self._proposed = self._population.proposed
        self._gains = Gains(run_dir, self._search.gain, state) if self._search.gain is not None else None
        self._valued_with: set[str] = set()  # finished members that the values of all trials take into account
        self._was_possible = False  # whether a proposal of this session was
        self._failed_first: int | None = 0  # of its trials failed, before one came to an epoch's end
        self._last_error = ""
        self._broken: str | None = None  # why a function of the user's says nothing of a finished trial
        self._unjudged: str | None = None  # why a member that finished in this session cannot be judged

    @property
    def abort_reason(self) -> str | None:
        """No proposal is possible, all trials failed before an epoch's end, or a trial cannot be judged.

        Trials that failed because the loss was not a number do not count: the sampler learns from them.
        """
        if self._broken is not None:
            return self._broken
        if self._extinct is not None and not self._finished():
            return self._extinct
        if self._unjudged is not None:
            return self._unjudged
        if self._failed_first is None or self._failed_first < FIRST_TRIALS:
            return None
        return f"the first {self._failed_first} trials of the search all failed, the last one: {self._last_error}"

    def left(self) -> int:
        if self._searcher.has_ended or self._extinct is not None:
            return 0
        return max(0, self._searcher.trials - self._proposed)

    @property
    def _extinct(self) -> str | None:
        """Why no generation of a population can follow; None where one can, or there is none to come."""
        if self._population is None or self._proposed >= self._searcher.trials:
            return None
        return self._population.explain_end(self._proposed)

    def ready(self) -> int:
        left = self.left()
        return left if self._population is None else min(left, self._population.count_ready(self._proposed))

    def next(self) -> Identity:
        """It joins the running stream, so its first epoch is not known yet."""
        self._revalue()
        number, params = self._searcher.next_number, dict[str, Any]()
        self._proposed += 1
        try:
            if self._population is not None:
                identity = self._population.propose(number, self._proposed - 1)
            else:
                params = self._searcher.ask(number)
                identity = self._ensemble.identify(number, params)
        except SpecError as error:
            if isinstance(error, ForeignError):
                self._broken = str(error)
            why = f"the search proposed hyperparameters that cannot be trained: {error}"
            self._searcher.tell(number, "failed")
            if not self._was_possible:
                self._count_failure(why)
            usual = self._ensemble.identify(number, {})
            raise ImpossibleError(dataclasses.replace(usual, params=params), why) from None
        if not self._was_possible:
            self._was_possible = True
            self._failed_first = None if self._failed_first is None else 0
        return dataclasses.replace(identity, first_epoch=self._first_epoch)

    def listed(self, number: int) -> Identity | None:
        """What was proposed, as the ensemble declares its trials now."""
        identity = identify_trial(self._ensemble, number, self._state.members[f"member-{number}"].identity)
        return dataclasses.replace(identity, first_epoch=self._first_epoch)

    def _count_failure(self, why: str) -> None:
        if self._failed_first is not None:
            self._failed_first += 1
            self._last_error = why

    @property
    def _first_epoch(self) -> int | None:
        return None if self._sharing else 0

    def add(self, given: Member | Mapping[str, Any], lineage: dict[str, Any] | None = None) -> Identity:
        member, space = given if isinstance(given, Member) else Member(given), self._search.space
        for name, value in member.params.items():
            check_kind(name, None if callable(space) else space.get(name), value)
        names = {name for params in sample_space(space, self._search.seed) for name in params}
        if twice := [name for name in sorted(names - {"params"}) if getattr(member, name, None) is not None]:
            raise SpecError(f"the search proposes {twice[0]!r}: give it as a hyperparameter, {twice[0]}=VALUE")
        asked = self._ensemble.identify(self._searcher.next_number, member)
        outside = self._searcher.explain_outside(member.params) or self._describe_difference(asked)
        if select_warm(lineage) is not None:
            whose = "weights of another member" if member.start is None else "declared weights"
            outside = f"it starts with the {whose}"
        number, params = self._searcher.add(member.params, outside, lineage)
        try:
            identity = self._ensemble.identify(number, dataclasses.replace(member, params=params))
        except SpecError:  # of what was given and what was proposed to complete it
            self._searcher.tell(number, "failed")
            raise
        return dataclasses.replace(
            identity,
            added=True,
            outside=outside,
            first_epoch=self._first_epoch,
            lineage=lineage,
        )

    def _describe_difference(self, identity: Identity) -> str | None:
        """The fields in which a member differs from the search's trials, in a sentence; None if there are none."""
        usual = self._ensemble.identify(identity.number, identity.params).compared_fields()
        differs = [
            name for name, value in identity.compared_fields().items() if value != usual[name] and name != "seed"
        ]
        return f"it trains with another {', '.join(differs)} than the trials" if differs else None

    def prune_decision(self, number: int, epoch: int, metrics: Mapping[str, Any]) -> PruneDecision:
        value, is_ranked = _number(metrics.get(self._objective)), self._searcher.is_ranked(number)
        if is_ranked and self._objective not in metrics and not self._searcher.has_reported(number):
            raise NoObjectiveError(describe_missing_objective(self._objective, metrics))
        self._failed_first = None
        if not is_ranked or value is None:  # undefined after this epoch, or not measured
            return "continue"
        try:
            return "prune" if self._searcher.report(number, epoch, value) else "continue"
        except SpecError as error:
            self._broken = str(error)
            return "continue"

    def final(self, number: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics, with the member's `gain` where that is the objective, and what it violates."""
        if self._gains is not None:
            try:
                metrics = {**metrics, "gain": self._gains.compute(f"member-{number}", self._finished())}
            except (CombineError, StoreError) as error:
                _log.warning("member-%d has no gain, the search learns nothing from it: %s", number, error)
        constraints = None
        if self._searcher.is_ranked(number):
            self._unjudged = self._unjudged or self._explain_absent(number, metrics)
            try:
                constraints = self._searcher.compute_constraints(number, metrics)
            except SpecError as error:
                self._broken = str(error)
        return {"metrics": metrics} | ({} if constraints is None else {"constraints": constraints})

    def _finished(self) -> list[str]:
        return [member.id for member in self._state.members.values() if member.state == "finished"]

    def _revalue(self) -> None:
        """Recompute the gain of each finished trial, before a proposal."""
        finished = self._finished()
        if self._gains is None or self._valued_with == set(finished):
            return
        gains = self._gains.compute_all(finished)
        self._searcher.revalue({self._state.members[id].number: self._signed(gain) for id, gain in gains.items()})
        self._valued_with = set(finished)

    def _signed(self, gain: float) -> float:
        return -gain if self._ensemble.mode == "min" else gain

    def ended(self, number: int, state: str, metrics: Mapping[str, Any]) -> None:
        member = self._state.members.get(f"member-{number}")
        if state == "failed" and member is not None and member.reason != "nan":
            self._count_failure(member.error or "it gave no reason")
        value = _number(metrics.get(self._objective))
        if state == "finished" and value is None:
            _warn_unranked(number, self._ensemble)
        if self._gains is not None:
            gain = _number(metrics.get("gain"))
            value = None if gain is None else self._signed(gain)
        cost, constraints = (None, None) if member is None else (member.cost, member.constraints)
        if state == "finished" and member is not None and self._searcher.is_ranked(number):
            self._judge(member)
        try:
            self._searcher.tell(number, state, value, cost, metrics, constraints)
        except SpecError as error:
            self._broken = str(error)

    def _explain_absent(self, number: int, metrics: Mapping[str, Any]) -> str | None:
        """Why no member will have a value of a further objective that is a metric: this one did not report it, and
        none before it has.
        """
        for each in self._search.objectives:
            if each.is_cost or each.name in metrics:
                continue
            members = self._state.members.values()
            if any(m.state == "finished" and m.value_of(each) is not None for m in members):
                continue
            reported = ", ".join(sorted(metrics)) or "nothing"
            hint = "; its log says why it was not measured" if each.name in FOOTPRINTS else ""
            return (
                f"member-{number} did not report {each.name!r}, which is one of the search's further_objectives "
                f"(reported: {reported}){hint}"
            )
        return None

    def _judge(self, member: MemberState) -> None:
        """Note what a finished trial lacks of the further objectives."""
        cost = member.cost
        for each in self._search.objectives:
            if each.name == "energy_j" and cost is not None and cost.energy_j is None:
                self._unjudged = (
                    f"{member.id} has no joules, which the search minimizes: no power source of its node could be "
                    "read (see `ensemble doctor`); give it one, or take 'cpu_s' in further_objectives"
                )
            elif member.value_of(each) is None:
                _log.warning(
                    "%s ended without a value of %r: the search does not learn from it", member.id, each.name
                )

    def flush(self) -> None:
        self._searcher.flush()

    @property
    def _objective(self) -> str:
        return self._ensemble.objective or "accuracy"


def _warn_unranked(number: int, ensemble: Ensemble) -> None:
    """Say that a member has ended without the objective; the run goes on."""
    _log.warning("member-%d ended without a value of %r, so it is not ranked", number, ensemble.objective)


def _find_judged_epochs(ensemble: Ensemble, state: RunState) -> int:
    """The epochs of a trial by which pruners go: those of the first declaration, also where it was given more.

    So what was decided stays decided, and no trial is pruned in the epochs beyond. Trials that were proposed
    between two extensions were declared with more.
    """
    trials = [m.identity for m in state.members.values() if m.identity.get("outside") is None]
    return min(
        (each["epochs_before"] for each in trials if each.get("epochs_before")), default=ensemble.largest("epochs")
    )


def _number(value: Any) -> float | None:
    """A metric as a finite number; None for NaN and infinities, which the log stores as None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def make_trials(ensemble: Ensemble, run_dir: RunDir, state: RunState, *, sharing: bool) -> Trials:
    """The `Trials` of an ensemble, restored from the state of the run."""
    if ensemble.search is not None:
        return SearchTrials(ensemble, run_dir, state, sharing=sharing)
    return ListedTrials(ensemble, state, sharing=sharing)
