"""Finds the idle power of a node: what its parts draw while nothing runs on it.

It is given, or measured before anything of the run starts there: cores and GPUs may be busy for at most
`BUSY_SHARE` of that time, after a while in which the node comes to rest. Busy cores say nothing against the idle
power of a GPU.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ensemble.interrupts import raise_if_deferred
from ensemble.meter.devices import has_driver
from ensemble.meter.origin import round_to_tick
from ensemble.spec import Energy
from pipelines.providers import import_object

log = logging.getLogger(__name__)

EnergyPart = Mapping[str, Any]
#: Returns the seconds since it was last called, CPU-seconds of all processes in them, and the energy by part.
Read = Callable[[], tuple[float, float | None, Sequence[EnergyPart]]]

BUSY_SHARE = 0.05
_STEP_S = 0.25
_LONG_S = 5.0  # what takes longer is said to whoever waits for it
NO_SOURCE = "no power source of this node measures; the model of the estimate has no idle power"


@dataclass(frozen=True)
class Idle:
    """Idle power by the name of the part, in watts; `reason`: why it is not known of some part."""

    origin: Literal["measured", "given", "unavailable"]
    watts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def as_event(self) -> dict[str, Any]:
        """`idle` in `power` of the node's `node` event."""
        return {"origin": self.origin, "watts": dict(self.watts), "reason": self.reason}

    def compute_share(self, part: EnergyPart, seconds: float) -> float | None:
        """The joules of a part that are idle, a whole number of ticks; None where its idle power is not known.

        Args:
            part: name, origin and energy_j, a whole number of ticks.
            seconds: that energy_j covers.
        """
        watts = 0.0 if part["origin"] == "estimated" else self.watts.get(part["name"])
        return None if watts is None else min(part["energy_j"], round_to_tick(watts * seconds))


@dataclass(frozen=True)
class Window:
    """What was seen of a node in a while.

    Attributes:
        seconds: its length.
        parts: energy by part.
        cores_busy: the share of the cores that was busy; None where that is not known.
        gpus_busy: the share of the time in which kernels ran on the busiest GPU; None where that is not known.
    """

    seconds: float
    parts: Sequence[EnergyPart]
    cores_busy: float | None
    gpus_busy: float | None

    def find_reason(self, kind: str) -> str:
        """Why the idle power of the parts of a kind cannot be told from this window; empty where it can."""
        cores, gpus = _describe_cores(self.cores_busy), _describe_gpus(self.gpus_busy)
        if kind == "gpu":
            return gpus
        has_gpus = any(part["kind"] == "gpu" for part in self.parts)
        return cores or (gpus if kind == "node" and has_gpus else "")

    def find_reasons(self) -> list[str]:
        """The reasons of all parts that were measured, each once, empty ones included."""
        kinds = {part["kind"]: None for part in self.parts if part["origin"] == "measured"}
        return list(dict.fromkeys(self.find_reason(kind) for kind in kinds))


def _describe_cores(share: float | None) -> str:
    if share is None:
        return "the CPU time of the whole host cannot be seen"
    return f"its cores were busy for {share:.0%} of the time" if share > BUSY_SHARE else ""


def _describe_gpus(share: float | None) -> str:
    if share is None:
        return "NVIDIA's driver does not report whether kernels run"
    return f"kernels ran on a GPU for {share:.0%} of the time" if share > BUSY_SHARE else ""


def spread_given(idle_w: Mapping[str, float], parts: Sequence[EnergyPart]) -> dict[str, float]:
    """Idle watts by the name of the part, from watts by kind.

    Args:
        idle_w: `Energy.idle_w`: those of "cpu" and "dram" are of all parts of that kind together, that of "gpu" is
            each GPU's.
        parts: of the node.
    """
    watts = {"node": idle_w["node"]} if "node" in idle_w else {}
    for part in parts:
        kind = part["kind"]
        if part["origin"] == "measured" and kind in idle_w:
            alike = 1 if kind == "gpu" else sum(other["kind"] == kind for other in parts)
            watts[part["name"]] = idle_w[kind] / alike
    return watts | _find_estimated(parts)


def judge(window: Window) -> Idle:
    """The idle power that a window shows."""
    measured = [part for part in window.parts if part["origin"] == "measured"]
    watts, reasons = {}, []
    for part in measured:
        reasons.append(reason := window.find_reason(part["kind"]))
        if not reason:
            watts[part["name"]] = part["energy_j"] / window.seconds
    all_watts = _find_estimated(window.parts) | watts
    if not measured:
        return Idle("unavailable", all_watts, NO_SOURCE)
    text = "; ".join(dict.fromkeys(filter(None, reasons)))
    return Idle("measured" if watts else "unavailable", all_watts, text)


def _find_estimated(parts: Sequence[EnergyPart]) -> dict[str, float]:
    return {part["name"]: 0.0 for part in parts if part["origin"] == "estimated"}


def find_idle(energy: Energy, read: Read, node: str) -> Idle:
    """The idle power of this node, given or measured.

    Args:
        energy: `idle_w`, else `measure_idle_s`: for so long the node is measured, after at most as long a wait for
            it to come to rest. Where no source measures, nothing is waited for.
        read: of the node's meter.
        node: its name, for messages.

    Raises:
        Interrupted: a signal was received that is deferred (`ensemble.interrupts`).
    """
    _, _, parts = read()
    if energy.idle_w is not None:
        return _use_given(energy.idle_w, parts)
    if not any(part["origin"] == "measured" for part in parts):
        return judge(Window(0.0, parts, None, None))
    if energy.measure_idle_s == 0:
        return Idle("unavailable", _find_estimated(parts), "it was not measured: Energy.measure_idle_s is 0")
    window = Window(0.0, parts, 0.0, None if read_gpu_load() is None else 0.0)
    if not all(window.find_reasons()):
        level = logging.WARNING if energy.measure_idle_s > _LONG_S else logging.INFO
        log.log(level, "measuring the idle power of node %s for %g s", node, energy.measure_idle_s)
        until = time.monotonic() + energy.measure_idle_s
        step_s = min(_STEP_S, energy.measure_idle_s)
        while (window := _watch(step_s, read)).find_reasons() and time.monotonic() < until:
            pass
    if not all(window.find_reasons()):
        read()
        window = _watch(energy.measure_idle_s, read)
    return judge(window)


def _use_given(idle_w: Mapping[str, float], parts: Sequence[EnergyPart]) -> Idle:
    watts = spread_given(idle_w, parts)
    if not set(watts) - set(_find_estimated(parts)):
        return Idle("unavailable", watts, f"Energy.idle_w names no part that is measured: {NO_SOURCE}")
    return Idle("given", watts)


def _watch(seconds: float, read: Read) -> Window:
    loads, begun = [read_gpu_load()], time.monotonic()
    while time.monotonic() - begun < seconds:
        raise_if_deferred()
        time.sleep(min(_STEP_S, seconds))
        loads.append(read_gpu_load())
    length_s, busy_s, parts = read()
    cores_busy = None if busy_s is None or length_s <= 0 else busy_s / length_s / (os.cpu_count() or 1)
    read_loads = [load for load in loads if load is not None]
    return Window(length_s, parts, cores_busy, max(read_loads) if len(read_loads) == len(loads) else None)


def read_gpu_load() -> float | None:
    """`nvml.read_gpu_load`; 0 where there is no GPU."""
    load: float | None = import_object("ensemble.meter.power.nvml:read_gpu_load")() if has_driver() else 0.0
    return load
