"""What a run takes at most of its nodes: no part of what is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble.spec.validation import SpecError, check_choice, check_number

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble

LIMITED = ("gpus", "cpus")


def check_limits(where: str, given: object) -> None:
    """Raise SpecError for what is no dict of limits: of `gpus` an integer of at least 0, of `cpus` above 0."""
    if not isinstance(given, Mapping):
        raise SpecError(f"{where} must be a dict of one or more of {', '.join(LIMITED)}, got {given!r:.60}")
    for name, limit in given.items():
        check_choice(f"a limit of {where}", name, LIMITED)
        check_number(f"{where}[{name!r}]", limit, low=0, above=name == "cpus", integer=name == "gpus")


def apply_limits(ensemble: Ensemble, limits: Mapping[str, float] | None = None) -> Ensemble:
    """The ensemble with other limits, of those that are named; None leaves what it declares.

    Raises:
        SpecError: one of them is invalid.
    """
    check_limits("limits", limits or {})
    made = copy.copy(ensemble)  # what else it declares has been checked
    if limits:
        object.__setattr__(made, "limits", {**ensemble.limits, **limits})
    return made
