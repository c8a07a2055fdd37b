"""The trials of a search, as the controller asks for them (`ensemble.schedule.trials.Trials`)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.combine.metrics import CombineError
from ensemble.schedule.declared_search import describe_search
from ensemble.schedule.trials import (
    FIRST_TRIALS,
    ImpossibleError,
    NoObjectiveError,
    PruneDecision,
    Trials,
    as_finite,
    warn_unranked,
)
from ensemble.search.foreign import ForeignError, compute_constraints
from ensemble.search.space import check_kind
from ensemble.spec import Ensemble, Identity, Member, SpecError
from ensemble.spec.identity import select_warm
from ensemble.spec.limits import FOOTPRINTS
from ensemble.spec.objectives import describe_missing_objective
from ensemble.spec.population import identify_trial
from ensemble.spec.search_space import sample_space
from ensemble.store import StoreError

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunDir, RunState

_log = logging.getLogger(__name__)


class SearchTrials(Trials):
    """The trials of a search, each proposed when resources are free, so that it uses the results before it."""

    streaming = True

    def __init__(self, ensemble: Ensemble, run_dir: RunDir, state: RunState, *, sharing: bool) -> None:
        from ensemble.search.marginal_gain import Gains
        from ensemble.search.population import Population
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
        )
        self._state = state
        self.constraints = self._compute_constraints()
        self._searcher.open(state)
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
        remaining = self.left()
        return (
            remaining if self._population is None else min(remaining, self._population.count_ready(self._proposed))
        )

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

    def add(self, declared: Member | Mapping[str, Any], lineage: dict[str, Any] | None = None) -> Identity:
        member, space = declared if isinstance(declared, Member) else Member(declared), self._search.space
        for name, value in member.params.items():
            check_kind(name, None if callable(space) else space.get(name), value)
        names = {name for params in sample_space(space, self._search.seed) for name in params}
        if twice := [name for name in sorted(names - {"params"}) if getattr(member, name, None) is not None]:
            raise SpecError(f"the search proposes {twice[0]!r}: give it as a hyperparameter, {twice[0]}=VALUE")
        identity_asked = self._ensemble.identify(self._searcher.next_number, member)
        outside = self._searcher.space.explain_outside(member.params) or self._describe_difference(identity_asked)
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
        return f"its {', '.join(differs)} differs from that of the trials" if differs else None

    def prune_decision(self, number: int, epoch: int, metrics: Mapping[str, Any]) -> PruneDecision:
        value, is_ranked = as_finite(metrics.get(self._objective)), self._searcher.is_ranked(number)
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
                _log.warning("member-%d has no gain, so the search does not learn from it: %s", number, error)
        if self._searcher.is_ranked(number):
            self._unjudged = self._unjudged or self._explain_absent(number, metrics)
        constraints = None
        try:
            constraints = compute_constraints(self._search, number, metrics)
        except SpecError as error:
            self._broken = self._broken or str(error)
        return {"metrics": metrics} | ({} if constraints is None else {"constraints": constraints})

    def _compute_constraints(self) -> dict[str, dict[str, float]]:
        """Compute the constraints of finished members where their function failed, or is another one now.

        Raises:
            SpecError: the function fails.
        """
        function, computed = self._search.constraints, dict[str, dict[str, float]]()
        before, now = self._state.header.search, describe_search(self._ensemble)
        is_edited = before and now and before.get("constraints") != now.get("constraints")
        for member in self._state.members.values() if function is not None else ():
            if member.state == "finished" and (member.constraints is None or is_edited):
                member.constraints = compute_constraints(self._search, member.number, member.metrics)
                computed[member.id] = member.constraints or {}
        return computed

    def _finished(self) -> list[str]:
        """The finished members that may be in the combination."""
        members, infeasible = self._state.members.values(), self._state.list_infeasible()
        return [member.id for member in members if member.state == "finished" and member.id not in infeasible]

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
        value = as_finite(metrics.get(self._objective))
        if state == "finished" and value is None:
            warn_unranked(number, self._objective)
        if self._gains is not None:
            gain = as_finite(metrics.get("gain"))
            value = None if gain is None else self._signed(gain)
        cost, constraints = (None, None) if member is None else (member.cost, member.constraints)
        if state == "finished" and member is not None and self._searcher.is_ranked(number):
            self._judge(member)
            if self._search.constraints is not None and constraints is None:
                return  # the function failed: the trial is told at the next start
        try:
            self._searcher.tell(number, state, value, cost, metrics, constraints)
        except SpecError as error:
            self._broken = str(error)

    def _explain_absent(self, number: int, metrics: Mapping[str, Any]) -> str | None:
        """Why no member will have a value of a further objective that is a metric: this one did not report it, and
        none before it has.
        """
        for objective in self._search.objectives:
            if objective.is_cost or objective.name in metrics:
                continue
            members = self._state.members.values()
            if any(m.state == "finished" and m.value_of(objective) is not None for m in members):
                continue
            reported = ", ".join(sorted(metrics)) or "nothing"
            hint = "; its log says why it was not measured" if objective.name in FOOTPRINTS else ""
            return (
                f"member-{number} did not report {objective.name!r}, which is one of the search's "
                f"further_objectives (reported: {reported}){hint}"
            )
        return None

    def _judge(self, member: MemberState) -> None:
        """Note what a finished trial lacks of the further objectives."""
        cost = member.cost
        for objective in self._search.objectives:
            if objective.name == "energy_j" and cost is not None and cost.energy_j is None:
                self._unjudged = (
                    f"{member.id} has no joules, which the search minimizes: no power source of its node could be "
                    "read (see `ensemble doctor`); give it one, or take 'cpu_s' in further_objectives"
                )
            elif member.value_of(objective) is None:
                _log.warning(
                    "%s ended without a value of %r: the search does not learn from it", member.id, objective.name
                )

    def flush(self) -> None:
        self._searcher.flush()

    @property
    def _objective(self) -> str:
        return self._ensemble.objective or "accuracy"


def _find_judged_epochs(ensemble: Ensemble, state: RunState) -> int:
    """The epochs of a trial by which pruners go: those of the first declaration, also where it was given more.

    So what was decided stays decided, and no trial is pruned in the epochs beyond. Trials that were proposed
    between two extensions were declared with more.
    """
    trials = [m.identity for m in state.members.values() if m.identity.get("outside") is None]
    return min(
        (identity["epochs_before"] for identity in trials if identity.get("epochs_before")),
        default=ensemble.largest("epochs"),
    )
