"""Reads all power sources of a node together, for one `power` event.

Where something measures the whole node (an external meter, else ACPI's), the parts of a node sum to what it says:
the processors, memory and GPUs that are measured by themselves, and a part ``node``, which is the residual
(`ensemble.meter.power.residual_power`). Nothing is estimated then; it holds processors that nothing measures.

An external meter's rows come late: an interval is kept open until they cover it
(`ensemble.meter.power.pending_interval`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ensemble.meter.origin import Origin, from_ticks, round_to_tick, to_ticks, weakest
from ensemble.meter.power import hwmon, rapl
from ensemble.meter.power.busy_time import BusyTime, find_busy_time
from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading, Trapezoid
from ensemble.meter.power.estimate import open_estimate
from ensemble.meter.power.external import NAME as EXTERNAL
from ensemble.meter.power.external import locate, open_external
from ensemble.meter.power.idle import Idle, find_idle
from ensemble.meter.power.nvml import open_nvml
from ensemble.meter.power.pending_interval import EnergyPart, PendingInterval, Slice
from ensemble.meter.power.residual_power import ResidualPower
from ensemble.spec import Energy

log = logging.getLogger(__name__)

_RETRY_S = 10.0  # how often a source that was lost is looked for
_SILENT_S = 10.0  # how old the external meter's last row may be for another one to be waited for at the end
_POLL_S = 0.1


def open_power_sources(
    rapl_root: Path = rapl.ROOT, hwmon_root: Path = hwmon.ROOT, external: PowerSource | None = None
) -> list[PowerSource]:
    """Returns the sources to use on this node.

    RAPL, else AMD's driver, measures the processors; the external meter, else ACPI's, the whole node.
    Only where nothing measures either, the processors are estimated.

    Args:
        rapl_root: folder of the powercap zones.
        hwmon_root: folder of the hwmon devices.
        external: the external meter, where there is one.

    Raises:
        SpecError: ``ENSEMBLE_WATTS_PER_CORE`` is no positive number, and the estimate is needed.
    """
    cpu = _open_first(lambda: rapl.open_rapl(rapl_root), lambda: hwmon.open_amd_energy(hwmon_root))
    node = external or _open_first(lambda: hwmon.open_power_meter(hwmon_root))
    measured = [source for source in (cpu, node) if source is not None]
    found: list[PowerSource | Absent] = [*measured] if measured else [open_estimate()]
    found.append(open_nvml())
    return [source for source in found if not isinstance(source, Absent)]


def _open_first(*openers: Callable[[], PowerSource | Absent]) -> PowerSource | None:
    for opener in openers:
        source = opener()
        if not isinstance(source, Absent):
            return source
    return None


class PowerMeter:
    """Energy of one node between samples.

    Args:
        node: its name in the events.
        sources: what to read; by default what this node has.
        clock: seconds, for the length of intervals.
        energy: where its idle power comes from, and the file of an external meter.
        busy: whose CPU time to report; by default the widest scope that can be seen.
        now: unix time in seconds, as an external meter writes it.

    Examples:
        >>> meter = PowerMeter("local", energy=Energy(measure_idle_s=0))
        >>> meter.start()
        >>> [power["origin"] in ("measured", "estimated", "unavailable") for power in meter.finish()]
        [True]
        >>> meter.close()
    """

    def __init__(
        self,
        node: str,
        sources: Sequence[PowerSource] | None = None,
        clock: Callable[[], float] = time.monotonic,
        energy: Energy | None = None,
        busy: BusyTime | Absent | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.node = node
        self._energy = Energy() if energy is None else energy
        self._idle = Idle("unavailable", reason="it has not been looked for yet")
        self._clock = clock
        self._now = now
        self._last = clock()
        self._busy = find_busy_time() if busy is None else busy
        self._last_busy_s = self._read_busy_s()
        self._residual = ResidualPower(now())
        self._held: PendingInterval | None = None
        self._unread = ""  # why no row of the external meter comes any more
        self._lost: dict[str, Callable[[], PowerSource | Absent]] = {}
        self._retry_at = self._last + _RETRY_S
        self._sources = self._open_sources() if sources is None else list(sources)
        self._begin_interval()

    @property
    def source(self) -> str:
        """Names of the sources, such as ``rapl + nvml``."""
        return " + ".join(source.name for source in self._sources) or "none"

    @property
    def origin(self) -> Origin:
        """Origin of the node's energy: that of its weakest source."""
        return weakest(source.origin for source in self._sources)

    def describe(self) -> dict[str, Any]:
        """`power` of the node's `node` event: its sources, its idle power (`Idle.as_event`), all of its cores."""
        known = {"source": self.source, "origin": self.origin, "idle": self._idle.as_event()}
        return {**known, "cores": os.cpu_count()}

    def start(self) -> None:
        """Finds the idle power, then starts the first interval: what was used before it does not count.

        Where a source measures, this takes `Energy.measure_idle_s`, and up to as long again while the node comes
        to rest; with an external meter also until its rows have come.

        Raises:
            Interrupted: a signal was received that is deferred (`ensemble.interrupts`).
        """
        self._held = None
        self._idle = find_idle(self._energy, self._read, self._begin_idle, self.node)
        *_, whole = self._read_sources()
        self._begin_interval(_list_rows(whole))  # of time to come, where the meter's clock is a little ahead

    def sample(self) -> list[dict[str, Any]]:
        """Fields of `power` events: what the node used since the last one, or since the start.

        Returns:
            One, in which is all that was used up to now. With an external meter: none while its rows do not cover
            the time, for up to 30 s, and one for each stretch that is decided, in order. Each has node, source,
            origin; energy_j and watts (None where nothing could be read, then `reason` says why if the external
            meter has no row of that time); interval_s; busy_s (CPU-seconds of *all* processes of the node, None
            where they cannot be seen); parts: list of {name, kind, device, energy_j, origin, idle_j}, which sum to
            energy_j exactly. idle_j is the part of energy_j that is idle, None where that is not known. `until`:
            unix time at which the interval ended: the event may be logged later.
        """
        # The names are those of the sources about to be read: one that fails now is replaced for the next time.
        source, held = self.source, self._held
        interval_s, busy_s, parts, whole = self._read_sources()
        if held is None:
            self._add_rest(parts, whole)
            events = [self._compose(source, interval_s, busy_s, parts) | {"until": self._now()}]
        else:
            held.add(self._now(), interval_s, busy_s, parts)
            held.add_rows(_list_rows(whole))
            events = self._decide(held, source, is_last=bool(self._unread))
        self._retry()  # now, so that the estimate covers all of its last interval
        return events

    def finish(self) -> list[dict[str, Any]]:
        """As `sample`, for the last time: rows of an external meter are waited for while it writes some.

        It is not waited for when its last row is older than ten seconds. Time of which no row has come then has no
        energy.
        """
        source, events, held = self.source, self.sample(), self._held
        if held is None:
            return events
        until = time.monotonic() + _SILENT_S
        while not held.is_covered and self._now() - held.covered_until < _SILENT_S and time.monotonic() < until:
            time.sleep(_POLL_S)
            late = [each for each in self._sources if each.is_late]
            held.add_rows(_list_rows([reading for each in late for reading in self._read_source(each)]))
        return events + self._decide(held, source, is_last=True)

    def _decide(self, held: PendingInterval, source: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The events of the stretches of held time that are decided."""
        events = []
        while (stretch := held.decide(is_last)) is not None:
            interval_s = sum(each.seconds for each in stretch.slices)
            busy = [each.busy_s for each in stretch.slices if each.busy_s is not None]
            busy_s = sum(busy) if len(busy) == len(stretch.slices) else None
            parts: list[dict[str, Any]] = []
            reason = ""
            if stretch.energy_j is None:
                reason = self._unread or "no row of this time came"
                text = "%.1f s of node %s have no reading of the external meter: %s"
                log.warning(text, interval_s, self.node, reason)
            else:
                parts = _sum_parts(stretch.slices)
                self._add_rest(parts, [Reading("node", "node", stretch.energy_j)])
            event = self._compose(source, interval_s, busy_s, parts) | {"until": stretch.end}
            events.append(event | ({"reason": reason} if reason else {}))
        if self._unread:
            self._begin_interval()
        return events

    def _compose(
        self, source: str, interval_s: float, busy_s: float | None, parts: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The fields of an event."""
        for part in parts:
            part["idle_j"] = self._idle.compute_share(part, interval_s)
        energy_j = sum(part["energy_j"] for part in parts) if parts else None
        return {
            "node": self.node,
            "watts": energy_j / interval_s if energy_j is not None and interval_s > 0 else None,
            "energy_j": energy_j,
            "origin": weakest(part["origin"] for part in parts),
            "source": source,
            "interval_s": interval_s,
            "busy_s": busy_s,
            "parts": parts,
        }

    def close(self) -> None:
        """Closes all sources."""
        for source in self._sources:
            source.close()
        self._sources, self._lost = [], {}

    def _open_sources(self) -> list[PowerSource]:
        if self._energy.meter is None:
            return open_power_sources()
        path = locate(self._energy.meter, self.node)
        external = open_external(path, self._now)
        if not isinstance(external, Absent):
            return open_power_sources(external=external)
        log.warning("node %s: the external meter is not used yet: %s", self.node, external.reason)
        self._lost[external.name] = lambda: open_external(path, self._now)
        return open_power_sources()

    def _begin_idle(self) -> None:
        """Starts the time in which idle power is measured."""
        self._read_sources()
        self._residual = ResidualPower(self._now())

    def _begin_interval(self, known: Sequence[Trapezoid] = ()) -> None:
        """Starts the time of the whole node's meter here."""
        now, self._unread = self._now(), ""
        self._residual = ResidualPower(now)
        self._held = PendingInterval(now) if any(each.is_late for each in self._sources) else None
        if self._held is not None:
            self._held.add_rows(known)

    def _read(self) -> tuple[float, float | None, list[dict[str, Any]]]:
        """Seconds since the last call, busy CPU-seconds in them, and the parts, the whole node's as its rest.

        Its `covered_s`: the seconds that it is of, where these are not the interval, because rows come late.
        """
        interval_s, busy_s, parts, whole = self._read_sources()
        self._add_rest(parts, whole)
        return interval_s, busy_s, parts

    def _read_sources(self) -> tuple[float, float | None, list[dict[str, Any]], list[Reading]]:
        """Seconds since the last call, busy CPU-seconds in them, the parts, and what measures the whole node."""
        parts, whole = [], []
        for source in list(self._sources):
            readings = self._read_source(source)
            whole += [reading for reading in readings if reading.kind == "node"]
            parts += [_make_part(each, source.origin) for each in readings if each.kind != "node"]
        now, now_busy_s = self._clock(), self._read_busy_s()
        interval_s, before_s = now - self._last, self._last_busy_s
        self._last, self._last_busy_s = now, now_busy_s
        busy_s = None if now_busy_s is None or before_s is None else max(0.0, now_busy_s - before_s)
        measures_host = any(part["origin"] == "measured" and part["kind"] != "gpu" for part in parts)
        if isinstance(self._busy, BusyTime) and self._busy.scope != "host" and (measures_host or whole):
            busy_s = None
        return interval_s, busy_s, parts, whole

    def _read_source(self, source: PowerSource) -> list[Reading]:
        """What a source says; nothing where it is lost."""
        try:
            return source.read()
        except PowerError as error:
            self._replace(source, str(error))
            return []

    def _add_rest(self, parts: list[dict[str, Any]], whole: Sequence[Reading]) -> None:
        """Adds the part ``node``, where something measures the whole node."""
        for reading in whole:
            ticks = sum(to_ticks(part["energy_j"]) for part in parts)
            energy = reading.energy_j if reading.curve is None else reading.curve
            rest, covered_s = self._residual.subtract(self._now(), ticks, energy)
            part = _make_part(Reading(reading.name, "node", from_ticks(rest)), "measured")
            parts.append(part if covered_s is None else part | {"covered_s": covered_s})

    def _read_busy_s(self) -> float | None:
        if isinstance(self._busy, Absent):
            return None
        try:
            return self._busy.read()
        except OSError:
            return None

    def _replace(self, source: PowerSource, reason: str) -> None:
        """Removes a source that failed; the estimate replaces the last one that covers processors."""
        if source.is_late and self._held is not None:
            self._unread = reason  # said with the time that it has no reading of
        else:
            log.warning("node %s: power source %s is lost: %s", self.node, source.name, reason)
        self._sources.remove(source)
        source.close()
        if source.reopen is not None:
            self._lost[source.name] = source.reopen
            self._retry_at = self._clock() + _RETRY_S
        if source.name == EXTERNAL and not isinstance(node := hwmon.open_power_meter(), Absent):
            self._sources.append(node)
        if source.kind in ("cpu", "node") and not any(each.kind in ("cpu", "node") for each in self._sources):
            estimate = open_estimate(self._busy)
            if source.origin == "measured" and not isinstance(estimate, Absent):
                self._sources.insert(0, estimate)

    def _retry(self) -> None:
        """Opens sources again that were lost and are there again; they replace the estimate."""
        if not self._lost or self._clock() < self._retry_at:
            return
        self._retry_at = self._clock() + _RETRY_S
        for name, reopen in list(self._lost.items()):
            source = reopen()
            if isinstance(source, Absent) or name not in self._lost:
                continue
            del self._lost[name]
            log.warning("node %s: power source %s is there", self.node, name)
            for each in list(self._sources):
                if each.origin == "estimated" or each.kind == source.kind == "node":
                    self._sources.remove(each)
                    each.close()
            self._sources.insert(0, source)
            if source.kind == "node":
                self._lost.pop(hwmon.POWER_METER, None)  # the external meter is the better one
                self._begin_interval()


def _make_part(reading: Reading, origin: Origin) -> dict[str, Any]:
    return {
        "name": reading.name,
        "kind": reading.kind,
        "device": reading.device,
        "energy_j": round_to_tick(reading.energy_j),
        "origin": origin,
    }


def _list_rows(whole: Sequence[Reading]) -> list[Trapezoid]:
    return [each for reading in whole for each in reading.curve or ()]


def _sum_parts(slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """Each part with its energy in all slices."""
    sums: dict[tuple[Any, ...], EnergyPart] = {}
    for part in (part for each in slices for part in each.parts):
        key = tuple(part[name] for name in ("name", "kind", "device", "origin"))
        before = sums.get(key)
        energy_j = part["energy_j"] + (before["energy_j"] if before is not None else 0.0)
        sums[key] = {**part, "energy_j": energy_j}
    return [dict(part) for part in sums.values()]
