"""A hyperparameter search: Optuna's samplers and pruners over the study in the run's storage, by ask and tell.

A proposal depends only on the study, the search's seed and the trial's number, because the sampler is seeded anew
for each `ask`. Samplers and pruners read a copy in memory, where a trial's number is that of its member.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Cost, Objective
from ensemble.search._compat import import_optuna, silence_optuna, without_constraints, without_first
from ensemble.search.factory import OwnSampler, is_beyond_gp, make_grid, make_pruner, make_sampler
from ensemble.search.foreign import calling
from ensemble.search.kept_study import PRUNED_AFTER, KeptStudy, directions
from ensemble.search.space import make_space
from ensemble.search.storage import open_storage
from ensemble.spec import Search, SpecError
from ensemble.store.member import UNRECOVERABLE

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial, TrialState

    from ensemble.store.member import MemberState
    from ensemble.store.state import RunState

_log = logging.getLogger(__name__)

#: Packages that a sampler needs beyond Optuna; each has a module of the same name.
_NEEDS = {"cmaes": ("cmaes",), "gp": ("scipy", "torch")}
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
        search: the space, the sampler, the pruner, the seed.
        direction: `"max"` or `"min"`.
        epochs: of each trial; hyperband's largest resource (its smallest is one epoch).
        storage: of the study: a path (journal file), a URL, an Optuna storage, or None for one in memory.
        prior: completed trials of an earlier study, from which the sampler learns.

    Raises:
        SpecError: the sampler needs a package that is not installed, or does not support this space; a trial of
            `Search.enqueue` lies outside.
        StoreError: the storage cannot be opened.
    """

    def __init__(
        self,
        search: Search,
        *,
        direction: str,
        epochs: int,
        storage: str | os.PathLike[str] | BaseStorage | None = None,
        prior: Sequence[FrozenTrial] = (),
    ) -> None:
        import_optuna()
        import optuna

        named = search.sampler_name
        missing = [m for m in _NEEDS.get(named, ()) if importlib.util.find_spec(m) is None]
        if missing:
            raise SpecError(
                f"Search.sampler={named!r} needs {' and '.join(missing)}: "
                f"`pip install {' '.join(missing)}`, or choose tpe"
            )
        self.search, self._gain, self._direction = search, search.gain is not None, direction
        self._awaits_cost = any(each.is_cost for each in search.objectives)
        self._epochs = epochs
        self._grid = make_grid(search) if named == "grid" else None
        self._space = make_space(search.space)
        for number, given in enumerate(search.enqueue):
            if (why := self._space.explain_outside(given)) is not None:
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
        for trial in prior:
            self._check_prior(trial)
        self.study.add_trials(prior)
        self._first = len(prior)  # the number of the run's first trial in the study
        self._judged = without_first(self.study, self._first)
        self.study.stop = self._end_proposals  # type: ignore[method-assign]
        self._study_id = self._memory.get_study_id_from_name(self.study.study_name)
        self._added = 0  # trials that a user added; they are no points of a grid
        self._unstarted: list[int] = []  # trials without a member: they were asked for before a kill
        self._changed: dict[int, None] = {}  # trials of which the storage does not have all
        self._has_ended = False  # whether nothing more is proposed
        self._outside: set[int] = set()  # trials that samplers and pruners ignore
        self._is_beyond_gp = False
        self._storage, self._address = open_storage(storage), str(storage)

    @property
    def trials(self) -> int:
        """The number of trials: as declared, and at most the points of a grid."""
        most = self.search.trials
        return most if self._grid is None else min(most, len(self._grid))

    @property
    def _count(self) -> int:
        """The number of the run's trials."""
        return len(self.study.get_trials(deepcopy=False)) - self._first

    @property
    def next_number(self) -> int:
        """The number of the next trial: of one without a member first."""
        return self._unstarted[0] if self._unstarted else self._count

    def open(self, state: RunState) -> None:
        """Read the study of a run, once, before any trial is requested, and tell it how members have ended.

        Trials that had not ended, or failed for a reason that may be corrected, are running again.

        Raises:
            SpecError: a trial lies outside the space, or the study has other objectives.
            StoreError: the storage cannot be read, or lacks the trial of a member.
        """
        if self._count:
            raise ValueError("open() must be called before trials are requested")
        joined = self.search.study if isinstance(self.search.study, str) else None
        objectives = [Objective(state.objective, self._direction), *self.search.objectives]
        name = joined or state.name
        self._kept = KeptStudy(self._storage, self._address, name, state.run_id, objectives, bool(joined))
        trials, members = self._kept.read(), {member.number: member for member in state.members.values()}
        for number in range(1 + max((*trials, *members), default=-1)):
            if number not in trials:
                self._kept.refuse(number)
            self._load(number, trials[number], members.get(number))
        if trials and self._own_sampler is not None and not self._own_sampler.is_of_optuna:
            _log.warning(
                "what Search.sampler (%s) keeps in itself is lost: it goes on by what the study has",
                type(self.search.sampler).__name__,
            )
        for member in members.values():
            if self._is_over(member):
                self._tell_member(member, state.objective)
        self._end_by_terminator()
        self.flush()

    def _load(self, number: int, trial: FrozenTrial, member: MemberState | None) -> None:
        """Add a trial of the storage to the study in memory."""
        from optuna.trial import TrialState, create_trial

        about = trial.system_attrs
        is_added, is_outside = _ADDED in about, _OUTSIDE in about
        if member is not None:
            is_added, is_outside = bool(member.identity.get("added")), member.identity.get("outside") is not None
        is_over = member is None or is_outside or self._is_over(member)
        if trial.state == TrialState.FAIL and member is not None and member.state in ("finished", "pruned"):
            is_over = is_outside  # else it was told that it failed, and ran again
        made = create_trial(
            state=trial.state if is_over else TrialState.RUNNING,
            values=trial.values if is_over else None,
            user_attrs=trial.user_attrs,
            system_attrs=about if is_over else without_constraints(about),
            intermediate_values=trial.intermediate_values,
        )
        if is_outside:
            self._outside.add(number)
        else:
            made.params, made.distributions = self._fit(trial, member, number)
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

    def _fit(
        self, trial: FrozenTrial, member: MemberState | None, number: int
    ) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """The values of a trial and their distributions in the declared space, which may be wider than before."""
        from optuna.trial import TrialState, create_trial

        try:
            params, distributions = self._space.describe(trial.params)
            create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
        except (KeyError, SpecError, ValueError) as error:
            if trial.state == TrialState.FAIL and (member is None or member.reason == "impossible"):
                return trial.params, trial.distributions
            raise SpecError(
                f"Search.space does not hold the hyperparameters of member-{number} ({error}); resume with "
                "the space that the run began with, or choose another run directory"
            ) from None
        return params, distributions

    def _is_over(self, member: MemberState) -> bool:
        """Whether all is known by which a member's trial is judged, and it does not run again."""
        if member.state == "failed":
            return member.reason in UNRECOVERABLE
        if member.state == "finished":
            return member.cost is not None or not self._awaits_cost
        return member.state in ("pruned", "cancelled")

    def _tell_member(self, member: MemberState, objective: str) -> None:
        """Tell how a member has ended, unless its trial has been told already."""
        if self.get_trial(member.number).state.is_finished():
            return
        value = member.metrics.get("gain" if self._gain else objective)
        value = -value if self._gain and self._direction == "min" and value is not None else value
        constraints = member.constraints
        if constraints is None and member.state == "finished":  # older logs lack it
            constraints = self.compute_constraints(member.number, member.metrics)
        self.tell(member.number, member.state, value, member.cost, member.metrics, constraints)

    def ask(
        self,
        number: int,
        given: Mapping[str, Any] | None = None,
        lineage: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Propose the hyperparameters of the next trial; an earlier trial gets the same again.

        Args:
            given: what is suggested to it and not left to the sampler, by name.
            lineage: of a member that goes on from another; becomes an attribute of the trial.

        Raises:
            ValueError: `number` is beyond the next trial.
            SpecError: the user's function that makes hyperparameters fails for this trial, which has none then.
        """
        if number > self._count:
            raise ValueError(f"trial {number} was requested, but the next trial is {self._count}")
        if number < self._count:
            if number in self._unstarted:
                self._unstarted.remove(number)
            return self._space.read(self.get_trial(number))
        return self._ask(number, self._find_given(number) if given is None else given, lineage)

    def get_trial(self, number: int) -> FrozenTrial:
        """A trial of the run, which nobody changes."""
        return self.study.get_trials(deepcopy=False)[self._first + number]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is proposed: a finite space has no point left, or the terminator says so."""
        return self._has_ended

    def _find_given(self, number: int) -> Mapping[str, Any]:
        """What the sampler does not decide of a trial: its point of the grid, or what the user enqueued."""
        proposed = number - self._added
        if self._grid is not None:
            return self._grid[proposed % len(self._grid)]
        return self.search.enqueue[proposed] if proposed < len(self.search.enqueue) else {}

    def _check_prior(self, trial: FrozenTrial) -> None:
        """Refuse a trial of an earlier study with other hyperparameters, from which no sampler can learn."""
        from optuna.distributions import check_distribution_compatibility

        for name, ours in (self._space.distributions or {}).items():
            if (theirs := trial.distributions.get(name)) is not None:
                try:
                    check_distribution_compatibility(theirs, ours)
                except ValueError:
                    raise SpecError(
                        f"Search.study has {name!r} from {theirs}, the search has it from {ours}: kind, scale and "
                        "the choices in their order must be the same"
                    ) from None

    def _ask(
        self, number: int, given: Mapping[str, Any], lineage: Mapping[str, Any] | None, marks: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Add trial `number` as running: the sampler proposes what is not given."""
        before = dict(self._memory.get_study_system_attrs(self._study_id))
        trial = self._propose(number, self._space.encode(given))
        params: dict[str, Any] = {}
        try:
            params = self._space.read(trial)
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
        self._choose_sampler(number)
        with calling(self.study.sampler, "Search.sampler"):
            trial = self.study.ask(self._space.distributions)
            if self.search.sampler_name in _KEPT_IN_TRIALS:
                # Reading it adds the trial to its generation, also where all of it was suggested.
                _ = trial.relative_params
        return trial

    def _choose_sampler(self, number: int) -> None:
        known = self._first + number
        if self._own_sampler is not None:
            self.study.sampler = self._own_sampler.get(known)
            return
        if is_beyond_gp(self.search, known) and not self._is_beyond_gp:
            self._is_beyond_gp = True
            _log.warning("gp takes seconds for a proposal after %d trials: tpe proposes from here on", known)
        self.study.sampler = make_sampler(self.search, known)

    def explain_outside(self, params: Mapping[str, Any]) -> str | None:
        """Why the search could not have proposed these hyperparameters, some of which may be missing, or None."""
        return self._space.explain_outside(params)

    def add(
        self,
        params: Mapping[str, Any],
        outside: str | None = None,
        lineage: Mapping[str, Any] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Add a trial that a user declared, in addition to `trials`.

        Args:
            params: its hyperparameters; missing ones are proposed.
            outside: why its results cannot be compared with the other trials'; None: they can. Such a trial is
                recorded as failed: samplers would ignore any hyperparameter that one of the trials lacks.
            lineage: of a clone; becomes an attribute of the trial.

        Returns:
            Its number, and all its hyperparameters.
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
        """Whether a trial is compared with the others; one that was added from outside the space is not."""
        return number not in self._outside

    def has_reported(self, number: int) -> bool:
        """Whether a trial has reported the objective after any of its epochs."""
        return bool(self.get_trial(number).intermediate_values)

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Record the objective of a trial after its own epoch `epoch` (from 0).

        Returns:
            Whether to prune it. A repeated report gets the same answer; once True, all later answers are True. A
            trial is never pruned after its last epoch.
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
            prune = self.study.pruner.prune(self._judged, trial)
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

        Args:
            value: the objective of a finished trial; None: its last report. If the objective is the gain (negated
                where the metric is minimised), a finished trial without a value is recorded as failed.
            cost: the `cost` event of a finished trial, if a cost is an objective.
            metrics: of a finished trial, if there are further objectives; a trial without one of them is recorded
                as failed.
            constraints: of a finished trial, by how much it violates them: see `compute_constraints`.

        """
        from optuna.trial import TrialState

        trial = self.get_trial(number)
        if trial.state.is_finished():
            return
        last = trial.intermediate_values.get(trial.last_step) if trial.last_step is not None else None
        if self._gain and state == "finished":
            last = None  # a metric, not a gain
        known = [v for v in (value if state == "finished" else None, last) if v is not None and not math.isnan(v)]
        if state == "pruned":
            self._end(number, TrialState.PRUNED, [float(v) for v in known[:1]])
        elif (
            state == "finished"
            and known
            and (values := self._find_values(number, float(known[0]), cost, metrics or {}))
        ):
            self._constrain(number, constraints or {})
            self._end(number, TrialState.COMPLETE, values)
        elif state in ("finished", "failed", "cancelled"):
            self._end(number, TrialState.FAIL, [])
        else:
            raise ValueError(f"a trial ends as finished, pruned, failed or cancelled, not {state!r}")

    def _end(self, number: int, state: TrialState, values: list[float]) -> None:
        if self._own_sampler is not None and number not in self._outside:
            sampler = self._own_sampler.get(self._first + number)
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

    def _end_proposals(self) -> None:
        self._has_ended = True

    def compute_constraints(self, number: int, metrics: Mapping[str, Any]) -> dict[str, float] | None:
        """By how much a finished trial violates each constraint of the search; None where that has none.

        Raises:
            SpecError: the user's function fails.
        """
        if self.search.constraints is None:
            return None
        known = dict(metrics)
        for name, value in metrics.items():  # as the log has them
            known[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        found, most = dict[str, float](), sys.float_info.max  # a log has no infinities
        with calling(self.search.constraints, f"Search.constraints of member-{number}"):
            for name, excess in self.search.constraints(known).items():
                value = float(excess)
                found[name] = most if math.isnan(value) else min(max(value, -most), most)
        return found

    def _constrain(self, number: int, constraints: Mapping[str, float]) -> None:
        """Record in the study by how much a finished trial violates each constraint."""
        from optuna import Trial

        for name, excess in constraints.items():
            Trial(self.study, self._trial_id(number)).set_constraint(name, excess)

    def _find_values(
        self, number: int, value: float, cost: Cost | None, metrics: Mapping[str, Any]
    ) -> list[float]:
        """The values of a finished trial, whose cost the study then shows; empty where one is not known."""
        for key in _COST:
            if (shown := getattr(cost, key, None)) is not None:
                self._memory.set_trial_user_attr(self._trial_id(number), key, shown)
        further = [each.read(cost, metrics) for each in self.search.objectives]
        known = [float(each) for each in further if each is not None]
        return [value, *known] if len(known) == len(further) and math.isfinite(value) else []

    def revalue(self, values: Mapping[int, float]) -> None:
        """Replace the values of completed trials, from which the next proposals are made.

        Args:
            values: number -> value. The storage keeps the values that were told.
        """
        from optuna.trial import TrialState

        self.flush()
        for number, value in values.items():
            trial = self.get_trial(number)
            if trial.state == TrialState.COMPLETE:
                trial.values = [value]

    def _trial_id(self, number: int) -> int:
        return self._memory.get_trial_id_from_study_id_trial_number(self._study_id, self._first + number)

    def flush(self) -> None:
        """Write what has changed of trials since the last call to the storage."""
        if self._changed:
            self._kept.save({number: self.get_trial(number) for number in self._changed})
            self._changed.clear()
