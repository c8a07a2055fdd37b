"""What a start may change: limits of a run and of a search, who is told at the end. None of it is trained.

Addresses of webhooks are no part of the declaration, which the run directory keeps: they may hold a token.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ensemble.spec.validation import SpecError, check_choice, check_number

if TYPE_CHECKING:
    from ensemble.spec.ensemble import Ensemble

LIMITED = ("gpus", "cpus")
#: What a budget of a search can limit.
BUDGETS = ("trials", "hours", "cpu_hours", "energy_kj")
#: What a Recipe's members measure only where a search optimizes it.
FOOTPRINTS = ("latency_ms", "model_mb")


def check_limits(where: str, limits: object) -> None:
    """Raise SpecError for what is no dict of limits: of `gpus` an integer of at least 0, of `cpus` above 0."""
    _check_amounts(where, limits, LIMITED, integers=("gpus",))


def check_budget(where: str, budget: object) -> None:
    """Raise SpecError for what is no dict of limits above 0 of a search."""
    _check_amounts(where, budget or None, BUDGETS, integers=("trials",), low=1)


def _check_amounts(
    where: str, amounts: object, names: Sequence[str], integers: Sequence[str], low: int = 0
) -> None:
    if not isinstance(amounts, Mapping):
        raise SpecError(f"{where} must be a dict of one or more of {', '.join(names)}, got {amounts!r:.60}")
    for name, amount in amounts.items():
        check_choice(f"a limit of {where}", name, names)
        least, is_integer = (low, True) if name in integers else (0, False)
        check_number(f"{where}[{name!r}]", amount, low=least, above=not is_integer, integer=is_integer)


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


def resolve_notify(addresses: Any) -> tuple[str, ...]:
    """Returns the addresses that are told.

    Args:
        addresses: None, an address, or a list of them.

    Raises:
        SpecError: one is no address; the message does not hold it, as it may have a token.
    """
    several = () if addresses is None else [addresses] if isinstance(addresses, str) else addresses
    if not isinstance(several, (list, tuple)) or not all(map(_is_web_address, several)):
        raise SpecError("notify= must be an address that begins with http:// or https://, or a list of them")
    return tuple(several)


def _is_web_address(url: object) -> bool:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        return parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False
