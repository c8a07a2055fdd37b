"""What a run takes at most of its nodes, and its rank among the runs of a cluster: no part of what is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble.spec.validation import SpecError, check_choice, check_number

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble

LIMITED = ("gpus", "cpus")
LEAST_WEIGHT, MOST_WEIGHT, MOST_PRIORITY = 1e-6, 1e6, 2**31


def check_limits(where: str, given: object) -> None:
    """Raise SpecError for what is no dict of limits: of `gpus` an integer of at least 0, of `cpus` above 0."""
    if not isinstance(given, Mapping):
        raise SpecError(f"{where} must be a dict of one or more of {', '.join(LIMITED)}, got {given!r:.60}")
    for name, limit in given.items():
        check_choice(f"a limit of {where}", name, LIMITED)
        check_number(f"{where}[{name!r}]", limit, low=0, above=name == "cpus", integer=name == "gpus")


def apply_limits(
    ensemble: Ensemble,
    limits: Mapping[str, float] | None = None,
    priority: int | None = None,
    share_weight: float | None = None,
) -> Ensemble:
    """The ensemble with other limits, of those that are named, priority and weight; None leaves what it declares.

    Raises:
        SpecError: one of them is invalid.
    """
    check_limits("limits", limits or {})
    check_number("priority", priority, low=-MOST_PRIORITY, high=MOST_PRIORITY, integer=True, optional=True)
    check_number("share_weight", share_weight, low=LEAST_WEIGHT, high=MOST_WEIGHT, optional=True)
    changed: dict[str, object] = {"priority": priority, "share_weight": share_weight}
    if limits:
        changed["limits"] = {**ensemble.limits, **limits}
    made = copy.copy(ensemble)  # what else it declares has been checked
    for name, value in changed.items():
        if value is not None:
            object.__setattr__(made, name, value)
    return made
