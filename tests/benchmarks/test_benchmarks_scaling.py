"""`python -m benchmarks scaling`: its model of time, what it says of exchanges, small runs on the digits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import make_row

from benchmarks import models
from benchmarks.__main__ import main
from benchmarks.scaling.exchange import FUSED, UNFUSED, ExchangeRow, make_rows
from benchmarks.scaling.expected import exchange_claims, worker_claims, worker_findings, worker_panels
from benchmarks.scaling.laws import LOGARITHMIC, RING, fit_laws, predict_rows, predict_step
from benchmarks.scaling.workers import REAL, STRONG, WEAK, WorkerRow
from benchmarks.training import TrainingSetup, make_trainer
from ensemble.comm import SingleRank

WORKERS = ("--model", "lstm-small", "--hidden", "8", "--embed", "8", "--workers", "1,2", "--scalings", "strong")
WORKERS += ("--step-ms", "200", "--steps", "3")
seconds = st.floats(1e-4, 10.0)


# --- workers -------------------------------------------------------------------------------------------------


def one_worker(scaling: str, compute: str, step_ms: float, optimizer_ms: float) -> WorkerRow:
    times: dict[str, float] = {"step_ms": step_ms, "optimizer_ms": optimizer_ms, "cores": 2, "workers": 1}
    return make_row(WorkerRow, scaling=scaling, compute=compute, **times)


@given(seconds, st.integers(1, 100))
def test_without_communication_and_optimizer_scaling_is_linear(compute: float, count: int) -> None:
    for scaling, expected in ((STRONG, compute / count), (WEAK, compute)):
        assert predict_step(one_worker(scaling, "100 ms", compute, 0.0), 0.0, count) == pytest.approx(expected)


@given(seconds, seconds, seconds, st.integers(1, 100), st.sampled_from((STRONG, WEAK)))
def test_workers_that_share_cores_are_no_faster_than_the_cores(
    compute: float, optimizer: float, communication: float, count: int, scaling: str
) -> None:
    real, emulated = (one_worker(scaling, kind, compute + optimizer, optimizer) for kind in (REAL, "100 ms"))
    shared = predict_step(real, communication, count)
    assert shared >= predict_step(emulated, communication, count) * (1 - 1e-9)
    if count > 2:
        work = compute * (count if scaling == WEAK else 1) + count * optimizer
        assert shared == pytest.approx(work / 2 + communication)


@given(seconds, seconds, seconds, st.integers(4, 7))
def test_a_law_is_found_again_and_the_other_is_told_from_it(a: float, b: float, c: float, most: int) -> None:
    counts = [2**i for i in range(1, most)]
    made = {
        LOGARITHMIC: [(n, a + b * math.log2(n)) for n in counts],
        RING: [(n, a + b * (n - 1) / n + c * (n - 1)) for n in counts],
    }
    for law, points in made.items():
        fit = next(fit for fit in fit_laws(points) if fit.law == law)
        assert [fit.at(n) for n in counts] == pytest.approx([value for _, value in points], rel=1e-4)
        assert fit.at(1) == 0 and fit.measured_ms == points[-1][1]
        if fit.beyond_ms is not None:
            assert fit.beyond_ms == pytest.approx(fit.measured_ms, rel=1e-3), "what was left out is foretold"
    ring_grows = [(n, a + 10.0 * (n - 1)) for n in (2, 4, 8, 16, 32)]
    assert next(fit for fit in fit_laws(ring_grows) if fit.best).law == RING


def test_few_points_are_fitted_exactly_and_leave_no_residual() -> None:
    for fit in fit_laws([(2, 7.0)]):
        assert fit.at(2) == pytest.approx(7.0) and fit.residual_ms is None and fit.beyond_ms is None
    assert fit_laws([]) == []


def test_steps_are_predicted_from_one_workers_and_the_law() -> None:
    def row(scaling: str, count: int, step_ms: float, communication_ms: float) -> WorkerRow:
        fields: dict[str, float] = {"step_ms": step_ms, "communication_ms": communication_ms, "cores": 8}
        fields |= {"optimizer_ms": 0.0}
        return make_row(WorkerRow, scaling=scaling, compute="100 ms", workers=count, efficiency=0.5, **fields)

    strong = [row(STRONG, 1, 100, 0), row(STRONG, 2, 60, 5), row(STRONG, 4, 40, 10)]
    weak = [row(WEAK, 1, 100, 0), row(WEAK, 2, 110, 5), row(WEAK, 4, 100, 10)]
    assert all(one.predicted_ms is None for one in predict_rows(strong + weak)[0]), "of too few other numbers"
    strong, weak = [*strong, row(STRONG, 8, 20, 999)], [*weak, row(WEAK, 8, 100, 999)]
    rows, fits = predict_rows(strong + weak)
    assert rows[0].predicted_ms is None and rows[7].predicted_ms == pytest.approx(100 + 15), "without 999 itself"
    assert rows[7].error_percent == pytest.approx(15)
    rows, fits = predict_rows(strong[:3] + weak[:3])
    linear_strong, linear_weak = worker_claims(rows, fits)  # two numbers of workers tell no law from another
    assert linear_strong.measured == "50% of linear at 4 workers, accelerators of 100 ms emulated"
    assert linear_strong.loses == linear_weak.loses == "below 90% of linear"
    assert list(worker_claims([strong[0]], [])) == []
    growing = [row(STRONG, n, 100.0, 10.0 * (n - 1)) for n in (1, 2, 4, 8, 16)]
    *_, communication = worker_claims(*predict_rows(growing))
    assert communication.measured.endswith("150 ms at 16") and communication.loses == "the ring's law fits better"


def test_an_emulated_worker_waits_its_part_of_the_batch_and_still_steps() -> None:
    setup = TrainingSetup(net=models.net_of("lstm-small", hidden=4, embed=4), data=None, batch_size=16)
    trainer = make_trainer(setup, "fp32", SingleRank())
    half = setup.batches(0, 2)[0]
    assert len(half["index"]) == 8 and half.global_size == 16
    assert 0.3 <= trainer.step(half, emulated_s=0.6)[0] < 0.6


def of_workers(count: int, compute: str = "100 ms") -> WorkerRow:
    times: dict[str, float] = {"examples_per_s": 576.0 * count, "step_ms": 100 / count / 0.9, "efficiency": 0.9}
    times |= {"predicted_ms": 100 / count + 10.0}
    return make_row(WorkerRow, scaling=STRONG, compute=compute, cores=2, workers=count, batch_size=64, **times)


def test_findings_leave_out_workers_that_had_no_core_of_their_own() -> None:
    rows = [of_workers(count, compute=REAL) for count in (1, 2, 8)]
    curve, note = worker_findings(rows)
    assert curve.startswith("strong scaling, compute real: 2 workers train 2 x the examples/s of one; ")
    assert note.startswith("more than 2 workers that compute share 2 cores")
    [emulated] = worker_findings([of_workers(count) for count in (1, 2, 8)])
    assert "8 workers train 8 x" in emulated and "13.9 ms a step, where the model says 22.5 ms" in emulated


def test_the_plot_has_what_was_measured_the_model_and_linear_scaling() -> None:
    [speed] = worker_panels([dataclasses.replace(of_workers(1), predicted_ms=None), of_workers(2)])
    assert [series.xs for series in speed.series] == [[1, 2], [2], [1, 2]]
    assert speed.series[2].ys == [640.0, 1280.0]


# --- exchange ------------------------------------------------------------------------------------------------


def times(step_s: float, exchange_s: float, messages: int = 3) -> dict[str, float]:
    return {"step_s": step_s, "exchange_s": exchange_s, "sent_bytes": 2e6, "messages": messages}


FOUND = {UNFUSED: times(0.3, 0.21, 86), FUSED: times(0.15, 0.03), "hierarchical": times(0.2, 0.05)}


OPTIONS = argparse.Namespace(exchange_workers=4, hosts=2, link="1gbit")


def exchange_rows(wait_ms: float, workers: int = 4) -> list[ExchangeRow]:
    options = argparse.Namespace(**vars(OPTIONS) | {"exchange_workers": workers})
    return make_rows("resnet", wait_ms, "contiguous", times(0.12, 0.01), FOUND, options)


def test_exchange_is_compared_with_each_tensor_by_itself_and_with_one_worker() -> None:
    unfused, fused, hierarchical = exchange_rows(100)
    assert (unfused.step_ratio, unfused.exchange_ratio, unfused.messages) == (1, 1, 86)
    assert fused.step_ratio == pytest.approx(2) and fused.exchange_ratio == pytest.approx(10)
    assert fused.efficiency == pytest.approx(0.8) and hierarchical.exchange_ms == pytest.approx(40)
    none = make_rows("resnet", 100, None, times(0.12, 0.04), FOUND, OPTIONS)
    assert none[1].exchange_ms == 0 and none[1].exchange_ratio is None, "no ratio of what was too short to measure"
    assert all(row.efficiency is None for row in exchange_rows(0, workers=len(os.sched_getaffinity(0)) + 1))


def test_the_claim_says_where_hierarchical_exchange_loses() -> None:
    speed, efficiency = exchange_claims(exchange_rows(100))
    assert speed.measured.startswith("a step 2.0 x") and speed.spread.startswith("exchange alone 5.0 to 10.0 x")
    where = "(hierarchical, 2 hosts, 1gbit, contiguous, compute 100 ms)"
    assert speed.loses == f"exchange takes 2.0 x as long as flat and fused {where}"
    assert efficiency.measured.startswith("80.0% at 4 workers") and efficiency.ratio is None
    assert not list(exchange_claims([exchange_rows(0, workers=99)[0]]))


# --- the command ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_studies_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["scaling", *WORKERS, "--parts", "workers", "--json", "rows.json"]) == 0
    found = json.loads((tmp_path / "rows.json").read_text())
    one, two = (row for row in found if row["part"] == "workers")
    assert {"claim", "fit"} < {row["part"] for row in found}
    assert (one["workers"], two["workers"], two["compute"]) == (1, 2, "200 ms")
    # Timed waits need no processor: two workers wait half as long each.
    assert one["step_ms"] >= 200 and two["step_ms"] >= 100
    assert two["step_ms"] == pytest.approx(two["compute_ms"] + two["sync_ms"])
    assert one["sent_mb"] == 0 < two["sent_mb"]
    assert "strong scaling, compute 200 ms: 2 workers train" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_studies_exchange_on_one_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        "scaling --parts exchange --exchange-models resnet --width 4 --exchange-workers 2 --worker-batch 16"
    )
    assert main([*arguments.split(), "--step-ms", "20", "--steps", "3", "--json", "rows.json"]) == 0
    *claims, unfused, fused = json.loads((tmp_path / "rows.json").read_text())
    assert [claim["part"] for claim in claims] == ["claim", "claim"]
    assert unfused["messages"] == 26 > fused["messages"] and unfused["placement"] is None
    assert unfused["sent_mb"] == pytest.approx(fused["sent_mb"], rel=0.1)
