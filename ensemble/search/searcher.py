"""A hyperparameter search: Optuna's samplers and pruners as a function of the run's log.

A proposal depends only on the history, the search's seed and the trial's number, because the sampler is made and
seeded anew for each `ask`. Therefore a resumed run proposes what the interrupted one would have proposed.

All decisions are made on a study in memory, which `Searcher.restore` rebuilds from the log. The storage that a
user names (or the journal in the run directory) is a mirror of that study, for people and dashboards. If a
database cannot be reached, only the mirror is behind. The caller updates the mirror by `Searcher.catch_up`, so
that many reports are written together.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.events import Cost, Epoch, Failed, Finished, MemberDeclared
from ensemble.search._compat import import_optuna
from ensemble.search.factory import (
    describe_mismatch,
    encode_choice,
    is_beyond_gp,
    is_equal,
    make_distribution,
    make_grid,
    make_pruner,
    make_sampler,
)
from ensemble.search.frozen_trials import describe_cost
from ensemble.search.mirror import Mirror
from ensemble.search.storage import open_storage, without_password
from ensemble.search.study import StudyMirror, directions, silence_optuna
from ensemble.spec import Dimension, Search, SpecError
from ensemble.store.member import UNRECOVERABLE

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage

    from ensemble.store.state import RunState

_log = logging.getLogger(__name__)

#: Packages that a sampler needs beyond Optuna; each has a module of the same name.
_NEEDS = {"cmaes": ("cmaes",), "gp": ("scipy", "torch")}


class Searcher:
    """Proposes trials, records their results, and decides which to prune.

    Args:
        search: the space, the sampler, the pruner, the seed.
        direction: `"max"` or `"min"`.
        epochs: of each trial; hyperband's largest resource (its smallest is one epoch).
        storage: of the mirror: a path (journal file), a URL, an Optuna storage, or None for one in memory.

    Raises:
        SpecError: the sampler needs a package that is not installed, or does not support this space.
        StoreError: the storage cannot be opened.
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

        missing = [m for m in _NEEDS.get(search.sampler, ()) if importlib.util.find_spec(m) is None]
        if missing:
            raise SpecError(
                f"Search.sampler={search.sampler!r} needs {' and '.join(missing)}: "
                f"`pip install {' '.join(missing)}`, or choose tpe"
            )
        self.search, self._gain = search, search.gain is not None
        self._direction, self._second = direction, search.second_objective
        self._epochs = epochs
        self._grid = make_grid(search) if search.sampler == "grid" else None
        self._space = {key: value for key, value in search.space.items() if isinstance(value, Dimension)}
        self._distributions = {key: make_distribution(value) for key, value in self._space.items()}
        self._storage = optuna.storages.InMemoryStorage()
        with silence_optuna():  # a fixed name: hyperband derives a trial's bracket from it
            self.study = optuna.create_study(
                storage=self._storage,
                study_name="search",
                directions=directions(direction, self._second),
                pruner=make_pruner(search.pruner_options, epochs),
            )
        self._study_id = self._storage.get_study_id_from_name(self.study.study_name)
        self._params: list[dict[str, Any]] = []
        self._outside: set[int] = set()  # trials that samplers and pruners ignore
        self._is_beyond_gp = False
        self._added = 0  # trials that a user added; they are no points of a grid
        self._prune_decisions: dict[int, dict[int, bool]] = {}
        self._name = self._run_id = self._objective = ""  # `restore` takes them from the log
        opened = [open_storage(storage)]

        def connect() -> StudyMirror:  # after a failure the storage is opened again
            at = opened.pop() if opened else open_storage(storage)
            return StudyMirror(at, self._name, self._direction, self._run_id, self._objective, self._second)

        self._mirror = Mirror(connect, lambda text: without_password(text, str(storage)))

    @property
    def trials(self) -> int:
        """The number of trials: as declared, and at most the points of a grid."""
        return self.search.trials if self._grid is None else min(self.search.trials, len(self._grid))

    def ask(self, number: int) -> dict[str, Any]:
        """Propose the hyperparameters of the next trial; an earlier trial gets the same again.

        Raises:
            ValueError: `number` is beyond the next trial.
        """
        if number < len(self._params):
            return dict(self._params[number])
        if number > len(self._params):
            raise ValueError(f"trial {number} was requested, but the next trial is {len(self._params)}")
        if self._grid is not None:
            point = self._grid[(number - self._added) % len(self._grid)]
            self._adopt(number, {**self.search.space, **point})
        else:
            self._choose_sampler(number)
            trial = self.study.ask(self._distributions)
            self._params.append(self._decode(trial.params))
            self._describe(number)
        self._mirror.mark_changed(number)
        return dict(self._params[number])

    def _choose_sampler(self, number: int) -> None:
        if is_beyond_gp(self.search, number) and not self._is_beyond_gp:
            self._is_beyond_gp = True
            _log.warning("gp takes seconds for a proposal after %d trials: tpe proposes from here on", number)
        self.study.sampler = make_sampler(self.search, number)

    def explain_outside(self, params: Mapping[str, Any]) -> str | None:
        """Why the search could not have proposed these hyperparameters, some of which may be missing, or None."""
        for name, value in params.items():
            if name not in self.search.space:
                return f"the space has no {name!r}"
            why = describe_mismatch(self.search.space[name], value)
            if why is not None:
                return f"{name}={value!r} is {why}"
        return None

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
            self._enqueue(number, params)
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
            prune = self.study.pruner.prune(self.study, self._storage.get_trial(self._trial_id(number)))
            prune_decisions[epoch] = prune and done < self._epochs
        return any(prune_decision for known, prune_decision in prune_decisions.items() if known <= epoch)

    def tell(self, number: int, state: str, value: float | None = None, cost: Cost | None = None) -> None:
        """Record that a trial has ended: "finished", "pruned", "failed" or "cancelled".

        Args:
            value: the objective of a finished trial; None: its last report. If the objective is the gain (negated
                where the metric is minimised), a finished trial without a value is recorded as failed.
            cost: the `cost` event of a finished trial, if there is a second objective; a trial without that is
                recorded as failed.
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
            self._storage.set_trial_state_values(
                self._trial_id(number), TrialState.PRUNED, [float(v) for v in known[:1]] or None
            )
        elif state == "finished" and known and (values := self._add_cost(number, float(known[0]), cost)):
            self._storage.set_trial_state_values(self._trial_id(number), TrialState.COMPLETE, values)
        elif state in ("finished", "failed", "cancelled"):
            self._storage.set_trial_state_values(self._trial_id(number), TrialState.FAIL)
        else:
            raise ValueError(f"a trial ends as finished, pruned, failed or cancelled, not {state!r}")

    def _add_cost(self, number: int, value: float, cost: Cost | None) -> list[float]:
        """The values of a finished trial, whose cost the study then shows; none where its cost is not known."""
        if self._second is None:
            return [value]
        for key, shown in describe_cost(cost).items():
            self._storage.set_trial_user_attr(self._trial_id(number), key, shown)
        second = getattr(cost, self._second, None)
        return [] if second is None else [value, float(second)]

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
        self._name, self._run_id, self._objective = state.name, state.run_id, state.objective
        for event in state.decision_events:
            if isinstance(event, Failed) and event.reason not in UNRECOVERABLE:
                continue
            if isinstance(event, Cost if self._second is None else Finished):
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
                    self._adopt(number, event.params)
                    self._describe_lineage(number, lineage)
                else:
                    self._add_outside(number, event.params, event.outside, lineage)
                self._added += bool(event.added)
            elif isinstance(event, Epoch):
                if value is not None:  # else it was undefined after this epoch, or not measured
                    self.report(number, event.epoch, value)
            elif isinstance(event, Cost):
                self.tell(number, "finished", member.metrics.get(state.objective), event)
            else:
                if self._gain and (value := metrics.get("gain")) is not None and self._direction == "min":
                    value = -value
                self.tell(number, event.type, value)
        for lost in range(len(self._params), 1 + max((m.number for m in state.members.values()), default=-1)):
            self._add_outside(lost, {}, "its declaration was lost with a part of the log")
        self._mirror.open(self.study.get_trials(deepcopy=False))

    def _adopt(self, number: int, params: Mapping[str, Any]) -> None:
        """Add trial `number` as running, with hyperparameters that were decided before."""
        from optuna.trial import TrialState, create_trial

        if self.search.sampler == "cmaes":  # its sampler keeps its state in the trials that it proposes
            self._enqueue(number, params)
            return
        encoded = self._encode(params)
        try:
            distributions = {name: self._distributions[name] for name in encoded}
            self.study.add_trial(
                create_trial(state=TrialState.RUNNING, params=encoded, distributions=distributions)
            )
        except ValueError as error:
            raise SpecError(
                f"Search.space does not hold the hyperparameters of member-{number} ({error}); resume with the "
                "space that the run began with, or choose another run directory"
            ) from None
        self._params.append(dict(params))
        self._describe(number)

    def _enqueue(self, number: int, params: Mapping[str, Any]) -> None:
        """Add trial `number` as running, with these hyperparameters; the sampler proposes the others."""
        self.study.enqueue_trial(self._encode(params))
        self._choose_sampler(number)
        trial = self.study.ask(self._distributions)
        # CMA-ES adds a trial to its generation when it proposes for it, which reading this attribute causes.
        _ = trial.relative_params
        self._params.append(self._decode(trial.params))
        self._describe(number)

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

    def _encode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: encode_choice(params[name]) for name in self._space if name in params}

    def _describe(self, number: int) -> None:
        """Record in the study a trial's member and its fixed hyperparameters."""
        fixed = {name: value for name, value in self._params[number].items() if name not in self._space}
        for key, value in {"member": f"member-{number}", **fixed}.items():
            self._storage.set_trial_user_attr(self._trial_id(number), key, value)

    def _describe_lineage(self, number: int, lineage: Mapping[str, Any] | None) -> None:
        """Record in the study what a running trial is a clone of."""
        if lineage is not None:
            self._storage.set_trial_user_attr(self._trial_id(number), "lineage", dict(lineage))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _frozen_trial(self, number: int) -> optuna.trial.FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _decode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Convert Optuna's values to the user's, in the order of the space, with its fixed values."""
        own: dict[str, Any] = {}
        for name, given in self.search.space.items():
            if not isinstance(given, Dimension):
                own[name] = given
            elif given.kind == "choice":
                own[name] = next(v for v in given.values if is_equal(encode_choice(v), params[name]))
            else:
                own[name] = params[name]
        return own

    def catch_up(self, within_s: float | None = None) -> None:
        """Update the mirror with everything that was recorded since the last call.

        Args:
            within_s: about how many seconds to spend on it, in another thread; the rest is written next time.
                None: write everything and wait for it, but not long for a storage that does not answer.
        """
        self._mirror.catch_up(self.study.get_trials(deepcopy=False), within_s)
