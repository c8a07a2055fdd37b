"""Calls of what a user has brought: samplers, pruners, terminators, functions."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from ensemble.spec import Search, SpecError


class ForeignError(SpecError):
    """An object or a function of the user's has failed, so that a search cannot go on; the message names it."""


@contextlib.contextmanager
def calling(what: object, where: str) -> Iterator[None]:
    """A block that calls the user's object or function, whose errors become a `ForeignError` that says `where`."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        name = getattr(what, "__name__", type(what).__name__)
        raise ForeignError(f"{where}: {name} raised {type(error).__name__}: {error}") from error


def compute_constraints(search: Search, number: int, metrics: Mapping[str, Any]) -> dict[str, float] | None:
    """By how much a finished trial violates each constraint of a search; None where that has none.

    Raises:
        SpecError: the user's function fails.
    """
    if search.constraints is None:
        return None
    finite = dict(metrics)
    for name, value in metrics.items():  # as the log has them
        finite[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    excesses, most = dict[str, float](), sys.float_info.max  # a log has no infinities
    where = f"Search.constraints of member-{number}"
    with calling(search.constraints, where):
        found: Any = search.constraints(finite)
    for name, excess in found.items() if isinstance(found, Mapping) else [("", found)]:
        if not isinstance(found, Mapping) or isinstance(excess, bool) or not isinstance(excess, Real):
            raise SpecError(
                f"{where} returned {found!r:.80}: return numbers by name, such as "
                "{'accuracy': 0.5 - metrics['accuracy']}; one of at most 0 holds"
            )
        value = float(excess)
        excesses[name] = most if math.isnan(value) else min(max(value, -most), most)
    return excesses
