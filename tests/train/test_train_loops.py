"""Loops that stop early, keep the best epoch, average weights, validate within epochs: real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import (
    LOOPS,
    STOPPING,
    checkpoint,
    finished,
    give_more_epochs,
    kill,
    of,
    own_loop,
    predictions,
    train,
    train_answered,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from ensemble.spec import EMA, SWA, EarlyStopping
from ensemble.store import RunDir, weights_sha256
from pipelines import Feeder, attach

#: "best of steps" is both of the others.
DEAR = {"compiled": pytest.mark.slow, "stopping": pytest.mark.more, "best": pytest.mark.more}


@pytest.mark.parametrize("at_ends", [False, pytest.param(True, marks=pytest.mark.more)], ids=["within", "at ends"])
@pytest.mark.parametrize("loop", [pytest.param(name, marks=DEAR.get(name, ())) for name in LOOPS])
def test_a_resume_gives_the_bits_of_an_undisturbed_training(tmp_path: Path, loop: str, at_ends: bool) -> None:
    whole = finished(tmp_path / "whole", **LOOPS[loop])
    steps = 5 * (whole["epoch"] + 1)
    for stop in (10, steps) if at_ends else (2, steps - 6):
        folder = tmp_path / str(stop)
        train(folder, inbox=cases.Script(stop, "stop"), **LOOPS[loop])
        again = finished(folder, **LOOPS[loop])
        assert again == whole, f"stopped after {stop} steps"
        assert np.array_equal(predictions(folder), predictions(tmp_path / "whole"))


@pytest.mark.parametrize("loop", ["best of steps", "ema", "swa"])
def test_a_member_that_dies_anywhere_ends_with_the_same_bits(tmp_path: Path, loop: str) -> None:
    """It goes on from its last checkpoint, which is of the end of an epoch."""
    whole = finished(tmp_path / "whole", **LOOPS[loop])
    for at in (4, 12):
        folder = tmp_path / str(at)
        kill(folder, cases.NOISY, at, **LOOPS[loop])
        again = finished(folder, job={"attempt": int(at > 6)}, **LOOPS[loop])
        assert {**again, "attempt": 0} == whole, f"died at step {at}"


def test_a_member_ends_after_epochs_without_an_improvement(tmp_path: Path) -> None:
    outcome, events = train(tmp_path, **STOPPING)
    assert outcome == "finished"
    losses = [event["metrics"]["loss"] for event in of(events, "epoch")]
    (end,) = of(events, "finished")
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 12 and end["epoch"] == best + 2
    best_of_all = {"metric": "loss", "mode": "min", "epoch": best, "step": 5, "value": losses[best]}
    assert end["early_stopping"]["best"] == best_of_all
    assert end["metrics"]["loss"] == losses[-1] and "kept" not in end, "its weights are the last"
    again = train(tmp_path, **STOPPING)
    assert of(again[1], "finished") == [end] and not of(again[1], "epoch"), "it stays ended"


def test_an_improvement_below_the_least_one_counts_for_keeping_and_not_for_going_on(tmp_path: Path) -> None:
    options = {"epochs": 12, "objective": "loss", "keep": "best", "params": {"lr": 0.002}}
    end = finished(tmp_path, cases.SMOOTH, early_stopping=EarlyStopping(3, min_delta=1.0), **options)
    assert end["epoch"] == 3, "the first epoch improves on nothing, three more improve by less than 1"
    assert end["kept"]["epoch"] == 3, "but each of them is better"


def test_weights_that_could_not_be_kept_are_said_to_be_absent(tmp_path: Path) -> None:
    loop = own_loop(lambda member, epoch: member.report(score=float("nan")))
    score: dict[str, Any] = {"objective": "score", "mode": "max"}

    def log(folder: str) -> str:
        return RunDir(tmp_path / folder).log("member-0").read_text()

    assert "kept" not in finished(tmp_path / "best", loop, keep="best", **score)
    assert "no evaluation had a finite value of the objective" in log("best")
    early = {**score, "early_stopping": EarlyStopping(1), "averaging": SWA(2)}
    assert finished(tmp_path / "swa", loop, **early)["epoch"] == 0
    assert "nothing was averaged: training ended before that began" in log("swa")
    finished(tmp_path / "both", averaging=SWA(2), keep="best", objective="loss")
    assert "nothing was averaged" not in log("both") and "no evaluation had" not in log("both")
    for first in (float("inf"), float("nan")):  # is not the best, and ends nobody
        loop = own_loop(lambda member, epoch, first=first: member.report(score=(first, 0.25, 0.5)[epoch]))
        kept = finished(tmp_path / str(first), loop, keep="best", **score)["kept"]
        assert (kept["epoch"], kept["value"]) == (2, 0.5)


def test_a_trial_that_stops_early_is_not_pruned_in_that_epoch(tmp_path: Path) -> None:
    """There is nothing left to save; its best weights would be lost."""
    options = {**STOPPING, "keep": "best"}
    alone = of(train(tmp_path / "alone", **options)[1], "epoch")
    answer = lambda epoch: "prune" if epoch >= len(alone) - 1 else "continue"  # noqa: E731
    outcome, events = train_answered(tmp_path / "gated", cases.NOISY, answer, **options)
    assert outcome == "finished"
    assert len(of(events, "epoch")) == len(alone) < 12
    assert of(events, "finished")[0]["early_stopping"] and checkpoint(tmp_path / "gated")["kept"]["is_best"]


def test_the_best_epoch_is_what_remains_of_a_member(tmp_path: Path) -> None:
    options = {"objective": "loss", "params": {"lr": 0.7}, "test": cases.data(9, seed=2)}
    best = finished(tmp_path / "best", cases.SMOOTH, epochs=8, keep="best", **options)
    last = finished(tmp_path / "last", cases.SMOOTH, epochs=8, **options)
    epoch = best["kept"]["epoch"]
    assert 0 < epoch < 7, "a case in which it overfits"
    short = finished(tmp_path / "short", cases.SMOOTH, epochs=epoch + 1, **options)
    assert best["weights_sha256"] == short["weights_sha256"] != last["weights_sha256"]
    assert best["metrics"] == short["metrics"]
    for split in ("valid", "test"):
        assert np.array_equal(predictions(tmp_path / "best", split), predictions(tmp_path / "short", split))
    saved = checkpoint(tmp_path / "best")
    assert weights_sha256(saved["model"]) == best["weights_sha256"]
    assert weights_sha256(saved["kept"]["trained"]) == last["weights_sha256"], "a resume goes on from the last"
    plain = set(checkpoint(tmp_path / "last"))
    assert "kept" not in plain and plain == set(saved) - {"kept"}, "others' checkpoints are what they were"
    # It may be of a step within an epoch.
    end = finished(tmp_path / "step", cases.SMOOTH, epochs=8, keep="best", validate_every=1, **options)
    assert end["kept"]["step"] < 5, "a case in which it is"
    stop = 6 * end["kept"]["epoch"] + end["kept"]["step"]  # a command is looked for once a step and once an epoch
    train(tmp_path / "cut", cases.SMOOTH, inbox=cases.Script(stop, "stop"), epochs=8, **options)
    assert weights_sha256(checkpoint(tmp_path / "cut")["model"]) == end["weights_sha256"]


def test_a_member_that_stops_early_leaves_the_stream_before_it_predicts(tmp_path: Path) -> None:
    """Else whoever reads the same stream would wait for it, until the feeder detaches it."""
    pipe, sizes = cases.data(), []
    with Feeder(pipe, workers=1, capacity=32, expect=1, stall_limit_s=120.0) as feeder:

        def read_late(member: Any) -> None:
            late = attach(feeder.address, pipe, batch_size=5, epochs=2, name="late")
            sizes.extend(len(batch["index"]) for batch in late)

        loop = own_loop(lambda member, epoch: member.report(loss=1.0), read_late)
        options = {"train": pipe, "valid": None, "epochs": 9, "objective": "loss"}
        finished(tmp_path, loop, job={"feeder": feeder.address}, early_stopping=EarlyStopping(1), **options)
        assert feeder.stats()["detached"] == 0
    assert sum(sizes) == 2 * cases.N


MORE: list[dict[str, Any]] = [{"averaging": EMA(0.8)}, {"averaging": SWA(2), "keep": "best", "objective": "loss"}]
MORE += [{"keep": "best", "objective": "loss", "early_stopping": EarlyStopping(6), "params": {"lr": 0.4}}]


@pytest.mark.parametrize("loop", MORE, ids=["ema", "swa", "best"])
def test_more_epochs_are_those_of_a_longer_training(tmp_path: Path, loop: dict[str, Any]) -> None:
    whole = finished(tmp_path / "whole", cases.SMOOTH, epochs=7, **loop)
    finished(tmp_path / "more", cases.SMOOTH, epochs=3, **loop)
    assert {**give_more_epochs(tmp_path / "more", cases.SMOOTH, 3, epochs=7, **loop), "attempt": 0} == whole


def average_beside(average_of: Any, from_epoch: int | None) -> Any:
    """A train function that trains as NOISY does and averages weights by torch's own class, in `loop.average`.

    It does so after each epoch from `from_epoch` on, with the statistics of the last; None: after each step.
    """

    def loop(member: Any) -> None:
        model = cases.noisy(member.params)
        optimizer = cases.optimizer(model, member.params)
        member.prepare(model, optimizer, cases.schedule(optimizer, member.params, member.steps), clip_norm=1.0)
        average = average_of(model)
        for epoch in member.epochs():
            model.train()
            for batch in member.batches():
                member.backward(cases.loss(model, batch))
                member.step()
                if from_epoch is None:
                    average.update_parameters(model)
            if from_epoch is not None and epoch >= from_epoch:
                average.update_parameters(model)
        if from_epoch is not None:
            update_bn((batch["x"] for batch in cases.data().loader(5, range(epoch, epoch + 1))), average)
        loop.average = average.module.state_dict()  # type: ignore[attr-defined]

    return loop


def check_average(folder: Path, averaging: Any, loop: Any, **options: Any) -> dict[str, Any]:
    end = finished(folder / "ours", averaging=averaging, **options)
    finished(folder / "theirs", loop, **options)
    saved = checkpoint(folder / "ours")
    assert weights_sha256(saved["model"]) == end["weights_sha256"]
    assert weights_sha256(saved["kept"]["trained"]) == weights_sha256(checkpoint(folder / "theirs")["model"])
    assert set(saved["model"]) == set(loop.average) and len(loop.average) == 9
    for name, tensor in loop.average.items():
        if tensor.is_floating_point():  # torch averages a count of batches, too
            torch.testing.assert_close(saved["model"][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    return end


def test_an_exponential_average_is_torchs(tmp_path: Path) -> None:
    # (1 + n) / (10 + n) is never below this decay
    loop = average_beside(lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.1)), None)
    check_average(tmp_path, EMA(0.1), loop, epochs=4)
    # A decay of 0.999 over 20 steps would leave 98 % of the initial weights: they are forgotten sooner.
    plain, averaged = (
        finished(tmp_path / name, cases.SMOOTH, epochs=4, averaging=name)["metrics"]["loss"]
        for name in ("none", "ema")
    )
    assert abs(averaged - plain) < 0.15


@pytest.mark.parametrize("valid", [True, False], ids=["with a validation split", "without one"])
def test_a_stochastic_average_is_torchs_with_statistics_of_its_own(tmp_path: Path, valid: bool) -> None:
    options = {"epochs": 5, **({} if valid else {"valid": None})}
    end = check_average(tmp_path, SWA(0.4), average_beside(AveragedModel, from_epoch=2), **options)
    if not valid:
        return
    model = cases.noisy({})
    model.load_state_dict(checkpoint(tmp_path / "ours")["model"])
    (batch,) = cases.data(13, seed=1).loader(13, 1)
    with torch.no_grad():
        expected = cases.loss(model.eval(), batch).mean().item()
        values = model(batch["x"][batch["index"].argsort()]).softmax(dim=1).numpy()
    assert end["metrics"]["loss"] == pytest.approx(expected, rel=1e-6), "what is evaluated is the average"
    np.testing.assert_allclose(predictions(tmp_path / "ours"), values, rtol=1e-5, atol=1e-6)


def test_a_member_is_evaluated_within_epochs(tmp_path: Path) -> None:
    plain = finished(tmp_path / "plain", epochs=3)
    outcome, events = train(tmp_path / "often", epochs=3, validate_every=2)
    assert outcome == "finished"
    # global steps 2, 4; 6, 8; 12, 14: the 10th is the last of its epoch, which ends with an evaluation anyway
    seen = [[step for step, _ in event["validations"]] for event in of(events, "epoch")]
    assert seen == [[2, 4], [1, 3], [2, 4]]
    assert set(of(events, "epoch")[0]["validations"][0][1]) == {"loss", "accuracy"}
    end = of(events, "finished")[0]
    assert {**end, "attempt": 0} == plain, "it changes no weight"
    assert "epoch 0, step 2: loss" in RunDir(tmp_path / "often").log("member-0").read_text()
