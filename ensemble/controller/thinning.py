"""Figures that come every second, thinned before they are logged: a run of a day is not to drown in them.

What is told is cumulative or can be added up, so no sum changes: of two counts the later one says all, energies of
two intervals are that of both. Only when something was used is known less finely, the longer a run lasts, up to
`MOST_S`. A log is never thinned afterwards: offsets in it are names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ensemble.meter.origin import from_ticks, to_ticks, weakest
from ensemble.meter.usage_intervals import ENDS_ATTEMPT

Event = dict[str, Any]

#: Seconds between two figures of one kind: a fiftieth of the run's age, and no more than this.
SHARE, MOST_S = 0.02, 30.0
#: Of `progress` events, over all members.
PROGRESS_PER_S = 4.0
#: Counts of a feeder of which a reader wants to know when they change.
TELLING = ("skipped", "restarts", "detached")
#: After these nothing may be missing.
LAST = frozenset(("run_stopped", "run_finished", "node_lost"))


class Thinning:
    """Holds figures back until they are due.

    Args:
        now: seconds on any clock that only goes forward, as in all that follows.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._held: dict[tuple[Any, ...], Event] = {}  # the earliest to be told comes first
        self._told: dict[tuple[Any, ...], float] = {}
        self._last: dict[tuple[Any, ...], Event] = {}
        self._progress: dict[str, float] = {}

    def take(self, event: Event, now: float) -> list[Event]:
        """What to log now that this has happened: itself, unless it is held back or left out."""
        kind = event["type"]
        if kind == "progress":
            return [event] if self._shows(event["member"], now) else []
        if kind in ("usage", "power", "feeder"):
            return self._hold(_key(event), event, now)
        if kind in LAST:
            return [*self.rest(), event]
        if kind in ENDS_ATTEMPT:
            self._progress.pop(event["member"], None)
            mine = [key for key, held in self._held.items() if held.get("member") == event["member"]]
            return [*(self._tell(key, now) for key in mine), event]
        return [event]

    def due(self, now: float) -> list[Event]:
        """What has been held back for long enough."""
        every_s = self._every_s(now)
        return [self._tell(key, now) for key in list(self._held) if now - self._told[key] >= every_s]

    def rest(self) -> list[Event]:
        """All that is held back."""
        held, self._held = self._held, {}
        return list(held.values())

    def _every_s(self, now: float) -> float:
        return min(MOST_S, SHARE * (now - self._began))

    def _shows(self, member: str, now: float) -> bool:
        every_s = max(self._every_s(now), len(self._progress) / PROGRESS_PER_S)
        if now - self._progress.get(member, float("-inf")) < every_s and every_s > 1.0:
            return False
        self._progress[member] = now
        return True

    def _hold(self, key: tuple[Any, ...], event: Event, now: float) -> list[Event]:
        before, out = self._held.pop(key, None), []
        if before is not None and not _continues(before, event):
            out, before = [before], None
        self._held[key] = event if before is None else _together(before, event)
        news = key not in self._told or _changed(self._last.get(key), event)
        self._last[key] = {name: event.get(name) for name in TELLING}
        if news or now - self._told[key] >= self._every_s(now):
            out.append(self._tell(key, now))
        return out

    def _tell(self, key: tuple[Any, ...], now: float) -> Event:
        self._told[key] = now
        return self._held.pop(key)


def _key(event: Event) -> tuple[Any, ...]:
    """Of figures that follow each other."""
    names = {"usage": ("node", "pid", "role"), "power": ("node",), "feeder": ("node", "cohort", "pid")}
    return (event["type"], *(event.get(name) for name in names[event["type"]]))


def _continues(before: Event, event: Event) -> bool:
    """Whether the later one says all that the earlier does, or they can be added up."""
    if event["type"] == "usage":
        same = all(before.get(name) == event.get(name) for name in ("member", "rank", "origin"))
        return same and None not in (before["cpu_s"], event["cpu_s"]) and before["cpu_s"] <= event["cpu_s"]
    if event["type"] == "power":
        summable = all(
            each.get("parts") is not None and each.get("interval_s") is not None for each in (before, event)
        )
        return summable and before.get("source") == event.get("source")
    return all(before.get(name, 0) <= event.get(name, 0) for name in ("prepared", "consumed", "skipped"))


def _changed(before: Event | None, event: Event) -> bool:
    return before is not None and any(before.get(name) != event.get(name) for name in TELLING)


def _together(before: Event, event: Event) -> Event:
    if event["type"] != "power":
        return event
    parts: dict[tuple[Any, ...], Event] = {}
    for part in (*before["parts"], *event["parts"]):
        key = tuple(part.get(name) for name in ("name", "kind", "device", "origin"))
        known = parts.get(key)
        energy_j = part["energy_j"] if known is None else _sum((known["energy_j"], part["energy_j"]))
        parts[key] = {**part, "energy_j": energy_j}
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


def _sum(energies: Iterable[float]) -> float:
    """Exactly: energies are whole ticks."""
    return from_ticks(sum(to_ticks(energy_j) for energy_j in energies))
