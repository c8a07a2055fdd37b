"""Reads all power sources of a node together, for one `power` event."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ensemble.meter.origin import Origin, round_to_tick, weakest
from ensemble.meter.power.common import Absent, PowerError, PowerSource
from ensemble.meter.power.estimate import node_busy_s, open_estimate
from ensemble.meter.power.idle import Idle, find_idle
from ensemble.meter.power.nvml import open_nvml
from ensemble.meter.power.rapl import ROOT, open_rapl
from ensemble.spec import Energy

log = logging.getLogger(__name__)


def open_power_sources(rapl_root: Path = ROOT) -> list[PowerSource]:
    """Returns the sources to use on this node; with RAPL there is no estimate of the CPU part.

    Args:
        rapl_root: folder of the powercap zones.

    Raises:
        SpecError: ``ENSEMBLE_WATTS_PER_CORE`` is no positive number, and the estimate is needed.
    """
    rapl = open_rapl(rapl_root)
    found = [open_estimate() if isinstance(rapl, Absent) else rapl, open_nvml()]
    return [source for source in found if not isinstance(source, Absent)]


class PowerMeter:
    """Energy of one node between samples.

    Args:
        node: its name in the events.
        sources: what to read; by default what this node has.
        clock: seconds, for the length of intervals.
        energy: where its idle power comes from.

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
    ) -> None:
        self.node = node
        self._energy = Energy() if energy is None else energy
        self._idle = Idle("unavailable", reason="it has not been looked for yet")
        self._sources = open_power_sources() if sources is None else list(sources)
        self._clock = clock
        self._last = clock()
        self._last_busy_s = node_busy_s()

    @property
    def source(self) -> str:
        """Names of the sources, such as ``rapl + nvml``."""
        return " + ".join(source.name for source in self._sources) or "none"

    @property
    def origin(self) -> Origin:
        """Origin of the node's energy: that of its weakest source."""
        return weakest(source.origin for source in self._sources)

    def describe(self) -> dict[str, Any]:
        """`power` of the node's `node` event, with its idle power (`Idle.as_event`)."""
        return {"source": self.source, "origin": self.origin, "idle": self._idle.as_event()}

    def start(self) -> None:
        """Finds the idle power, then starts the first interval: what was used before it does not count.

        Where a source measures, this takes `Energy.measure_idle_s`, and up to as long again while the node comes
        to rest.
        """
        self._idle = find_idle(self._energy, self._read)
        self._read()

    def sample(self) -> dict[str, Any]:
        """Fields of a `power` event: what the node used since the last sample, or since the start.

        Returns:
            node, source, origin; energy_j and watts (None where nothing could be read); interval_s; busy_s
            (CPU-seconds of *all* processes of the node); parts: list of {name, kind, device, energy_j, origin,
            idle_j}, which sum to energy_j exactly. idle_j is the part of energy_j that is idle, None where that
            is not known.
        """
        # The names are those of the sources about to be read: one that fails now is replaced for the next time.
        source = self.source
        interval_s, busy_s, parts = self._read()
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
        self._sources = []

    def _read(self) -> tuple[float, float, list[dict[str, Any]]]:
        parts = []
        for source in list(self._sources):
            try:
                readings = source.read()
            except PowerError as error:
                self._replace(source, str(error))
                continue
            parts += [
                {
                    "name": reading.name,
                    "kind": reading.kind,
                    "device": reading.device,
                    "energy_j": round_to_tick(reading.energy_j),
                    "origin": source.origin,
                }
                for reading in readings
            ]
        now, now_busy_s = self._clock(), node_busy_s()
        interval_s, busy_s = now - self._last, max(0.0, now_busy_s - self._last_busy_s)
        self._last, self._last_busy_s = now, now_busy_s
        return interval_s, busy_s, parts

    def _replace(self, source: PowerSource, reason: str) -> None:
        """Removes a source that failed during the run; the estimate replaces a CPU source."""
        log.warning("node %s: power source %s is lost: %s", self.node, source.name, reason)
        self._sources.remove(source)
        source.close()
        if source.kind == "cpu" and source.origin == "measured":
            estimate = open_estimate()
            if not isinstance(estimate, Absent):
                self._sources.insert(0, estimate)
