"""A hyperparameter search: what Optuna's samplers propose and its pruners stop, as a function of the run's log.

A proposal depends on the history, the search's seed and the trial's number, on nothing else: the sampler is
made and seeded anew for each `ask`. So a resumed run proposes what the interrupted one would have proposed. All
decisions are taken on a study in memory, rebuilt from the log by `Searcher.restore`; the storage that a user
names (or the journal in the run directory) is a mirror of it, for people and dashboards. A database that is
away costs its mirror the news until it is back, and the search nothing. The mirror lags: whoever runs the search
calls `Searcher.catch_up` now and then, so that many reports are written together.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.search.factory import (
    describe_mismatch,
    encode_choice,
    is_equal,
    make_distribution,
    make_grid,
    make_pruner,
    make_sampler,
)
from ensemble.search.mirror import Mirror
from ensemble.search.study import StudyMirror, open_storage, quiet, without_password
from ensemble.spec import Dimension, Search, SpecError
from ensemble.store.member import UNRECOVERABLE

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage

    from ensemble.store.state import RunState

#: What a sampler needs beyond Optuna: module names that are also the packages' names.
_NEEDS = {"cmaes": ("cmaes",), "gp": ("scipy", "torch")}


class Searcher:
    """Asks Optuna for the next trials, tells it how they go, and says which to prune.

    Args:
        search: the space, the sampler, the pruner, the seed.
        direction: `"max"` or `"min"`.
        epochs: of each trial; what hyperband takes as the most a trial can use (its least is one epoch).
        storage: where the mirror is: a path (journal file), a URL, an Optuna storage; None: `search.storage`, and
            no mirror where that is None too.
        name, run_id: of the run; they name the mirrored study and are taken from the log by `restore`.

    Raises:
        SpecError: the sampler needs a package that is not there, or cannot work in this space.
        StoreError: the storage cannot be opened.
    """

    def __init__(
        self,
        search: Search,
        *,
        direction: str,
        epochs: int,
        storage: str | os.PathLike[str] | BaseStorage | None = None,
        name: str = "search",
        run_id: str = "",
    ) -> None:
        import optuna

        missing = [m for m in _NEEDS.get(search.sampler, ()) if importlib.util.find_spec(m) is None]
        if missing:
            raise SpecError(
                f"Search.sampler={search.sampler!r} needs {' and '.join(missing)}: "
                f"`pip install {' '.join(missing)}`, or choose tpe"
            )
        self.search, self._gain = search, search.gain is not None
        self._direction = direction
        self._epochs = epochs
        self._grid = make_grid(search) if search.sampler == "grid" else None
        self._space = {key: value for key, value in search.space.items() if isinstance(value, Dimension)}
        self._distributions = {key: make_distribution(value) for key, value in self._space.items()}
        self._storage = optuna.storages.InMemoryStorage()
        with quiet():  # the name is fixed: hyperband hashes it into the choice of a trial's bracket
            self.study = optuna.create_study(
                storage=self._storage,
                study_name="search",
                direction="maximize" if direction == "max" else "minimize",
                pruner=make_pruner(search, epochs),
            )
        self._study_id = self._storage.get_study_id_from_name(self.study.study_name)
        self._params: list[dict[str, Any]] = []
        self._left: set[int] = set()  # that no sampler or pruner looks at
        self._added = 0  # of them, those that the user added: they are no points of a grid
        self._verdicts: dict[int, dict[int, bool]] = {}
        target = storage if storage is not None else search.storage
        self._mirror: Mirror | None = None
        if target is not None:
            opened = [open_storage(target)]

            def connect() -> StudyMirror:  # anew after a failure: what the storage was may be gone
                at = opened.pop() if opened else open_storage(target)
                return StudyMirror(at, self._name, self._direction, self._run_id, self._objective)

            self._mirror = Mirror(connect, lambda text: without_password(text, str(target)))
        self._name, self._run_id, self._objective = name, run_id, "objective"

    @property
    def trials(self) -> int:
        """How many trials there are to be: as asked, but no more than a grid has points."""
        return self.search.trials if self._grid is None else min(self.search.trials, len(self._grid))

    def ask(self, number: int) -> dict[str, Any]:
        """Hyperparameters for trial `number`, the next one; one that was asked for before gets the same again.

        Raises:
            ValueError: trials are asked for in order, and this is not the next.
        """
        if number < len(self._params):
            return dict(self._params[number])
        if number > len(self._params):
            raise ValueError(f"trial {number} was asked for, the next one is {len(self._params)}")
        if self._grid is not None:
            point = self._grid[(number - self._added) % len(self._grid)]
            self._adopt(number, {**self.search.space, **point})
        else:
            self.study.sampler = make_sampler(self.search, number)
            trial = self.study.ask(self._distributions)
            self._params.append(self._decoded(trial.params))
            self._describe(number)
        self._show(number)
        return dict(self._params[number])

    def outside(self, params: Mapping[str, Any]) -> str | None:
        """Why these hyperparameters could not have been proposed; None where they could, with those missing."""
        for name, value in params.items():
            if name not in self.search.space:
                return f"the space has no {name!r}"
            why = describe_mismatch(self.search.space[name], value)
            if why is not None:
                return f"{name}={value!r} is {why}"
        return None

    def add(self, params: Mapping[str, Any], outside: str | None = None) -> dict[str, Any]:
        """Take in a trial that the user gave, the next one; it counts on top of `trials`.

        Args:
            params: its hyperparameters; those missing are proposed.
            outside: why its results tell nothing of others (`outside(params)` and more). It is a failed trial
                then: Optuna takes no value out of its range, and a trial that lacks hyperparameters would take
                them from what the samplers look at together.

        Returns:
            All its hyperparameters.
        """
        number = len(self._params)
        if outside is None:
            self._enqueue(number, params)
        else:
            self._leave_out(number, params, outside)
        self._added += 1
        self._show(number)
        return dict(self._params[number])

    def judges(self, number: int) -> bool:
        """Whether a trial's results matter here; those of one that was added from outside the space do not."""
        return number not in self._left

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Take the objective of a trial after its own epoch `epoch` (0-based); True: prune it.

        The same report again gets the same answer, a condemned trial stays condemned, and a trial is not pruned
        after its last epoch, where nothing is left to save.
        """
        verdict = self._report(number, epoch, value)
        self._show(number)
        return verdict

    def tell(self, number: int, state: str, value: float | None = None) -> None:
        """A trial has ended as finished, pruned, failed or cancelled.

        Args:
            value: of one that finished; unless given it is its last report. Where the objective is the gain
                (negative where the metric is to be min) there is no other: without one the trial has failed.
        """
        self._tell(number, state, value)
        self._show(number)

    def revalue(self, values: Mapping[int, float]) -> None:
        """Give trials that are complete other values, those that the next proposals are to be made from.

        Args:
            values: number -> value. The mirror keeps what a trial was told when it ended.
        """
        from optuna.trial import TrialState

        for number, value in values.items():
            trial = self._trial(number)
            if trial.state == TrialState.COMPLETE:
                trial.values = [value]

    def restore(self, state: RunState) -> None:
        """Take over a run's history, of a fresh run as of one that is resumed; only on a new Searcher.

        Trials that had not ended are running again, and those that failed for a reason that may be mended.

        Raises:
            SpecError: a member of the log does not fit the space.
            StoreError: the storage holds a study of the same name that belongs to another run.
        """
        if self._params:
            raise ValueError("restore() is for a Searcher that was not used yet")
        self._name, self._run_id = state.name or self._name, state.run_id or self._run_id
        self._objective = state.objective
        for event in state.trail:
            if event["type"] == "failed" and event.get("reason") not in UNRECOVERABLE:
                continue
            number = state.members[event["member"]].number
            metrics = event.get("metrics") or {}
            value = metrics.get(state.objective)
            if event["type"] == "member":
                for skipped in range(len(self._params), number):
                    self._leave_out(skipped, {}, "it was never declared")
                if event.get("outside") is None:
                    self._adopt(number, event["params"])
                else:
                    self._leave_out(number, event["params"], event["outside"])
                self._added += bool(event.get("added"))
            elif event["type"] == "epoch":
                self._report(number, event["epoch"], math.nan if value is None else value)
            else:
                if self._gain and (value := metrics.get("gain")) is not None and self._direction == "min":
                    value = -value
                self._tell(number, event["type"], value)
        if self._mirror is not None:
            self._mirror.open(self.study.get_trials(deepcopy=False))

    def _adopt(self, number: int, params: Mapping[str, Any]) -> None:
        """Make trial `number` a running one with params that were decided before."""
        from optuna.trial import TrialState, create_trial

        if self.search.sampler == "cmaes":  # its sampler keeps its state in the trials it is asked for
            self._enqueue(number, params)
            return
        encoded = self._encoded(params)
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
        """Make trial `number` a running one with these params; the sampler proposes the others."""
        self.study.enqueue_trial(self._encoded(params))
        self.study.sampler = make_sampler(self.search, number)
        trial = self.study.ask(self._distributions)
        # CMA-ES counts a trial to a generation when it proposes for it; where all is given nobody asks it to.
        _ = trial.relative_params
        self._params.append(self._decoded(trial.params))
        self._describe(number)

    def _leave_out(self, number: int, params: Mapping[str, Any], why: str) -> None:
        """Make trial `number` one that no sampler or pruner looks at."""
        from optuna.trial import TrialState, create_trial

        about = {**params, "member": f"member-{number}", "outside": why}
        self.study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=about))
        self._left.add(number)
        self._params.append(dict(params))

    def _encoded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: encode_choice(params[name]) for name in self._space if name in params}

    def _describe(self, number: int) -> None:
        """Say in the study which member a trial is, and the hyperparameters that were not searched."""
        fixed = {name: value for name, value in self._params[number].items() if name not in self._space}
        for key, value in {"member": f"member-{number}", **fixed}.items():
            self._storage.set_trial_user_attr(self._id_of(number), key, value)

    def _report(self, number: int, epoch: int, value: float) -> bool:
        verdicts = self._verdicts.setdefault(number, {})
        if epoch not in verdicts and not self._trial(number).state.is_finished():
            done = epoch + 1
            self._storage.set_trial_intermediate_value(self._id_of(number), done, float(value))
            # asked even when the answer is not used: the pruner notes the value of this rung for the others
            hopeless = self.study.pruner.prune(self.study, self._storage.get_trial(self._id_of(number)))
            verdicts[epoch] = hopeless and done < self._epochs
        return any(verdict for known, verdict in verdicts.items() if known <= epoch)

    def _tell(self, number: int, state: str, value: float | None) -> None:
        from optuna.trial import TrialState

        trial = self._trial(number)
        if trial.state.is_finished():
            return
        last = trial.intermediate_values.get(trial.last_step) if trial.last_step is not None else None
        if self._gain and state == "finished":
            last = None  # a metric, not a gain
        known = [v for v in (value if state == "finished" else None, last) if v is not None and not math.isnan(v)]
        if state == "pruned":
            self._storage.set_trial_state_values(
                self._id_of(number), TrialState.PRUNED, [float(v) for v in known[:1]] or None
            )
        elif state == "finished" and known:
            self._storage.set_trial_state_values(self._id_of(number), TrialState.COMPLETE, [float(known[0])])
        elif state in ("finished", "failed", "cancelled"):
            self._storage.set_trial_state_values(self._id_of(number), TrialState.FAIL)
        else:
            raise ValueError(f"a trial ends as finished, pruned, failed or cancelled, not {state!r}")

    def _id_of(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _trial(self, number: int) -> optuna.trial.FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _decoded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Optuna's values as the user's own, in the order of the space, with its fixed values."""
        own: dict[str, Any] = {}
        for name, given in self.search.space.items():
            if not isinstance(given, Dimension):
                own[name] = given
            elif given.kind == "choice":
                own[name] = next(v for v in given.values if is_equal(encode_choice(v), params[name]))
            else:
                own[name] = params[name]
        return own

    def _show(self, number: int) -> None:
        if self._mirror is not None:
            self._mirror.changed(number)

    def catch_up(self, within_s: float | None = None) -> None:
        """Bring the mirror up to date with what was asked, reported and told since the last time.

        Args:
            within_s: about how long may be spent on it, while the caller goes on; what is left then comes next
                time. None: all of it, and the caller waits, though not long for a storage that does not answer.
        """
        if self._mirror is not None:
            self._mirror.catch_up(self.study.get_trials(deepcopy=False), within_s)
