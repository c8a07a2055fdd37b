"""Joules as kilowatt-hours, greenhouse gas and money: by the formula, with their origin, only of what is given."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from kit.event_dicts import ledger

from ensemble.meter.impact import UNITS, Impact, Work, assess_impact
from ensemble.meter.ledger_rows import Total
from ensemble.spec import Energy

KWH = 3.6e6
WORK = Work(models=4, samples=50_000, objective="accuracy", maximized=True, best=0.8, reported=(0.2, 0.8))
GIVEN = Energy(intensity_g_per_kwh=300.0, pue=1.5, price_per_kwh=0.25, currency="CHF")


def use(energy_j: float, origin: str = "measured") -> Total:
    """What a run used whose one process had all of a node's energy."""
    head = {"v": 2, "t": 1.0, "type": "run_started"}
    usage = {"v": 2, "t": 2.0, "type": "usage", "node": "n", "role": "train", "member": "member-0", "pid": 1}
    power = {"v": 2, "t": 2.0, "type": "power", "node": "n", "interval_s": 1.0, "source": "s", "origin": origin}
    return ledger([head, usage | {"cpu_s": 1.0}, power | {"energy_j": energy_j, "watts": energy_j}]).run


def impact(energy: Energy = GIVEN, work: Work = WORK, used: Total | None = None) -> Impact:
    return assess_impact(use(2 * KWH) if used is None else used, energy.as_event(), work)


def test_emissions_and_price_are_energy_times_pue_times_what_is_given() -> None:
    found = impact()
    assert [(each.name, each.unit, each.total) for each in found.quantities] == [
        ("energy", "J", 2 * KWH),
        ("electricity", "kWh", 2.0),
        ("emissions", "gCO2e", 2.0 * 1.5 * 300.0),
        ("price", "CHF", 2.0 * 1.5 * 0.25),
    ]
    assert found.emissions.given == ("300 gCO2e per kWh", "PUE 1.5")
    assert found.price.given == ("0.25 CHF per kWh", "PUE 1.5")
    assert found.energy.given == () and found.reasons == {}
    for each in found.quantities:
        per_point = pytest.approx((each.total or 0.0) / 80)
        figures = {"per_model": each.total / 4, "per_1000_samples": each.total / 50, "per_point": per_point}
        assert each.per == figures and json.loads(json.dumps(each.per)) == each.per
    nothing = impact(work=Work(0, 0, "accuracy", True, None))
    assert set(nothing.reasons) == set(UNITS) and all({*one.per.values()} == {None} for one in nothing.quantities)
    assert found.as_dict()["quantities"][2]["per_model"] == 225.0


@pytest.mark.parametrize("names", [("intensity_g_per_kwh",), ("intensity_g_per_kwh", "price_per_kwh")])
def test_what_is_not_given_is_not_computed_and_origins_are_those_of_the_energy(names: tuple[str, ...]) -> None:
    found = impact(dataclasses.replace(GIVEN, **dict.fromkeys(names)))
    for quantity, name in ((found.emissions, "intensity_g_per_kwh"), (found.price, "price_per_kwh")):
        assert (quantity.total is None) == (name in names)
        if name in names:
            assert quantity.per == dict.fromkeys(UNITS) and quantity.given == () and name in quantity.reason
    assert found.energy.total == 2 * KWH
    for origin, called in (("measured", "attributed"), ("estimated", "estimated")):
        assert {each.origin for each in impact(used=use(1e6, origin)).quantities} == {called}
    unknown = impact(used=ledger([{"v": 2, "t": 1.0, "type": "run_started"}]).run).quantities
    assert {(one.total, one.origin, one.reason) for one in unknown} == {
        (None, "unavailable", "the run's energy is unavailable")
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(({"maximized": False, "objective": "nll"}, "nll is minimized"), ({"best": 0.0}, "is 0")),
        *(({"best": 3.5, "reported": (3.5,)}, ": 3.5"), ({"reported": (0.2, 0.8, -0.1)}, "between 0 and 1: -0.1")),
        ({"best": None}, "no model has finished with a value"),
    ],
)
def test_points_are_told_only_of_a_maximized_share(change: dict[str, Any], says: str) -> None:
    found = impact(work=dataclasses.replace(WORK, **change))
    assert says in found.reasons["per_point"]
    assert all(each.per["per_point"] is None and each.per["per_model"] is not None for each in found.quantities)
