"""Thins the figures that arrive every second before they are logged, so that the log of a long run stays small.

The figures are cumulative counts, of which the later includes the earlier, or amounts of an interval, which are
added up. No sum changes; only the time at which something was used is known less precisely, at worst to
`ensemble.meter.cpu.MOST_S`. A log is never thinned afterwards: readers refer to its events by their offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ensemble.meter.cpu import report_interval_s
from ensemble.meter.origin import from_ticks, to_ticks, weakest
from ensemble.meter.usage_intervals import ENDS_ATTEMPT

Event = dict[str, Any]

PROGRESS_PER_S = 4.0  # `progress` events of all members together
#: Counts of a feeder that are logged at once when they change.
WATCHED_COUNTS = ("skipped", "restarts", "detached")
#: Before these events all figures are logged.
ENDS_SESSION = frozenset(("run_stopped", "run_finished", "node_lost"))


class Thinning:
    """Holds figures back until they are due. All times are seconds of a clock that does not go back."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._held: dict[tuple[Any, ...], Event] = {}  # in the order in which they are released
        self._released_at: dict[tuple[Any, ...], float] = {}
        self._counts: dict[tuple[Any, ...], Event] = {}
        self._progress_at: dict[str, float] = {}
        self._due_at = float("inf")  # no figure is due before; the interval only grows

    def add(self, event: Event, now: float) -> list[Event]:
        """Add an event.

        Returns:
            The events to log now: this one, unless it is held back or left out, after held ones that it releases.
        """
        kind = event["type"]
        if kind == "progress":
            return [event] if self._is_progress_due(event["member"], now) else []
        if kind in ("usage", "power", "feeder"):
            return self._hold(_key(event), event, now)
        if kind in ENDS_SESSION:
            return [*self.pop_all(), event]
        if kind in ENDS_ATTEMPT:
            self._progress_at.pop(event["member"], None)
            keys = [key for key, held in self._held.items() if held.get("member") == event["member"]]
            return [*(self._release(key, now) for key in keys), event]
        return [event]

    def pop_due(self, now: float) -> list[Event]:
        """Release the figures that were held back for long enough."""
        if now < self._due_at:
            return []
        interval_s = self._interval_s(now)
        due = [key for key in self._held if now - self._released_at[key] >= interval_s]
        released = [self._release(key, now) for key in due]
        self._due_at = min((self._released_at[key] for key in self._held), default=float("inf")) + interval_s
        return released

    def pop_cost(self, member: str, now: float) -> list[Event]:
        """Release what the cost of a member is computed from: its own figures, and the power of all nodes."""
        held = list(self._held.items())
        return [self._release(key, now) for key, of in held if of["type"] == "power" or of.get("member") == member]

    def pop_all(self) -> list[Event]:
        """Release all figures."""
        held, self._held = self._held, {}
        return list(held.values())

    def _interval_s(self, now: float) -> float:
        return report_interval_s(now - self._began)

    def _is_progress_due(self, member: str, now: float) -> bool:
        interval_s = max(self._interval_s(now), len(self._progress_at) / PROGRESS_PER_S)
        if now - self._progress_at.get(member, float("-inf")) < interval_s and interval_s > 1.0:
            return False
        self._progress_at[member] = now
        return True

    def _hold(self, key: tuple[Any, ...], event: Event, now: float) -> list[Event]:
        before, released = self._held.pop(key, None), []
        if before is not None and not _can_merge(before, event):
            released, before = [before], None
        self._held[key] = event if before is None else _merge(before, event)
        counts = {name: event.get(name) for name in WATCHED_COUNTS}
        is_news = key not in self._released_at or self._counts.get(key, counts) != counts
        self._counts[key] = counts
        if is_news or now - self._released_at[key] >= self._interval_s(now):
            released.append(self._release(key, now))
        else:
            self._due_at = min(self._due_at, self._released_at[key] + self._interval_s(now))
        return released

    def _release(self, key: tuple[Any, ...], now: float) -> Event:
        self._released_at[key] = now
        return self._held.pop(key)


def _key(event: Event) -> tuple[Any, ...]:
    """Identifies a series of figures."""
    names = {"usage": ("node", "pid", "role"), "power": ("node",), "feeder": ("node", "cohort", "pid")}
    return (event["type"], *(event.get(name) for name in names[event["type"]]))


def _can_merge(before: Event, event: Event) -> bool:
    """Whether the later figures include the earlier ones, or both can be added up."""
    if event["type"] == "usage":
        same = all(before.get(name) == event.get(name) for name in ("member", "rank", "origin"))
        return same and None not in (before["cpu_s"], event["cpu_s"]) and before["cpu_s"] <= event["cpu_s"]
    if event["type"] == "power":
        summable = all(
            each.get("parts") is not None and each.get("interval_s") is not None for each in (before, event)
        )
        known = _list_known(before) == _list_known(event) if summable else False
        return known and before.get("source") == event.get("source")
    return all(before.get(name, 0) <= event.get(name, 0) for name in ("prepared", "consumed", "skipped"))


def _list_known(power: Event) -> set[tuple[Any, ...]]:
    """What is known of each part, as far as the sum of two parts would not say when it was known."""
    return {
        (part.get("name"), part.get("idle_j") is None, part.get("activity") is None)
        for part in power.get("parts") or ()
    }


def _merge(before: Event, event: Event) -> Event:
    if event["type"] != "power":
        return event
    parts: dict[tuple[Any, ...], Event] = {}
    for part in (*before["parts"], *event["parts"]):
        key = tuple(part.get(name) for name in ("name", "kind", "device", "origin"))
        known = parts.get(key)
        parts[key] = part if known is None else _merge_parts(known, part)
    interval_s = before["interval_s"] + event["interval_s"]
    energy_j = _sum(part["energy_j"] for part in parts.values()) if parts else None
    busy = [before.get("busy_s"), event.get("busy_s")]
    return {
        **event,
        "parts": list(parts.values()),
        "energy_j": energy_j,
        "watts": energy_j / interval_s if energy_j is not None and interval_s > 0 else None,
        "origin": weakest(part["origin"] for part in parts.values()),
        "interval_s": interval_s,
        "busy_s": None if None in busy else sum(busy),
    }


def _merge_parts(before: Event, part: Event) -> Event:
    merged = {**part, "energy_j": _sum((before["energy_j"], part["energy_j"]))}
    if part.get("idle_j") is not None:
        merged["idle_j"] = _sum((before["idle_j"], part["idle_j"]))
    if part.get("activity") is not None:
        seconds: dict[tuple[str, str | None], list[float]] = {}
        for role, member, sm_s in (*before["activity"], *part["activity"]):
            seconds.setdefault((role, member), []).append(sm_s)
        merged["activity"] = [[*who, _sum(each)] for who, each in seconds.items()]
    return merged


def _sum(energies: Iterable[float]) -> float:
    """The exact sum: energies are whole ticks."""
    return from_ticks(sum(to_ticks(energy_j) for energy_j in energies))
