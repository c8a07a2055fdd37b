"""The study of what the account costs, with few members for a short time."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from ensemble.bench.energy.metered_node import ACCOUNT, LOG, PARTS, RANKS, RECEIVE, SAMPLE
from ensemble.bench.energy.overhead import ALL, OverheadRow, findings, measure, table

MEMBERS = 6


def has_compiler() -> bool:
    try:
        return subprocess.run(["cc", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


Found = tuple[list[OverheadRow], dict[str, Any]]
YOUNG, OLD = "at the beginning", "after an hour"


@pytest.fixture(scope="module")
def found() -> Found:
    return measure(MEMBERS, seconds=3.0)


def test_every_part_of_the_account_costs_something_and_all_of_them_little(found: Found) -> None:
    for age in (YOUNG, OLD):
        cost = {row.what: row.percent_of_core for row in found[0] if row.age == age}
        assert list(cost) == [*PARTS, ALL]
        assert cost[ALL] == pytest.approx(sum(cost[part] for part in PARTS))
        for part in (SAMPLE, RANKS, RECEIVE, LOG, ACCOUNT):
            assert 0 < cost[part] < 20, part


def test_members_are_on_the_stand_ins_gpus_where_there_is_a_compiler(found: Found) -> None:
    assert found[1]["gpus"] == (8 if has_compiler() else 0)
    assert ("nvml" in found[1]["source"]) == has_compiler()


@pytest.mark.more
def test_figures_of_an_old_run_are_fewer(found: Found) -> None:
    assert found[1]["events_per_s"][YOUNG] > 0, "members have reported"
    assert found[1]["logged_per_s"][YOUNG] > found[1]["logged_per_s"][OLD] > 0


def test_the_finding_says_whether_the_target_is_met() -> None:
    rows = [
        OverheadRow(what=what, age=age, percent_of_core=share)
        for age, share in ((YOUNG, 0.7), (OLD, 0.3))
        for what in (*PARTS, ALL)
    ]
    per_s = {YOUNG: 20.0, OLD: 5.0}
    found = {"gpus": 0, "source": "rapl", "events_per_s": per_s, "logged_per_s": per_s}
    young, old, _, gpus = findings(rows, found, 64)
    assert "0.70 % of a core for 64 members at 1 Hz, above 0.5 %" in young and "below 0.5 %" in old
    assert "without a GPU" in gpus
    assert table(rows)[-1] == {"part": ALL, YOUNG: 0.7, OLD: 0.3}
