"""`python -m benchmarks compression`: its words, who wins, what is said of accuracy, and small runs."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.plain_rows import make_row

from benchmarks import models
from benchmarks.__main__ import main
from benchmarks.compression.accuracy import AccuracyRow, accuracy_rows, declare_members, mean_bits, parse_schemes
from benchmarks.compression.expected import show_accuracies, winners
from benchmarks.compression.steps import StepRow
from benchmarks.emulated_net import EmulatedNet, largest_parameter
from benchmarks.members import MemberResult
from benchmarks.net_shapes import FORWARD, parameter_shapes, ready_times
from ensemble.comm import SingleRank
from ensemble.comm.gradients import GradientExchange


def test_a_word_says_whether_errors_are_fed_back() -> None:
    words = {"qsgd4": "qsgd4", "qsgd4+ef": "qsgd4+ef", "qsgd4-ef": "qsgd4", "onebit": "onebit+ef"}
    words["onebit-ef"] = "onebit"
    for word, label in words.items():
        (made,) = (options for name, options in parse_schemes("--schemes", [word]).items() if name == label)
        assert made["error_feedback"] == label.endswith("+ef")
    assert list(parse_schemes("--schemes", ["onebit", "onebit+ef", "fp16"])) == ["none", "onebit+ef", "fp16"]


@pytest.mark.parametrize(
    ("word", "bits"),
    [("none", 32), ("fp16", 16), ("qsgd4", 8 * 260 / 512), ("onebit", 2), ("powersgd", 32 * 4 * 1536 / 2**19)],
)
def test_bits_of_a_value_count_scales_and_means(word: str, bits: float) -> None:
    *_, options = parse_schemes("--schemes", [word]).values()
    assert mean_bits(options, [(1024, 512)]) == pytest.approx(bits)
    assert mean_bits(options, [(100,)]) == 32  # small ones travel as they are
    both = (bits * 2**19 + 32 * 9999) / (2**19 + 9999)
    assert mean_bits(options, [(1024, 512), (9999,)]) == pytest.approx(both)


def test_an_emulated_net_exchanges_each_gradient_once_and_takes_its_time() -> None:
    values = torch.arange(float(largest_parameter("resnet50")))
    net = EmulatedNet("resnet50", 0.05, values)
    assert [tuple(parameter.shape) for parameter in net.parameters] == parameter_shapes("resnet50")
    exchange = GradientExchange(net.parameters, SingleRank())
    net.step(exchange)
    assert all(parameter.grad is not None for parameter in net.parameters)
    grad = net.parameters[2].grad
    assert grad is not None and grad.data_ptr() == values.data_ptr()  # not copied


def test_gradients_are_ready_from_the_last_layer_to_the_first() -> None:
    ready = ready_times("resnet50")
    assert len(ready) == 161 and ready == sorted(ready, reverse=True)
    assert ready[0] == 1.0 and FORWARD < ready[-1] < FORWARD + 0.01


def step(scheme: str, step_ms: float, sent_mb: float = 100.0, **more: Any) -> StepRow:
    where = {"net": "resnet50", "device": "p100", "workers": 4, "rate": "10gbit", **more}
    return make_row(StepRow, scheme=scheme, step_ms=step_ms, sent_mb=sent_mb, **where)


def test_the_winner_is_the_fastest_without_a_published_loss() -> None:
    steps = [step("none", 300.0), step("qsgd4", 200.0, 13.0), step("powersgd+ef", 180.0, 5.0)]
    steps += [step("onebit-tensor+ef", 400.0, 110.0), step("qsgd4", 100.0, net="vgg16")]
    (row,) = winners(steps)
    assert (row.net, row.scheme, row.speedup) == ("resnet50", "qsgd4", 1.5), "of vgg16 there is no fp32"
    assert (row.fastest, row.fastest_speedup) == ("powersgd+ef", pytest.approx(300 / 180))
    (slow,) = winners([step("none", 100.0), step("qsgd2", 50.0), step("fp16", 120.0)])
    assert (slow.scheme, slow.speedup, slow.fastest) == ("none", 1.0, "qsgd2")


def of_digits() -> list[AccuracyRow]:
    net, trained = models.net_of("cnn"), parse_schemes("--schemes", ["qsgd4", "onebit-ef", "onebit"])
    percents = [90.0, 89.0, 80.0, 88.0, 91.0, 90.0, 80.5, 88.5]
    came = [*(MemberResult(percent) for percent in percents), *[MemberResult(None, "the loss is infinite")] * 4]
    return accuracy_rows(net, None, trained, came)


def test_accuracy_is_paired_by_seed_and_says_who_failed() -> None:
    by = {row.scheme: row for row in of_digits()}
    assert by["onebit"].difference is not None and by["onebit"].difference.mean == pytest.approx(-10.25)
    assert by["qsgd4"].seeds == 2
    assert by["qsgd4"].note == "1 of 3 seeds failed: the loss is infinite"
    assert by["none"].bits == 32 and by["onebit"].bits < by["qsgd4"].bits < 6
    found = show_accuracies(of_digits()).findings
    assert [line.split(",")[0] for line in found if "onebit" in line] == [
        "cnn: onebit at 2.65 bits a value less fp32 is -10.25 points"
    ]


def test_members_differ_in_what_their_gradients_travel_as_and_in_nothing_else() -> None:
    net = models.net_of("cnn-small")
    options = Namespace(data=None, seeds=2, epochs=1, samples=300, held_out=100)
    declared = declare_members(net, parse_schemes("--schemes", ["qsgd4+ef"]), options)
    made = [declared.identify(number) for number in range(4)]
    found = [(one.seed, (one.compression or {}).get("name")) for one in made]
    assert found == [(seed, name) for seed in (0, 1) for name in (None, "qsgd4")]
    assert {one.workers for one in made} == {2}
    assert made[1].compression is not None and made[1].compression["error_feedback"] is True


@pytest.mark.more
def test_a_small_run_counts_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "compression --parts steps --nets resnet50 --schemes qsgd4,onebit --workers 2 --links 10gbit"
    assert main([*arguments.split(), "--steps", "1", "--json", "rows.json"]) == 0
    made = json.loads(Path("rows.json").read_text())
    by = {row["scheme"]: row for row in made if row["part"] == "step"}
    assert list(by) == ["none", "qsgd4", "onebit+ef"]
    size = sum(math.prod(shape) for shape in parameter_shapes("resnet50"))
    assert by["none"]["sent_mb"] == pytest.approx(4 * size / 1e6, rel=0.01), "2 (n - 1) / n of fp32"
    assert by["none"]["sent_mb"] / by["qsgd4"]["sent_mb"] > 7
    assert all(row["step_ms"] >= row["alone_ms"] for row in by.values())


@pytest.mark.slow
def test_members_are_trained_in_each_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "compression --parts accuracy --train cnn --train-schemes qsgd4,onebit --seeds 1 --epochs 2"
    assert main([*arguments.split(), "--json", "rows.json"]) == 0
    made = json.loads(Path("rows.json").read_text())
    own = [row for row in made if row["part"] == "accuracy"]
    assert [row["scheme"] for row in own] == ["none", "qsgd4", "onebit+ef"]
    assert all(row["accuracy"] > 40 for row in own)
