"""A hyperparameter search: Optuna's samplers and pruners as a function of the run's log.

A proposal depends only on the history, the search's seed and the trial's number, because the sampler is made and
seeded anew for each `ask`. Therefore a resumed run proposes what the interrupted one would have proposed. A
sampler of the user's has a state of its own: a resume asks it again for each trial of the log, where the history
was the same, and so brings it to the same state, or finds out that it cannot be.

All decisions are made on a study in memory, which `Searcher.restore` rebuilds from the log. The storage that a
user names (or the journal in the run directory) is a mirror of that study, for people and dashboards. If a
database cannot be reached, only the mirror is behind. The caller updates the mirror by `Searcher.catch_up`, so
that many reports are written together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Cost, Epoch, Failed, Finished, MemberDeclared, Objective
from ensemble.search._compat import import_optuna, silence_optuna, without_first
from ensemble.search.factory import is_beyond_gp, make_grid, make_pruner, make_sampler
from ensemble.search.foreign import calling
from ensemble.search.frozen_trials import describe_cost
from ensemble.search.mirror import Mirror
from ensemble.search.space import is_equal, make_space
from ensemble.search.storage import open_storage, without_password
from ensemble.search.study import StudyMirror, directions
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
#: Samplers that keep what they know in the trials that they propose: those of the log are proposed again.
_KEPT_IN_TRIALS = ("cmaes", "nsga2", "nsga3")


class Searcher:
    """Proposes trials, records their results, and decides which to prune.

    Args:
        search: the space, the sampler, the pruner, the seed.
        direction: `"max"` or `"min"`.
        epochs: of each trial; hyperband's largest resource (its smallest is one epoch).
        storage: of the mirror: a path (journal file), a URL, an Optuna storage, or None for one in memory.
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
        self.search, self._gain = search, search.gain is not None
        self._objectives = [Objective("", direction), *search.objectives]  # `restore` knows the first one's name
        self._awaits_cost = any(each.is_cost for each in search.objectives)
        self._epochs = epochs
        self._grid = make_grid(search) if search.sampler_name == "grid" else None
        self._space = make_space(search.space)
        for number, given in enumerate(search.enqueue):
            if (why := self._space.explain_outside(given)) is not None:
                raise SpecError(f"Search.enqueue[{number}]: {why}")
        self._own_sampler = None if named else make_sampler(search, 0)
        self._terminator = search.terminator
        self._storage = optuna.storages.InMemoryStorage()
        with silence_optuna():  # a fixed name: hyperband derives a trial's bracket from it
            self.study = optuna.create_study(
                storage=self._storage,
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
        self._study_id = self._storage.get_study_id_from_name(self.study.study_name)
        self._params: list[dict[str, Any]] = []
        self._suggested: dict[int, dict[str, Any]] = {}  # where the hyperparameters do not have all of it
        self._has_ended = False  # whether nothing more is proposed
        self._is_repeatable = True  # whether the user's sampler has proposed what the log has
        self._outside: set[int] = set()  # trials that samplers and pruners ignore
        self._is_beyond_gp = False
        self._added = 0  # trials that a user added; they are no points of a grid
        self._prune_decisions: dict[int, dict[int, bool]] = {}
        self._name = self._run_id = ""  # `restore` takes them from the log
        opened = [open_storage(storage)]

        def connect() -> StudyMirror:  # after a failure the storage is opened again
            at = opened.pop() if opened else open_storage(storage)
            name = search.study if isinstance(search.study, str) else None
            return StudyMirror(at, name or self._name, self._run_id, self._objectives, bool(name))

        self._mirror = Mirror(connect, lambda text: without_password(text, str(storage)))

    @property
    def trials(self) -> int:
        """The number of trials: as declared, and at most the points of a grid."""
        most = self.search.trials
        return most if self._grid is None else min(most, len(self._grid))

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
        if number < len(self._params):
            return dict(self._params[number])
        if number > len(self._params):
            raise ValueError(f"trial {number} was requested, but the next trial is {len(self._params)}")
        self._mirror.mark_changed(number)
        if self._grid is not None:
            assert isinstance(self.search.space, Mapping)
            point = self._grid[(number - self._added) % len(self._grid)]
            self._adopt(number, {**self.search.space, **point})
        else:
            self._ask(number, self._find_enqueued(number) if given is None else given)
        self._describe_lineage(number, lineage)
        return dict(self._params[number])

    def get_trial(self, number: int) -> FrozenTrial:
        """A trial of the run, which nobody changes."""
        return self._frozen_trial(number)

    def suggested(self, number: int) -> dict[str, Any] | None:
        """What the sampler suggested for a trial; None where its hyperparameters have all of that."""
        return self._suggested.get(number)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is proposed: a finite space has no point left, or the terminator says so."""
        return self._has_ended

    def _find_enqueued(self, number: int) -> Mapping[str, Any]:
        """What the user gave of a trial before the search; nothing of most."""
        proposed = number - self._added
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

    def _end_proposals(self) -> None:
        self._has_ended = True

    def _ask(self, number: int, given: Mapping[str, Any], is_added: bool = False) -> None:
        """Add trial `number` as running: the sampler proposes what is not given."""
        trial = self._propose(number, self._space.encode(given), is_added)
        self._params.append({})
        try:
            self._params[number] = self._space.read(trial)
        finally:
            self._keep_suggested(number, trial.params)
        self._describe(number)

    def _propose(self, number: int, suggested: Mapping[str, Any], is_added: bool = False) -> Trial:
        """A new trial of the study, in which the sampler proposes what is not suggested.

        Of a trial that was added, a sampler of the user's is not asked: a resume does not know what was given.
        """
        if suggested:
            self.study.enqueue_trial(dict(suggested))
        self._choose_sampler(number)
        if is_added and self._own_sampler is not None:
            self.study.sampler = make_sampler(dataclasses.replace(self.search, sampler="random"), number)
        with calling(self.study.sampler, "Search.sampler"):
            trial = self.study.ask(self._space.distributions)
            if self.search.sampler_name in _KEPT_IN_TRIALS:
                # Reading it adds the trial to its generation, also where all of it was suggested.
                _ = trial.relative_params
        return trial

    def _keep_suggested(self, number: int, suggested: Mapping[str, Any]) -> None:
        known = self._space.encode(self._params[number])
        if any(name not in known or not is_equal(known[name], value) for name, value in suggested.items()):
            self._suggested[number] = dict(suggested)

    def _choose_sampler(self, number: int) -> None:
        if self._own_sampler is not None:
            self.study.sampler = self._own_sampler
            return
        known = self._first + number
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
    ) -> dict[str, Any]:
        """Add a trial that a user declared, in addition to `trials`.

        Args:
            params: its hyperparameters; missing ones are proposed.
            outside: why its results cannot be compared with the other trials' (`explain_outside`, or other
                settings); None: they can. Such a trial is recorded as failed: Optuna accepts no value outside the
                range, and samplers would ignore any hyperparameter that one of the trials lacks.
            lineage: of a clone; becomes an attribute of the trial.

        Returns:
            All its hyperparameters.
        """
        number = len(self._params)
        if outside is None:
            self._ask(number, params, is_added=True)
            self._describe_lineage(number, lineage)
        else:
            self._add_outside(number, params, outside, lineage)
        self._added += 1
        self._mirror.mark_changed(number)
        return dict(self._params[number])

    def is_ranked(self, number: int) -> bool:
        """Whether a trial is compared with the others; one that was added from outside the space is not."""
        return number not in self._outside

    def has_reported(self, number: int) -> bool:
        """Whether a trial has reported the objective after any of its epochs."""
        return bool(self._frozen_trial(number).intermediate_values)

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Record the objective of a trial after its own epoch `epoch` (from 0).

        Returns:
            Whether to prune it. A repeated report gets the same answer; once True, all later answers are True. A
            trial is never pruned after its last epoch.
        """
        self._mirror.mark_changed(number)
        prune_decisions = self._prune_decisions.setdefault(number, {})
        if epoch not in prune_decisions and not self._frozen_trial(number).state.is_finished():
            done = epoch + 1
            self._storage.set_trial_intermediate_value(self._trial_id(number), done, float(value))
            # Called even if the answer is not used, because the pruner records the value of this rung.
            prune_decisions[epoch] = self._judge(number) and done < self._epochs
        return any(prune_decision for known, prune_decision in prune_decisions.items() if known <= epoch)

    def _judge(self, number: int) -> bool:
        """Whether the pruner, or the user's function, ends a trial after its last report."""
        trial, stop = self._storage.get_trial(self._trial_id(number)), self.search.stop
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

        self._mirror.mark_changed(number)
        trial = self._frozen_trial(number)
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
            with calling(self._own_sampler, "Search.sampler"):
                self._own_sampler.after_trial(self.study, self._frozen_trial(number), state, values or None)
        self._storage.set_trial_state_values(self._trial_id(number), state, values or None)
        if self._terminator is None or self._has_ended:
            return
        with calling(self._terminator, "Search.terminator"):
            self._has_ended = bool(self._terminator.should_terminate(self.study))
        if self._has_ended:
            _log.warning("the terminator ends the search after %d trials", len(self._params))

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
        for key, shown in describe_cost(cost).items():
            self._storage.set_trial_user_attr(self._trial_id(number), key, shown)
        further = [each.read(cost, metrics) for each in self.search.objectives]
        known = [float(each) for each in further if each is not None]
        return [value, *known] if len(known) == len(further) and math.isfinite(value) else []

    def revalue(self, values: Mapping[int, float]) -> None:
        """Replace the values of completed trials, from which the next proposals are made.

        Args:
            values: number -> value. The mirror keeps the values that were recorded first.
        """
        from optuna.trial import TrialState

        for number, value in values.items():
            trial = self._frozen_trial(number)
            if trial.state == TrialState.COMPLETE:
                trial.values = [value]

    def restore(self, state: RunState) -> None:
        """Rebuild the study from a run's log, once, before any trial is requested.

        Trials that had not ended, or failed for a reason that may be corrected, are running again.

        Raises:
            SpecError: a member of the log lies outside the space.
            StoreError: the storage cannot be opened.
        """
        if self._params:
            raise ValueError("restore() must be called before trials are requested")
        self._name, self._run_id = state.name, state.run_id
        self._objectives[0] = Objective(state.objective, self._objectives[0].mode)
        for event in state.decision_events:
            if isinstance(event, Failed) and event.reason not in UNRECOVERABLE:
                continue
            if isinstance(event, Finished if self._awaits_cost else Cost):
                continue  # a trial has ended when all that it is judged by is known
            member = state.members[event.member]
            number = member.number
            if not member.is_declared:  # its declaration was lost with a part of the log
                continue
            metrics: Mapping[str, Any] = getattr(event, "metrics", None) or {}
            value = metrics.get(state.objective)
            if isinstance(event, MemberDeclared):
                for skipped in range(len(self._params), number):  # an addition that was refused
                    self._add_outside(skipped, {}, "it was never declared")
                    self._added += 1
                lineage = event.lineage
                if event.outside is None:
                    self._adopt(number, event.params, event.suggested, is_added=bool(event.added))
                    self._describe_lineage(number, lineage)
                else:
                    self._add_outside(number, event.params, event.outside, lineage)
                self._added += bool(event.added)
            elif isinstance(event, Epoch):
                if value is not None:  # else it was undefined after this epoch, or not measured
                    self.report(number, event.epoch, value)
            elif isinstance(event, Cost):
                value = member.metrics.get(state.objective)
                self.tell(number, "finished", value, event, member.metrics, self._read_constraints(member))
            else:
                if self._gain and (value := metrics.get("gain")) is not None and self._objectives[0].mode == "min":
                    value = -value
                known = self._read_constraints(member) if isinstance(event, Finished) else None
                self.tell(number, event.type, value, metrics=metrics, constraints=known)
        for lost in range(len(self._params), 1 + max((m.number for m in state.members.values()), default=-1)):
            self._add_outside(lost, {}, "its declaration was lost with a part of the log")
        self._mirror.open(self._run_trials())

    def _read_constraints(self, member: MemberState) -> Mapping[str, float] | None:
        """By how much a finished trial of the log violates each constraint; older logs lack it."""
        known = member.constraints
        return self.compute_constraints(member.number, member.metrics) if known is None else known

    def _adopt(
        self,
        number: int,
        params: Mapping[str, Any],
        suggested: Mapping[str, Any] | None = None,
        is_added: bool = False,
    ) -> None:
        """Add trial `number` as running, with hyperparameters that were decided before.

        Args:
            suggested: what the sampler suggested, where the hyperparameters do not have that.
        """
        from optuna.trial import TrialState, create_trial

        encoded = self._space.encode(params) if suggested is None else suggested
        try:
            values, distributions = self._space.describe(encoded)
            adopted = create_trial(state=TrialState.RUNNING, params=values, distributions=distributions)
        except (KeyError, SpecError, ValueError) as error:
            if not params:  # the user's function failed for it
                values, distributions, adopted = {}, {}, create_trial(state=TrialState.RUNNING)
            else:
                raise SpecError(
                    f"Search.space does not hold the hyperparameters of member-{number} ({error}); resume with "
                    "the space that the run began with, or choose another run directory"
                ) from None
        if self.search.sampler_name in _KEPT_IN_TRIALS:
            self._repeat(number, values, distributions, values)
        elif self._own_sampler is None or is_added:
            self.study.add_trial(adopted)
        else:
            self._repeat(number, values, distributions, self._space.encode(self._find_enqueued(number)))
        self._params.append(dict(params))
        if suggested is not None:
            self._suggested[number] = dict(suggested)
        self._describe(number)

    def _repeat(
        self,
        number: int,
        values: dict[str, Any],
        distributions: dict[str, BaseDistribution],
        suggested: Mapping[str, Any],
    ) -> None:
        """Ask the sampler again for a trial of the log; it is that trial, whatever the sampler says now."""
        trial = self._propose(number, suggested)
        if self._space.distributions is None:
            with contextlib.suppress(SpecError):
                self._space.read(trial)
        if self._own_sampler is not None and self._is_repeatable and values and trial.params != values:
            self._is_repeatable = False
            _log.warning(
                "the sampler %s proposes otherwise than before the interruption (has it a seed?): trials "
                "of the log stay, and the next ones are not those of an undisturbed run",
                type(self._own_sampler).__name__,
            )
        frozen = self._frozen_trial(number)
        frozen.params, frozen.distributions = values, distributions

    def _add_outside(
        self, number: int, params: Mapping[str, Any], why: str, lineage: Mapping[str, Any] | None = None
    ) -> None:
        """Add trial `number` as failed, so that samplers and pruners ignore it."""
        from optuna.trial import TrialState, create_trial

        about = {**params, "member": f"member-{number}", "outside": why}
        if lineage is not None:
            about["lineage"] = dict(lineage)
        self.study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=about))
        self._outside.add(number)
        self._params.append(dict(params))

    def _describe(self, number: int) -> None:
        """Record in the study a trial's member and its fixed hyperparameters."""
        suggested = self._frozen_trial(number).params
        fixed = {name: value for name, value in self._params[number].items() if name not in suggested}
        for key, value in {"member": f"member-{number}", **fixed}.items():
            self._storage.set_trial_user_attr(self._trial_id(number), key, value)

    def _describe_lineage(self, number: int, lineage: Mapping[str, Any] | None) -> None:
        """Record in the study what a running trial is a clone of."""
        if lineage is not None:
            self._storage.set_trial_user_attr(self._trial_id(number), "lineage", dict(lineage))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, self._first + number)

    def _frozen_trial(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[self._first + number]

    def _run_trials(self) -> list[FrozenTrial]:
        """The trials of the run, by number."""
        return self.study.get_trials(deepcopy=False)[self._first :]

    def catch_up(self, within_s: float | None = None) -> None:
        """Update the mirror with everything that was recorded since the last call.

        Args:
            within_s: about how many seconds to spend on it, in another thread; the rest is written next time.
                None: write everything and wait for it, but not long for a storage that does not answer.
        """
        self._mirror.catch_up(self._run_trials(), within_s)
