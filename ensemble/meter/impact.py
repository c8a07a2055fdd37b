"""Computes what a run's joules amount to: kilowatt-hours, greenhouse gas, money, and each per unit of work.

Emissions are kWh x PUE x carbon intensity (ISO/IEC 21031:2024, operational, location-based, no offsets); the
price is kWh x PUE x price. Intensity, PUE and price are given by the user (`ensemble.spec.Energy`); nothing is
assumed of a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.meter.ledger_rows import Total
from ensemble.meter.origin import Origin

J_PER_KWH = 3.6e6
SAMPLES = 1000  # in the unit of samples

#: A figure per unit of work: its name, and what one unit is.
UNITS = {
    "per_model": "finished model",
    "per_1000_samples": "1,000 samples trained",
    "per_point": "percentage point",
}


@dataclass(frozen=True)
class Work:
    """What a run achieved.

    Attributes:
        models: members that finished.
        samples: that members trained on, over all of them; each epoch once, however often it was repeated.
        objective: name of the metric that ranks members.
        maximized: whether more of it is better.
        best: value of the best finished member; None where none finished with a value.
        reported: all values of it that members reported.
    """

    models: int
    samples: int
    objective: str
    maximized: bool
    best: float | None
    reported: tuple[float, ...] = ()

    def units(self) -> dict[str, float | str]:
        """How many units of work were done, by the names of `UNITS`; the reason where that cannot be said."""
        return {
            "per_model": self.models or "no model has finished",
            "per_1000_samples": self.samples / SAMPLES or "no sample was trained on",
            "per_point": self._points(),
        }

    def _points(self) -> float | str:
        if self.best is None:
            return f"no model has finished with a value of {self.objective}"
        if not self.maximized:
            return f"{self.objective} is minimized, so it has no percentage points"
        outside = next((value for value in (*self.reported, self.best) if not 0 <= value <= 1), None)
        if outside is not None:
            return f"{self.objective} is not between 0 and 1: {outside:.4g} was reported"
        return 100 * self.best or f"the best {self.objective} is 0"


@dataclass(frozen=True)
class Quantity:
    """One thing that a run used or caused.

    Attributes:
        name: energy, electricity, emissions or price.
        unit: J, kWh, gCO2e, or the currency.
        total: of the whole run; None where it is not known.
        per: total over the units of work, by the names of `UNITS`; None where either is not known.
        origin: of the energy that it is computed from.
        given: what was given for it, in words.
        reason: why there is no total; empty where there is one.
    """

    name: str
    unit: str
    total: float | None
    per: Mapping[str, float | None]
    origin: Origin
    given: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Impact:
    """What a run's joules amount to.

    Attributes:
        energy, electricity, emissions, price: in J, kWh, gCO2e and the currency.
        reasons: why there are no figures per unit, by the names of `UNITS`; only those that cannot be had.
    """

    energy: Quantity
    electricity: Quantity
    emissions: Quantity
    price: Quantity
    reasons: Mapping[str, str]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """All four, from energy to price."""
        return (self.energy, self.electricity, self.emissions, self.price)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values: what ledger.json holds under `impact`."""
        quantities = [{**vars(quantity), **quantity.per} for quantity in self.quantities]
        for row in quantities:
            row["given"] = list(row["given"])
            del row["per"]
        return {"quantities": quantities, "reasons": dict(self.reasons)}


def assess_impact(used: Total, options: Mapping[str, Any], work: Work) -> Impact:
    """Returns what the energy of a run amounts to; pure.

    Args:
        used: by the run, as `Ledger.run` has it.
        options: what `run_started` records under `energy` (`Energy.as_event`); empty where it was lost.
        work: what was achieved with it.
    """
    units = work.units()
    counts = {name: None if isinstance(count, str) else count for name, count in units.items()}
    reasons = {name: count for name, count in units.items() if isinstance(count, str)}
    joules, intensity, price = used.energy_j, options.get("intensity_g_per_kwh"), options.get("price_per_kwh")
    pue = float(options.get("pue") or 1.0)
    currency = str(options.get("currency") or "")
    kwh = None if joules is None else joules / J_PER_KWH

    def quantity(name: str, unit: str, total: float | None, factors: Iterable[str], reason: str) -> Quantity:
        per = {of: None if total is None or not count else total / count for of, count in counts.items()}
        return Quantity(name, unit, total, per, used.origin, tuple(factors), "" if total is not None else reason)

    def priced(name: str, unit: str, rate: float | None, what: str, option: str) -> Quantity:
        total = None if kwh is None or rate is None else kwh * pue * rate
        building = () if pue == 1.0 else (f"PUE {pue:g}",)
        factors = () if rate is None else (f"{rate:g} {unit} per kWh", *building)
        return quantity(
            name, unit, total, factors, unknown if rate is not None else f"no {what} is given: {option}"
        )

    unknown = "the run's energy is unavailable"
    return Impact(
        energy=quantity("energy", "J", joules, (), unknown),
        electricity=quantity("electricity", "kWh", kwh, (), unknown),
        emissions=priced("emissions", "gCO2e", intensity, "carbon intensity", "Energy(intensity_g_per_kwh=...)"),
        price=priced("price", currency, price, "price", "Energy(price_per_kwh=...)"),
        reasons=reasons,
    )
