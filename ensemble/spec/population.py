"""The members of a population: each has a place, in which one follows another, generation by generation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble.spec.identity import Identity
from ensemble.spec.member import Member

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble


def find_last_epoch(generation: int, generations: int, epochs: int) -> int:
    """The number of epochs after which a generation ends, of so many in all; the last one ends with all."""
    return math.ceil(epochs * (generation + 1) / generations)


def identify_in_population(
    ensemble: Ensemble, number: int, params: Mapping[str, Any], *, generation: int, place: int, first: int
) -> Identity:
    """The identity of a member of a population, without what it goes on from.

    Args:
        first: the number of the first member in its place, whose seed and sample weights all of them have.

    Raises:
        SpecError: its hyperparameters cannot be trained.
    """
    assert ensemble.search is not None
    options = ensemble.search.sampler_options
    trained = ensemble.identify(first, Member(params))
    return dataclasses.replace(
        trained,
        member=f"member-{number}",
        number=number,
        epochs=find_last_epoch(generation, options["generations"], trained.epochs),
        population={
            "generation": generation,
            "place": place,
            "first": first,
            "size": options["population"],
            "generations": options["generations"],
            "epochs": trained.epochs,
        },
    )


def identify_trial(ensemble: Ensemble, number: int, record: Mapping[str, Any]) -> Identity:
    """The identity of an earlier trial by the present declaration.

    Args:
        record: its recorded identity, which has what was proposed: its hyperparameters, in a population also its
            place and what it goes on from.
    """
    had = record.get("population")
    if had is None or ensemble.search is None or ensemble.search.population is None:
        return ensemble.identify(number, record["params"])
    where = {name: had[name] for name in ("generation", "place", "first")}
    identity = identify_in_population(ensemble, number, record["params"], **where)
    return dataclasses.replace(identity, lineage=record.get("lineage"))
