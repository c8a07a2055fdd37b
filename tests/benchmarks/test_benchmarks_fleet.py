"""`python -m benchmarks fleet`: its table of members, its parts in a small size, its command."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.fleet import fleet, real, throughput, workload


def test_the_table_of_members_is_the_one_of_the_published_figures() -> None:
    digest = hashlib.sha256(repr(fleet.draw_table()).encode()).hexdigest()
    assert digest.startswith("430548a0ed7b5d22") and len(fleet.draw_table()) == 500


def test_ensembles_are_drawn_by_their_seed_and_wider_is_never_slower() -> None:
    one, again, other = (fleet.draw_members(seed, 20, 4) for seed in (1, 1, 2))
    assert one == again != other
    for member in one:
        assert member.samples_per_s[1] < member.samples_per_s[2] < member.samples_per_s[4]
        assert member.samples_per_s[4] < 4 * member.samples_per_s[1]
        assert member.epochs <= member.identity.epochs == 90


def test_planned_members_end_sooner_and_costly_preparation_tells() -> None:
    free, costly = (
        fleet.measure(fleet.Fleet(members=20, nodes=5, prep_ms=cost), 2, lambda line: None)
        for cost in (0.0, 1000.0)
    )
    assert free.over_default.low > 1 and free.over_equal.low > 1
    assert costly.over_default.median > 2 * free.over_default.median, "each prepares everything for itself"
    assert costly.plan_s > 0 and costly.react_ms > 0


@pytest.mark.parametrize("mode", throughput.MODES)
def test_every_report_is_recorded_and_a_search_answers_each(mode: str) -> None:
    row = throughput.measure(mode, members=12, epochs=3)
    assert row.reports == 36 if mode == throughput.LIST else 12 <= row.reports <= 36
    assert row.events > 3 * row.reports and row.status_s > 0 and row.report_s > 0
    assert (row.answer_ms is None) == (mode == throughput.LIST)


def test_uneven_steps_span_a_factor_of_four() -> None:
    steps = workload.steps_ms(8)
    assert steps == sorted(steps) and steps[-1] == pytest.approx(4 * steps[0])
    assert len(workload.make_photographs(70, 32)) == 70
    assert workload.make_photographs(3, 32) == workload.make_photographs(3, 32)


@pytest.mark.parametrize(
    "executor", [pytest.param("inline", marks=pytest.mark.more), pytest.param("local", marks=pytest.mark.slow)]
)
def test_real_members_are_trained_in_three_arms(executor: str) -> None:
    plan = real.Plan(steps_ms=(5.0, 10.0), epochs=1, samples=32, batch_size=16, executor=executor)
    rows = real.study(plan, 1, lambda line: None)
    assert [row.arm for row in rows] == list(real.ARMS)
    by_arm = {row.arm: row for row in rows}
    assert by_arm[real.IN_TURN].over_median > 1.5, "one after another takes as long as all"
    for row in rows:
        assert row.ttta_s > 0 and row.cpu_s > 0 and 0 <= row.orchestration < 1


def test_the_command_writes_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "--devices 8 --seeds 1 --prep-ms 0 --reporting 5 --repeats 1 --json rows.json"
    assert main(["fleet", "--parts", "simulated,throughput", *sizes.split()]) == 0
    rows = json.loads(Path("rows.json").read_text())
    assert [row["part"] for row in rows] == ["claim"] * 2 + ["simulated"] * 3 + ["throughput"] * 2
    assert [row["published"] for row in rows[:2]] == ["1.12 to 1.92 times", "1.23 to 1.97 times"]
    rows = rows[2:]
    assert [(row["members"], row["streams"]) for row in rows[:3]] == [(8, 2), (8, 1), (8, 4)]
    assert rows[0]["over_default_low"] == rows[0]["over_default"]
    assert "over default" in capsys.readouterr().err
