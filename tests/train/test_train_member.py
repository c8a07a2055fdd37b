"""Members with one worker, trained in this process: events, ends, resumes; early stops, kept epochs, averages."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit import loop_cases
from kit import train_child as cases
from kit.checkpoints import newest_checkpoint
from kit.loop_cases import (
    LOOPS,
    STOPPING,
    Events,
    checkpoint,
    failed,
    finished,
    give_more_epochs,
    kill,
    of,
    own_loop,
    predictions,
    train_answered,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from ensemble.spec import EMA, SWA, Bootstrap, EarlyStopping, Folds, Recipe
from ensemble.store import RunDir, weights_sha256
from ensemble.train import lifecycle
from pipelines import Feeder, Pipeline, attach, sources, weights


def train(folder: Path, recipe: Any = cases.SMOOTH, *given: Any, **options: Any) -> tuple[str, Events]:
    return loop_cases.train(folder, recipe, *given, **options)


def failure(outcome: str, events: Events) -> str:
    return str(failed(outcome, events)["error"])


def raising(model: Any, batch: Any) -> Any:
    raise RuntimeError("nothing\nmore")


RAISING = Recipe(model=cases.plain, loss=raising, task="classification")


def test_what_is_told_of_a_training(tmp_path: Path) -> None:
    outcome, events = train(tmp_path)
    assert outcome == "finished"
    types = [e["type"] for e in events if e["type"] not in ("usage", "progress", "first_outputs", "remark")]
    assert types == ["started", *["epoch", "checkpoint"] * 3, "finished"]
    (started,), epoch = of(events, "started"), of(events, "epoch")[1]
    assert (started["epoch"], started["step"], started["first_epoch"]) == (0, 0, 0)
    assert (epoch["epoch"], epoch["step"], epoch["samples"], epoch["skipped_steps"]) == (1, 5, 23, 0)
    assert set(epoch["metrics"]) == {"loss", "accuracy", "margin"}
    assert epoch["private_batches"] == 5 and epoch["shared_batches"] == 0 and epoch["lr"] == 0.05
    checkpoint, finished = of(events, "checkpoint")[-1], of(events, "finished")[0]
    assert (checkpoint["epoch"], checkpoint["step"]) == (3, 0)
    assert checkpoint["weights_sha256"] == finished["weights_sha256"]
    assert finished["metrics"] == of(events, "epoch")[-1]["metrics"]
    log = RunDir(tmp_path).log("member-0").read_text()
    assert "started" in log and "finished" in log
    for role in ("startup", "train", "prepare"):
        used = [e["cpu_s"] for e in of(events, "usage") if e["role"] == role]
        assert used == sorted(used) and used[-1] > 0
    again = train(tmp_path)[1]
    assert of(again, "finished") == [finished] and not of(again, "epoch"), "started again it only says so"


def test_a_member_trains_where_no_log_can_be_written_and_a_last_batch_is_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDir(tmp_path).log("member-0").mkdir(parents=True)
    norm = replace(RAISING, loss=cases.loss, model=cases.noisy)
    events = train(tmp_path, norm, train=cases.data(11), epochs=5, checkpoint_every=2)[1]
    assert [e["epoch"] for e in of(events, "checkpoint")] == [2, 4, 5] and of(events, "finished")
    assert of(events, "epoch")[0]["samples"] == 11, "the last through batch normalization"
    assert "cannot write" in capsys.readouterr().err


def test_a_checkpoint_is_written_after_epochs_that_end_late_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that is killed trains again what was trained since; it comes to the same bits."""
    whole = finished(tmp_path / "whole", checkpoint_every=None)
    for save_every_s, epochs in ((0.0, [1, 2]), (3600.0, [])):
        monkeypatch.setattr("ensemble.train.lifecycle.SAVE_EVERY_S", save_every_s)
        path = tmp_path / f"{save_every_s}"
        events = loop_cases.kill(path, cases.NOISY, lambda event: event.get("epoch") == 2, checkpoint_every=None)
        assert [event["epoch"] for event in of(events, "checkpoint")] == epochs
        again = train(path, cases.NOISY, attempt=1, checkpoint_every=None)[1]
        assert of(again, "started")[0]["epoch"] == len(epochs)
        assert of(again, "finished")[0]["weights_sha256"] == whole["weights_sha256"]


def test_checkpoints_within_epochs_are_minutes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]

    def take_20_s(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        seconds[0] += 20 * model.training
        return cases.loss(model, batch)

    monkeypatch.setattr("ensemble.train.lifecycle.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    events = train(tmp_path, replace(RAISING, loss=take_20_s), checkpoint_minutes=1.0)[1]
    assert [(event["epoch"], event["step"]) for event in of(events, "checkpoint")][:3] == [(0, 3), (1, 0), (1, 3)]


def test_a_checkpoint_is_written_within_an_epoch_when_it_is_due(tmp_path: Path) -> None:
    """A member that dies then does the step in progress again, and no other; it comes to the same bits."""
    whole = finished(tmp_path / "whole", checkpoint_minutes=None)

    def is_due(event: dict[str, Any]) -> bool:
        return event["type"] == "checkpoint" and (event["epoch"], event["step"]) == (1, 3)

    events = loop_cases.kill(tmp_path / "killed", cases.NOISY, is_due, checkpoint_minutes=1e-9)
    written = [(e["epoch"], e["step"]) for e in of(events, "checkpoint")]
    assert written == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 3)]
    outcome, again = train(tmp_path / "killed", cases.NOISY, attempt=1, checkpoint_minutes=1e-9)
    (started,) = of(again, "started")
    assert outcome == "finished" and (started["epoch"], started["step"]) == (1, 3)
    assert of(again, "finished")[0] == {**whole, "attempt": 1}


def test_the_size_of_a_large_checkpoint_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "LARGE_BYTES", 1)
    _, events = train(tmp_path, cases.NOISY)
    written = [number for number, event in enumerate(events) if event["type"] == "checkpoint"]
    sizes = [events[number - 1]["saves_bytes"] for number in written]
    assert len(written) > 1 and 0 < sizes[-1] < Path(events[written[-1]]["path"]).stat().st_size


@pytest.mark.parametrize("averaging", [pytest.param("none", marks=pytest.mark.more), "ema"])
def test_a_member_is_stopped_in_its_evaluation_and_goes_on_with_it(tmp_path: Path, averaging: str) -> None:
    """The third batch of the evaluations: 3 batches within the epoch, 3 at its end, 3 for predictions after it."""
    options = {"epochs": 1, "validate_every": 2, "averaging": averaging}
    whole = finished(tmp_path / "whole", **options)
    seen = []
    for n in range(1, 30):
        folder = tmp_path / str(n)
        outcome, events = train(folder, cases.NOISY, cases.Script(n, "stop", in_evaluation=True), **options)
        if outcome == "finished":
            break
        assert outcome == "stopped", events[-1]
        seen.append((of(events, "stopped")[0]["epoch"], of(events, "stopped")[0]["step"]))
        outcome, again = train(folder, cases.NOISY, attempt=1, **options)
        assert outcome == "finished" and of(again, "finished")[0] == {**whole, "attempt": 1}, (n, again)
        assert [e["samples"] for e in of([*events, *again], "epoch")] == [23], n
    assert seen.count((0, 2)) == 1 + 3 and seen.count((0, 4)) == 1 + 3 and seen.count((0, 5)) == 3, seen


def test_a_pruner_ends_a_member_between_epochs(tmp_path: Path) -> None:
    def train_answered(folder: str, *answers: str, attempt: int = 0) -> tuple[str, Events]:
        answer = answers.__getitem__
        return loop_cases.train_answered(tmp_path / folder, cases.SMOOTH, answer, attempt)

    outcome, events = train_answered("pruned", "continue", "prune")
    assert outcome == "pruned" and of(events, "pruned")[0]["epoch"] == 1 and len(of(events, "epoch")) == 2
    assert len(of(events, "checkpoint")) == 1, "none is written for the member that is given up"
    outcome, events = train_answered("stopped", "continue", "stop")
    (end,) = of(events, "stopped")
    assert (outcome, end["epoch"], end["step"]) == ("stopped", 2, 0) and len(of(events, "epoch")) == 2
    outcome, events = train_answered("stopped", "", "", "continue", attempt=1)
    assert outcome == "finished" and [e["epoch"] for e in of(events, "epoch")] == [2]


@pytest.mark.parametrize(("command", "outcome"), [("cancel", "cancelled"), ("prune", "pruned")])
def test_a_member_ends_at_once_without_a_checkpoint(tmp_path: Path, command: str, outcome: str) -> None:
    ended, events = train(tmp_path, inbox=cases.Script(2, command))
    assert ended == outcome and of(events, outcome)
    assert newest_checkpoint(RunDir(tmp_path), "member-0", 0) is None


def test_a_member_that_cannot_be_saved_says_so_and_goes_on_once_it_can(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")
    path = RunDir(tmp_path / "full").checkpoint("member-0", 0, 1, 0)

    def loss(model: Any, batch: Any) -> Any:
        path.mkdir(parents=True, exist_ok=True)  # what is to be a file cannot be written then
        return cases.loss(model, batch)

    end = failed(*train(tmp_path / "full", replace(cases.NOISY, loss=loss, task="classification")))
    assert f"cannot write {path}" in end["error"] and (end["reason"], end["retry"]) == ("disk", False)
    path.rmdir()
    again = finished(tmp_path / "full", job={"attempt": 1})
    assert again["weights_sha256"] == whole["weights_sha256"]


def test_a_resume_tells_the_last_epoch_again_with_its_start(tmp_path: Path) -> None:
    first = train(tmp_path, inbox=cases.Script(8, "stop"))[1]
    assert "last_epoch" not in of(first, "started")[0]
    (epoch,) = of(first, "epoch")
    last_epoch = {name: value for name, value in epoch.items() if name not in ("type", "member", "attempt")}
    (started,) = of(train(tmp_path, attempt=1)[1], "started")
    assert (started["epoch"], started["step"], started["last_epoch"]) == (1, 2, last_epoch)


def test_a_checkpoint_of_another_identity_or_of_other_data_is_refused(tmp_path: Path) -> None:
    train(tmp_path, inbox=cases.Script(3, "stop"))
    for options, *parts in (
        ({"params": {"lr": 0.1}, "seed": 5}, "another identity", "lr", "seed was 0, is 5"),
        ({"train": cases.data(24)}, "samples of train was 23, is 24", "was trained on other data"),
        ({"drop_last": True}, "drop_last was False, is True", "was trained on other data"),
        ({"train": cases.data(seed=1)}, "the training pipeline has changed", "other data"),
        ({"train": cases.data().map(lambda sample: sample)}, "the training pipeline has changed", "other data"),
    ):
        refused = failure(*train(tmp_path, attempt=1, **options))
        assert all(part in refused for part in parts), refused
    # It is left as it was; what a member asks of a node may change.
    more = replace(cases.declare(cases.SMOOTH, 1).identify(0), cpus_per_worker=0.5)
    assert train(tmp_path, attempt=1, job={"identity": more})[0] == "finished"


def test_training_does_not_depend_on_the_process_and_leaves_it_alone(tmp_path: Path) -> None:
    digests = [finished(tmp_path / "other", cases.SMOOTH, seed=1)["weights_sha256"]]
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_num_threads(), torch.get_rng_state(), random.getstate()
        digests.append(finished(tmp_path / str(seed), cases.NOISY)["weights_sha256"])
        assert torch.get_num_threads() == before[0] and random.getstate() == before[2]
        assert torch.equal(torch.get_rng_state(), before[1])
    assert digests[0] != digests[1] == digests[2]


@pytest.mark.parametrize(
    "weights",
    ["uniform", "balanced", *(pytest.param(given, marks=pytest.mark.more) for given in ("bootstrap", Folds(3)))],
)
def test_a_feeder_gives_the_same_weights(tmp_path: Path, weights: Any) -> None:
    alone = finished(tmp_path / "alone", weights=weights)
    with Feeder(cases.data(), workers=1, capacity=64, expect=1) as feeder:
        # the feeder says where the member joins, and was not given the validation set
        identity = cases.declare(cases.NOISY, 1, weights=weights).identify(0)
        job = {"feeder": feeder.address, "identity": replace(identity, first_epoch=None)}
        outcome, events = train(tmp_path / "fed", cases.NOISY, job=job, valid=None, weights=weights)
    assert outcome == "finished" and of(events, "finished")[0]["weights_sha256"] == alone["weights_sha256"]
    assert of(events, "started")[0]["first_epoch"] == 0
    assert sum(e["shared_batches"] for e in of(events, "epoch")) == 15


def test_a_held_out_sample_teaches_nothing_and_validation_is_unweighted(tmp_path: Path) -> None:
    """Without dropout and batch normalization, weight 0 is absence: labels of the held-out fold are any."""
    held_out = weights.fold(cases.N, 4, 0, seed=0)(np.arange(cases.N)) == 0
    columns, ends = cases.data().source.columns, []
    for shift in (0, 1):
        labels = np.where(held_out, (columns["label"] + shift) % cases.CLASSES, columns["label"])
        pipe = Pipeline(sources.arrays(x=columns["x"], label=labels))
        ends.append(finished(tmp_path / str(shift), cases.SMOOTH, train=pipe, valid=pipe, weights=Folds(4)))
    one, other = ends
    assert one["weights_sha256"] == other["weights_sha256"], "the same model"
    assert one["metrics"]["loss"] != other["metrics"]["loss"], "judged by all samples alike"
    unweighted = finished(tmp_path / "all", cases.SMOOTH, train=Pipeline(sources.arrays(**columns)), valid=None)
    assert unweighted["weights_sha256"] != one["weights_sha256"]


def test_a_gradient_is_of_the_weighted_losses_over_the_true_size(tmp_path: Path) -> None:
    steps = 0

    def one_step(member: Any) -> None:
        nonlocal steps
        model = cases.plain(member.params)
        model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        fresh = copy.deepcopy(model)
        for _ in member.epochs():
            for batch in member.batches():
                member.backward(cases.loss(model, batch))
                member.step()
                own = weights.bootstrap(5)(batch["index"].numpy())
                assert batch["weight"].tolist() == own.tolist()
                (cases.loss(fresh, batch) * batch["weight"]).sum().div(len(own)).backward()
                for trained, before in zip(model.parameters(), fresh.parameters(), strict=True):
                    torch.testing.assert_close(trained.detach(), before.detach() - before.grad)
                steps += 1

    finished(tmp_path, one_step, weights=Bootstrap(5), epochs=1, batch_size=cases.N, valid=None)
    assert steps == 1


def test_a_stream_epoch_that_is_not_0_is_gone_on_from(tmp_path: Path) -> None:
    def trained(folder: str, first_epoch: int, *stops: int | None) -> str:
        identity = replace(cases.declare(cases.NOISY, 1).identify(0), first_epoch=first_epoch)
        for attempt, steps in enumerate(stops):
            inbox, job = cases.Script(steps, "stop"), {"identity": identity}
            events = train(tmp_path / folder, cases.NOISY, inbox, attempt, job=job)[1]
        return str(of(events, "finished")[0]["weights_sha256"])

    late = trained("late", 4, None)
    assert trained("late-stopped", 4, 8, None) == late != trained("early", 0, None)


@pytest.mark.filterwarnings("ignore:left out")
def test_skipped_records_are_left_out_of_the_mean(tmp_path: Path) -> None:
    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 0 and sample["x"][1] < -0.5:
            raise ValueError("unreadable")
        return sample

    pipe = Pipeline(cases.data().source, on_error="skip", max_skipped=1.0).map(broken, id="broken")
    bad = sum(bool(s["label"] == 0 and s["x"][1] < -0.5) for s in (pipe.source[i] for i in range(len(pipe))))
    outcome, events = train(tmp_path, train=pipe)
    assert outcome == "finished" and bad > 0
    assert [e["samples"] for e in of(events, "epoch")] == [cases.N - bad] * 3
    assert [e["private_skipped"] for e in of(events, "epoch")] == [bad] * 3, "it has prepared them itself"


def test_what_nobody_reads_of_the_hyperparameters_is_told(tmp_path: Path) -> None:
    function = loop_cases.own_loop(lambda member, epoch: member.params["lr"])
    for number, recipe in enumerate((replace(RAISING, loss=cases.loss), function)):
        _, events = train(tmp_path / str(number), recipe, params={"momentun": 0.9}, epochs=3)
        assert [event["params"] for event in of(events, "unused_hyperparameters")] == [["momentun"]]


def test_an_exception_is_told_in_one_line_and_traced_in_the_log(tmp_path: Path) -> None:
    end = failed(*train(tmp_path, RAISING))
    assert "\n" not in end["error"] and end["retry"] and end["reason"] == "error"
    assert "Traceback" in RunDir(tmp_path).log("member-0").read_text()


def test_an_except_clause_of_the_user_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    def stubborn(member: Any) -> None:
        model = cases.plain(member.params)
        member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in (batch for _ in member.epochs() for batch in member.batches()):
            try:
                member.backward(cases.loss(model, batch))
                member.step()
            except Exception:
                pytest.fail("the request to stop was taken for an error")

    assert train(tmp_path, stubborn, cases.Script(2, "stop"))[0] == "stopped"


#: "best of steps" is both of the others.
DEAR = {"compiled": pytest.mark.slow, "stopping": pytest.mark.more, "best": pytest.mark.more}


@pytest.mark.parametrize("at_ends", [False, pytest.param(True, marks=pytest.mark.more)], ids=["within", "at ends"])
@pytest.mark.parametrize("loop", [pytest.param(name, marks=DEAR.get(name, ())) for name in LOOPS])
def test_a_resume_gives_the_bits_of_an_undisturbed_training(tmp_path: Path, loop: str, at_ends: bool) -> None:
    whole = finished(tmp_path / "whole", **LOOPS[loop])
    steps = 5 * (whole["epoch"] + 1)
    for stop in (10, steps) if at_ends else (2, steps - 6):
        folder = tmp_path / str(stop)
        loop_cases.train(folder, inbox=cases.Script(stop, "stop"), **LOOPS[loop])
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
    outcome, events = loop_cases.train(tmp_path, **STOPPING)
    assert outcome == "finished"
    losses = [event["metrics"]["loss"] for event in of(events, "epoch")]
    (end,) = of(events, "finished")
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 12 and end["epoch"] == best + 2
    best_of_all = {"metric": "loss", "mode": "min", "epoch": best, "step": 5, "value": losses[best]}
    assert end["early_stopping"]["best"] == best_of_all
    assert end["metrics"]["loss"] == losses[-1] and "kept" not in end, "its weights are the last"
    again = loop_cases.train(tmp_path, **STOPPING)
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
    alone = of(loop_cases.train(tmp_path / "alone", **options)[1], "epoch")
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
    loop_cases.train(tmp_path / "cut", cases.SMOOTH, inbox=cases.Script(stop, "stop"), epochs=8, **options)
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
    outcome, events = loop_cases.train(tmp_path / "often", epochs=3, validate_every=2)
    assert outcome == "finished"
    # global steps 2, 4; 6, 8; 12, 14: the 10th is the last of its epoch, which ends with an evaluation anyway
    seen = [[step for step, _ in event["validations"]] for event in of(events, "epoch")]
    assert seen == [[2, 4], [1, 3], [2, 4]]
    assert set(of(events, "epoch")[0]["validations"][0][1]) == {"loss", "accuracy"}
    for epoch, ended in enumerate(of(events, "epoch")):
        within = events[: events.index(ended)]  # each is reported when it happens, not with the epoch
        reported = [e for e in within if e["type"] == "progress" and "metrics" in e and e["epoch"] == epoch]
        assert [[e["step"], e["metrics"]] for e in reported] == ended["validations"]
        assert {e["steps"] for e in reported} == {5}
    end = of(events, "finished")[0]
    assert {**end, "attempt": 0} == plain, "it changes no weight"
    assert "epoch 1, step 2: loss" in RunDir(tmp_path / "often").log("member-0").read_text()
