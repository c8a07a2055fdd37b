"""The shared streams: what each feeder does, how fast, and what holds it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ensemble.events import Feeder, FeederLost, RunStarted, SharingEnded
from ensemble.reporting.sections.feeders import bottlenecks
from ensemble.reporting.sections.notices import describe_end_of_sharing, describe_lost_feeder

if TYPE_CHECKING:
    from ensemble.events import Event
    from ensemble.store.state import RunState

COUNTS = ("prepared", "consumed")
SUMS = (*COUNTS, "skipped", "restarts", "sent_bytes")
FIELDS = ("workers", "capacity", "ring_bytes", "members", "detached", "cache")


class StreamRates:
    """Samples a second of each (node, cohort), between its feeder's last two reports, and what all its feeders in
    turn have counted: each counts from zero.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Feeder] = {}
        self.rates: dict[tuple[str, int], dict[str, float]] = {}
        self.totals: dict[tuple[str, int], dict[str, int]] = {}

    def apply(self, event: Event) -> None:
        """Reads the counts of a `feeder` event."""
        if isinstance(event, RunStarted):
            self._last.clear()
            self.rates.clear()
        if not isinstance(event, Feeder):
            return
        key = (event.node, event.cohort)
        before, self._last[key] = self._last.get(key), event
        if before is not None and (before.pid != event.pid or event.prepared < before.prepared):
            before = None  # of another process
        total = self.totals.setdefault(key, dict.fromkeys(SUMS, 0))
        for name in SUMS:
            total[name] += (getattr(event, name) or 0) - (getattr(before, name, 0) or 0)
        if before is None or event.t <= before.t:
            return
        seconds = event.t - before.t
        grown = {name: getattr(event, name) - getattr(before, name) for name in COUNTS}
        if min(grown.values()) >= 0:
            self.rates[key] = {name: round(many / seconds, 2) for name, many in grown.items()}


def describe_streams(state: RunState, rates: StreamRates) -> list[dict[str, Any]]:
    """Returns each (node, cohort) that has a feeder, or had one."""
    limits = bottlenecks(state)
    found = []
    for key in sorted({*state.feeders, *(key for key in state.unshared if key[0] is not None)}, key=str):
        node, cohort = key
        event, gone = state.feeders.get(key), state.unshared.get(key)  # type: ignore[arg-type]
        group = (event and event.group) or {}
        rate = {} if gone or state.ended else rates.rates.get(key, {})  # type: ignore[arg-type]
        found.append(
            {
                "node": node,
                "cohort": cohort,
                **{name: getattr(event, name, None) for name in FIELDS},
                **(rates.totals.get(key) or dict.fromkeys(SUMS)),  # type: ignore[arg-type]
                **{f"{name}_per_s": rate.get(name) for name in COUNTS},
                "levels": event.fullness if event is not None else {},
                "design": group.get("design"),
                "nodes": list(group.get("nodes") or ()),
                "limit": limits.get(cohort) if cohort is not None else None,
                "lost": gone and _describe_loss(gone),
            }
        )
    return found


def _describe_loss(event: FeederLost | SharingEnded) -> str:
    return describe_end_of_sharing(event) if isinstance(event, SharingEnded) else describe_lost_feeder(event)
