"""Reports the power of a node: sampled once a second, added up, and reported more seldom the older the run is.

A GPU's driver remembers the activity of a few seconds only, so power is sampled more often than it is reported.
The log of a long run stays small, and no sum changes: energies are added up exactly. When something was used is
known less precisely, at worst to `ensemble.meter.cpu.MOST_S`, and with it who used the node at the same time and
shares its energy. After the end of a rank power is reported at once: a search may wait for what it has cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ensemble.events import Report
from ensemble.meter import PowerMeter
from ensemble.meter.cpu import report_interval_s
from ensemble.meter.gpu_activity import GpuActivity, RunProcess
from ensemble.meter.origin import from_ticks, to_ticks, weakest
from ensemble.meter.power import Gpu
from ensemble.spec import Energy

POWER_EVERY_S = 1.0
LAST_S = 0.2  # the last interval has so many seconds at least: counters of energy and of CPU time go in steps


class PowerReports:
    """Samples and reports the power of a node from now on.

    Args:
        node: its name in the events.
        energy: how its power is measured.

    Attributes:
        began: of the run, in seconds of the monotonic clock.
        next_sample: when `sample` has something to do, of the same clock.
        list_processes: returns the processes that may use its GPUs, by id: all since the last call.

    Raises:
        Interrupted: a signal was received while idle power was measured.
    """

    def __init__(self, node: str, energy: Energy) -> None:
        self._meter = PowerMeter(node, energy=energy)
        try:
            self._meter.start()
        except BaseException:
            self._meter.close()
            raise
        self._activity = GpuActivity(())
        self.list_processes: Callable[[], Mapping[int, RunProcess]] = dict
        self.began = self._sampled_at = time.monotonic()
        self.next_sample = self.began + POWER_EVERY_S
        self._held: dict[str, Any] | None = None
        self._reported_at = float("-inf")

    def watch_gpus(self, gpus: Sequence[Gpu], *, with_mps: bool = False) -> None:
        """Attribute the activity of GPUs to processes; see `GpuActivity`."""
        self._activity = GpuActivity(gpus, with_mps=with_mps)

    def describe(self) -> dict[str, Any]:
        """`power` of the node's `node` event."""
        known = self._activity.describe()
        return {**self._meter.describe(), **({"gpu_activity": known} if known else {})}

    @property
    def interval_s(self) -> float:
        """Seconds from one report of any figure of the node to the next, at least."""
        return report_interval_s(time.monotonic() - self.began)

    @property
    def is_due(self) -> bool:
        """Whether figures are to be reported now."""
        return time.monotonic() - self._reported_at >= self.interval_s

    def report_soon(self) -> None:
        """Report what was sampled with the next sample: a rank has ended."""
        self._reported_at = float("-inf")

    def sample(self) -> list[Report]:
        """From `next_sample` on: measure the power since the last sample; the `power` events to be emitted."""
        is_due = self.is_due
        reports = self._add_up(self._meter.sample())
        # From its end: after a stall a shorter interval follows, but never one in which counters hardly step.
        self.next_sample = max(self._sampled_at + POWER_EVERY_S / 2, self.next_sample + POWER_EVERY_S)
        return reports + self._pop_held() if is_due else reports

    def finish(self) -> list[Report]:
        """The last `power` events, up to now."""
        time.sleep(max(0.0, self._sampled_at + LAST_S - time.monotonic()))
        return self._add_up(self._meter.finish()) + self._pop_held()

    def close(self) -> None:
        """Close the meter and the driver of the GPUs."""
        self._meter.close()
        self._activity.close()

    def _add_up(self, sampled: Iterable[dict[str, Any]]) -> list[Report]:
        """Hold samples; what cannot be added to them is returned."""
        self._sampled_at = time.monotonic()
        reports: list[Report] = []
        for power in sampled:
            if power["parts"]:
                self._activity.add_to(power, self.list_processes())
            if self._held is None or not _can_add(self._held, power):
                reports += self._pop_held()
                self._held = power
            else:
                self._held = add_power(self._held, power)
        return reports

    def _pop_held(self) -> list[Report]:
        held, self._held = self._held, None
        if held is None:
            return []
        self._reported_at = self._sampled_at
        return [{"type": "power", **held}]


def _can_add(before: Mapping[str, Any], power: Mapping[str, Any]) -> bool:
    """Whether the sum of two samples says what is known of each part, and when."""
    known = [
        {(part["name"], part["idle_j"] is None, part.get("activity") is None) for part in each["parts"]}
        for each in (before, power)
    ]
    return known[0] == known[1] and before["source"] == power["source"]


def add_power(before: Mapping[str, Any], power: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the `power` event of two intervals, one after the other."""
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in (*before["parts"], *power["parts"]):
        key = tuple(part[name] for name in ("name", "kind", "device", "origin"))
        parts[key] = _add_part(parts[key], part) if key in parts else part
    interval_s = before["interval_s"] + power["interval_s"]
    energy_j = _sum(part["energy_j"] for part in parts.values()) if parts else None
    busy_s = None if None in (before["busy_s"], power["busy_s"]) else before["busy_s"] + power["busy_s"]
    return {
        **power,
        "parts": list(parts.values()),
        "energy_j": energy_j,
        "watts": energy_j / interval_s if energy_j is not None and interval_s > 0 else None,
        "origin": weakest(part["origin"] for part in parts.values()),
        "interval_s": interval_s,
        "busy_s": busy_s,
    }


def _add_part(before: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    added = {**part, "energy_j": _sum((before["energy_j"], part["energy_j"]))}
    if part["idle_j"] is not None:
        added["idle_j"] = _sum((before["idle_j"], part["idle_j"]))
    if part.get("activity") is not None:
        seconds: dict[tuple[str, str | None], list[float]] = {}
        for role, member, sm_s in (*before["activity"], *part["activity"]):
            seconds.setdefault((role, member), []).append(sm_s)
        added["activity"] = [[*who, _sum(each)] for who, each in seconds.items()]
    return added


def _sum(amounts: Iterable[float]) -> float:
    """The exact sum: amounts are whole ticks."""
    return from_ticks(sum(to_ticks(amount) for amount in amounts))
