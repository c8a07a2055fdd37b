"""The study of a search in its Optuna storage, which is the truth: a trial for each member, asked and told.

A trial is written whole, in one operation, before its member is declared in the run's log, and what ends it after
the log has the member's end: a kill leaves at most a trial without a member, or one that has not been told.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ensemble.events import Objective
from ensemble.search._compat import silence_optuna
from ensemble.search.storage import without_password
from ensemble.spec import SpecError
from ensemble.store import StoreError
from ensemble.store.member import UNRECOVERABLE

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import StudyDirection
    from optuna.trial import FrozenTrial

    from ensemble.store.member import MemberState

_log = logging.getLogger(__name__)

#: System attributes of a trial: its member's number; the epochs after which its pruner ended it.
NUMBER, PRUNED_AFTER = "ensemble:number", "ensemble:pruned_after"
_MEMBER = re.compile("member-[0-9]+")
#: Pauses in seconds between attempts to write to a database; then the run stops, and a resume goes on.
PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


def directions(direction: str, further: Iterable[Objective]) -> list[StudyDirection]:
    """Optuna's directions of a study: of the metric, "max" or "min", and of what is optimized beside it."""
    from optuna.study import StudyDirection

    modes = [direction, *(objective.mode for objective in further)]
    return [StudyDirection.MAXIMIZE if mode == "max" else StudyDirection.MINIMIZE for mode in modes]


class KeptStudy:
    """Reads and writes the trials of one run.

    Several runs may have one name and one storage: the study of the first one has the ensemble's name, those of
    the others have the beginning of the run's id behind it.
    """

    def __init__(
        self,
        storage: BaseStorage,
        address: str,
        name: str,
        run_id: str,
        objectives: Sequence[Objective],
    ) -> None:
        self.name, self._run_id = name, run_id
        self._storage, self._address = storage, address
        self._directions = directions(objectives[0].mode, objectives[1:])
        self._objectives = [objective.name for objective in objectives]
        self._ids: dict[int, int] = {}  # the storage's, by the member's number
        self._saved: dict[int, FrozenTrial] = {}  # what the storage has
        try:
            self._study = self._open()
        except (SpecError, StoreError):
            raise
        except Exception as error:  # whatever the database's driver raises
            raise StoreError(self._explain("cannot be read", error)) from None

    def _open(self) -> int:
        owners: dict[str, str | None] = {}
        for name in (f"{self.name}-{self._run_id[:8]}", self.name):
            with contextlib.suppress(KeyError):
                study = self._storage.get_study_id_from_name(name)
                owners[name] = self._find_owner(study)
                if owners[name] == self._run_id:
                    self.name = name
                    self._check_objectives(study)
                    return study
        if self.name in owners:
            name, self.name = self.name, f"{self.name}-{self._run_id[:8]}"
            _log.warning(
                "the Optuna storage has a study %r of another run (%s): that of this run is %r",
                name,
                owners[name],
                self.name,
            )
        with silence_optuna():
            study = self._storage.create_new_study(self._directions, self.name)
        self._claim(study)
        return study

    def _find_owner(self, study: int) -> str | None:
        """The id of the run whose study it is; an empty one that nobody claims becomes ours.

        A start that was killed has left it.
        """
        owner: str | None = self._storage.get_study_user_attrs(study).get("run_id")
        is_like_ours = self._storage.get_study_directions(study) == self._directions
        if owner is None and is_like_ours and not self._storage.get_n_trials(study):
            self._claim(study)
            return self._run_id
        return owner

    def _claim(self, study: int) -> None:
        self._storage.set_study_system_attr(study, "study:metric_names", self._objectives)
        self._storage.set_study_user_attr(study, "run_id", self._run_id)

    def _check_objectives(self, study: int) -> None:
        before = self._storage.get_study_system_attrs(study).get("study:metric_names", self._objectives)
        if self._storage.get_study_directions(study) != self._directions or before != self._objectives:
            raise SpecError(
                f"the Optuna study {self.name!r} optimizes {', '.join(before)}, and the search "
                f"{', '.join(self._objectives)}, or one of them in the other direction: resume with the "
                "objectives that the search began with, or use another run directory"
            )

    def read(self) -> dict[int, FrozenTrial]:
        """The trials of the run by their members' numbers; of a member that ran again, the last one."""
        find_id = self._storage.get_trial_id_from_study_id_trial_number
        for trial in self._storage.get_all_trials(self._study, deepcopy=False):
            named = str(trial.user_attrs.get("member"))  # all that a study of an earlier version has
            number = trial.system_attrs.get(NUMBER, int(named[7:]) if _MEMBER.fullmatch(named) else None)
            if number is not None:
                self._ids[number], self._saved[number] = find_id(self._study, trial.number), trial
        return dict(self._saved)

    def refuse(self, number: int) -> NoReturn:
        """Raise the StoreError of a trial that the run has and the study lacks."""
        what = f"has no trial {number} of the study {self.name!r}, which the run has"
        raise StoreError(self._explain(what, "restore the study, or train again with --fresh"))

    def save(self, trials: Mapping[int, FrozenTrial]) -> None:
        """Write what has changed of trials; into a journal together."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.storages import JournalStorage

        for pause_s in (*PAUSES_S, None):
            try:
                self._save(trials)
                return
            except UpdateFinishedTrialError:  # somebody else has ended one of them, such as in optuna-dashboard
                self._read_again()
            except Exception as error:  # whatever the database's driver raises
                message = self._explain("cannot be written", error)
                if pause_s is None or isinstance(self._storage, JournalStorage):
                    raise StoreError(f"{message}; a resume goes on with the search") from None
                _log.warning("%s; it is tried again in %g s", message, pause_s)
                time.sleep(pause_s)
        raise StoreError(self._explain("cannot be written", "another program ends its trials"))

    def _save(self, trials: Mapping[int, FrozenTrial]) -> None:
        amended = {number: trial for number, trial in trials.items() if not self._create(number, trial)}
        batch: Any = getattr(self._storage, "batch", contextlib.nullcontext)
        with batch():
            for number, trial in amended.items():
                self._amend(self._ids[number], self._saved[number], trial)
        self._saved |= {number: _copy(trial) for number, trial in amended.items()}

    def _read_again(self) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        while True:
            try:
                self.read()
                return
            except UpdateFinishedTrialError:  # a journal says it of each operation that was in vain
                continue

    def _create(self, number: int, trial: FrozenTrial) -> bool:
        """Write a new trial, if it is one; returns whether all that is to be written now is there."""
        before = self._saved.get(number)
        if before is not None and not before.state.is_finished():
            return False
        if before is None or (before.state, before.values) != (trial.state, trial.values):
            # Optuna changes no finished trial: what runs again is another one.
            trial = _copy(trial)
            trial.user_attrs["member"] = f"member-{number}"
            trial.system_attrs[NUMBER] = number
            self._ids[number] = self._storage.create_new_trial(self._study, trial)
            self._saved[number] = trial
        return True

    def _amend(self, id: int, before: FrozenTrial, trial: FrozenTrial) -> None:
        storage = self._storage
        # What the pruner decided after an epoch is there if what it keeps of that is, and that if its value is.
        for key, value in trial.user_attrs.items():
            if key not in before.user_attrs or before.user_attrs[key] != value:
                storage.set_trial_user_attr(id, key, value)
        for key, value in sorted(trial.system_attrs.items(), key=lambda attribute: attribute[0] != PRUNED_AFTER):
            if key not in before.system_attrs or before.system_attrs[key] != value:
                storage.set_trial_system_attr(id, key, value)
        for step in sorted(trial.intermediate_values.keys() - before.intermediate_values.keys()):
            storage.set_trial_intermediate_value(id, step, trial.intermediate_values[step])
        if trial.state != before.state:
            storage.set_trial_state_values(id, trial.state, trial.values)

    def _explain(self, what: str, error: Exception | str) -> str:
        cause = getattr(error, "__cause__", None) or error  # Optuna says "invalid data" of what a driver raises
        line = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
        return without_password(f"the Optuna storage {self._address} {what}: {line}", self._address)


def is_over(member: MemberState, awaits_cost: bool) -> bool:
    """Whether all is known by which a member's trial is judged, and it does not run again."""
    if member.state == "failed":
        return member.reason in UNRECOVERABLE
    if member.state == "finished":
        return member.cost is not None or not awaits_cost
    return member.state in ("pruned", "cancelled")


def _copy(trial: FrozenTrial) -> FrozenTrial:
    """A copy that does not change with the trial, whose attributes Optuna changes in place."""
    made = copy.copy(trial)
    made.user_attrs, made.system_attrs = dict(trial.user_attrs), dict(trial.system_attrs)
    return made
