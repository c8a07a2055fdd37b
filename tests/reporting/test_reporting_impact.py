"""What the energy amounts to: joules per unit of work always, emissions and price only where they were given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import run_events as runs
from event_dicts import fold, ledger, project

from ensemble.meter.impact import Impact
from ensemble.reporting.sections.impact import measure_work, run_impact, summarize, tabulate
from ensemble.reporting.summary import summary_lines
from ensemble.reporting.text import amount, emissions
from ensemble.spec import Energy

GIVEN = Energy(intensity_g_per_kwh=300.0, pue=1.25, price_per_kwh=0.2, currency="CHF")


def with_energy(events: list[dict[str, Any]], energy: Energy = GIVEN) -> list[dict[str, Any]]:
    return [e | {"energy": energy.as_event()} if e["type"] == "run_started" else e for e in events]


def impact(events: list[dict[str, Any]]) -> Impact:
    return run_impact(fold(events), ledger(events))


def test_the_work_of_a_run_is_that_of_its_members_log() -> None:
    events = runs.list_run()
    work = measure_work(fold(events))
    epochs = [e for e in events if e["type"] == "epoch"]
    assert work.models == 7 and work.samples == sum(e["samples"] for e in epochs) == 46 * 5000
    last = [e["metrics"]["accuracy"] for e in epochs if e["epoch"] == 5 and e["member"] != "member-6"]
    assert work.best == max(last), "member-6 failed"
    assert sorted(work.reported) == sorted(e["metrics"]["accuracy"] for e in epochs) and work.maximized


def test_the_figures_follow_the_ledger_and_what_the_last_start_was_given() -> None:
    events = with_energy(runs.list_run())
    joules = ledger(events).run.energy_j
    found = impact(events)
    assert joules and found.energy.total == joules and found.energy.per["per_model"] == joules / 7
    assert found.emissions.total == pytest.approx(joules / 3.6e6 * 1.25 * 300)
    again = with_energy(runs.list_run(), Energy(intensity_g_per_kwh=30.0))
    resumed = [*events, again[0] | {"t": events[-1]["t"] + 1, "resumed": True}]
    assert fold(resumed).starts == 2
    assert (
        impact(resumed).emissions.total == pytest.approx(joules / 3.6e6 * 30) and not impact(resumed).price.given
    )


def test_the_summary_has_joules_per_unit_and_names_what_was_given() -> None:
    events = with_energy(runs.list_run())
    lines = dict(summarize(fold(events), ledger(events)))
    assert re.fullmatch(
        r".* k?J per finished model, .* J per 1,000 samples trained, .* J per percentage point of accuracy",
        lines[""],
    )
    emitted = r"\d.* m?gCO2e estimated, .*gCO2e per finished model \(given: 300 gCO2e per kWh, PUE 1.25\)"
    assert re.fullmatch(emitted, lines["emissions"])
    assert re.search(r"^0\.\d+ CHF estimated, .* \(given: 0.2 CHF per kWh, PUE 1.25\)$", lines["price"])
    assert not any("saved" in line or "saving" in line for line in lines.values())
    labels = [label for label, _ in summary_lines(project(events))]
    assert labels[labels.index("energy") :][:6] == ["energy", "", "", "", "emissions", "price"]


def test_nothing_is_said_of_emissions_and_price_that_nobody_gave() -> None:
    events = runs.list_run()
    assert [label for label, _ in summarize(fold(events), ledger(events))] == [""]
    assert summarize(fold(runs.search_run()), ledger(runs.search_run())) == [], "no node had a power source"


def test_a_run_without_a_finished_model_has_no_joules_per_model() -> None:
    events = with_energy(runs.list_run(until=9.0))
    (per_unit, *_), lines = zip(*summarize(fold(events), ledger(events)), strict=True)
    assert per_unit == "" and "per 1,000 samples" in lines[0] and "model" not in "".join(lines)
    assert "no model" in impact(events).reasons["per_model"]


@pytest.mark.parametrize("energy", [GIVEN, Energy(), Energy(currency="<b>", price_per_kwh=1.0)])
def test_there_is_a_row_for_each_quantity_and_others_are_said_to_be_absent(energy: Energy) -> None:
    events = with_energy(runs.list_run(), energy)
    (table,) = tabulate(fold(events), ledger(events))
    emitted, paid = energy.intensity_g_per_kwh is not None, energy.price_per_kwh is not None
    names = ["energy", "electricity", *["emissions"] * emitted, *["price"] * paid]
    assert [str(row[0]).partition(" (")[0] for row in table.rows] == names
    assert ("No emissions: no carbon intensity is given" in table.text) == (not emitted)
    assert ("No price: no price is given" in table.text) == (not paid)
    assert "location-based" in table.text and all("estimated" in row for row in table.rows)


def test_small_sums_have_no_exponent() -> None:
    assert [amount(value) for value in (0.0, 1234.567, 0.0123, 1.49e-05)] == [
        "0.00",
        "1,234.57",
        "0.012",
        "0.000015",
    ]
    assert [emissions(grams) for grams in (0.0179, 12.34, 5600.0, 2.5e6)] == [
        "17.9 mgCO2e",
        "12.3 gCO2e",
        "5.6 kgCO2e",
        "2.5 tCO2e",
    ]
