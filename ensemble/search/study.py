"""The Optuna study of a run: derived from the event log, and updated by the smallest possible changes.

Each member is a trial with its hyperparameters, its state, and the objective after each epoch as intermediate
values (step = finished epochs). The study is for `optuna-dashboard` and other readers of Optuna storages. It is
never read back, so it may be deleted at any time. A list of members has a study just as a search has.

Optuna (5.0) accepts no change of a finished trial: if one has changed, the study is written anew.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Objective
from ensemble.meter.origin import Origin, weakest
from ensemble.search._compat import import_optuna, silence_optuna
from ensemble.search.frozen_trials import make_frozen_trials
from ensemble.search.storage import open_storage
from ensemble.store import RunState, StoreError

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage
    from optuna.study import StudyDirection
    from optuna.trial import FrozenTrial

_log = logging.getLogger(__name__)


def write_study(state: RunState, storage: str | os.PathLike[str] | BaseStorage | None) -> optuna.Study:
    """Write the study of a run into `storage`.

    Numeric hyperparameters become Optuna parameters over the observed range, all others user attributes. Trials
    that a `Searcher` has written keep their distributions.

    Args:
        state: of the run, as its log has it.
        storage: a path (journal file), a storage URL, an Optuna storage, or None for one in memory.

    Raises:
        StoreError: the storage cannot be opened.
    """
    import_optuna()
    import optuna

    opened = open_storage(storage)
    mirror = StudyMirror(opened, state.name or "run", state.run_id, state.objectives)
    mirror.sync(make_frozen_trials(state))
    with silence_optuna():
        return optuna.load_study(study_name=mirror.name, storage=opened)


def directions(direction: str, further: Iterable[Objective]) -> list[StudyDirection]:
    """Optuna's directions of a study: of the metric, "max" or "min", and of what is optimized beside it."""
    from optuna.study import StudyDirection

    modes = [direction, *(each.mode for each in further)]
    return [StudyDirection.MAXIMIZE if mode == "max" else StudyDirection.MINIMIZE for mode in modes]


class AmendError(Exception):
    """A trial in the storage cannot be changed into what the log says."""


class StudyMirror:
    """Writes trials into one study of a storage. There is no other writer of that study.

    Several runs may have one name and one storage: the study of the first one has the ensemble's name, those of
    the others have the beginning of the run's id behind it.

    Where joules are an objective, the study's attribute `energy_origin` is the weakest origin of its trials'.

    Args:
        objectives: that which ranks the members first.
        continues: whether the study may be there already, with trials of others, to which the run's are added.

    Attributes:
        name: of the study.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        run_id: str,
        objectives: Sequence[Objective],
        continues: bool = False,
    ) -> None:
        self.name, self._continues = name, continues
        self._storage = storage
        self._directions = directions(objectives[0].mode, objectives[1:])
        self._run_id = run_id
        self._objectives = [each.name for each in objectives]
        self._origin: Origin | None = None
        self._written: list[FrozenTrial] = []
        self._stale: set[int] = set()  # trials that could not be changed
        self._trial_ids: dict[int, int] = {}  # the storage's, by number
        self._id = self._open()

    def _open(self) -> int:
        if self._continues:
            return self._join()
        plain, with_id = self.name, f"{self.name}-{self._run_id[:8]}"
        owners: dict[str, str | None] = {}
        for name in (with_id, plain):
            try:
                id = self._storage.get_study_id_from_name(name)
            except KeyError:
                continue
            owners[name] = self._storage.get_study_user_attrs(id).get("run_id")
            if owners[name] == self._run_id:
                self.name = name
                return self._reopen(id)
        if plain not in owners:
            return self._create()
        _log.warning(
            "the Optuna storage has a study %r of another run (%s): that of this run is %r",
            plain,
            owners[plain],
            with_id,
        )
        self.name = with_id
        return self._create()

    def _reopen(self, id: int) -> int:
        if self._storage.get_study_directions(id) != self._directions:  # it was declared otherwise before
            self._storage.delete_study(id)
            return self._create()
        self._written = list(self._storage.get_all_trials(id, deepcopy=False))
        self._origin = self._storage.get_study_user_attrs(id).get("energy_origin")
        return id

    def _join(self) -> int:
        """The study with trials of others, or a new one; those of this run say so."""
        try:
            id = self._storage.get_study_id_from_name(self.name)
        except KeyError:
            return self._create()
        if self._storage.get_study_directions(id) != self._directions:
            raise StoreError(f"the Optuna study {self.name!r} has other objectives than the search")
        known = self._storage.get_all_trials(id, deepcopy=False)
        self._written = [trial for trial in known if trial.user_attrs.get("run_id") == self._run_id]
        for number, trial in enumerate(self._written):
            self._trial_ids[number] = self._storage.get_trial_id_from_study_id_trial_number(id, trial.number)
        return id

    def _create(self) -> int:
        with silence_optuna():
            id = self._storage.create_new_study(self._directions, self.name)
        self._storage.set_study_user_attr(id, "run_id", self._run_id)
        self._storage.set_study_system_attr(id, "study:metric_names", self._objectives)
        self._origin = None
        return id

    def catch_up(self, trials: Sequence[FrozenTrial], behind: dict[int, None], until: float | None) -> None:
        """Write the trials that have changed.

        Args:
            trials: all trials, by number.
            behind: the numbers of changed trials, in order; those that were written are removed from it.
            until: the time at which to stop (monotonic clock); None: write all.
        """
        try:
            with self._batch():
                while behind and (until is None or time.monotonic() < until):
                    number = next(iter(behind))
                    self.put(number, trials[number])
                    del behind[number]
        except AmendError:
            self.sync(trials)
            behind.clear()

    def _batch(self) -> contextlib.AbstractContextManager[None]:
        """A context in which changes are collected and written at its end, if the storage supports that."""
        batch: Any = getattr(self._storage, "batch", contextlib.nullcontext)
        return batch()  # type: ignore[no-any-return]

    def sync(self, trials: Sequence[FrozenTrial]) -> None:
        """Write all trials, from number 0 on; the study is written anew where a trial cannot be changed."""
        with self._batch():
            try:
                if len(self._written) > len(trials):
                    raise AmendError
                for number, trial in enumerate(trials):
                    self._put_anyway(number, trial)
            except AmendError:
                self._storage.delete_study(self._id)
                self._written, self._trial_ids = [], {}
                self._id = self._create()
                for number, trial in enumerate(trials):
                    self.put(number, trial)

    def _put_anyway(self, number: int, trial: FrozenTrial) -> None:
        """`put`; in a study that has trials of others, which is not written anew, what cannot be changed stays."""
        try:
            self.put(number, trial)
        except AmendError:
            if not self._continues or number >= len(self._written):
                raise
            if number not in self._stale:
                self._stale.add(number)
                _log.warning("the Optuna study %r shows trial %d of the run as it was before", self.name, number)

    def put(self, number: int, trial: FrozenTrial) -> None:
        """Write a trial of the run, the next one or an earlier one.

        Raises:
            AmendError: the trial in the storage cannot be changed; call `sync` with all trials.
        """
        if number > len(self._written):
            raise AmendError
        if number == len(self._written):
            if self._continues:
                trial = copy.copy(trial)
                trial.user_attrs = {**trial.user_attrs, "run_id": self._run_id}
            self._trial_ids[number] = self._storage.create_new_trial(self._id, trial)
        else:
            self._amend(number, self._written[number], trial)
        kept = self._storage.get_trial(self._trial_id(number))
        self._written[number:] = [kept, *self._written[number + 1 :]]
        if "energy_j" in self._objectives and (origin := trial.user_attrs.get("energy_origin")) is not None:
            known = self._origin
            self._origin = weakest([origin] if known is None else [origin, known])
            if self._origin != known:
                self._storage.set_study_user_attr(self._id, "energy_origin", self._origin)

    def _trial_id(self, number: int) -> int:
        """The storage's id of a trial."""
        if number not in self._trial_ids:
            known = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
            self._trial_ids[number] = known
        return self._trial_ids[number]

    def _amend(self, number: int, old: FrozenTrial, new: FrozenTrial) -> None:
        from optuna.trial import TrialState

        if old.state.is_finished():
            if (old.state, old.values) != (new.state, new.values):
                raise AmendError
            return
        values = new.intermediate_values
        given = {**old.user_attrs, **old.params}
        if any(given.get(name) != value for name, value in new.params.items()):
            raise AmendError
        # compared as text, because NaN differs from itself
        if any(repr(values.get(step)) != repr(value) for step, value in old.intermediate_values.items()):
            raise AmendError
        id = self._trial_id(number)
        for step in sorted(values.keys() - old.intermediate_values.keys()):
            self._storage.set_trial_intermediate_value(id, step, values[step])
        for attributes, kept, write in (
            (new.user_attrs, old.user_attrs, self._storage.set_trial_user_attr),
            (new.system_attrs, old.system_attrs, self._storage.set_trial_system_attr),
        ):
            for key, value in attributes.items():
                if key not in kept or kept[key] != value:
                    write(id, key, value)
        if new.state not in (old.state, TrialState.WAITING):
            self._storage.set_trial_state_values(id, new.state, new.values)
