"""Adds up the power of a node between two reports: the older the run, the more seconds lie between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ensemble.meter.cpu import ReportPace
from ensemble.meter.origin import from_ticks, to_ticks, weakest

Power = Mapping[str, Any]  # fields of a `power` event, as `PowerMeter.sample` returns them
PAUSE_S = 60.0  # without a measurement: what lies on both sides of it is not added up


class PowerReports:
    """The power of a node that is not reported yet.

    Args:
        pace: says when it is.
    """

    def __init__(self, pace: ReportPace) -> None:
        self.pace = pace
        self._held: Power | None = None

    def add(self, power: Power) -> list[Power]:
        """Add what was measured; returns what is reported now."""
        reported: list[Power] = []
        if self._held is not None and can_add(self._held, power):
            self._held = add_power(self._held, power)
        else:
            reported = self.take()
            self._held = power
        return [*reported, *self.take()] if self.pace.is_due() else reported

    def take(self) -> list[Power]:
        held, self._held = self._held, None
        return [] if held is None else [held]


def can_add(before: Power, power: Power) -> bool:
    """Whether both are known in the same way, and one follows the other."""
    times = (before.get("until"), power.get("until"), before.get("interval_s"), power.get("interval_s"))
    if before.get("source") != power.get("source") or None in times or _list_known(before) != _list_known(power):
        return False
    return bool(abs(power["until"] - before["until"] - power["interval_s"]) <= PAUSE_S)


def _list_known(power: Power) -> set[tuple[Any, ...]]:
    """What is known of each part, as far as the sum of two parts would not say when it was known."""
    return {(part["name"], part.get("idle_j") is None, "activity" in part) for part in power["parts"]}


def add_power(before: Power, power: Power) -> Power:
    """The power of two intervals that follow each other. Energies are summed up without rounding."""
    parts: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for part in (*before["parts"], *power["parts"]):
        key = (part["name"], part["kind"], part["device"], part["origin"])
        parts[key] = _add_parts(parts[key], part) if key in parts else part
    interval_s = before["interval_s"] + power["interval_s"]
    energy_j = _sum([part["energy_j"] for part in parts.values()]) if parts else None
    busy = [before.get("busy_s"), power.get("busy_s")]
    return {
        **power,
        "parts": list(parts.values()),
        "energy_j": energy_j,
        "watts": energy_j / interval_s if energy_j is not None and interval_s > 0 else None,
        "origin": weakest(part["origin"] for part in parts.values()),
        "interval_s": interval_s,
        "busy_s": None if None in busy else sum(busy),
    }


def _add_parts(before: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    total = {**part, "energy_j": _sum([before["energy_j"], part["energy_j"]])}
    if part.get("idle_j") is not None and before.get("idle_j") is not None:
        total["idle_j"] = _sum([before["idle_j"], part["idle_j"]])
    if "activity" in part and "activity" in before:
        seconds: dict[tuple[str, str | None], list[float]] = {}
        for role, member, busy_s in (*before["activity"], *part["activity"]):
            seconds.setdefault((role, member), []).append(busy_s)
        total["activity"] = [(*who, _sum(values)) for who, values in seconds.items()]
    return total


def _sum(values: Sequence[float]) -> float:
    return from_ticks(sum(map(to_ticks, values)))
