"""Loops that compute their own steps: what they read of `member.dataloader` says where the member is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import checkpoint, failed, finished, kill, nothing_more, of, predictions, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ensemble.spec import EMA, EarlyStopping, Folds, Recipe
from ensemble.train import Inbox
from ensemble.train.call import Observation
from pipelines import weights

EPOCHS = 5
OPTIONS: dict[str, Any] = {"epochs": EPOCHS, "objective": "loss"}


def measure(model: nn.Module, batches: Any) -> float:
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y, reduction="none") for x, y in batches]
    return float(torch.cat(losses).mean())


def script(use: Any = lambda member, epoch: None, epochs: int = EPOCHS) -> Callable[[Any], None]:
    def loop(member: Any) -> None:
        model = cases.noisy(member.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        member.prepare(model, optimizer)
        member.state("schedule", schedule)
        member.state("averaged", averaged)
        batches = {split: member.dataloader(split, fields=("x", "label")) for split in ("train", "valid")}
        for epoch in range(epochs):
            model.train()
            for x, y in batches["train"]:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                averaged.update_parameters(model)
            schedule.step()
            member.report(loss=measure(model, batches["valid"]), averaged=measure(averaged, batches["valid"]))
            use(member, epoch)
        member.predict_all()

    return loop


def recipe(loop: Callable[[Any], None]) -> Recipe:
    return Recipe(model=cases.noisy, train=loop)


def loop_of(
    before: Callable[[Any, Any], None] = nothing_more,
    after_epoch: Callable[[Any, int], None] = nothing_more,
    at_the_end: Callable[[Any], None] = nothing_more,
    read: Callable[[Any], Any] = lambda member: member.dataloader("train"),
) -> Callable[[Any], None]:
    def loop(member: Any) -> None:
        model = cases.noisy(member.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        member.prepare(model, optimizer)
        before(member, optimizer)
        for epoch in range(member.identity.epochs):
            for batch in read(member):
                optimizer.zero_grad()
                cases.loss(model, batch).mean().backward()
                optimizer.step()
            after_epoch(member, epoch)
        at_the_end(member)

    return loop


def test_a_loop_of_its_own_trains_what_the_member_s_loop_does(tmp_path: Path) -> None:
    def own(member: Any) -> None:
        model = cases.noisy(member.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        member.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5))
        for _ in member.epochs():
            model.train()
            for batch in member.batches():
                member.backward(cases.loss(model, batch))
                member.step()
            member.report(**member.evaluate(lambda model, batch: {"loss": cases.loss(model, batch)}))
        member.predict_all()

    seen: list[int] = []

    def hook(member: Any, epoch: int) -> None:
        """An epoch can be ended where a framework's hook is: the end of the pass is no second one."""
        member.end_epoch()
        seen.append(member.position["epoch"])

    loops = {"passes": script(), "own": own, "hook": script(hook)}
    ends = {name: finished(tmp_path / name, recipe(loop), **OPTIONS) for name, loop in loops.items()}
    assert ends["hook"] == ends["passes"] and seen == [1, 2, 3, 4, 5]
    losses = [ends[name]["metrics"]["loss"] for name in ("passes", "own")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "up to the last bits of a mean"
    np.testing.assert_allclose(predictions(tmp_path / "passes"), predictions(tmp_path / "own"), atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"keep": "best"}, {"averaging": EMA(0.8)}], ids=["last", "best", "averaged"]
)
def test_a_loop_that_counts_from_0_ends_with_the_same_bits_wherever_it_dies(tmp_path: Path, options: Any) -> None:
    """Schedule and averaged weights, too, which its passes over trained epochs have stepped once more."""
    chosen, loop = {**OPTIONS, **options}, recipe(script())
    whole = finished(tmp_path / "whole", loop, **chosen)
    for at in (3, 7, 5 * EPOCHS - 1):
        folder = tmp_path / str(at)
        before = kill(folder, loop, at, **chosen)
        done = len(of(before, "checkpoint"))
        outcome, events = train(folder, loop, attempt=int(done > 0), **chosen)
        assert outcome == "finished"
        (again,) = of(events, "finished")
        assert {**again, "attempt": 0} == whole, f"died at poll {at}"
        epochs = [event["epoch"] for event in of(events, "epoch")]
        assert epochs == list(range(done, EPOCHS)), "reports of epochs that were trained before are left out"


def test_a_member_that_is_stopped_within_an_epoch_begins_it_anew(tmp_path: Path) -> None:
    loop = recipe(script())
    whole = finished(tmp_path / "whole", loop, **OPTIONS)
    outcome, events = train(tmp_path / "again", loop, inbox=cases.Script(7, "stop"), **OPTIONS)
    assert outcome == "stopped" and of(events, "stopped")
    position = checkpoint(tmp_path / "again")["position"]
    assert (position["epoch"], position["step"]) == (1, 0)
    assert finished(tmp_path / "again", loop, **OPTIONS) == whole


def test_a_pruner_ends_it_after_an_epoch(tmp_path: Path) -> None:
    class Pruner(Inbox):
        def wait(self) -> Any:
            return "prune"

    seen: list[int] = []
    loop = recipe(script(lambda member, epoch: seen.append(epoch)))
    outcome, events = train(tmp_path, loop, Pruner(), job={"awaits_pruner": True}, **OPTIONS)
    assert outcome == "pruned" and seen == [0], "the next pass is where it learns of it"
    assert [event["epoch"] for event in of(events, "epoch")] == [0]


def swa(crash: list[bool], stops: bool = False) -> Recipe:
    """Averages the weights once an epoch, also in passes that are empty, and reports what it sees."""
    averaged: list[Any] = []
    seen: list[int] = []

    def before(member: Any, optimizer: Any) -> None:
        averaged[:] = [AveragedModel(member.model)]
        member.state("averaged", averaged[0])

    def read(member: Any) -> Any:
        seen.clear()
        for batch in member.dataloader("train"):
            seen.append(len(batch["x"]))
            yield batch

    def after_epoch(member: Any, epoch: int) -> None:
        averaged[0].update_parameters(member.model)
        member.report(loss=float(sum(seen)))
        if stops and epoch == 1:
            member.stop("enough")

    def at_the_end(member: Any) -> None:
        if crash and crash.pop():
            raise RuntimeError("after the loop")
        member.use_weights(averaged[0].module)
        assert averaged[0].n_averaged == (2 if stops else EPOCHS)
        member.predict_all(lambda model, batch: model(batch["x"]).softmax(1))

    return recipe(loop_of(before, after_epoch, at_the_end, read))


def test_what_a_loop_does_in_empty_passes_is_undone(tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole", swa([]), **OPTIONS)
    again = swa([True])
    assert train(tmp_path / "again", again, **OPTIONS)[0] == "failed"
    outcome, events = train(tmp_path / "again", again, attempt=1, **OPTIONS)
    assert outcome == "finished"
    assert {**of(events, "finished")[0], "attempt": 0} == whole, "after the last epoch"
    stopped = finished(tmp_path / "stopped", swa([], stops=True), **OPTIONS)
    assert stopped["metrics"]["loss"] == whole["metrics"]["loss"] > 0, "empty passes report nothing"


def predicting(change: Callable[[Any], Any], **options: Any) -> Recipe:
    loop = loop_of(
        after_epoch=lambda member, epoch: member.report(loss=0.0),
        at_the_end=lambda member: member.predict_all(lambda model, batch: change(model(batch["x"]))),
    )
    return Recipe(model=cases.noisy, train=loop, **options)


softmax, third = lambda scores: scores.softmax(1), lambda scores: (scores / 3).softmax(1)
drop = lambda scores: nn.functional.dropout(scores).softmax(1)  # noqa: E731


@pytest.mark.parametrize(
    ("change", "declared", "is_other"),
    [(softmax, None, False), (third, None, True), (third, softmax, True), (drop, None, True), (drop, drop, False)],
)
def test_predictions_that_no_loaded_model_would_make_are_told(
    tmp_path: Path, change: Any, declared: Any, is_other: bool
) -> None:
    options = {"predict": lambda model, batch: declared(model(batch["x"]))} if declared else {}
    outcome, events = train(tmp_path, predicting(change, **options), **OPTIONS)
    assert outcome == "finished" and len(predictions(tmp_path))
    remarks = [event["text"] for event in of(events, "remark")]
    assert any("declare the function as Recipe.predict" in text for text in remarks) == is_other
    seen = Observation.from_checkpoint(checkpoint(tmp_path))
    reason = None if seen is None else seen.reason
    assert (reason is not None and "none can be loaded" in reason) == is_other
    assert seen is None or is_other or seen.reason is None


def test_it_stops_early_by_itself_and_by_the_objective(tmp_path: Path) -> None:
    def stop(member: Any, epoch: int) -> None:
        if epoch == 1:
            member.stop("good enough")

    end = finished(tmp_path / "stop", recipe(script(stop)), **OPTIONS)
    assert end["epoch"] == 1 and end["early_stopping"]["reason"] == "good enough"
    end = finished(tmp_path / "left", recipe(script(epochs=2)), **OPTIONS)
    assert end["epoch"] == 1 and "left" in end["early_stopping"]["reason"]
    patient = {**OPTIONS, "epochs": 12, "early_stopping": EarlyStopping(1, min_delta=1.0)}
    end = finished(tmp_path / "early", recipe(script(epochs=12)), **patient)
    assert end["epoch"] == 1 and end["early_stopping"]["patience"] == 1


def test_batches_stay_valid_and_have_the_shape_that_is_asked_for(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def read(member: Any) -> Any:
        loader = member.dataloader("train", fields={"inputs": "x", "labels": "label"})
        seen["train"] = list(loader)
        seen["len"] = len(loader), len(member.dataloader("valid"))
        seen["valid"] = list(member.dataloader("valid"))
        seen["tuples"] = list(member.dataloader("valid", fields=("label", "x")))
        return ()

    finished(tmp_path, loop_of(read=read), **{**OPTIONS, "epochs": 1})
    assert seen["len"] == (len(seen["train"]), len(seen["valid"]))
    assert all(set(batch) == {"inputs", "labels"} for batch in seen["train"])
    rows = torch.cat([batch["inputs"] for batch in seen["train"]])
    assert len(rows.unique(dim=0)) == len(rows), "no batch lies where another was"
    indices = torch.cat([batch["index"] for batch in seen["valid"]])
    assert torch.equal(indices, torch.arange(len(indices)))
    assert all(torch.equal(one["x"], two[1]) for one, two in zip(seen["valid"], seen["tuples"], strict=True))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_with_folds_it_reads_each_other_sample_once_and_no_empty_batch(tmp_path: Path, batch_size: int) -> None:
    """A loop with one loss a batch; also where the last batches of an epoch are empty, and it reads no further."""
    kept = set(np.flatnonzero(weights.fold(cases.N, 4, 0, seed=0)(np.arange(cases.N))).tolist())
    seen: list[list[int]] = []

    def read(member: Any) -> Any:
        seen.append([])
        batches = iter(member.dataloader("train"))
        while len(seen[-1]) < len(kept):
            batch = next(batches)
            assert 0 < len(batch["index"]) == batch.global_size <= batch_size
            seen[-1] += batch["index"].tolist()
            yield batch

    loop = loop_of(at_the_end=lambda member: member.predict_all(), read=read)
    outcome, events = train(tmp_path, recipe(loop), weights=Folds(4), batch_size=batch_size, epochs=2)
    assert outcome == "finished", events[-1]
    assert all(set(epoch) == kept and len(epoch) == len(kept) for epoch in seen) and seen[0] != seen[1]
    assert [event["samples"] for event in of(events, "epoch")] == [len(kept)] * 2


def test_a_state_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    def register(name: str) -> Callable[[Any], None]:
        return loop_of(lambda member, optimizer: member.state(name, torch.optim.lr_scheduler.StepLR(optimizer, 1)))

    train(tmp_path, register("a"), inbox=cases.Script(7, "stop"), **OPTIONS)
    assert "has no such state" in failed(*train(tmp_path, register("b"), **OPTIONS))["error"]


def test_a_function_without_a_recipe_may_say_how_it_predicts(tmp_path: Path) -> None:
    for name, predict in (("none", None), ("given", lambda model, batch: model(batch["x"]).softmax(1))):
        loop = loop_of(at_the_end=lambda member, predict=predict: member.predict_all(predict))
        assert "valid" in finished(tmp_path / name, loop, **OPTIONS)["predictions"]
        np.testing.assert_allclose(predictions(tmp_path / name).sum(axis=1), 1.0, rtol=1e-5)
