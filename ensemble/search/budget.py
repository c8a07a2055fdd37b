"""What of a search's budget is used: hours of work, CPU-hours, joules, trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble.meter.ledger_rows import Total
    from ensemble.store import RunState
    from ensemble.store.member import Span

#: Of each limit but the number of trials, so much is kept for checkpoints and the combination.
RESERVE = 0.02

#: So long after the first attempt has ended, its joules are known if they can be.
MEASURED_S = 30.0

#: Of the limits, for people.
UNITS = {"trials": "trials", "hours": "hours", "cpu_hours": "CPU-hours", "energy_kj": "kJ"}


@dataclass(frozen=True)
class Limit:
    """What of one limit, as `Search.budget` names it, is used, in the same unit; None: it was not measured."""

    name: str
    used: float | None
    limit: float

    @property
    def is_used(self) -> bool:
        """Whether no more is to be begun; a limit on trials is kept by proposing no more."""
        return self.name != "trials" and self.used is not None and self.used >= (1 - RESERVE) * self.limit

    def __str__(self) -> str:
        used = "unknown" if self.used is None else f"{self.used:.4g}"
        return f"{used} of {self.limit:.4g} {UNITS[self.name]}"


def measure_budget(budget: Mapping[str, float], state: RunState, used: Total, t: float) -> list[Limit]:
    """What is used of each limit, up to a time in Unix seconds.

    An hour of work is one in which a member has a place; that the run waits for nodes is none.
    """
    spans = (span for member in state.members.values() for span in member.spans)
    amounts = {
        "trials": float(len(state.members)),
        "hours": sum_work_s(spans, t) / 3600,
        "cpu_hours": used.cpu_s / 3600,
        "energy_kj": None if used.energy_j is None else used.energy_j / 1000,
    }
    return [Limit(name, amounts[name], limit) for name, limit in budget.items()]


def explain_end(budget: Mapping[str, float], state: RunState, used: Total, t: float) -> str | None:
    """Why the budget ends a run at a time in Unix seconds; None: it does not."""
    limits = measure_budget(budget, state, used, t)
    if reached := [str(limit) for limit in limits if limit.is_used]:
        return f"its budget is used: {', '.join(reached)}; resume --budget goes on with a larger one"
    spans = (span for member in state.members.values() for span in member.spans)
    first = min((span.ended for span in spans if span.ended is not None), default=t)
    unknown = [share.name for share in limits if share.used is None]
    if unknown and first + MEASURED_S < t:
        return (
            f"what it uses of its budget {unknown[0]!r} is not measured: no power source of its nodes could be "
            "read (see `ensemble doctor`); limit cpu_hours or hours instead"
        )
    return None


def sum_work_s(spans: Iterable[Span], t: float) -> float:
    """The seconds in which any member had a place."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((span.placed, t if span.ended is None else span.ended) for span in spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
