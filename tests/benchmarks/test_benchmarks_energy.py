"""The studies of energy: Shapley values, and how far meter and ledger are from a synthetic node's truth."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from event_dicts import ledger
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.energy import attribution
from benchmarks.energy.beds import Measured
from benchmarks.energy.member import Member
from benchmarks.energy.shapley import SPLITS, Coalition, Window, list_coalitions, shapley_values, split_energy
from benchmarks.energy.synthetic import CONCAVE, IDLE, IDLE_W, LINEAR, take_turns
from ensemble.bench.energy import nvml_stand_in
from pipelines.ipc.child_processes import child_environment

PLAYERS = ("a", "b", "c", "d")
VALUE = st.floats(-1e6, 1e6)

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler to build the stand-in for NVIDIA's driver"
)


@st.composite
def games(draw: st.DrawFn) -> dict[Coalition, float]:
    return {coalition: draw(VALUE) for coalition in list_coalitions(PLAYERS)}


# --- Shapley values ------------------------------------------------------------------------------------------


@given(games())
def test_a_shapley_value_is_the_mean_over_all_orders(game: dict[Coalition, float]) -> None:
    """From which its axioms follow: what players add is shared out, equals have equal values, sums are sums."""
    orders = list(itertools.permutations(PLAYERS))
    means = dict.fromkeys(PLAYERS, 0.0)
    for order in orders:
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            means[player] += (game[before | {player}] - game[before]) / len(orders)
    assert shapley_values(game) == pytest.approx(means, abs=1e-6)


# --- the synthetic node --------------------------------------------------------------------------------------


def test_two_who_share_a_concave_node_cost_less_than_each_alone() -> None:
    alone, both = CONCAVE.dynamic_w(0.5)["cpu"], CONCAVE.dynamic_w(1.0)["cpu"]
    assert alone < both < 2 * alone
    assert LINEAR.dynamic_w(1.0)["cpu"] == pytest.approx(2 * LINEAR.dynamic_w(0.5)["cpu"])


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Some seconds of four members on a linear node, whose counters wrap around meanwhile."""
    return attribution.measure_processors(6.0)


@pytest.mark.more
def test_members_of_a_linear_node_are_charged_what_they_truly_used(measured: Measured) -> None:
    rows = {row.name: row for row in attribution.compare("", measured)}
    watts = LINEAR.core_w + LINEAR.dram_w
    for member in attribution.MEMBERS:
        row = rows[member.name]
        assert row.true_j == pytest.approx(row.idle_j + watts * row.cpu_s)
        assert abs(row.error_pct) < 3.0
    half_of_idle_w = sum(IDLE_W.values()) / 2
    assert rows[IDLE].attributed_j > 6.0 * half_of_idle_w  # members reserve the other half of the cores


@pytest.mark.slow
def test_work_that_draws_more_on_a_core_is_charged_as_any_other_of_that_cpu_time() -> None:
    measured = attribution.measure_processors(4.0, attribution.UNLIKE)
    rows = {row.name: row for row in attribution.compare("", measured)}
    true, attributed = (
        {name: getattr(rows[name], of) - rows[name].idle_j for name in ("dense", "sparse")}
        for of in ("true_j", "attributed_j")
    )
    cpu_s = {name: rows[name].cpu_s for name in true}
    assert true["dense"] / cpu_s["dense"] == pytest.approx(3 * true["sparse"] / cpu_s["sparse"], rel=0.01)
    assert attributed["dense"] / cpu_s["dense"] == pytest.approx(attributed["sparse"] / cpu_s["sparse"], rel=0.05)


@pytest.mark.more
def test_what_is_attributed_adds_up_to_the_meters_joules_and_these_to_the_truth(
    measured: Measured,
) -> None:
    assert attribution.is_exact(attribution.read_ledger(measured.events), measured.events)
    assert ledger(measured.events).total.energy_j == pytest.approx(measured.truth.energy_j, rel=0.02)


# --- the synthetic GPUs --------------------------------------------------------------------------------------


def test_processes_take_turns_on_a_gpu_while_they_have_work() -> None:
    assert take_turns([]) == []
    assert take_turns([0.7]) == [0.7]
    assert take_turns([1.0, 1.0, 1.0]) == pytest.approx([1 / 3] * 3)
    assert take_turns([1.0, 0.5, 0.0]) == pytest.approx([0.75, 0.25, 0.0])


@given(st.lists(st.floats(0, 1), max_size=4))
def test_a_gpu_computes_while_any_process_has_work(demands: list[float]) -> None:
    shares = take_turns(demands)
    none = math.prod(1 - demand for demand in demands)
    assert sum(shares) == pytest.approx(1 - none, abs=1e-9)
    assert all(share <= demand + 1e-9 for share, demand in zip(shares, demands, strict=True))


@pytest.mark.more
@needs_compiler
def test_on_gpus_members_are_charged_by_sm_utilization_what_they_truly_used() -> None:
    rows, is_exact = attribution.run_gpus(attribution.WHOLE, 4.0)
    assert is_exact
    error = {(row.scenario, row.name): abs(row.error_pct) for row in rows}
    for name in ("busy", "half"):
        assert error["GPU, SM utilization", name] < 5.0
    assert error["GPU, busy time", "resting"] < error["GPU, share", "resting"]
    assert error["GPU, SM utilization", "sparse"] > 20.0  # what a kernel draws is in no figure of the driver


@pytest.mark.slow
@needs_compiler
def test_in_mig_mode_busy_time_is_closer_to_the_truth_than_the_share() -> None:
    rows, is_exact = attribution.run_gpus(attribution.MIG, 4.0)
    assert is_exact
    error = {(row.scenario, row.name): abs(row.error_pct) for row in rows}
    assert {scenario for scenario, _ in error} == {"MIG, busy time", "MIG, share"}
    for name in ("busy", "half"):
        assert error["MIG, busy time", name] < 5.0
    assert error["MIG, busy time", "resting"] < error["MIG, share", "resting"]


# --- coalitions and splits -----------------------------------------------------------------------------------


def make_windows(watts: dict[str, float], attributed: dict[str, float]) -> list[Window]:
    """Windows of ten seconds of the coalitions "", "a", "b", "ab"."""
    return [
        Window(tuple(names), 10.0, power, {name: attributed[name] for name in names})
        for names, power in watts.items()
    ]


def test_splits_share_what_is_beyond_idle_and_are_compared_with_the_shapley_value() -> None:
    members = (Member(name="a", duty=1.0, cpus=3.0), Member(name="b", duty=1.0, cpus=1.0))
    windows = make_windows({"": 10.0, "a": 18.0, "b": 14.0, "ab": 20.0}, {"a": 90.0, "b": 30.0})
    rows = {(row.split, row.member): row for row in split_energy(windows, members)}
    for split in SPLITS:  # a adds 8 W or 6 W, b 4 W or 2 W
        assert (rows[split, "a"].shapley_j, rows[split, "b"].shapley_j) == pytest.approx((70.0, 30.0))
        assert rows[split, "a"].joules + rows[split, "b"].joules == pytest.approx(100.0)
    assert [rows[split, "a"].joules for split in SPLITS] == pytest.approx([75.0, 75.0, 50.0])
    assert rows["even", "b"].error_pct == pytest.approx(100 * (50 / 30 - 1))


@pytest.mark.more
def test_a_split_by_what_was_used_is_closest_to_the_shapley_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shapley", "--repeats", "1", "--json", str(tmp_path / "rows.json"), "--plot", "-"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    errors = {split: [abs(row["error_pct"]) for row in rows if row.get("split") == split] for split in SPLITS}
    assert max(errors["ours"]) < max(errors["share x time"]) < max(errors["even"])
    assert sum("coalition" in row for row in rows) == 8 and "shapley: ours: median" in capsys.readouterr().err


_ON_A_GPU = """
import json
from benchmarks.energy.beds import RealGpuBed
from benchmarks.energy.shapley import measure_window
with RealGpuBed() as bed:
    bed.settle_s = 0.0
    window = measure_window(bed, bed.members[:1], 1.0)
print(json.dumps([window.watts * window.seconds, window.members, window.attributed_j]))
"""


@pytest.mark.more
@needs_compiler
def test_a_coalition_trains_on_a_gpu_and_is_charged_its_energy(tmp_path: Path) -> None:
    stand_in = {**nvml_stand_in.build(tmp_path), "STAND_IN_GPUS": "H100:80,H100:80"}
    command = [sys.executable, "-c", _ON_A_GPU]
    done = subprocess.run(command, env={**os.environ, **stand_in}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    energy_j, members, attributed_j = json.loads(done.stdout)
    assert members == ["busy"]
    assert energy_j > 0 and attributed_j["busy"] <= energy_j


# --- the command ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_study_prints_tables_and_writes_rows_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, plot = tmp_path / "rows.json", tmp_path / "plot.html"
    files = ["--json", str(rows), "--plot", str(plot)]
    assert main(["attribution", "--seconds", "1", "--repeats", "1", *files]) == 0
    found = json.loads(rows.read_text())
    assert {row["name"] for row in found} >= {member.name for member in attribution.MEMBERS}
    shown = capsys.readouterr()
    assert "Attributed joules" in shown.out
    assert "to the tick" in shown.err
    assert plot.stat().st_size > 1000


def test_a_member_ends_with_its_input() -> None:
    command = Member(name="m", duty=0.5).command(min(os.sched_getaffinity(0)))
    done = subprocess.run(command, input=b"work\n", capture_output=True, env=child_environment(), timeout=300)
    assert done.returncode == 0
    roles = [json.loads(line)["role"] for line in done.stdout.splitlines() if line != b"ok"]
    assert roles == ["startup", "train"]
