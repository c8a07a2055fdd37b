"""The study of precision: its statistics against known ones, its rows on the digits, its errors in a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks import members as bench_members
from benchmarks import models
from benchmarks.__main__ import main
from benchmarks.members import Accuracy, MemberResult, compare, declare
from benchmarks.results import flatten, interval, paired_interval
from benchmarks.training import TrainingSetup, make_trainer
from ensemble.comm import SingleRank
from ensemble.spec import Member, SpecError
from ensemble.train.job import Diverged
from pipelines.environment.machine_limits import usable_cpus

SMALL = ("--models", "lstm-small", "--train", "lstm-small", "--precisions", "fp32,bf16")
QUICK = ("--steps", "3", "--seeds", "2", "--epochs", "1", "--samples", "128", "--held-out", "64")


@given(st.lists(st.tuples(*2 * [st.floats(0, 100)]), min_size=2, max_size=12))
def test_a_paired_interval_is_scipys(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    if len({round(a - b, 6) for a, b in pairs}) == 1:
        return  # scipy divides by a deviation of 0
    found, known = paired_interval(ours, theirs), stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found is not None
    assert found.ends[1:] == pytest.approx((known.low, known.high), rel=1e-6, abs=1e-6)


def test_one_seed_has_no_interval() -> None:
    found = interval([81.5])
    assert (found.ends, str(found)) == ((81.5, None, None), "81.50")
    assert found.describe() == "+81.50 points with one seed, which says nothing; take more --seeds"
    flat = {"accuracy": 81.5, "accuracy_low": None, "accuracy_high": None}
    flat |= dict.fromkeys(("difference", "difference_low", "difference_high"))
    assert flatten(Accuracy(accuracy=found, seeds=1)) == {**flat, "seeds": 1, "note": None}


def test_precisions_are_compared_seed_by_seed() -> None:
    results = [MemberResult(accuracy) for accuracy in (80.0, 80.5, 90.0, 90.7, 70.0, 70.6)]
    found = compare(results, ["fp32", "bf16"], "fp32")
    half, full = found["bf16"], found["fp32"]
    assert half.accuracy is not None and half.accuracy.mean == pytest.approx(80.6)
    # Seeds are 10 points apart, precisions always about 0.6: that is seen only where pairs are compared.
    assert half.difference is not None and half.difference.half is not None
    assert half.difference.mean == pytest.approx(0.6) and half.difference.half < 0.3
    assert full.difference is None


def test_a_seed_that_failed_is_said_and_leaves_its_pair_out() -> None:
    failed = MemberResult(None, "the loss is inf")
    results = [MemberResult(80.0), failed, MemberResult(82.0), MemberResult(81.0)]
    found = compare(results, ["fp32", "bf16"], "fp32")["bf16"]
    assert found.accuracy is not None and found.difference is not None
    assert found.accuracy.n == found.difference.n == 1
    assert found.note == "1 of 2 seeds failed: the loss is inf"


@pytest.mark.parametrize("name", models.NETS)
def test_every_network_learns_the_digits_in_half_precision(name: str) -> None:
    small = models.net_of(name, width=4, embed=8, hidden=8)
    setup = TrainingSetup(net=small, data=None, batch_size=32)
    batches = setup.batches()
    trainer = make_trainer(setup, "bf16", SingleRank())
    before = [weight.clone() for weight in trainer.model.parameters()]
    seconds, waited = trainer.step(batches[0])
    assert 0 < waited < seconds
    assert any((a != b).any() for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_step_with_a_loss_that_is_not_finite_is_not_timed() -> None:
    setup = TrainingSetup(net=models.net_of("cnn", width=4), data=None, batch_size=32)
    trainer = make_trainer(setup, "fp32", SingleRank())
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(Diverged, match="the loss is nan"):
        trainer.step(setup.batches()[0])


def test_members_share_the_cores_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "self").symlink_to(tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")  # half a core, whatever the machine has
    monkeypatch.setattr(bench_members, "usable_cpus", lambda: usable_cpus(tmp_path, tmp_path))
    net = models.NETS["cnn"]
    data, members = models.splits(net, None, 100, 10), [Member(net.params(None)) for _ in range(2)]
    declared = declare("study", net, data.train, data.valid, members, 1)
    assert declared.resources.cpus_per_worker == 0.25  # more than there is would never be placed


def test_splits_share_no_sample() -> None:
    splits = models.splits(models.NETS["cnn-small"], None, 10_000, 10_000)
    found = [
        {batch.tobytes() for part in pipe.loader(64, epochs=1) for batch in part["image"].numpy()}
        for pipe in (splits.valid, splits.test)
    ]
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (1078, 360, 359)
    assert found[0] and found[1] and not found[0] & found[1]


@pytest.mark.skipif("ENSEMBLE_DATA" not in os.environ, reason="needs ENSEMBLE_DATA: the data sets")
def test_real_images_and_texts_come_in_the_shapes_the_networks_take() -> None:
    data = os.environ["ENSEMBLE_DATA"]
    for name, field, shape in (("cnn-small", "image", (3, 16, 16)), ("lstm-small", "text", (128,))):
        net = models.NETS[name]
        splits = models.splits(net, data, 64, 16)
        assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [64, 16, 16]
        assert splits.train.fields[field][0] == shape
        assert len(TrainingSetup(net=net, data=data, batch_size=32).batches()) == 2
    with pytest.raises(SpecError, match=r"cifar10: 60000 samples to learn from .* take fewer"):
        models.splits(models.NETS["cnn"], data, 60_000, 100)


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_precision_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["precision", *SMALL, *QUICK, "--json", "rows.json"]) == 0
    claim, full, half = json.loads((tmp_path / "rows.json").read_text())
    assert claim["claim"].endswith("here lstm-small, digits")
    assert (full["precision"], half["precision"]) == ("fp32", "bf16")
    for row in (full, half):
        assert row["samples_per_s"] == pytest.approx(1000 * row["batch_size"] / row["step_ms"])
        assert row["memory_mb"] > 0 and row["seeds"] == 2 and row["steps"] == 3
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    # A ring of two sends its gradients once, and a little more: of small tensors, and the loss.
    gradients = 4e-6 * full["parameters"]
    assert gradients <= full["exchange_mb"] < 1.05 * gradients
    assert 0.5 * gradients <= half["exchange_mb"] < 0.6 * gradients
    assert full["difference"] is None
    assert "lstm-small on digits: bf16 less fp32 is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
