"""The report says how members were packed: what was measured, what was given, what was decided about laggards."""

from __future__ import annotations

from typing import Any

import pytest
import run_events as runs
from event_dicts import collect_notices, fold, ledger

from ensemble.reporting.progress import head_line
from ensemble.reporting.sections import Table
from ensemble.reporting.sections.packing import describe_plan, tabulate

Event = dict[str, Any]


@pytest.fixture
def events() -> list[Event]:
    return runs.list_run()


def tables(events: list[Event]) -> list[Table]:
    return tabulate(fold(events), ledger(events))


def profile(**fields: Any) -> Event:
    """As it is read back from the log: numbers of workers are words."""
    figures = {"step_s": {"1": 0.0125}, "samples_per_s": {"1": 5120.0}, "cpus": {"1": 0.9}, "memory_gb": 0.25}
    return {
        "v": 2,
        "t": 1.0,
        "type": "profile",
        "shape": "s",
        "device": "cpu",
        "members": ["member-1"],
        **figures,
    } | fields


def test_what_was_measured_stands_beside_what_was_given(events: list[Event]) -> None:
    (table,) = tables([*events, profile()])
    rows = {row[0]: dict(zip([name for name, _ in table.head], row, strict=True)) for row in table.rows}
    one = rows["member-1", 1]
    assert (one["a step alone, ms"], one["samples/s alone"], one["memory, GiB"]) == (12.5, 5120.0, 0.25)
    assert rows["member-2", 2]["a step alone, ms"] is None


def test_a_run_in_which_nothing_was_measured_has_no_such_section(events: list[Event]) -> None:
    assert tables(events) == []


def test_the_plan_is_said_in_words(events: list[Event]) -> None:
    plan = {"v": 2, "t": 2.0, "type": "planned"}
    (line,) = describe_plan(fold([*events, plan | {"concurrent": ["member-0", "member-1"], "pace_s": 12.0}]))
    assert line.startswith("2 members share the cores and one stream: an epoch takes all of them 12 s")
    flotillas = {"flotillas": [{"members": ["member-0"]}] * 3, "makespan_s": 60.0, "lower_bound_s": 48.0}
    (line,) = describe_plan(fold([*events, plan | flotillas]))
    assert "3 flotillas, all done in 1 min 00 s; nothing could be faster than 48 s" in line


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("alone", "its own batches"),
        ("move", "stream group 3"),
        ("apart", "stream group 3"),
        ("widen", "4 workers"),
    ],
)
def test_what_is_done_about_a_laggard_is_said(events: list[Event], what: str, says: str) -> None:
    remedy = {"v": 2, "t": events[-1]["t"], "type": "remedy", "members": ["member-0"], "what": what}
    found = collect_notices([*events, remedy | {"cohort": 3, "workers": 4}])
    assert found[-1].text.startswith("member-0: ") and says in found[-1].text


def test_who_is_being_measured_is_said_until_something_is_known(events: list[Event]) -> None:
    declared = [{"v": 2, "t": 3.0, "type": "member", "member": f"new-{n}", "number": 90 + n} for n in range(2)]
    measuring = {"v": 2, "t": 3.0, "type": "measuring", "members": ["new-0", "new-1"]}
    assert "2 measuring" in head_line(fold([*events, *declared, measuring]), None)
    half = profile(members=["new-0"])
    assert "1 measuring" in head_line(fold([*events, *declared, measuring, half]), None)
    lost = {"v": 2, "t": 4.0, "type": "unmeasured", "members": ["new-1"], "error": "it died"}
    assert "measuring" not in head_line(fold([*events, *declared, measuring, half, lost]), None)
    long = lost | {"error": "ValueError: " + "it says much " * 20}  # said in full where the member fails
    said = [collect_notices([*events, each])[-1].text for each in (lost, long)]
    assert said[0] == "new-1: not measured, placed by default estimates: it died"
    assert said[1].endswith("it says much ...") and len(said[1]) < 140
