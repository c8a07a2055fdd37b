"""How a run's energy is measured, and what a kilowatt-hour of it emits and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.spec.validation import SpecError, check_number, option_class, unknown_name

#: Parts of a node whose idle power can be given; "gpu" is each GPU, "node" the rest where the whole node is
#: measured.
IDLE_PARTS = ("cpu", "dram", "gpu", "node")
LONGEST_IDLE_S = 600.0


@option_class
@dataclass(frozen=True, kw_only=True)
class Energy:
    """How energy is measured, and what it emits and costs. What is not given is not computed.

    Attributes:
        idle_w: watts that each part of a node draws while nothing runs, by kind: "cpu" (all processors of a node
            together), "dram", "gpu" (each physical GPU), "node" (what a meter of the whole node sees beyond
            these). None: they are measured.
        measure_idle_s: seconds for which each node's idle power is measured before anything of the run starts
            there, at most 600; 0 measures none. A node without a power source that measures is not waited for.
        intensity_g_per_kwh: carbon intensity of the electricity where the run takes place, in gCO2e per kWh.
        pue: power usage effectiveness of the building: its energy over that of its computers, at least 1.
        price_per_kwh: price of electricity, in `currency`.
        currency: shown with the price.
    """

    idle_w: Mapping[str, float] | None = None
    measure_idle_s: float = 2.0
    intensity_g_per_kwh: float | None = None
    pue: float = 1.0
    price_per_kwh: float | None = None
    currency: str = "EUR"

    def __post_init__(self) -> None:
        if self.idle_w is not None:
            if not isinstance(self.idle_w, Mapping):
                raise SpecError(f"Energy.idle_w must be a dict of watts, got {self.idle_w!r}")
            for part, watts in self.idle_w.items():
                if part not in IDLE_PARTS:
                    raise SpecError(unknown_name("Energy.idle_w has no part", str(part), IDLE_PARTS))
                check_number(f"Energy.idle_w[{part!r}]", watts, low=0)
            object.__setattr__(self, "idle_w", {part: float(watts) for part, watts in self.idle_w.items()})
        check_number("Energy.measure_idle_s", self.measure_idle_s, low=0)
        if self.measure_idle_s > LONGEST_IDLE_S:
            most = f"must be at most {LONGEST_IDLE_S:g}, while no member runs"
            raise SpecError(f"Energy.measure_idle_s {most}, got {self.measure_idle_s!r}")
        check_number("Energy.intensity_g_per_kwh", self.intensity_g_per_kwh, low=0, optional=True)
        check_number("Energy.pue", self.pue, low=1)
        check_number("Energy.price_per_kwh", self.price_per_kwh, low=0, optional=True)
        if not isinstance(self.currency, str):
            raise SpecError(f"Energy.currency must be a str, got {self.currency!r}")

    def as_event(self) -> dict[str, Any]:
        """What a run's log records of it: all that turns joules into emissions and costs."""
        names = ("intensity_g_per_kwh", "pue", "price_per_kwh", "currency")
        return {name: getattr(self, name) for name in names}
