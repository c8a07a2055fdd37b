"""`python -m benchmarks scaling`: its model of time, where SGD begins to lose, small runs on the digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import make_row

from benchmarks import models
from benchmarks.__main__ import main
from benchmarks.scaling.expected import batch_findings, batch_panels, first_loss, worker_findings, worker_panels
from benchmarks.scaling.measure import (
    LARS,
    LARS_DECAY,
    OPTIMIZERS,
    REAL,
    SGD,
    STRONG,
    WEAK,
    BatchRow,
    WorkerRow,
    best_rate,
    make_member,
    predict_step_s,
)
from benchmarks.training import TrainingSetup, make_trainer
from ensemble.bench.results import Interval
from ensemble.comm import SingleRank

WORKERS = ("--model", "lstm-small", "--hidden", "8", "--embed", "8", "--workers", "1,2", "--scalings", "strong")
WORKERS += ("--step-ms", "200", "--steps", "3")
BATCHES = ("--net", "cnn-small", "--width", "4", "--batches", "32,256", "--rates", "0.1", "--lars-rates", "1")
BATCHES += ("--epochs", "1", "--seeds", "2", "--samples", "300", "--held-out", "100")

seconds = st.floats(1e-4, 10.0)


# --- workers -------------------------------------------------------------------------------------------------


@given(seconds, st.integers(1, 100))
def test_without_communication_scaling_is_linear(compute_s: float, count: int) -> None:
    assert predict_step_s(compute_s, 0.0, count, STRONG, None) == pytest.approx(compute_s / count)
    assert predict_step_s(compute_s, 0.0, count, WEAK, None) == pytest.approx(compute_s)


@given(seconds, seconds, st.integers(1, 100), st.integers(1, 8), st.sampled_from((STRONG, WEAK)))
def test_workers_that_share_cores_are_no_faster_than_the_cores(
    compute_s: float, communication_s: float, count: int, cores: int, scaling: str
) -> None:
    shared = predict_step_s(compute_s, communication_s, count, scaling, cores)
    assert shared >= predict_step_s(compute_s, communication_s, count, scaling, None) * (1 - 1e-9)
    if count > cores:
        work = compute_s * (count if scaling == WEAK else 1)
        assert shared == pytest.approx(work / cores + communication_s)


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


# --- batches -------------------------------------------------------------------------------------------------


def test_the_best_rate_is_the_smaller_of_equals_and_never_one_that_diverged() -> None:
    assert best_rate({0.1: 50.0, 0.2: 60.0, 0.4: 60.0, 0.8: None}) == 0.2
    assert best_rate({0.1: None}) is None


def of_batch(size: int, optimizer: str, accuracy: float, edge: bool = False) -> BatchRow:
    found = Interval(accuracy, 0.4, 5)
    return make_row(BatchRow, batch_size=size, optimizer=optimizer, lr=0.1, edge=edge, grid={}, accuracy=found)


GROWING = [
    of_batch(128, SGD, 60.0),
    of_batch(256, SGD, 61.0),
    of_batch(512, SGD, 59.5),
    of_batch(512, LARS, 60.5),
    of_batch(1024, SGD, 58.0),
    of_batch(1024, LARS_DECAY, 59.0),
    of_batch(8192, SGD, 40.0),
    of_batch(8192, LARS, 50.0, edge=True),
]


def test_where_sgd_begins_to_lose_is_measured_from_its_best_smaller_batch() -> None:
    found = first_loss(GROWING)
    assert found is not None and (found[0].batch_size, found[1].batch_size) == (1024, 256)
    assert first_loss(GROWING[:4]) is None


def test_findings_name_where_sgd_loses_and_grids_that_were_too_narrow() -> None:
    assert list(batch_findings(GROWING)) == [
        "the best SGD has 61.00 ± 0.40 % at batch 256 and loses 2 points first at 1024: 58.00 ± 0.40 %",
        "the best rate is an end of its grid, a better one may lie beyond: lars at 8192 (lr 0.1)",
    ]


def test_the_plot_has_each_curve_and_the_place_where_sgd_loses() -> None:
    [accuracy] = batch_panels(GROWING)
    assert [series.name for series in accuracy.series] == [SGD, LARS, LARS_DECAY]
    assert [(mark.x, mark.y) for mark in accuracy.marks] == [(1024, 58.0)]
    [speed] = worker_panels([of_workers(count) for count in (1, 2)])
    assert speed.series[2].ys == [640.0, 1280.0]


def test_statistics_of_normalization_are_averages_over_as_many_samples_at_every_batch() -> None:
    members = [make_member(models.NETS["cnn-small"], None, SGD, batch, 0.1, 0) for batch in (32, 128, 1024, 8192)]
    assert [member.params["norm_momentum"] for member in members] == [0.025, 0.1, 0.8, 1.0]


# --- the command ---------------------------------------------------------------------------------------------


@pytest.mark.more
def test_the_command_studies_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["scaling", *WORKERS, "--parts", "workers", "--json", "rows.json"]) == 0
    one, two = json.loads((tmp_path / "rows.json").read_text())
    assert (one["workers"], two["workers"], two["compute"]) == (1, 2, "200 ms")
    # Timed waits need no processor: two workers wait half as long each.
    assert one["step_ms"] >= 200 and two["step_ms"] >= 100
    assert two["step_ms"] == pytest.approx(two["compute_ms"] + two["sync_ms"])
    assert one["sent_mb"] == 0 < two["sent_mb"]
    assert "strong scaling, compute 200 ms: 2 workers train" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_studies_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["scaling", *BATCHES, "--parts", "batches", "--json", "rows.json", "--plot", "plot.html"]) == 0
    found = json.loads((tmp_path / "rows.json").read_text())
    expected = [(batch, name, steps) for batch, steps in ((32, 10), (256, 2)) for name in OPTIMIZERS]
    assert [(row["batch_size"], row["optimizer"], row["steps"]) for row in found] == expected
    for row in found:
        assert 0 <= row["accuracy"] <= 100 and row["seeds"] == 2 and row["edge"]
        assert str(row["lr"]) in row["grid"]
        assert (row["difference"] is None) == (row["optimizer"] == "sgd")
    assert b"plotly" in (tmp_path / "plot.html").read_bytes()
