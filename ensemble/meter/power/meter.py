"""Reads all power sources of a node together, for one `power` event.

Where something measures the whole node, the parts of a node sum to what it says: the processors, memory and GPUs
that are measured by themselves, and a part ``node``, the rest (fans, power supplies, boards). Nothing is estimated
then.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

from ensemble.meter.origin import Origin, from_ticks, round_to_tick, to_ticks, weakest
from ensemble.meter.power.busy_time import BusyTime, find_busy_time
from ensemble.meter.power.common import Absent, Kind, PowerError, PowerSource, Reading
from ensemble.meter.power.estimate import open_estimate
from ensemble.meter.power.idle import Idle, find_idle
from ensemble.spec import Energy
from pipelines.providers import Providers

log = logging.getLogger(__name__)

#: name -> function `() -> PowerSource | Absent`, called on each node. Of several sources that cover the processors
#: (kind `cpu`), memory (`dram`), one GPU, or the whole node (`node`) the first one counts, those of other
#: distributions before ours.
POWER_SOURCES = Providers(
    "power_sources",
    {
        "rapl": "ensemble.meter.power.rapl:open_rapl",
        "power_meter": "ensemble.meter.power.hwmon:open_power_meter",
        "nvml": "ensemble.meter.power.nvml:open_nvml",
    },
)

_RETRY_S = 10.0  # how often a source that was lost is looked for


def open_power_sources() -> list[PowerSource]:
    """Open the sources to use on this node; the processors are estimated only where nothing measures them.

    Raises:
        SpecError: ``ENSEMBLE_WATTS_PER_CORE`` is no positive number, and the estimate is needed.
    """
    opened: list[PowerSource] = []
    for provider in sorted(POWER_SOURCES.list_providers(), key=lambda provider: not provider.distribution):
        # With `load` inside: a package of another distribution may not be importable.
        source = _open(provider.name, lambda provider=provider: provider.load()())  # type: ignore[misc]
        if isinstance(source, Absent):
            continue
        if source.kind != "gpu" and any(other.kind == source.kind for other in opened):
            _close(source)
        else:
            opened.append(source)
    if not any(source.kind in ("cpu", "node") for source in opened):
        estimate = open_estimate()
        opened[:0] = [] if isinstance(estimate, Absent) else [estimate]
    return opened


def _open(name: str, open_source: Callable[[], PowerSource | Absent], level: int = logging.WARNING) -> Any:
    """Open a source, which may be anybody's code: one that fails, in whatever way, is absent, with a line."""
    try:
        source = open_source()
        if not isinstance(source, PowerSource | Absent):
            raise PowerError(f"it opened a {type(source).__name__}, not a PowerSource")
    except Exception as error:
        log.log(level, "power source %s cannot be opened: %s", name, error)
        return Absent(name, str(error))
    return source


def _read_source(source: PowerSource) -> list[Reading]:
    """The energies that a source reads; raises PowerError if it reads something else, or fails."""
    try:
        readings = list(source.read())
        for reading in readings:
            if not 0 <= reading.energy_j < math.inf:
                raise PowerError(f"it reads {reading.energy_j} J of {reading.name}")
            if reading.kind not in get_args(Kind):
                raise PowerError(f"it reads a part of unknown kind, {reading.kind!r}")
    except Exception as error:  # anybody's code: a run is not lost by its meter
        raise PowerError(str(error) or type(error).__name__) from error
    return readings


def _close(source: PowerSource) -> None:
    try:
        source.close()
    except Exception as error:
        log.warning("power source %s cannot be closed: %s", source.name, error)


class PowerMeter:
    """Energy of one node between samples.

    Args:
        node: its name in the events.
        sources: what to read; by default what this node has.
        clock: seconds, for the length of intervals.
        energy: where its idle power comes from.
        busy: whose CPU time to report; by default the widest scope that can be seen.

    Examples:
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
        self._owed = 0  # ticks by which the parts were ahead of the whole node; later rests are smaller by that
        self._lost: dict[str, Callable[[], PowerSource | Absent]] = {}
        self._retry_at = self._last + _RETRY_S
        self._sources = open_power_sources() if sources is None else list(sources)

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
        sources = {"source": self.source, "origin": self.origin, "idle": self._idle.as_event()}
        return {**sources, "cores": os.cpu_count()}

    def start(self) -> None:
        """Find the idle power, then start the first interval: what was used before it does not count.

        Where a source measures, this takes `Energy.measure_idle_s`, and up to as long again while the node comes
        to rest.

        Raises:
            Interrupted: a signal was received that is deferred (`ensemble.interrupts`).
        """
        self._idle = find_idle(self._energy, self._read, self.node)
        self._read()
        self._owed = 0

    def sample(self) -> dict[str, Any]:
        """Fields of a `power` event: what the node used since the last call, or since the start.

        Returns:
            node, source, origin; energy_j and watts (None where nothing could be read); interval_s; until (Unix
            time at which the interval ended); busy_s (CPU-seconds of *all* processes of the node, None where they
            cannot be seen); parts: list of {name, kind, device, energy_j, origin, idle_j}, which sum to energy_j
            exactly. idle_j is the part of energy_j that is idle, None where that is not known.
        """
        # The names are those of the sources about to be read: one that fails now is replaced for the next time.
        source = self.source
        interval_s, busy_s, parts = self._read()
        for part in parts:
            part["idle_j"] = self._idle.compute_share(part, interval_s)
        energy_j = sum(part["energy_j"] for part in parts) if parts else None
        event = {
            "node": self.node,
            "watts": energy_j / interval_s if energy_j is not None and interval_s > 0 else None,
            "energy_j": energy_j,
            "origin": weakest(part["origin"] for part in parts),
            "source": source,
            "interval_s": interval_s,
            "busy_s": busy_s,
            "parts": parts,
            "until": time.time(),
        }
        self._retry()  # now, so that the estimate covers all of its last interval
        return event

    def close(self) -> None:
        for source in self._sources:
            _close(source)
        self._sources, self._lost = [], {}

    def _read(self) -> tuple[float, float | None, list[dict[str, Any]]]:
        """Seconds since the last call, busy CPU-seconds in them, and the parts, the whole node's as its rest."""
        readings: list[tuple[Reading, Origin]] = []
        owners: dict[tuple[str, str], PowerSource] = {}  # a part that two sources read is counted once
        for source in list(self._sources):
            try:
                source_readings = _read_source(source)
            except PowerError as error:
                self._replace(source, str(error))
                continue
            for reading in source_readings:
                part = ("gpu", reading.device or reading.name) if reading.kind == "gpu" else (reading.kind, "")
                if owners.setdefault(part, source) is source:
                    readings.append((reading, source.origin))
        parts = [_make_part(reading, origin) for reading, origin in readings if reading.kind != "node"]
        now_s, now_busy_s = self._clock(), self._read_busy_s()
        interval_s, before_s = now_s - self._last, self._last_busy_s
        self._last, self._last_busy_s = now_s, now_busy_s
        busy_s = None if now_busy_s is None or before_s is None else max(0.0, now_busy_s - before_s)
        whole = [reading for reading, _ in readings if reading.kind == "node"]
        measures_host = any(part["origin"] == "measured" and part["kind"] != "gpu" for part in parts)
        if isinstance(self._busy, BusyTime) and self._busy.scope != "host" and (measures_host or whole):
            busy_s = None
        for reading in whole:
            # Meters are not read at the same moment: where the parts are more than the whole, later rests make it
            # good.
            rest_ticks = (
                to_ticks(reading.energy_j) - sum(to_ticks(part["energy_j"]) for part in parts) + self._owed
            )
            self._owed = min(0, rest_ticks)
            parts.append(_make_part(Reading(reading.name, "node", from_ticks(max(0, rest_ticks))), "measured"))
        return interval_s, busy_s, parts

    def _read_busy_s(self) -> float | None:
        if isinstance(self._busy, Absent):
            return None
        try:
            return self._busy.read()
        except OSError:
            return None

    def _replace(self, source: PowerSource, reason: str) -> None:
        """Remove a source that failed; the estimate replaces the last one that covers processors."""
        log.warning("node %s: power source %s is lost: %s", self.node, source.name, reason)
        self._sources.remove(source)
        _close(source)
        if source.reopen is not None:
            self._lost[source.name] = source.reopen
            self._retry_at = self._clock() + _RETRY_S
        if source.kind in ("cpu", "node") and not any(other.kind in ("cpu", "node") for other in self._sources):
            estimate = _open("estimate", lambda: open_estimate(self._busy))
            if source.origin == "measured" and not isinstance(estimate, Absent):
                self._sources.insert(0, estimate)

    def _retry(self) -> None:
        """Open sources again that were lost; those that cover the processors replace the estimate."""
        if not self._lost or self._clock() < self._retry_at:
            return
        self._retry_at = self._clock() + _RETRY_S
        for name, reopen in list(self._lost.items()):
            source = _open(name, reopen, logging.DEBUG)
            if isinstance(source, Absent):
                continue
            del self._lost[name]
            log.warning("node %s: power source %s is there", self.node, name)
            if source.kind in ("cpu", "node"):
                for estimate in [other for other in self._sources if other.origin == "estimated"]:
                    self._sources.remove(estimate)
                    _close(estimate)
            self._sources.insert(0, source)
            self._owed = 0


def _make_part(reading: Reading, origin: Origin) -> dict[str, Any]:
    return {
        "name": reading.name,
        "kind": reading.kind,
        "device": reading.device,
        "energy_j": round_to_tick(reading.energy_j),
        "origin": origin,
    }
