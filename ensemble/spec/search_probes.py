"""Checks the trials of a search before any is trained: some that stand for all of its space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble.spec.identity import Identity
from ensemble.spec.options import check_hyperparameters
from ensemble.spec.recipe import list_member_options
from ensemble.spec.validation import SpecError

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble


def check_search(ensemble: Ensemble, probes: Sequence[Identity]) -> None:
    """Raise SpecError where the search does not fit the ensemble, or `probes`, trials that stand for all."""
    assert ensemble.search is not None
    ensemble.check_identity(0, ensemble.identify(0, {}))
    for trial in probes:
        ensemble.search.check_epochs(trial.epochs)
    if any(objective.name == ensemble.objective for objective in ensemble.search.objectives):
        raise SpecError(
            f"Search.further_objectives has {ensemble.objective!r}, which ranks the members already (objective=)"
        )
    if ensemble.search.gain and ensemble.valid is None:
        raise SpecError("Search.objective='gain' is measured on Ensemble.valid: give valid=")


def identify_probes(ensemble: Ensemble) -> list[Identity]:
    """The identities of trials that stand for all of a search's, see `Search.probes`.

    Raises:
        SpecError: one cannot be trained.
    """
    assert ensemble.search is not None
    parts, points = ensemble.search.probes
    probes = []
    try:
        ensemble.search.check_population(list_member_options(ensemble.recipe), points)
        for params in parts:
            try:
                probes.append(ensemble.identify(0, params))
            except SpecError:  # it may need another option that the space has
                probes.append(ensemble.identify(0, {**points[0], **params}))
        for params in points:
            probes.append(trial := ensemble.identify(0, params))
            check_hyperparameters(trial.optimizer, trial.schedule, params, partial=False)
        for trial in probes:
            ensemble.check_identity(0, trial)
    except SpecError as error:
        raise SpecError(f"Search.space: {str(error).removeprefix('members[0]: ')}") from None
    return probes
