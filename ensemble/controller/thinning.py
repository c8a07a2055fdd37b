"""Thins the figures that arrive every second before they are logged, so that the log of a long run stays small.

The figures are cumulative counts, of which the later includes the earlier, or amounts of an interval, which are
added up. No process's total and no node's energy changes. A figure has the time at which it is logged: when
something was used is known less precisely, at worst to `ensemble.meter.cpu.MOST_S`, and with it who used a node at
the same time and shares its energy. A log is never thinned later: readers refer to its events by their offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

import ensemble.events as events
from ensemble.events import Event, Feeder, Power, PowerPart, Usage
from ensemble.meter.cpu import report_interval_s
from ensemble.meter.origin import from_ticks, to_ticks, weakest
from ensemble.meter.usage_parser import BEGINS_POWER, ENDS_ATTEMPT, PAUSE_S

#: Figures that arrive every second.
Figures = Usage | Power | Feeder
FIGURES = (Usage, Power, Feeder)

PROGRESS_PER_S = 4.0  # `progress` events of all members together
#: Before these events all figures are logged.
ENDS_SESSION = (events.RunStopped, events.RunFinished, events.NodeLost)


class _Held(NamedTuple):
    """A figure that is held back, and when its last part came."""

    event: Figures
    at: float


class _Released(NamedTuple):
    """When a series of figures was last logged, and of which member."""

    at: float
    member: str | None


class Thinning:
    """Holds figures back until they are due. All times are seconds of a clock that does not go back."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._held: dict[tuple[Any, ...], _Held] = {}  # in the order in which they are released
        self._released: dict[tuple[Any, ...], _Released] = {}  # of all that are held, and of others that may go on
        self._counts: dict[tuple[Any, ...], tuple[int, ...]] = {}  # of feeders, logged at once when they change
        self._ended: set[str] = set()  # members whose last attempt has ended: their figures are the last ones
        self._progress_at: dict[str, float] = {}
        self._due_at = float("inf")  # no figure is due before; the interval only grows

    def add(self, event: Event, now: float) -> list[Event]:
        """Add an event.

        Returns:
            The events to log now: this one, unless it is held back or left out, after held ones that it releases.
        """
        if isinstance(event, events.StepsDone):
            return [event] if self._is_progress_due(event.member, now) else []
        if isinstance(event, FIGURES):
            return self._hold(_key(event), event, now)
        if isinstance(event, ENDS_SESSION):
            return [*self.pop_all(), event]
        if isinstance(event, ENDS_ATTEMPT):
            self._ended.add(event.member)
            return [*self._end_attempt(event.member, now), event]
        if isinstance(event, events.Placed):
            self._ended.discard(event.member)
            return [*self._end_attempt(event.member, now), event]
        if isinstance(event, BEGINS_POWER):
            key = ("power", event.node)
            return [*([self._release(key, now)] if key in self._held else []), event]
        return [event]

    def pop_due(self, now: float) -> list[Event]:
        """Release the figures that were held back for long enough."""
        if now < self._due_at:
            return []
        interval_s = self._interval_s(now)
        due = [key for key in self._held if now - self._released[key].at >= interval_s]
        released = [self._release(key, now) for key in due]
        self._due_at = min((self._released[key].at for key in self._held), default=float("inf")) + interval_s
        return released

    def pop_cost(self, now: float) -> list[Event]:
        """Release what the cost of a member is computed from: power, and usage of all that share it."""
        keys = [key for key, held in self._held.items() if isinstance(held.event, Usage | Power)]
        return [self._release(key, now) for key in keys]

    def pop_all(self) -> list[Event]:
        """Release all figures."""
        held: list[Event] = [each.event for each in self._held.values()]
        self._held.clear()
        self._released.clear()
        self._counts.clear()
        return held

    def _end_attempt(self, member: str, now: float) -> list[Event]:
        """Release the figures of a member, and forget its processes."""
        self._progress_at.pop(member, None)
        keys = [key for key, held in self._held.items() if _member_of(held.event) == member]
        released = [self._release(key, now) for key in keys]
        for key in [key for key, last in self._released.items() if last.member == member]:
            if key not in self._held:  # otherwise the process has gone on to another member
                del self._released[key]
        return released

    def _interval_s(self, now: float) -> float:
        return report_interval_s(now - self._began)

    def _is_progress_due(self, member: str, now: float) -> bool:
        interval_s = max(self._interval_s(now), len(self._progress_at) / PROGRESS_PER_S)
        if now - self._progress_at.get(member, float("-inf")) < interval_s and interval_s > 1.0:
            return False
        self._progress_at[member] = now
        return True

    def _hold(self, key: tuple[Any, ...], event: Figures, now: float) -> list[Event]:
        released: list[Event] = []
        before = self._held.get(key)
        if before is not None and _can_merge(before.event, event) and not _is_after_gap(before, event, now):
            event = _merge(before.event, event)
            del self._held[key]
        elif before is not None:
            released.append(self._release(key, now))
        if _member_of(event) in self._ended:
            return [*released, event]
        self._held[key] = _Held(event, now)
        is_news = self._note_counts(key, event) or key not in self._released
        if is_news or now - self._released[key].at >= self._interval_s(now):
            released.append(self._release(key, now))
        else:
            self._due_at = min(self._due_at, self._released[key].at + self._interval_s(now))
        return released

    def _note_counts(self, key: tuple[Any, ...], event: Figures) -> bool:
        """Whether a count of a feeder has changed that is logged at once."""
        if not isinstance(event, Feeder):
            return False
        counts = (event.skipped, event.restarts, event.detached)
        before, self._counts[key] = self._counts.get(key, counts), counts
        return before != counts

    def _release(self, key: tuple[Any, ...], now: float) -> Event:
        event = self._held.pop(key).event
        self._released[key] = _Released(now, _member_of(event))
        return event


def _member_of(event: Figures) -> str | None:
    return event.member if isinstance(event, Usage) else None


def _key(event: Figures) -> tuple[Any, ...]:
    """Identifies a series of figures."""
    match event:
        case Usage():
            return (event.type, event.node, event.pid, event.began, event.role)
        case Power():
            return (event.type, event.node)
        case Feeder():
            return (event.type, event.node, event.cohort, event.pid)


def _can_merge(before: Figures, event: Figures) -> bool:
    """Whether the later figures include the earlier ones, or both can be added up."""
    if isinstance(before, Usage) and isinstance(event, Usage):
        same = (before.member, before.rank, before.origin) == (event.member, event.rank, event.origin)
        return same and before.cpu_s is not None and event.cpu_s is not None and before.cpu_s <= event.cpu_s
    if isinstance(before, Power) and isinstance(event, Power):
        are_known = None not in (before.parts, event.parts, before.interval_s, event.interval_s)
        return are_known and _list_known(before) == _list_known(event) and before.source == event.source
    return all(getattr(before, name) <= getattr(event, name) for name in ("prepared", "consumed", "skipped"))


def _list_known(power: Power) -> set[tuple[Any, ...]]:
    """What is known of each part, as far as the sum of two parts would not say when it was known."""
    return {(part.name, part.idle_j is None, part.activity is None) for part in power.parts or ()}


def _is_after_gap(before: _Held, event: Figures, now: float) -> bool:
    """Whether the node's power was not measured for a while between the two."""
    return isinstance(event, Power) and abs(now - before.at - (event.interval_s or 0.0)) > PAUSE_S


def _merge(before: Figures, event: Figures) -> Figures:
    if isinstance(before, Usage) and isinstance(event, Usage) and event.gpu_busy_s is None:
        # Who reports the end of a process does not know how long it kept its GPU busy.
        return replace(event, gpu_busy_s=before.gpu_busy_s, gpu=before.gpu if event.gpu is None else event.gpu)
    if not isinstance(before, Power) or not isinstance(event, Power):
        return event
    parts: dict[tuple[Any, ...], PowerPart] = {}
    for part in (*(before.parts or ()), *(event.parts or ())):
        key = (part.name, part.kind, part.device, part.origin)
        known = parts.get(key)
        parts[key] = part if known is None else _merge_parts(known, part)
    interval_s = (before.interval_s or 0.0) + (event.interval_s or 0.0)
    energy_j = _sum(part.energy_j for part in parts.values()) if parts else None
    return replace(
        event,
        parts=list(parts.values()),
        energy_j=energy_j,
        watts=energy_j / interval_s if energy_j is not None and interval_s > 0 else None,
        origin=weakest(part.origin for part in parts.values()),
        interval_s=interval_s,
        busy_s=None if before.busy_s is None or event.busy_s is None else before.busy_s + event.busy_s,
    )


def _merge_parts(before: PowerPart, part: PowerPart) -> PowerPart:
    idle_j, activity = part.idle_j, part.activity
    if idle_j is not None and before.idle_j is not None:
        idle_j = _sum((before.idle_j, idle_j))
    if activity is not None and before.activity is not None:
        seconds: dict[tuple[str, str | None], list[float]] = {}
        for role, member, sm_s in (*before.activity, *activity):
            seconds.setdefault((role, member), []).append(sm_s)
        activity = [(*who, _sum(each)) for who, each in seconds.items()]
    return replace(part, energy_j=_sum((before.energy_j, part.energy_j)), idle_j=idle_j, activity=activity)


def _sum(energies: Iterable[float]) -> float:
    """The exact sum: energies are whole ticks."""
    return from_ticks(sum(to_ticks(energy_j) for energy_j in energies))
