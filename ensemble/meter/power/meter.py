"""Reads all power sources of a node together, for one `power` event.

Where something measures the whole node (an external meter, else ACPI's), the parts of a node sum to what it says:
the processors, memory and GPUs that are measured by themselves, and a part ``node``, which is the rest
(`ensemble.meter.power.rest`). Nothing is estimated then; the rest holds processors that nothing measures.
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
from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading
from ensemble.meter.power.estimate import open_estimate
from ensemble.meter.power.external import locate, open_external
from ensemble.meter.power.idle import Idle, find_idle
from ensemble.meter.power.nvml import open_nvml
from ensemble.meter.power.rest import Rest
from ensemble.spec import Energy

log = logging.getLogger(__name__)

_RETRY_S = 10.0  # how often a source that was lost is looked for


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

    Example:
        >>> meter = PowerMeter("local", energy=Energy(measure_idle_s=0))
        >>> meter.start()
        >>> meter.sample()["origin"] in ("measured", "estimated", "unavailable")
        True
        >>> meter.close()
    """

    def __init__(
        self,
        node: str,
        sources: Sequence[PowerSource] | None = None,
        clock: Callable[[], float] = time.monotonic,
        energy: Energy | None = None,
        busy: BusyTime | Absent | None = None,
    ) -> None:
        self.node = node
        self._energy = Energy() if energy is None else energy
        self._idle = Idle("unavailable", reason="it has not been looked for yet")
        self._clock = clock
        self._last = clock()
        self._busy = find_busy_time() if busy is None else busy
        self._last_busy_s = self._read_busy_s()
        self._rest = Rest(time.time())
        self._lost: dict[str, Callable[[], PowerSource | Absent]] = {}
        self._retry_at = self._last + _RETRY_S
        self._sources = self._open_sources() if sources is None else list(sources)

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
        """
        self._idle = find_idle(self._energy, self._read, self._begin)
        self._begin()

    def sample(self) -> dict[str, Any]:
        """Fields of a `power` event: what the node used since the last sample, or since the start.

        Returns:
            node, source, origin; energy_j and watts (None where nothing could be read); interval_s; busy_s
            (CPU-seconds of *all* processes of the node, None where they cannot be seen); parts: list of {name,
            kind, device, energy_j, origin, idle_j}, which sum to energy_j exactly. idle_j is the part of energy_j
            that is idle, None where that is not known. An external meter's rows come late: what they add is in the
            interval in which they have come.
        """
        # The names are those of the sources about to be read: one that fails now is replaced for the next time.
        source = self.source
        interval_s, busy_s, parts = self._read()
        for part in parts:
            part["idle_j"] = self._idle.compute_share(part, part.pop("covered_s", interval_s))
        self._retry()  # now, so that the estimate covers all of its last interval
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
        external = open_external(path)
        if not isinstance(external, Absent):
            return open_power_sources(external=external)
        log.warning("node %s: the external meter is not used yet: %s", self.node, external.reason)
        self._lost[external.name] = lambda: open_external(path)
        return open_power_sources()

    def _begin(self) -> None:
        """Starts an interval here, also of the whole node's meter."""
        self._read()
        self._rest = Rest(time.time())

    def _read(self) -> tuple[float, float | None, list[dict[str, Any]]]:
        """Seconds since the last call, busy CPU-seconds in them, and the parts, the whole node's as its rest."""
        parts, whole = [], []
        for source in list(self._sources):
            try:
                readings = source.read()
            except PowerError as error:
                self._replace(source, str(error))
                continue
            whole += [reading for reading in readings if reading.kind == "node"]
            parts += [_make_part(each, source.origin) for each in readings if each.kind != "node"]
        for reading in whole:
            parts.append(self._compute_rest(reading, parts))
        now, now_busy_s = self._clock(), self._read_busy_s()
        interval_s, before_s = now - self._last, self._last_busy_s
        self._last, self._last_busy_s = now, now_busy_s
        busy_s = None if now_busy_s is None or before_s is None else max(0.0, now_busy_s - before_s)
        covers_host = any(part["origin"] == "measured" and part["kind"] != "gpu" for part in parts)
        if isinstance(self._busy, BusyTime) and self._busy.scope != "host" and covers_host:
            busy_s = None
        return interval_s, busy_s, parts

    def _compute_rest(self, whole: Reading, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The part ``node``; `covered_s`: the seconds that it is of, where these are not the interval."""
        ticks = sum(to_ticks(part["energy_j"]) for part in parts)
        energy = whole.energy_j if whole.curve is None else whole.curve
        rest, covered_s = self._rest.subtract(time.time(), ticks, energy)
        part = _make_part(Reading(whole.name, "node", from_ticks(rest)), "measured")
        return part if covered_s is None else part | {"covered_s": covered_s}

    def _read_busy_s(self) -> float | None:
        if isinstance(self._busy, Absent):
            return None
        try:
            return self._busy.read()
        except OSError:
            return None

    def _replace(self, source: PowerSource, reason: str) -> None:
        """Removes a source that failed; the estimate replaces the last one that covers processors."""
        log.warning("node %s: power source %s is lost: %s", self.node, source.name, reason)
        self._sources.remove(source)
        source.close()
        if source.reopen is not None:
            self._lost[source.name] = source.reopen
            self._retry_at = self._clock() + _RETRY_S
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
                self._rest = Rest(time.time())


def _make_part(reading: Reading, origin: Origin) -> dict[str, Any]:
    return {
        "name": reading.name,
        "kind": reading.kind,
        "device": reading.device,
        "energy_j": round_to_tick(reading.energy_j),
        "origin": origin,
    }
