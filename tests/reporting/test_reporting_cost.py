"""What a run cost, in summary, tables and figures: the ledger's figures, how each was split, its origin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import run_events as runs

from ensemble.meter import ledger
from ensemble.reporting import figures, write_report
from ensemble.reporting.sections.cost import METHOD_WORDS, sum_methods, summarize
from ensemble.reporting.text import joules
from ensemble.store import RunDir, fold


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return runs.measured(runs.list_run())


def with_gpus(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The run with a GPU on each node, whose use by process is known on node-0 and not on node-1."""

    def add(event: dict[str, Any]) -> dict[str, Any]:
        node = event.get("node")
        if event["type"] == "node":
            return event | {"gpu_ids": [f"GPU-{node}"]}
        if event["type"] == "placed":
            return event | {"devices": [f"GPU-{node}"] * len(event["devices"])}
        if event["type"] == "power":
            gpu = {"name": "gpu", "kind": "gpu", "device": f"GPU-{node}", "energy_j": 50.0, "idle_j": 10.0}
            on = {} if node == "node-1" else {"activity": [["train", "member-0", 0.5], ["train", "member-2", 1.5]]}
            return event | {"parts": [*event["parts"], gpu | on | {"origin": "measured"}]}
        return event

    return [add(event) for event in events]


def lines(events: list[dict[str, Any]]) -> list[str]:
    """The lines on energy in the summary."""
    found = summarize(fold(events), ledger(events))
    at = [label for label, _ in found].index("energy")
    return [line for _, line in found[at : at + 2]]


def test_the_energy_line_has_origin_and_says_how_idle_and_dynamic_energy_were_split(measured: Any) -> None:
    book = ledger(measured)
    run = book.run
    assert run.energy_j and run.idle_j and book.total.energy_j
    total, split = lines(measured)
    assert total.startswith(
        f"{joules(run.energy_j)} attributed, of {joules(book.total.energy_j)} measured for the whole"
    )
    idle, dynamic = joules(run.idle_j), joules(run.energy_j - run.idle_j)
    assert split == f"idle {idle} by reservation, dynamic {dynamic} by CPU time"


def test_where_idle_energy_is_not_known_it_is_not_told_apart(measured: Any) -> None:
    busy = [
        e | {"parts": [part | {"idle_j": None} for part in e["parts"]]} if e["type"] == "power" else e
        for e in measured
    ]
    assert lines(busy)[1] == "idle and dynamic energy together, split by CPU time"


def test_an_estimate_is_said_to_know_no_idle_power() -> None:
    assert lines(runs.list_run()) == [
        f"{joules(ledger(runs.list_run()).run.energy_j)} estimated (source: 12 W per busy core)",
        "split by CPU time; the estimate knows no idle power",
    ]


def test_a_model_of_the_machine_without_idle_power_has_no_idle_level_and_no_column_of_it(tmp_path: Path) -> None:
    events = [
        e | {"parts": [part | {"idle_j": 0.0} for part in e["parts"]]} if e["type"] == "power" else e
        for e in runs.measured(runs.list_run())
    ]
    assert lines(events)[1] == "split by CPU time", "measured, and idle power was found to be nothing"
    page = write_report(RunDir(runs.write_run(tmp_path / "run", events))).read_text()
    members, _ = cells(page, "Cost by member and role")
    assert "idle J" not in members[0] and "Dotted: what a node" not in page


def test_each_method_by_which_gpus_were_split_is_named(measured: Any) -> None:
    _, split = lines(with_gpus(measured))
    assert re.fullmatch(
        r"idle .* by reservation, dynamic .* by CPU time, .* by SM utilization and .* by declared share .*",
        split,
    )


def test_joules_by_method_add_up_to_those_of_the_rows(measured: Any) -> None:
    book = ledger(with_gpus(measured))
    methods = sum_methods(book.rows)
    assert set(methods) == {"reservation", "cpu_time", "sm_utilization", "share"} <= set(METHOD_WORDS)
    assert sum(methods.values()) == book.total.energy_j


def test_energy_bars_add_up_to_the_nodes_with_what_nobody_reserved_in_a_bar_of_its_own(measured: Any) -> None:
    book = ledger(measured)
    by_row: dict[str, float] = {}
    for trace in figures.joules_by_role(book).data:
        for row, used in zip(trace.y, trace.x, strict=True):
            by_row[row] = by_row.get(row, 0.0) + used
    assert by_row.pop("whole nodes") == pytest.approx(book.total.energy_j) == pytest.approx(sum(by_row.values()))
    assert by_row["not the run's"] == pytest.approx(book.by_role()["idle"].energy_j)
    assert by_row["member-2"] == pytest.approx(book.member("member-2").energy_j)
    assert "no node has a power source" in figures.joules_by_role(ledger(runs.search_run()))


def test_the_power_curve_has_its_idle_level_where_that_is_known(measured: Any) -> None:
    def dotted(events: list[dict[str, Any]]) -> list[Any]:
        drawn = figures.power_over_time(ledger(events), events[0]["t"]).data
        return [trace for trace in drawn if trace.line.dash == "dot"]

    levels = dotted(measured)
    assert len(levels) == 2 and all(list(trace.y) == pytest.approx([8.0] * 27, abs=1e-5) for trace in levels)
    assert dotted(runs.list_run()) == []


def test_shares_of_measured_energy_are_called_attributed_where_members_have_bars(
    measured: Any, tmp_path: Path
) -> None:
    figure = figures.joules_by_role(ledger(measured))
    assert not isinstance(figure, str)
    assert figure.layout.xaxis2.title.text == "joules (attributed)"
    assert all("attributed" in bars.hovertemplate for bars in figure.data)
    page = write_report(RunDir(runs.write_run(tmp_path / "run", measured))).read_text()
    assert "<h3>Energy (attributed)</h3><p>" in page and "The whole of the nodes was measured." in page
    assert "Energy (measured)" not in page and "joules (measured)" not in page
    assert "<h3>Power over time (measured)</h3>" in page
    assert page.count("All joules and watts are attributed.") == 2


def test_power_is_drawn_from_the_beginning_of_its_first_interval(measured: Any) -> None:
    first = next(e for e in measured if e["type"] == "power")
    once = [e for e in measured if e["type"] != "power" or e is first]
    (power, idle) = figures.power_over_time(ledger(once), runs.START).data
    assert list(power.x) == pytest.approx([0.0, 2.0]) and list(power.y) == pytest.approx([first["watts"]] * 2)
    assert list(idle.x) == pytest.approx([0.0, 2.0])


def test_power_is_not_drawn_over_the_time_between_two_starts(measured: Any) -> None:
    begun = [e for e in measured if e["t"] <= runs.START + 6]
    again = [e | {"t": e["t"] + 3600} for e in begun if e["type"] in ("run_started", "power")]
    curve = figures.power_over_time(ledger([*begun, *again]), runs.START).data[0]
    at = [60 * minutes for minutes in curve.x]
    assert at == pytest.approx([0, 2, 4, 6, 3600, 3600, 3602, 3604, 3606])
    assert [place for place, watts in enumerate(curve.y) if watts is None] == [4]


def half_measured() -> list[dict[str, Any]]:
    """The run on two nodes of which one, that of the feeders, has but an estimate."""
    events = runs.list_run()
    pairs = zip(events, runs.measured(events), strict=True)
    return [old if old["type"] == "power" and old["node"] == "node-0" else new for old, new in pairs]


def test_where_origins_differ_every_line_of_the_report_has_those_of_both_views(tmp_path: Path) -> None:
    page = write_report(RunDir(runs.write_run(tmp_path / "run", half_measured()))).read_text()
    members, roles = cells(page, "Cost by member and role")
    of = {row[0]: row[-1] for row in members[1:]}
    assert members[0][1] == "direct J" and members[0][-1] == "J is" and "All joules" not in page
    assert of["member-0"] == "estimated" and of["member-1"] == "attributed, full estimated"
    assert roles[0][-1] == "J is" and "Energy (attributed + estimated)" in page


def cells(page: str, heading: str) -> list[list[list[str]]]:
    """The tables below a heading of the report: their lines with their head, as text."""
    section = page.split(f"<h2>{heading}</h2>")[1].split("</section>")[0]
    tables = []
    for table in section.split("<table>")[1:]:
        rows = re.findall(r"<tr.*?</tr>", table.split("</table>")[0])
        tables.append([re.findall(r">([^<]*)</t[hd]>", row) for row in rows])
    return tables


def test_the_report_has_direct_and_full_cost_of_each_member_and_of_each_role(
    measured: Any, tmp_path: Path
) -> None:
    book = ledger(measured)
    page = write_report(RunDir(runs.write_run(tmp_path / "run", measured))).read_text()
    members, roles = cells(page, "Cost by member and role")
    head = "member; direct J (attributed); full J; CPU-s; full CPU-s; idle J; mean W; peak W; split by"
    assert members[0] == head.split("; ")
    assert [row[0] for row in members[1:]] == [f"member-{number}" for number in range(8)]
    for row in members[1:]:
        direct, full = book.member(row[0]), book.member(row[0], full=True)
        assert direct.energy_j and full.energy_j and full.energy_j > direct.energy_j
        shown = [float(cell) for cell in row[1:8]]
        expected = [direct.energy_j, full.energy_j, direct.cpu_s, full.cpu_s, direct.idle_j]
        assert shown == pytest.approx([*expected, direct.mean_w, direct.peak_w], rel=0.01)
        assert re.fullmatch(r"CPU time \d\d%, reservation \d\d%", row[8])
    by_role = {row[0]: row for row in roles[1:]}
    assert roles[0][:4] == ["role", "J (attributed)", "direct J", "full J"]
    preparing, idle = by_role["preparing samples"], by_role["idle, reserved by nobody"]
    assert preparing[2] == "" and preparing[1] == preparing[3] != "", "it serves all, and is shared out to all"
    assert idle[2] == idle[3] == "" and idle[-1] == "reservation 100%", "in neither view a member's"


def test_busy_gpu_seconds_are_shown_where_there_are_gpus(measured: Any, tmp_path: Path) -> None:
    events = with_gpus(measured)
    page = write_report(RunDir(runs.write_run(tmp_path / "run", events))).read_text()
    members, roles = cells(page, "Cost by member and role")
    at = members[0].index("GPU-s")
    shown = {row[0]: row[at] for row in members[1:] if row[at]}
    gpu_s = {member: total.gpu_s for member, total in ledger(events).by_member().items() if total.gpu_s}
    assert set(shown) == set(gpu_s) == {"member-0", "member-2"} and "GPU-s" in roles[0]
    assert float(shown["member-2"]) == pytest.approx(gpu_s["member-2"], abs=0.1)


@pytest.mark.parametrize(
    "events", [runs.just_started(), runs.search_run(), []], ids=["started", "no power", "empty"]
)
def test_without_energy_there_are_no_tables_of_it(events: list[dict[str, Any]], tmp_path: Path) -> None:
    page = write_report(RunDir(runs.write_run(tmp_path / "run", events))).read_text()
    assert "What the energy amounts to" not in page and "cannot be shown" not in page


def test_what_was_estimated_is_never_called_measured_or_a_saving(tmp_path: Path) -> None:
    page = write_report(RunDir(runs.write_run(tmp_path / "run", runs.list_run()))).read_text()
    assert "Energy (estimated)" in page and "Energy (measured)" not in page
    for caption in re.findall(r"<figcaption><h3>(?:Energy|Power) .*?</figcaption>", page):
        assert "not evidence of a saving" in caption
    assert "Dotted: what a node" not in page


def test_the_table_of_members_leaves_costs_to_the_table_of_costs(measured: Any, tmp_path: Path) -> None:
    page = write_report(RunDir(runs.write_run(tmp_path / "run", measured))).read_text()
    ((head, *_),) = cells(page, "Members")
    assert head[-1] == "samples/s" and not {"CPU-s", "J", "J (attributed)"} & set(head)
