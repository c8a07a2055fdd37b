"""A hyperparameter search: Optuna's samplers and pruners over the study in the run's storage, by ask and tell.

A proposal depends only on the study, the search's seed and the trial's number, because the sampler is seeded anew
for each `ask`. Samplers and pruners read a copy in memory, where a trial's number is that of its member.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Cost, Objective
from ensemble.search._compat import import_optuna, silence_optuna, without_constraints
from ensemble.search.factory import OwnSampler, check_installed, make_grid, make_pruner, make_sampler
from ensemble.search.foreign import calling, compute_constraints
from ensemble.search.kept_study import PRUNED_AFTER, KeptStudy, directions, is_over
from ensemble.search.space import fit_trial, make_space
from ensemble.search.storage import open_storage
from ensemble.spec import Search, SpecError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial, TrialState

    from ensemble.store.member import MemberState
    from ensemble.store.state import RunState

_log = logging.getLogger(__name__)

#: Samplers that keep what they know in the trials that they propose.
_KEPT_IN_TRIALS = ("cmaes", "nsga2", "nsga3")
#: System attributes of a trial: what its sampler has changed in the study's attributes; whether a user added it,
#: whether it lies outside the search, and whether the sampler ended that with it.
_STUDY_CHANGES = "ensemble:study"
_ADDED, _OUTSIDE, _ENDS_SEARCH = "ensemble:added", "ensemble:outside", "ensemble:ends_search"
#: Fields of `cost` events that a trial shows.
_COST = ("energy_j", "energy_origin", "cpu_s")


class Searcher:
    """Proposes trials, records their results, and decides which to prune.

    Args:
        direction: `"max"` or `"min"`.
        epochs: of each trial; hyperband's largest resource (its smallest is one epoch).
        storage: of the study: a path (journal file), a URL, an Optuna storage, or None for one in memory.
    """

    def __init__(
        self,
        search: Search,
        *,
        direction: str,
        epochs: int,
        storage: str | os.PathLike[str] | BaseStorage | None = None,
    ) -> None:
        import_optuna()
        import optuna

        if search.constraints is not None and not hasattr(optuna.Trial, "set_constraint"):
            raise SpecError(f"Search.constraints needs Optuna 5; {optuna.__version__} is installed")
        check_installed(named := search.sampler_name)
        self.search, self._gain, self._direction = search, search.gain is not None, direction
        self._awaits_cost = any(objective.is_cost for objective in search.objectives)
        self._epochs = epochs
        self._grid = make_grid(search) if named == "grid" else None
        self.space = make_space(search.space)
        for number, params in enumerate(search.enqueue):
            if (why := self.space.explain_outside(params)) is not None:
                raise SpecError(f"Search.enqueue[{number}]: {why}")
        self._own_sampler = None if named else OwnSampler(search)
        self._memory = optuna.storages.InMemoryStorage()
        with silence_optuna():  # a fixed name: hyperband derives a trial's bracket from it
            self.study = optuna.create_study(
                storage=self._memory,
                study_name="search",
                directions=directions(direction, search.objectives),
                pruner=make_pruner(search, epochs),
            )
        self.study.stop = lambda: setattr(self, "_has_ended", True)  # type: ignore[method-assign]
        self._study_id = self._memory.get_study_id_from_name(self.study.study_name)
        self._added = 0  # trials that a user added; they are no points of a grid
        self._unstarted: list[int] = []  # trials without a member: they were asked for before a kill
        self._changed: dict[int, None] = {}  # trials of which the storage does not have all
        self._has_ended = False  # whether nothing more is proposed
        self._outside: set[int] = set()  # trials that samplers and pruners ignore
        self._storage, self._address = open_storage(storage), str(storage)

    @property
    def trials(self) -> int:
        """The number of trials: as declared, and at most the points of a grid."""
        most = self.search.trials
        return most if self._grid is None else min(most, len(self._grid))

    @property
    def _count(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    @property
    def next_number(self) -> int:
        """The number of the next trial: of one without a member first."""
        return self._unstarted[0] if self._unstarted else self._count

    def open(self, state: RunState) -> None:
        """Read the study of a run, once, before any trial is requested, and tell it how members have ended.

        Trials that had not ended, or failed for a reason that may be corrected, are running again.
        """
        objectives = [Objective(state.objective, self._direction), *self.search.objectives]
        self._kept = KeptStudy(self._storage, self._address, state.name, state.run_id, objectives)
        trials, members = self._kept.read(), {member.number: member for member in state.members.values()}
        for number in range(1 + max((*trials, *members), default=-1)):
            if number not in trials:
                self._kept.refuse(number)
            self._load(number, trials[number], members.get(number))
        if trials and self._own_sampler is not None and not self._own_sampler.is_of_optuna:
            _log.warning(
                "the own state of Search.sampler (%s) is lost: it continues from the trials in the study",
                type(self.search.sampler).__name__,
            )
        for member in members.values():
            if is_over(member, self._awaits_cost):
                self._tell_member(member, state.objective)
        self._end_by_terminator()
        self.flush()

    def _load(self, number: int, trial: FrozenTrial, member: MemberState | None) -> None:
        from optuna.trial import TrialState, create_trial

        about = trial.system_attrs
        is_added, is_outside = _ADDED in about, _OUTSIDE in about
        if member is not None:
            is_added, is_outside = bool(member.identity.get("added")), member.identity.get("outside") is not None
        is_told = member is None or is_outside or is_over(member, self._awaits_cost)
        if trial.state == TrialState.FAIL and member is not None and member.state in ("finished", "pruned"):
            is_told = is_outside  # else it was told that it failed, and ran again
        made = create_trial(
            state=trial.state if is_told else TrialState.RUNNING,
            values=trial.values if is_told else None,
            user_attrs=trial.user_attrs,
            system_attrs=about if is_told else without_constraints(about),
            intermediate_values=trial.intermediate_values,
        )
        if is_outside:
            self._outside.add(number)
        else:
            made.params, made.distributions = fit_trial(self.space, trial, member, number)
        self.study.add_trial(made)
        for key, value in about.get(_STUDY_CHANGES, {}).items():
            self._memory.set_study_system_attr(self._study_id, key, value)
        self._added += is_added
        self._has_ended |= _ENDS_SEARCH in about
        if member is None and is_added:  # the addition was refused, or it was killed before the log had it
            self.tell(number, "failed")
            self._outside.add(number)
        elif member is None:
            self._unstarted.append(number)

    def _tell_member(self, member: MemberState, objective: str) -> None:
        """Tell how a member has ended, unless its trial has been told already."""
        if self.get_trial(member.number).state.is_finished():
            return
        value = member.metrics.get("gain" if self._gain else objective)
        value = -value if self._gain and self._direction == "min" and value is not None else value
        constraints = member.constraints
        if constraints is None and member.state == "finished":  # older logs lack it
            constraints = compute_constraints(self.search, member.number, member.metrics)
        self.tell(member.number, member.state, value, member.cost, member.metrics, constraints)

    def ask(
        self,
        number: int,
        suggested: Mapping[str, Any] | None = None,
        lineage: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Propose the hyperparameters of the next trial; an earlier trial gets the same again.

        Args:
            suggested: to it, and not left to the sampler, by name.
            lineage: of a member that goes on from another; becomes an attribute of the trial.
        """
        if number > self._count:
            raise ValueError(f"trial {number} was requested, but the next trial is {self._count}")
        if number < self._count:
            if number in self._unstarted:
                self._unstarted.remove(number)
            return self.space.read(self.get_trial(number))
        return self._ask(number, self._find_given(number) if suggested is None else suggested, lineage)

    def get_trial(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is proposed: no point is left, or the terminator says so."""
        return self._has_ended

    def _find_given(self, number: int) -> Mapping[str, Any]:
        """What the sampler does not decide of a trial: its point of the grid, or what the user enqueued."""
        proposed = number - self._added
        if self._grid is not None:
            return self._grid[proposed % len(self._grid)]
        return self.search.enqueue[proposed] if proposed < len(self.search.enqueue) else {}

    def _ask(
        self,
        number: int,
        suggested: Mapping[str, Any],
        lineage: Mapping[str, Any] | None,
        marks: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Add trial `number` as running: the sampler proposes what is not given."""
        before = dict(self._memory.get_study_system_attrs(self._study_id))
        trial = self._propose(number, self.space.encode(suggested))
        params: dict[str, Any] = {}
        try:
            params = self.space.read(trial)
        finally:
            fixed = {name: value for name, value in params.items() if name not in trial.params}
            for key, value in {**fixed, **({} if lineage is None else {"lineage": dict(lineage)})}.items():
                trial.set_user_attr(key, value)
            after = self._memory.get_study_system_attrs(self._study_id)
            attributes: dict[str, Any] = dict.fromkeys(marks, True)
            if changes := {key: value for key, value in after.items() if before.get(key) != value}:
                attributes[_STUDY_CHANGES] = changes
            for key, value in attributes.items():
                self._memory.set_trial_system_attr(self._trial_id(number), key, value)
            self._changed[number] = None
            self.flush()
        return params

    def _propose(self, number: int, suggested: Mapping[str, Any]) -> Trial:
        """A new trial of the study, in which the sampler proposes what is not suggested."""
        if suggested:
            self.study.enqueue_trial(dict(suggested))
        own = self._own_sampler
        self.study.sampler = make_sampler(self.search, number) if own is None else own.get(number)
        with calling(self.study.sampler, "Search.sampler"):
            trial = self.study.ask(self.space.distributions)
            if self.search.sampler_name in _KEPT_IN_TRIALS:
                # Reading it adds the trial to its generation, also where all of it was suggested.
                _ = trial.relative_params
        return trial

    def add(
        self,
        params: Mapping[str, Any],
        outside: str | None = None,
        lineage: Mapping[str, Any] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Add a trial that a user declared, in addition to `trials`; returns its number, and all its
        hyperparameters.

        Args:
            params: its hyperparameters; missing ones are proposed.
            outside: why its results cannot be compared with the other trials'; None: they can. Such a trial is
                recorded as failed: samplers would ignore any hyperparameter that one of the trials lacks.
        """
        from optuna.trial import TrialState, create_trial

        number = self._count
        self._added += 1
        if outside is None:
            return number, self._ask(number, params, lineage, [_ADDED])
        about = {**params, "outside": outside} | ({} if lineage is None else {"lineage": dict(lineage)})
        marks: dict[str, Any] = {_ADDED: True, _OUTSIDE: True}
        self.study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=about, system_attrs=marks))
        self._outside.add(number)
        self._changed[number] = None
        self.flush()
        return number, dict(params)

    def is_ranked(self, number: int) -> bool:
        """Whether a trial is compared with the others: it was not added from outside the space."""
        return number not in self._outside

    def has_reported(self, number: int) -> bool:
        return bool(self.get_trial(number).intermediate_values)

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Record the objective of a trial after its own epoch `epoch` (from 0); returns whether to prune it.

        A repeated report gets the same answer; once True, all later answers are True. A trial is never pruned
        after its last epoch.
        """
        trial, done = self.get_trial(number), epoch + 1
        pruned_after = trial.system_attrs.get(PRUNED_AFTER)  # its value may be missing: a kill came between
        is_open = not trial.state.is_finished() and (pruned_after is None or done <= pruned_after)
        if is_open and done not in trial.intermediate_values:
            self._memory.set_trial_intermediate_value(self._trial_id(number), done, float(value))
            # Called even if the answer is not used, because the pruner records the value of this rung.
            if pruned_after is None and self._judge(number) and done < self._epochs:
                self._memory.set_trial_system_attr(self._trial_id(number), PRUNED_AFTER, done)
            self._changed[number] = None
        pruned_after = self.get_trial(number).system_attrs.get(PRUNED_AFTER)
        return pruned_after is not None and done >= pruned_after

    def _judge(self, number: int) -> bool:
        """Whether the pruner, or the user's function, ends a trial after its last report."""
        trial, stop = self.get_trial(number), self.search.stop
        with calling(self.study.pruner, "Search.pruner"):
            prune = self.study.pruner.prune(self.study, trial)
        if stop is None:
            return prune
        with calling(stop, f"Search.stop after {trial.last_step} epochs of member-{number}"):
            return bool(stop(trial)) or prune

    def tell(
        self,
        number: int,
        state: str,
        value: float | None = None,
        cost: Cost | None = None,
        metrics: Mapping[str, Any] | None = None,
        constraints: Mapping[str, float] | None = None,
    ) -> None:
        """Record that a trial has ended: "finished", "pruned", "failed" or "cancelled".

        A finished trial without a value of each objective is recorded as failed; where `value` is None, its last
        report counts, unless the objective is the gain. `constraints` says by how much it violates them.
        """
        from optuna.trial import TrialState

        trial = self.get_trial(number)
        if trial.state.is_finished():
            return
        last = trial.intermediate_values.get(trial.last_step) if trial.last_step is not None else None
        if self._gain and state == "finished":
            last = None  # a metric, not a gain
        values_told = [
            v for v in (value if state == "finished" else None, last) if v is not None and not math.isnan(v)
        ]
        if state == "pruned":
            self._end(number, TrialState.PRUNED, [float(v) for v in values_told[:1]])
        elif (
            state == "finished"
            and values_told
            and (values := self._find_values(number, float(values_told[0]), cost, metrics or {}))
        ):
            from optuna import Trial

            for name, excess in (constraints or {}).items():
                Trial(self.study, self._trial_id(number)).set_constraint(name, excess)
            self._end(number, TrialState.COMPLETE, values)
        elif state in ("finished", "failed", "cancelled"):
            self._end(number, TrialState.FAIL, [])
        else:
            raise ValueError(f"a trial ends as finished, pruned, failed or cancelled, not {state!r}")

    def _end(self, number: int, state: TrialState, values: list[float]) -> None:
        if self._own_sampler is not None and number not in self._outside:
            sampler = self._own_sampler.get(number)
            with calling(sampler, "Search.sampler"):
                sampler.after_trial(self.study, self.get_trial(number), state, values or None)
            if self._has_ended:
                self._memory.set_trial_system_attr(self._trial_id(number), _ENDS_SEARCH, True)
        self._memory.set_trial_state_values(self._trial_id(number), state, values or None)
        self._changed[number] = None
        self._end_by_terminator()

    def _end_by_terminator(self) -> None:
        terminator, trials = self.search.terminator, self.study.get_trials(deepcopy=False)
        if terminator is None or self._has_ended or not any(trial.state.is_finished() for trial in trials):
            return
        with calling(terminator, "Search.terminator"):
            self._has_ended = bool(terminator.should_terminate(self.study))
        if self._has_ended:
            _log.warning("the terminator ends the search after %d trials", self._count)

    def _find_values(
        self, number: int, value: float, cost: Cost | None, metrics: Mapping[str, Any]
    ) -> list[float]:
        """The values of a finished trial, whose cost the study then shows; empty where one is not known."""
        for key in _COST:
            if (shown := getattr(cost, key, None)) is not None:
                self._memory.set_trial_user_attr(self._trial_id(number), key, shown)
        further = [objective.read(cost, metrics) for objective in self.search.objectives]
        further_values = [float(objective) for objective in further if objective is not None]
        return [value, *further_values] if len(further_values) == len(further) and math.isfinite(value) else []

    def revalue(self, values: Mapping[int, float]) -> None:
        """Replace the values of completed trials for the next proposals; the storage keeps the others."""
        from optuna.trial import TrialState

        self.flush()
        for number, value in values.items():
            trial = self.get_trial(number)
            if trial.state == TrialState.COMPLETE:
                trial.values = [value]

    def _trial_id(self, number: int) -> int:
        return self._memory.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def flush(self) -> None:
        if self._changed:
            self._kept.save({number: self.get_trial(number) for number in self._changed})
            self._changed.clear()
