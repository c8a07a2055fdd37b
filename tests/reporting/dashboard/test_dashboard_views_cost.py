"""The view "Cost" in a real browser: bars and figures against the document, origins in words, live power."""

from __future__ import annotations

from typing import Any

import pytest
from document_parts import COST_COLUMNS
from documents import START, make_documents
from page_server import PageServer
from page_steps import Open, figure

pytestmark = [pytest.mark.browser, pytest.mark.more]

AT = {name: i for i, name in enumerate(COST_COLUMNS)}
NOT_MEASURED = "not evidence of a saving"


def names(tab: Any) -> list[str]:
    return tab.locator("[data-view=cost] [data-member]").evaluate_all("all => all.map(one => one.dataset.member)")


def costs(server: PageServer) -> dict[str, list[Any]]:
    return server.documents["state"]["cost"]["members"]["rows"]


def choose(tab: Any, label: str, value: str) -> None:
    tab.get_by_label(label, exact=True).select_option(value)


def test_the_run_by_role_with_amounts_and_shares(tab: Any, open_page: Open) -> None:
    open_page(make_documents(12), "#cost")
    text = figure(tab, "The whole run by role").inner_text()
    assert "CPU-seconds (measured): 4,600 s" in text and "training 3,300 s, 72 %" in text
    assert "joules (measured): 190 kJ" in text and "preparing samples 40 kJ, 21 %" in text
    widths = [
        tab.locator("[data-mark=joules] [data-role]").nth(i).bounding_box()["width"] for i in range(2)
    ]  # fmt: skip
    assert widths[0] / widths[1] == pytest.approx(150 / 40, rel=0.03)


def test_members_are_bars_that_can_be_sorted_and_counted(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(60, seed=2), "#cost")
    known = costs(server)
    by_cpu = sorted(known, key=lambda m: -known[m][AT["cpu_s"]])
    assert names(tab) == by_cpu[:40]
    row = tab.locator(f"[data-view=cost] [data-member='{by_cpu[0]}']")
    assert f"{known[by_cpu[0]][AT['cpu_s']]:.1f} s" in row.inner_text()
    assert "20 other members" in figure(tab, "Members").inner_text()
    tab.click("[data-view=cost] button:has-text('all 60')")
    assert len(names(tab)) == 60
    choose(tab, "Sort by", "number")
    assert names(tab) == [f"member-{i}" for i in range(60)]


def test_joules_bear_their_origin_and_the_full_view_adds_the_shared_work(tab: Any, open_page: Open) -> None:
    server = open_page(make_documents(8, seed=2), "#cost")
    choose(tab, "Show", "energy")
    members = figure(tab, "Members")
    assert "Joules, measured." in members.inner_text()
    choose(tab, "View", "full")
    assert "Joules, estimated." in members.inner_text(), "the full joules of the fixture are estimated"
    name = max(costs(server), key=lambda m: costs(server)[m][AT["full_energy_j"]])
    full = costs(server)[name][AT["full_energy_j"]]
    assert f"{full:.3g} J" in tab.inner_text(f"[data-view=cost] [data-member='{name}']")
    assert tab.locator("[data-view=cost] [data-role=shared]").count() > 0


def test_estimated_joules_are_never_shown_as_measured(tab: Any, open_page: Open) -> None:
    documents = make_documents(8, seed=2)
    open_page(documents, "#cost")
    assert NOT_MEASURED not in tab.inner_text("[data-view=cost]")
    state = documents["state"]
    state["run"]["totals"] |= {"energy_origin": "estimated", "watts_origin": "estimated"}
    state["cost"]["lines"] = [["energy", "201 kJ estimated"]]
    for role in state["cost"]["roles"]:
        role["origin"] = "estimated"
    for row in state["cost"]["members"]["rows"].values():
        row[AT["origin"]] = row[AT["full_origin"]] = "estimated"
    open_page(documents, "#cost")
    choose(tab, "Show", "energy")
    text = tab.inner_text("[data-view=cost]")
    assert text.count(NOT_MEASURED) == 1 and "CPU-seconds with a weight" in text
    assert "Energy (estimated)" in text and "Power now (estimated)" in text and "Joules, estimated" in text
    joules = [line for line in text.splitlines() if "measured" in line and "not" not in line]
    assert all("CPU" in line or line.startswith("measured;") for line in joules), joules


def test_a_run_without_energy_says_so_and_shows_its_cpu_time(tab: Any, open_page: Open) -> None:
    documents = make_documents(8, seed=2)
    state = documents["state"]
    state["run"]["totals"] |= {"energy_j": None, "energy_origin": "unavailable", "watts": None}
    for role in state["cost"]["roles"]:
        role |= {"energy_j": None, "origin": "unavailable", "full_j": None}
    for row in state["cost"]["members"]["rows"].values():
        for name in ("energy_j", "full_energy_j", "idle_j", "mean_w", "peak_w"):
            row[AT[name]] = None
        row[AT["origin"]] = row[AT["full_origin"]] = "unavailable"
    for roles in state["cost"]["by_member_role"].values():
        for sums in roles.values():
            sums[1] = None
    open_page(documents, "#cost")
    text = tab.inner_text("[data-view=cost]")
    assert "There is no energy to share out" in text
    assert "training 3,300 s" in text and NOT_MEASURED not in text
    choose(tab, "Show", "energy")
    assert "unavailable" in tab.inner_text(f"[data-view=cost] [data-member='{names(tab)[0]}']")


def test_a_change_of_the_cost_is_shown_and_the_selection_is_shared(tab: Any, open_page: Open) -> None:
    documents = make_documents(8, seed=2)
    server = open_page(documents, "#cost?select=member-1")
    tab.wait_for_selector("[data-member=member-0].pale")
    assert tab.locator("[data-member=member-1].pale").count() == 0
    tab.locator("[data-member=member-0] button").press("Enter")
    tab.wait_for_function("() => location.hash.endsWith('select=member-1,member-0')")
    cost = documents["state"]["cost"]
    cost["members"]["rows"]["member-2"][AT["cpu_s"]] = 777.0
    cost["by_member_role"]["member-2"]["train"][0] = 777.0
    cost["lines"].append(["emissions", "12 gCO2e estimated (given: 380 g/kWh)"])
    cost["reading"] = "By the location-based method."
    server.push({"offset": documents["state"]["offset"] + 1, "now": START + 400, "cost": cost})
    tab.wait_for_function("() => document.querySelector('[data-member=member-2]').innerText.includes('777 s')")
    assert names(tab)[0] == "member-2"
    text = tab.inner_text("[data-view=cost]")
    assert "12 gCO2e estimated" in text and "location-based method" in text
