"""Training steps of `python -m benchmarks compression`: what is predicted, who wins, and a small run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.compression.cells import MEASURED, PREDICTED, PRIMITIVES, Cell, StepRow, choose_checks, list_cells
from benchmarks.compression.cells import make_row as step_row
from benchmarks.compression.measure import PLAIN, parse_schemes
from benchmarks.compression.predict import (
    PAYS,
    Costs,
    crossing,
    direct_costs,
    fit_costs,
    list_pays,
    load_of,
    predict_row,
    predict_s,
)
from benchmarks.compression.steps import list_steps
from benchmarks.compression.steps_expected import CheckRow, show_steps, winners
from ensemble.bench.charts import write
from ensemble.bench.emulated_net import EmulatedNet
from ensemble.bench.net_shapes import FORWARD, parameter_shapes, ready_times
from ensemble.comm import SingleRank
from ensemble.comm.gradients import GradientExchange

SCHEMES = parse_schemes(["fp16", "qsgd4", "onebit-tensor", "powersgd"])
COSTS = Costs(
    codec={PLAIN: 1e-9, "fp16": 8e-10, "qsgd4": 6e-10, "onebit-tensor+ef": 2e-9, "powersgd+ef": 3e-9},
    move={"ring": 7e-10, "gloo": 1e-9},
    message={"ring": 3e-4, "gloo": 5e-4},
    efficiency={"ring": 0.9, "gloo": 0.8},
)


def load(cell: Cell) -> Any:
    return load_of(cell.net, SCHEMES[cell.scheme])


def cells(*rates: str, workers: tuple[int, ...] = (2, 4), devices: tuple[str, ...] = ("p100",)) -> list[Cell]:
    steps = list_steps(["alexnet", "resnet50"], devices, 0.0)
    return list_cells(steps, workers, rates, ["ring", "gloo"], SCHEMES)


# --- what there is -------------------------------------------------------------------------------------------


def test_a_cell_without_a_meaning_is_left_out() -> None:
    steps = list_steps(["alexnet", "lstm"], ["k80"], 0.5)
    made = list_cells(steps, [4, 8], ["1gbit"], list(PRIMITIVES), SCHEMES, 2)
    found = {(cell.primitive, cell.scheme) for cell in made}
    assert {scheme for primitive, scheme in found if primitive == "ring"} == {PLAIN, "powersgd+ef"}
    assert {scheme for primitive, scheme in found if primitive == "gloo"} == {"fp16", "qsgd4", "onebit-tensor+ef"}
    assert {scheme for primitive, scheme in found if primitive == "mpi"} == {*SCHEMES} - {"onebit-tensor+ef"}
    assert {scheme for primitive, scheme in found if primitive == "hierarchical"} == {PLAIN, "powersgd+ef"}
    assert {(cell.workers, cell.hosts) for cell in made} == {(4, 2), (8, 4)}, "the same for all primitives"
    assert {(cell.net, cell.device, cell.step_s) for cell in made} == {
        ("alexnet", "k80", 32 / 656),
        ("lstm", "core", 0.5),
    }


def test_one_predicted_cell_in_ten_is_checked_of_those_that_can_be_measured() -> None:
    able = dict.fromkeys(cells("1gbit", "3gbit", "10gbit", workers=(2, 4)), 0.1)
    checked, _ = choose_checks(able, 10)
    assert len(checked) == len(able) // 10 and set(checked) < set(able) and choose_checks(able, 0)[0] == []
    large = {dataclasses.replace(cell, net="vgg16", workers=999): 0.1 for cell in able if cell.rate == "1gbit"}
    slow = dict.fromkeys(cells("100mbit"), 60.0)
    checked, said = choose_checks({**able, **large, **slow}, 1)
    assert checked == list(able)
    assert f"{len(large)} cannot be measured here for want of memory, and {len(slow)} because" in said


# --- emulated networks ---------------------------------------------------------------------------------------


def test_an_emulated_net_exchanges_each_gradient_once_and_takes_its_time() -> None:
    values = torch.arange(4.0 * 1024 * 512)
    net = EmulatedNet("lstm", 0.05, values)
    assert [tuple(parameter.shape) for parameter in net.parameters] == parameter_shapes("lstm")
    exchange = GradientExchange(net.parameters, SingleRank())
    net.step(exchange)
    assert all(parameter.grad is not None for parameter in net.parameters)
    grad = net.parameters[2].grad
    assert grad is not None and grad.data_ptr() == values.data_ptr()  # not copied


def test_gradients_are_ready_from_the_last_layer_to_the_first() -> None:
    ready = ready_times("resnet50")
    assert len(ready) == 161 and ready == sorted(ready, reverse=True)
    assert ready[0] == 1.0 and FORWARD < ready[-1] < FORWARD + 0.01


# --- predictions ---------------------------------------------------------------------------------------------


def test_what_is_sent_follows_the_formulas() -> None:
    values = 25_557_032
    small = sum(math.prod(s) for s in parameter_shapes("resnet50") if math.prod(s) < 10_000)
    assert load_of("resnet50", SCHEMES[PLAIN]).sent.sum() == pytest.approx(4 * values, rel=1e-3)
    packed = 2 * (values - small) + 4 * small
    assert load_of("resnet50", SCHEMES["fp16"]).sent.sum() == pytest.approx(packed, rel=1e-3)
    columns = sum(
        math.prod(s[:-1]) * (8 + 4 * -(-s[-1] // 32))
        for s in parameter_shapes("resnet50")
        if math.prod(s) >= 10_000
    )
    sent = load_of("resnet50", SCHEMES["onebit-tensor+ef"]).sent.sum()
    assert sent == pytest.approx(columns + 4 * small, rel=1e-3) and sent > 4 * values


@given(st.sampled_from(cells("1gbit", "10gbit")), st.floats(1.5, 20))
def test_a_step_is_as_long_as_its_computation_and_longer_where_anything_costs_more(
    cell: Cell, times: float
) -> None:
    plain = predict_s(cell, load(cell), COSTS)
    slower = dataclasses.replace(COSTS, move={name: times * cost for name, cost in COSTS.move.items()})
    assert cell.step_s <= plain <= predict_s(cell, load(cell), slower)
    assert plain <= predict_s(cell, load(cell), COSTS, cores=1)
    free = Costs(
        dict.fromkeys(COSTS.codec, 0.0),
        dict.fromkeys(COSTS.move, 0.0),
        dict.fromkeys(COSTS.message, 0.0),
        dict.fromkeys(COSTS.move, 1.0),
    )
    wire = (
        2 * (cell.workers - 1) / cell.workers * load(cell).sent.sum() * 8 / (1e9 if cell.rate == "1gbit" else 1e10)
    )
    assert max(cell.step_s, wire) <= predict_s(cell, load(cell), free) <= cell.step_s + wire


def test_hosts_of_several_ranks_send_what_crosses_their_link() -> None:
    steps = list_steps(["alexnet"], ["p100"], 0.0)
    free = dict.fromkeys(PRIMITIVES, 0.0)
    costs = Costs(dict.fromkeys(SCHEMES, 0.0), free, free, dict.fromkeys(PRIMITIVES, 1.0))
    made = list_cells(steps, [8], ["1mbit"], ["ring", "gloo", "hierarchical"], SCHEMES, 4)
    by = {(cell.primitive, cell.scheme): predict_s(cell, load(cell), costs) / 8e-6 for cell in made}
    for scheme in (PLAIN, "powersgd+ef"):  # 8 ranks in a ring; two leaders
        sent = load_of("alexnet", SCHEMES[scheme]).sent.sum()
        assert by["ring", scheme] == pytest.approx(2 * 7 / 8 * sent, rel=1e-3)
        assert by["hierarchical", scheme] == pytest.approx(2 * 1 / 2 * sent, rel=1e-3)
    # An all-to-all, of which each of 4 ranks sends half over the link, and a ring.
    sent = load_of("alexnet", SCHEMES["fp16"]).sent.sum()
    assert by["gloo", "fp16"] == pytest.approx((4 * 4 / 8 + 7 / 8) * sent, rel=1e-2)


def predicted(given: list[Cell], costs: Costs, cores: int | None = None) -> Iterator[StepRow]:
    return (predict_row(cell, load(cell), costs, cores) for cell in given)


def test_costs_are_found_again_in_steps_that_they_have_made() -> None:
    rows = list(predicted(cells("1gbit", "10gbit"), COSTS, 2))
    found = fit_costs(rows, load, 2)
    for cell in cells("200mbit", "40gbit", workers=(2, 8)):
        assert predict_s(cell, load(cell), found, 2) == pytest.approx(
            predict_s(cell, load(cell), COSTS, 2), rel=0.1
        )


@given(st.floats(1e7, 1e11))
def test_the_crossing_of_a_falling_speed_up_is_found(at: float) -> None:
    kind, bps = crossing(lambda rate: PAYS * at / rate)
    assert kind == "below" and bps == pytest.approx(at, rel=0.01)
    assert crossing(lambda rate: 2.0) == ("always", None) and crossing(lambda rate: 1.0) == ("never", None)


# --- what is shown -------------------------------------------------------------------------------------------


def row(scheme: str, step_ms: float, **more: Any) -> StepRow:
    usual: dict[str, Any] = {"net": "vgg16", "device": "k80", "step_s": 0.1, "batch": 32, "workers": 8}
    usual |= {"hosts": 8, "rate": "10gbit", "primitive": "gloo", "scheme": scheme, **more}
    return step_row(Cell(**usual), PREDICTED, step_ms / 1e3, 1e6, 10)


def test_the_winner_is_the_fastest_without_a_published_loss() -> None:
    rows = [row(PLAIN, 400), row(PLAIN, 300, primitive="ring"), row("qsgd4", 150), row("qsgd2", 100)]
    (found,) = winners(rows)
    assert (found.scheme, found.plain_primitive, found.speedup) == ("qsgd4", "ring", 2.0)
    assert (found.fastest, found.fastest_speedup) == ("qsgd2", 3.0)
    assert rows[2].samples_per_s == pytest.approx(8 * 32 / 0.15)
    (other,) = winners([row(PLAIN, 100), row("qsgd4", 120)])
    assert (other.scheme, other.speedup) == (PLAIN, 1.0)
    (other,) = winners([row(PLAIN, 100), row("qsgd4", 50, hosts=4)])
    assert other.speedup == 1.0, "of other hosts"


def test_steps_are_shown_claims_first(tmp_path: Path) -> None:
    timed: dict[str, Any] = {"origin": MEASURED, "low_ms": 1.0, "high_ms": 1e6}
    rows = [dataclasses.replace(each, **timed) for each in predicted(cells("1gbit", "10gbit"), COSTS, 2)]
    wanted = cells("10gbit", "100gbit", workers=(8,), devices=("k80", "p100"))
    pays, free = list(list_pays(wanted, load, COSTS)), direct_costs(COSTS)
    direct = [predict_row(cell, load(cell), free) for cell in wanted]
    check = CheckRow(**vars(rows[0]), predicted_ms=1.1 * rows[0].step_ms, error=0.1)
    shown = show_steps(rows, [check], "9 are too slow", list(predicted(wanted, COSTS)), direct, pays, COSTS)
    parts = [made["part"] for made in json.loads(json.dumps(shown.rows))]
    assert parts[:4] == ["claim"] * 4
    assert set(parts[4:]) == {
        "step-pays",
        "step-check",
        "step",
        "step-cost",
        "winner",
        "step-predicted",
        "step-direct",
    }
    assert all(table for _, table in shown.tables)
    assert shown.findings[0] == "9 are too slow"
    assert shown.findings[1].startswith("1 of the others were measured: median error 10%")
    assert "checked on shared cores: median error 10%" in shown.rows[0]["spread"]
    columns = next(made for made in shown.rows if "columns" in made.get("claim", ""))
    assert columns["loses"] == "more bytes than fp32: resnet50"
    write("Steps", [], shown.panels, tmp_path / "plot.html")


@pytest.mark.slow
def test_a_small_run_measures_fits_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "compression --parts steps --nets lstm --devices p100 --primitives ring,gloo --workers 2"
    arguments += (
        " --step-schemes qsgd4 --links 10gbit --predicted-links 1gbit --check 4 --steps 1 --json rows.json"
    )
    assert main([*arguments.split(), "--plot", "-"]) == 0
    made = json.loads(Path("rows.json").read_text())
    by = {each["scheme"]: each for each in made if each["part"] == "step"}
    assert list(by) == [PLAIN, "qsgd4"]
    assert by[PLAIN]["sent_mb"] == pytest.approx(4 * 13.634692, rel=1e-3)
    assert by["qsgd4"]["sent_mb"] < by[PLAIN]["sent_mb"] / 7
    assert all(each["step_ms"] >= 1e3 * each["step_s"] for each in by.values())
    assert {each["workers"] for each in made if each["part"] == "step-predicted"} == {8, 16}
    (checked,) = (each for each in made if each["part"] == "step-check")
    assert checked["workers"] in (8, 16) and checked["rate"] == "1gbit", "one of those that are predicted"
