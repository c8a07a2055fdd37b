"""What a run cost, in summary and tables: the ledger's figures, how each was split, its origin."""

from __future__ import annotations

import re
from typing import Any

import pytest
import run_events as runs
from event_dicts import fold, ledger

from ensemble.reporting.sections import cost_tables
from ensemble.reporting.sections.cost import METHOD_WORDS, sum_methods, summarize
from ensemble.reporting.text import joules


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


def cells(events: list[dict[str, Any]]) -> list[list[list[Any]]]:
    """The tables of members and of roles: their lines with their head, as they are sorted but for the names."""
    found = [table.as_dict() for table in cost_tables.tabulate(fold(events), ledger(events))]
    names = [[[name for name, _ in table["head"]]] for table in found]
    return [
        head + [[cell[0] if isinstance(cell, list) else cell for cell in row] for row in table["rows"]]
        for head, table in zip(names, found, strict=True)
    ]


def texts(events: list[dict[str, Any]]) -> str:
    """What is to be known of the tables."""
    return " ".join(table.text for table in cost_tables.tabulate(fold(events), ledger(events)))


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
        "split by CPU time; the estimate does not include idle power",
    ]


def test_a_model_of_the_machine_without_idle_power_has_no_idle_level_and_no_column_of_it() -> None:
    events = [
        e | {"parts": [part | {"idle_j": 0.0} for part in e["parts"]]} if e["type"] == "power" else e
        for e in runs.measured(runs.list_run())
    ]
    assert lines(events)[1] == "split by CPU time", "measured, and idle power was found to be nothing"
    members, _ = cells(events)
    assert "idle J" not in members[0]


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


def half_measured() -> list[dict[str, Any]]:
    """The run on two nodes of which one, that of the feeders, has but an estimate."""
    events = runs.list_run()
    pairs = zip(events, runs.measured(events), strict=True)
    return [old if old["type"] == "power" and old["node"] == "node-0" else new for old, new in pairs]


def test_where_origins_differ_every_line_of_the_report_has_those_of_both_views() -> None:
    members, roles = cells(half_measured())
    of = {row[0]: row[-1] for row in members[1:]}
    assert members[0][1] == "direct J" and members[0][-1] == "J is" and "All joules" not in texts(half_measured())
    assert of["member-0"] == "estimated" and of["member-1"] == "attributed, full estimated"
    assert roles[0][-1] == "J is"


def test_the_report_has_direct_and_full_cost_of_each_member_and_of_each_role(measured: Any) -> None:
    book = ledger(measured)
    members, roles = cells(measured)
    assert texts(measured).count("All joules and watts are attributed.") == 2
    head = "member; direct J (attributed); full J; CPU-s; full CPU-s; idle J; mean W; peak W; split by"
    assert members[0] == head.split("; ")
    assert [row[0] for row in members[1:]] == [f"member-{number}" for number in range(8)]
    for row in members[1:]:
        direct, full = book.member(row[0]), book.member(row[0], full=True)
        assert direct.energy_j and full.energy_j and full.energy_j > direct.energy_j
        shown = row[1:8]
        expected = [direct.energy_j, full.energy_j, direct.cpu_s, full.cpu_s, direct.idle_j]
        assert shown == pytest.approx([*expected, direct.mean_w, direct.peak_w], rel=0.01)
        assert re.fullmatch(r"CPU time \d\d%, reservation \d\d%", row[8])
    by_role = {row[0]: row for row in roles[1:]}
    assert roles[0][:4] == ["role", "J (attributed)", "direct J", "full J"]
    preparing, idle = by_role["preparing samples"], by_role["idle, reserved by nobody"]
    assert preparing[2] is None and preparing[1] == preparing[3] is not None, (
        "it serves all, and is shared out to all"
    )
    assert idle[2] is idle[3] is None and idle[-1] == "reservation 100%", "in neither view a member's"


def test_busy_gpu_seconds_are_shown_where_there_are_gpus(measured: Any) -> None:
    events = with_gpus(measured)
    members, roles = cells(events)
    at = members[0].index("GPU-s")
    shown = {row[0]: row[at] for row in members[1:] if row[at]}
    gpu_s = {member: total.gpu_s for member, total in ledger(events).by_member().items() if total.gpu_s}
    assert set(shown) == set(gpu_s) == {"member-0", "member-2"} and "GPU-s" in roles[0]
    assert shown["member-2"] == pytest.approx(gpu_s["member-2"], abs=0.1)


@pytest.mark.parametrize(
    "events", [runs.just_started(), runs.search_run(), []], ids=["started", "no power", "empty"]
)
def test_without_energy_there_are_no_joules_in_a_table(events: list[dict[str, Any]]) -> None:
    for table in cells(events):
        assert all(row[1] is None for row in table[1:])
