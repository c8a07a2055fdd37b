"""The trials of an earlier Optuna study that a search knows from the start.

They are kept in the run directory: a resume knows what the first start knew, whatever the study holds by then.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ensemble.search._compat import import_optuna
from ensemble.search.kept_study import directions
from ensemble.search.storage import open_storage
from ensemble.spec import Search, SpecError
from ensemble.spec.search import take_trials
from ensemble.store.files import write_json

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from ensemble.store import RunDir


def load_prior(run_dir: RunDir, search: Search, direction: str) -> list[FrozenTrial]:
    """The completed trials of `Search.study`, as they were when the run first began.

    Args:
        direction: of the search, "max" or "min".

    Raises:
        SpecError: the study has other objectives.
        StoreError: the storage cannot be opened.
    """
    if search.study is None:
        return []
    import_optuna()
    if not run_dir.prior.exists():
        write_json(run_dir.prior, [_as_json(each) for each in _read_study(search, direction)])
    return [_from_json(each) for each in json.loads(run_dir.prior.read_bytes())]


def _read_study(search: Search, direction: str) -> list[FrozenTrial]:
    import optuna

    study: Any = search.study
    if isinstance(study, str):
        try:
            study = take_trials(optuna.load_study(study_name=study, storage=open_storage(search.storage)))
        except KeyError:  # the run's trials begin it
            return []
    wanted = tuple(each.name for each in directions(direction, search.objectives))
    if study.directions != wanted:
        shown = [" and ".join(each.lower() for each in some) for some in (study.directions, wanted)]
        raise SpecError(f"Search.study {study.name!r} was to {shown[0]}, the search is to {shown[1]}")
    return list(study.trials)


def _as_json(trial: FrozenTrial) -> dict[str, Any]:
    from optuna.distributions import distribution_to_json

    return {
        "params": trial.params,
        "distributions": {name: distribution_to_json(each) for name, each in trial.distributions.items()},
        "values": trial.values,
        "constraints": trial.constraints,
    }


def _from_json(kept: dict[str, Any]) -> FrozenTrial:
    from optuna.distributions import json_to_distribution
    from optuna.trial import create_trial

    return create_trial(
        params=kept["params"],
        distributions={name: json_to_distribution(each) for name, each in kept["distributions"].items()},
        values=kept["values"],
        constraints=kept["constraints"] or None,
    )
