"""Train functions: what the built-in loop has, early ends, weights handed over, loops that step by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import (
    STOPPING,
    Events,
    checkpoint,
    failed,
    finished,
    give_more_epochs,
    kill,
    nothing_more,
    of,
    predictions,
    train,
)
from kit.loop_cases import own_loop as plain_loop
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from ensemble.reporting.sections.notices import describe_early_stop
from ensemble.spec import EMA, SWA, EarlyStopping, Folds, Member, Recipe
from ensemble.store import RunDir, load_predictions, weights_sha256
from ensemble.train import Inbox, work
from pipelines import Pipeline, sources, weights


def own_loop(member: Any) -> None:
    """What NOISY says, with all that a loop may have, as a script would write it."""
    model = cases.noisy(member.params)
    optimizer = cases.optimizer(model, member.params)
    schedule = cases.schedule(optimizer, member.params, member.steps)
    model, optimizer = member.prepare(model, optimizer, schedule, clip_norm=1.0)

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = model(batch["x"])
        losses = nn.functional.cross_entropy(outputs, batch["label"], reduction="none")
        return {"loss": losses, "accuracy": (outputs.argmax(dim=1) == batch["label"]).double()}

    member.validate_with(measure)
    for _ in member.epochs():
        model.train()
        for batch in member.batches():
            mixed = member.mixup(batch)
            with member.autocast():
                outputs = model(mixed["x"])
                losses = mixed.losses(lambda y: nn.functional.cross_entropy(outputs, y, reduction="none"))  # noqa: B023
            member.backward(losses)
            member.step()
        member.report(**member.evaluate(measure))
    with member.evaluating():
        rows = [(model(batch["x"]).softmax(dim=1), batch["index"].clone()) for batch in member.batches("valid")]
    member.predictions("valid", *map(torch.cat, zip(*rows, strict=True)))


COMPILED = {"epochs": 3, "averaging": "ema", "compile": {"name": "default", "backend": "aot_eager"}}


@pytest.mark.parametrize(
    "options",
    [
        {**STOPPING, "keep": "best", "validate_every": 2},
        {"epochs": 5, "averaging": SWA(0.4), "mixup": 0.3},
        pytest.param(COMPILED, marks=pytest.mark.more),
    ],
    ids=["stopping", "averaged", "compiled"],
)
def test_a_train_function_has_all_of_it(tmp_path: Path, options: dict[str, Any]) -> None:
    built_in = finished(tmp_path / "recipe", **options)
    for folder, recipe in (("loop", own_loop), ("within", Recipe(model=cases.noisy, train=own_loop))):
        assert finished(tmp_path / folder, recipe, **options) == built_in
        np.testing.assert_array_equal(predictions(tmp_path / folder), predictions(tmp_path / "recipe"))


def own_evaluation(measures: bool) -> Any:
    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"outputs": model(batch["x"]).sum(dim=1)}

    def evaluate(member: Any, epoch: int) -> None:
        with member.evaluating() as model:
            losses = [cases.loss(model, batch).mean() for batch in member.batches("valid")]
        member.report(loss=float(torch.stack(losses).mean()))

    return plain_loop(evaluate, make=cases.normed, measure=measure if measures else None)


NORM = Recipe(model=cases.normed, loss=cases.loss, task="classification")
BY_HAND: dict[str, Any] = {"epochs": 5, "averaging": SWA(0.4), "params": {"lr": 0.1}}


@pytest.mark.parametrize("keep", ["last", "best"])
def test_averages_that_are_evaluated_by_hand_have_statistics_of_their_own(tmp_path: Path, keep: str) -> None:
    def update(member: Any, epoch: int) -> None:
        with member.evaluating() as averaged:
            update_bn((batch["x"] for batch in cases.data().loader(5, range(epoch, epoch + 1))), averaged)

    loops = {"recipe": NORM, "measured": own_evaluation(True)}
    loops["declared"] = Recipe(model=NORM.model, train=own_evaluation(False), predict=predict)
    options = {**BY_HAND, "keep": keep, "objective": "loss"}
    ends = [finished(tmp_path / name, loop, **options)["weights_sha256"] for name, loop in loops.items()]
    if keep == "last":  # they may be computed by the function itself, which reports nothing then
        ends.append(finished(tmp_path / "own", plain_loop(update, make=cases.normed), **BY_HAND)["weights_sha256"])
    assert len(set(ends)) == 1, ends


def test_averages_of_a_model_that_nobody_can_call_are_trained_on(tmp_path: Path) -> None:
    finished(tmp_path, own_evaluation(False), **BY_HAND)
    log = RunDir(tmp_path).log("member-0").read_text()
    assert log.count("call member.validate_with(measure) before the loop") == 1


def test_statistics_are_computed_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    passes: list[int] = []

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        if model.training and len(batch["index"]) == 5 and batch.step == 0:
            passes.append(batch.epoch)
        return {"outputs": model(batch["x"]).sum(dim=1)}

    loop = plain_loop(make=cases.normed, measure=measure)
    finished(tmp_path, loop, epochs=8, averaging=SWA(2), checkpoint_every=3)
    assert passes == [2, 5, 7]


def test_a_train_function_mixes_a_batch_of_several_inputs(tmp_path: Path) -> None:
    """The Recipe's loss by name, which would have to be told which of them, is not used."""
    seen: list[bool] = []

    def losses(member: Any, model: nn.Module, batch: Any) -> Any:
        mixed = member.mixup(batch)
        seen.append(mixed.partner_weight is not None)
        outputs = model(mixed["x"] + mixed["more"])
        return mixed.losses(lambda y: nn.functional.cross_entropy(outputs, y, reduction="none"))

    columns = cases.data().source.columns
    pipe = Pipeline(sources.arrays(**columns, more=columns["x"]))
    recipe = Recipe(model=cases.plain, train=plain_loop(losses=losses), loss="cross_entropy")
    for weighting in ("uniform", "bootstrap"):  # samples are weighed where the member has weights
        options = {"train": pipe, "valid": None, "mixup": 0.3, "epochs": 1, "weights": weighting}
        finished(tmp_path / weighting, recipe, **options)
    assert seen == [False] * 5 + [True] * 5


def test_an_epoch_without_an_evaluation_does_not_count_for_early_stopping(tmp_path: Path) -> None:
    def train_with(value: Any, epochs: int) -> dict[str, Any]:
        """The objective is reported after each third epoch, and something else after others."""

        def report(member: Any, epoch: int) -> None:
            if epoch % 3 == 0 or epoch % 2:
                member.report(other=1.0, **({} if epoch % 3 else {"loss": value(epoch)}))

        options = {"objective": "loss", "early_stopping": EarlyStopping(2), "keep": "best", "epochs": epochs}
        return finished(tmp_path / str(epochs), plain_loop(report), **options)

    better, worse = train_with(lambda epoch: 1 / (1 + epoch), 9), train_with(float, 12)
    assert better["epoch"] == 8 and better["kept"]["epoch"] == 6
    assert (worse["epoch"], worse["kept"]["epoch"]) == (6, 0), "the third and the sixth epoch were worse"


GIVEN = [("regression", torch.tensor([0.5, 2.0], dtype=torch.bfloat16), np.array([0.5, 2.0]))]
GIVEN += [("regression", torch.tensor([1, 2]), np.array([1.0, 2.0]))]
GIVEN += [("free", torch.tensor([0.5, 2.0], dtype=torch.bfloat16), np.array([0.5, 2.0]))]
GIVEN += [("multilabel", torch.tensor([[0.0, 1.0], [1.0, torch.nan]]), np.array([[0, 1], [1, -100]]))]


def test_a_given_target_is_stored_as_its_task_has_it(tmp_path: Path) -> None:
    for number, (task, target, stored) in enumerate(GIVEN):
        given = ("valid", torch.full(target.shape, 0.5), torch.arange(2), target, task)
        loop = plain_loop(at_the_end=lambda member, given=given: member.predictions(*given))
        finished(tmp_path / str(number), loop, epochs=1)
        kept = load_predictions(RunDir(tmp_path / str(number)).predictions("member-0", 0), "valid").target
        assert kept is not None and kept.dtype == stored.dtype and np.array_equal(kept, stored)


def test_members_have_loops_of_their_own(tmp_path: Path) -> None:
    members = [Member({"lr": 0.05}, averaging="ema"), Member({"lr": 0.05}, seed=0)]
    ensemble = replace(cases.declare(cases.NOISY, 1, epochs=4), members=members)
    for number, options in enumerate(({"averaging": "ema"}, {})):
        job = cases.make_job(tmp_path / str(number), ensemble, identity=ensemble.identify(number))
        events: Events = []
        assert work(job, ensemble, events.append, Inbox()) == "finished"
        alone = finished(tmp_path / f"alone-{number}", epochs=4, **options)
        assert of(events, "finished")[0]["weights_sha256"] == alone["weights_sha256"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.more_calls = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.more_calls += 1
        scores: torch.Tensor = self.head(self.frozen(x))
        return scores


def test_looks_at_a_model_in_training_leave_it_as_it_was(tmp_path: Path) -> None:
    """A layer that a loop freezes once stays so behind checkpoints, and state that calls change counts its own."""
    seen: list[tuple[bool, float, float]] = []

    def train_it(member: Any) -> None:
        model = Counting()
        member.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        model.train()
        model.frozen.eval()
        for _ in member.epochs():
            for batch in member.batches():
                member.backward(cases.loss(model, batch))
                member.step()
            with member.evaluating():
                for batch in member.batches("valid"):
                    model(batch["x"])
            seen.append((model.frozen.training, float(model.calls), float(model.more_calls)))

    finished(tmp_path, Recipe(model=lambda params: Counting(), train=train_it), epochs=3)
    calls = seen[0][1]
    assert seen == [(False, calls * epoch, calls * epoch) for epoch in (1, 2, 3)]


KEPT: dict[str, dict[str, Any]] = {"last": {}, "best": {"keep": "best", "objective": "loss"}}
KEPT |= {"ema": {"averaging": EMA(0.8)}, "swa": {"averaging": SWA(1)}}


def resume_from_the_end(folder: Path, loop: Any, again: Any, **options: Any) -> dict[str, Any]:
    """A loop dies where the last checkpoint is written and nobody has been told; the end by another loop."""
    assert of(kill(folder, loop, lambda event: event["type"] == "finished", **options), "checkpoint")
    outcome, events = train(folder, again, attempt=1, **options)
    assert outcome == "finished" and not of(events, "epoch")
    return {**of(events, "finished")[0], "attempt": 0}


def test_ending_after_a_whole_epoch_is_what_fewer_epochs_are(tmp_path: Path) -> None:
    for name, options in KEPT.items():
        short = finished(tmp_path / name / "short", cases.ending("not", 9), epochs=2, **options)
        for way in ("stop", "stop at once", "break", "break before"):
            folder = tmp_path / name / way
            outcome, events = train(folder, cases.ending(way, 1), epochs=6, **options)
            assert outcome == "finished", (name, way, of(events, "failed"))
            (end,) = of(events, "finished")
            stop = end.pop("early_stopping")
            reason = "good enough" if way.startswith("stop") else "its train function left member.epochs()"
            assert stop == {"reason": reason, "epochs": 6}
            assert end == short, (name, way)
            assert np.array_equal(predictions(folder), predictions(tmp_path / name / "short"))
            assert [epoch["samples"] for epoch in of(events, "epoch")] == [23, 23], "each sees every sample once"
    text = describe_early_stop("member-0", 2, stop)
    assert text == "member-0: ended after 2 of 6 epochs: its train function left member.epochs()"
    assert "early_stopping" not in finished(tmp_path / "last", cases.ending("stop", 2), epochs=3)


def test_a_member_that_has_ended_itself_trains_no_more_when_it_is_resumed(tmp_path: Path) -> None:
    options = {"epochs": 6, **KEPT["swa"]}
    whole = finished(tmp_path / "whole", cases.ending("stop", 1), **options)
    ends = (cases.ending("stop", 1), cases.ending("not", 9))
    assert resume_from_the_end(tmp_path / "again", *ends, **options) == whole
    # A resume within the epoch in which it was asked to end ends after it.
    loop = cases.ending("stop once", 1)
    whole = finished(tmp_path / "whole once", loop, **options)
    assert whole["epoch"] == 1
    assert train(tmp_path / "once", loop, cases.Script(8, "stop"), **options)[0] == "stopped"
    assert finished(tmp_path / "once", loop, **options) == whole


def test_what_is_evaluated_after_a_loop_that_was_left_is_what_is_saved(tmp_path: Path) -> None:
    """The running statistics for averaged weights are of an epoch that was trained, and are in the checkpoint."""
    found: list[float] = []

    def measure(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": cases.loss(model, batch)}

    def train_two(member: Any) -> None:
        model = cases.normed(member.params)
        model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in member.epochs():
            for batch in member.batches():
                member.backward(cases.loss(model, batch))
                member.step()
            if epoch == 1:
                break
        found.append(member.evaluate(measure)["loss"])

    finished(tmp_path, train_two, epochs=6, **KEPT["swa"])
    saved, valid = cases.normed({}).eval(), next(iter(cases.data(13, seed=1).loader(13, 1)))
    saved.load_state_dict(checkpoint(tmp_path)["model"])
    assert found == [pytest.approx(float(cases.loss(saved, valid).mean()), rel=1e-6)]


def report(member: Any, epoch: int) -> None:
    member.report(loss=9.0 - epoch)


def hand_over(member: Any, weights: Any) -> None:
    member.use_weights(weights, metrics={"loss": 0.25})
    with member.evaluating() as model:
        found = [(model(b["x"]).softmax(dim=1), b["index"].clone()) for b in member.batches("valid")]
    member.predictions("valid", *map(torch.cat, zip(*found, strict=True)))


@pytest.mark.parametrize("kept", KEPT)
def test_weights_that_are_handed_over_are_the_members(kept: str, tmp_path: Path) -> None:
    options = {"epochs": 3, **KEPT[kept]}
    torch.manual_seed(7)
    other = cases.plain({}).state_dict()
    trained, hands_over = plain_loop(report), plain_loop(report, lambda member: hand_over(member, other))
    end = finished(tmp_path / "a", hands_over, **options)
    assert end["weights_sha256"] == weights_sha256(other)
    assert (end["metrics"], end["kept"]) == ({"loss": 0.25}, {"by": "use_weights"})
    saved = checkpoint(tmp_path / "a")
    assert weights_sha256(saved["model"]) == end["weights_sha256"]
    last = finished(tmp_path / "last", trained, epochs=3)["weights_sha256"]
    assert weights_sha256(saved["kept"]["trained"]) == last, "those in training stay beside them"
    # A resume whose framework has forgotten its best weights has them from the checkpoint; it predicts nothing.
    again = resume_from_the_end(tmp_path / "b", hands_over, trained, **options)
    assert {**again, "predictions": end["predictions"]} == end
    # Given more epochs it goes on from those in training.
    more = give_more_epochs(tmp_path / "a", trained, 3, **{**options, "epochs": 5})
    if kept in ("last", "best"):
        assert more["weights_sha256"] == finished(tmp_path / "five", trained, epochs=5)["weights_sha256"]


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
    return Recipe(model=cases.noisy, train=loop, predict=predict)


def predict(model: Any, batch: Any) -> Any:
    return model(batch["x"]).softmax(1)


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
    built_in = Recipe(
        model=cases.noisy,
        loss=cases.loss,
        optimizer=lambda model, params: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        schedule=lambda optimizer, params, steps: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5),
    )
    seen: list[int] = []

    def hook(member: Any, epoch: int) -> None:
        """An epoch can be ended where a framework's hook is: the end of the pass is no second one."""
        member.end_epoch()
        seen.append(member.position["epoch"])

    loops = {"passes": recipe(script()), "built in": built_in, "hook": recipe(script(hook))}
    ends = {name: finished(tmp_path / name, loop, **OPTIONS) for name, loop in loops.items()}
    assert ends["hook"] == ends["passes"] and seen == [1, 2, 3, 4, 5]
    losses = [ends[name]["metrics"]["loss"] for name in ("passes", "built in")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "up to the last bits of a mean"
    np.testing.assert_allclose(predictions(tmp_path / "passes"), predictions(tmp_path / "built in"), atol=1e-4)


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
        member.predict_all()

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


@pytest.mark.parametrize(("given", "declared"), [(None, None), (predict, lambda *given: predict(*given))])
def test_what_predicts_is_declared_once(tmp_path: Path, given: Any, declared: Any) -> None:
    loop = loop_of(at_the_end=lambda member: member.predict_all(given))
    error = failed(*train(tmp_path, Recipe(model=cases.noisy, train=loop, predict=declared), **OPTIONS))
    assert "Recipe.predict" in error["error"] and not error["retry"]


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
    loop = loop_of(at_the_end=lambda member: member.predict_all(predict))
    assert "valid" in finished(tmp_path, loop, **OPTIONS)["predictions"]
    np.testing.assert_allclose(predictions(tmp_path).sum(axis=1), 1.0, rtol=1e-5)
