"""What is measured of a member before it is placed: its training steps, and nothing on top of them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import own_loop as plain_loop
from torch import nn

import ensemble
from ensemble import Ensemble, Member, Recipe
from ensemble.spec import Folds
from ensemble.store import RunDir
from ensemble.train import Inbox, gpu_busy, profile, work
from ensemble.train.gpu_busy import GpuBusy, describe_gpu_busy, open_gpu_busy
from ensemble.train.job import ProfileRequest
from ensemble.train.model_signature import signature_of
from pipelines import Pipeline, sources, weights


def not_finite(model: Any, batch: Any) -> Any:
    return cases.loss(model, batch) * float("nan")


def measure(run_dir: Path, loss: Any, members: int = 1, asked: Any = None, **options: Any) -> Any:
    own = {"train": loss} if members > 1 else {"loss": loss}
    recipe = Recipe(model=cases.plain, task="classification", **own)
    declared = cases.declare(recipe, 1, **{**options, "out_of_fold": False})
    changed = replace(declared, members=list(declared.members) * members, **options)
    request = ProfileRequest(members=[changed.identify(0)], known=[], steps_s=0.05, **(asked or {}))
    events: list[dict[str, Any]] = []
    job = replace(cases.make_job(run_dir, changed), profile=request)
    assert profile.run(job, changed, events.append, Inbox()) == "finished", events
    (profiled,) = (event for event in events if event["type"] == "profiled")
    assert profiled["measured"]["step_s"] > 0
    return profiled


def test_evaluations_within_epochs_are_no_part_of_a_step(tmp_path: Path) -> None:
    calls = {True: 0, False: 0}  # of the loss, by whether the model was training

    def loss(model: Any, batch: Any) -> Any:
        calls[model.training] += 1
        return cases.loss(model, batch)

    measure(tmp_path, loss, validate_every=1)
    assert calls[True] > 2 and calls[False] == 1, "one evaluation, after the steps, for its memory"


def test_a_member_whose_loss_is_not_finite_is_measured_like_any_other(tmp_path: Path) -> None:
    assert measure(tmp_path, not_finite)["of"] == ["member-0"]
    assert not RunDir(tmp_path).list_checkpoints("member-0"), "nothing is left behind"
    finite, other = (
        ensemble.dry_run(cases.declare(Recipe(model=cases.normed, loss=loss, task="classification"), 1)).members[0]
        for loss in (cases.loss, not_finite)
    )
    for name in ("parameters", "trainable", "checkpoint_bytes", "predictions_bytes"):
        assert finite[name] == other[name] > 0
    assert other["evaluate_s"] is not None


def test_a_train_function_is_measured_by_a_few_steps_and_a_batch_of_its_own_fold(tmp_path: Path) -> None:
    """What follows in its evaluation is left out; a long one is measured once, however often it is asked for."""
    held_out = np.flatnonzero(weights.fold(cases.N, 3, 0, seed=0)(np.arange(cases.N)) == 0)
    seen: dict[str, list[int]] = {"train": [], "valid": []}

    def loop(member: Any) -> None:
        model = cases.normed(member.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        member.prepare(model, optimizer)
        for batch in (batch for _ in range(member.identity.epochs) for batch in member.dataloader("train")):
            seen["train"] += batch["index"].tolist()
            cases.loss(model, batch).mean().backward()
            optimizer.step()
        for batch in member.batches("valid"):
            seen["valid"] += batch["index"].tolist()
            time.sleep(0.06)  # longer than the steps that are to be measured
        raise AssertionError("the evaluation goes on")

    pipe = cases.data()
    options = {"weights": Folds(3), "out_of_fold": True, "train": pipe, "valid": pipe, "epochs": 1}
    measure(tmp_path, loop, 3, {"evaluations": 4}, **options)
    assert seen["valid"] == held_out[:5].tolist() and not set(seen["train"]) & set(held_out.tolist())


class Gate(nn.Module):
    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        self.dropout, self.steps = params.get("dropout", 0.1), params.get("steps", 3)
        self.weight = nn.Parameter(torch.ones(4))


def loss(model: nn.Module, batch: Any) -> Any:
    raise AssertionError("no step is needed")


def plain(params: dict[str, Any]) -> nn.Module:
    width = params.get("width", 8)
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(params.get("drop", 0.1)), nn.LSTM(width, 3), Gate(params))


class Config:
    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __repr__(self) -> str:
        return "Config"


def changed(change: Any) -> Any:
    """The plain model, to which something was done."""

    def make(params: dict[str, Any]) -> nn.Module:
        model = plain(params)
        change(model, params)
        return model

    return make


def of_a_local_class(params: dict[str, Any]) -> nn.Module:
    class Local(nn.Linear):
        pass

    return Local(4, 8)


def momentum(model: nn.Module, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=params.get("m", 0.0))


def data(params: dict[str, Any]) -> Pipeline:
    return Pipeline(sources.arrays(x=np.zeros((64, params.get("features", 4)), np.float32)))


RECIPE = Recipe(model=plain, loss=loss, task="classification", optimizer=momentum)


def shape(member: dict[str, Any] | Member, model: Any = plain, recipe: Any = None, **options: Any) -> str:
    made = recipe or replace(RECIPE, model=model)
    declared = Ensemble(name="shapes", recipe=made, members=[member], train=data, **options)
    return signature_of(declared, declared.identify(0))[0]


def test_what_changes_no_kernel_changes_no_shape() -> None:
    same = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1, "drop": 0.5}, {"lr": 0.1, "dropout": 0.7}, {"lr": 0.1, "x": 1}]
    assert {shape(params) for params in same} == {shape(Member({"lr": 0.1}, seed=9, epochs=7))}
    assert shape({"lr": 0.1, "m": 0.5}) == shape({"lr": 0.1, "m": 0.9})
    # there is no number on the meta device: such a network is really built
    needs_numbers = changed(lambda model, params: float(model[0].weight.detach().sum()))
    assert shape({"lr": 0.1}, needs_numbers) == shape({"lr": 0.1})


def test_what_may_cost_more_is_another_shape() -> None:
    params: list[dict[str, Any]] = [{"width": 16}, {"drop": 0.0}, {"steps": 4}, {"m": 0.9}, {"features": 5}]
    words: dict[str, Any] = {"batch_size": 16, "precision": "bf16", "accumulate": 2, "workers": "auto"}
    shapes = {shape({"lr": 0.1, **more}) for more in params}
    shapes |= {shape(Member({"lr": 0.1}, **{name: value})) for name, value in words.items()}
    assert len(shapes | {shape({"lr": 0.1})}) == 1 + len(params) + len(words)
    no_optimizer = replace(RECIPE, optimizer=None)
    assert len({shape({"lr": 0.1}, recipe=no_optimizer, optimizer=name) for name in ("sgd", "adam")}) == 2


def test_where_it_cannot_be_told_hyperparameters_count_but_for_those_of_an_optimizer() -> None:
    with_a_closure = changed(lambda model, params: setattr(model, "f", lambda x: x * params.get("scale", 1)))
    for model in (with_a_closure, of_a_local_class):
        assert shape({"lr": 0.1, "scale": 1}, model) != shape({"lr": 0.1, "scale": 2}, model)
        assert shape({"lr": 0.1, "scale": 1}, model) == shape({"lr": 0.2, "scale": 1}, model)
    hiding = changed(lambda model, params: setattr(model, "config", Config(params["depth"])))
    assert shape({"lr": 0.1, "depth": 1}, hiding) != shape({"lr": 0.1, "depth": 1000}, hiding)


def test_a_train_function_is_told_by_its_hyperparameters() -> None:
    def train(member: Any) -> None:
        raise AssertionError("it is not called")

    assert shape({"lr": 0.1, "width": 8}, recipe=train) == shape({"lr": 0.3, "width": 8}, recipe=train)
    assert shape({"lr": 0.1, "width": 8}, recipe=train) != shape({"lr": 0.1, "width": 9}, recipe=train)


class Gpu:
    """Does the work that was launched when it is told to, and has events."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.launched: list[Any] = []
        self.now_s, self.has_failed = 0.0, False
        self.busy = GpuBusy(self.make_event, lambda: "the stream")

    def make_event(self) -> Any:
        event: Any = SimpleNamespace(reached_s=None)

        def record(stream: Any) -> None:
            assert stream == "the stream"
            event.reached_s = None
            self.launched.append(event)

        def query() -> bool:
            if self.has_failed:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return event.reached_s is not None

        event.record, event.query = record, query
        event.elapsed_time = lambda end: (end.reached_s - event.reached_s) * 1e3
        self.events.append(event)
        return event

    def do(self, items: int) -> None:
        for item in self.launched[:items]:
            if isinstance(item, float):
                self.now_s += item
            else:
                item.reached_s = self.now_s
        del self.launched[:items]

    def measure(self, work_s: float) -> None:
        self.busy.begin()
        self.launched.append(work_s)
        self.busy.end()


def test_only_work_between_the_marks_counts_and_only_when_it_is_done() -> None:
    gpu = Gpu()
    for work_s in (2.0, 3.0):
        gpu.measure(work_s)
        gpu.launched.append(10.0)  # of others, or idle
    for items, total in ((0, 0.0), (3, 2.0), (3, 2.0), (2, 5.0), (0, 5.0)):  # the second's end is reached last
        gpu.do(items)
        assert gpu.busy.read() == pytest.approx(total)
    gpu = Gpu()
    for _ in range(100):
        gpu.measure(0.5)
        gpu.do(3)
    assert gpu.busy.read() == pytest.approx(50.0) and len(gpu.events) <= 4, "events are used again"


def test_work_that_was_left_counts_for_nothing_and_a_failure_leaves_what_was_counted() -> None:
    gpu = Gpu()
    gpu.busy.end()
    gpu.busy.begin()
    gpu.launched.append(7.0)
    gpu.measure(1.0)
    gpu.do(5)
    assert gpu.busy.read() == 1.0
    for _ in range(2):
        gpu.measure(1.0)
        gpu.do(3)
    gpu.has_failed = True
    with pytest.raises(RuntimeError):
        gpu.measure(1.0)
    assert [gpu.busy.read(), gpu.busy.read()] == [2.0, 2.0]


def evaluate_first(member: Any, model: Any, batch: Any) -> Any:
    losses = cases.loss(model, batch)
    member.evaluate(lambda model, batch: {"loss": cases.loss(model, batch)})
    return losses


def train(folder: Path, recipe: Any, do: Any = work, **job: Any) -> list[dict[str, Any]]:
    """What a member tells of its usage."""
    ensemble, events = cases.declare(recipe, 1), []
    assert do(cases.make_job(folder, ensemble, **job), ensemble, events.append, Inbox()) == "finished"
    return [event for event in events if event["type"] == "usage"]


@pytest.mark.parametrize("own_loop", [False, True])
def test_each_batch_is_measured_once_and_summed(tmp_path: Path, own_loop: bool, monkeypatch: Any) -> None:
    gpu = Gpu()

    class Busy(GpuBusy):
        def end(self) -> None:
            gpu.launched.append(1.0)  # a second of work for each batch
            super().end()
            gpu.do(3)

    busy = Busy(gpu.make_event, lambda: "the stream")
    monkeypatch.setattr("ensemble.train.state.open_gpu_busy", lambda device: busy)
    monkeypatch.setitem(gpu_busy._BY_DEVICE, torch.device("cpu"), busy)
    usage = train(tmp_path, plain_loop(losses=evaluate_first) if own_loop else cases.SMOOTH, gpu="GPU-x")
    seconds = [e["gpu_busy_s"] for e in usage if e["role"] == "train"]
    # 5 steps, and 13 samples of the validation set are three batches, which the recipe also predicts
    epochs = [5, 10, 15] if own_loop else [8, 16, 24]
    total = epochs[-1] + (0 if own_loop else 3)
    assert (seconds[0], seconds[-1]) == (0.0, total) and seconds == sorted(seconds)
    assert set(seconds) <= {0.0, *epochs, total}
    assert {e["role"] for e in usage if "gpu_busy_s" in e} == {"train"}
    assert {e.get("gpu") for e in usage if "gpu_busy_s" in e} == {"GPU-x"}


def test_a_session_that_measures_says_which_gpu_it_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_busy._BY_DEVICE, torch.device("cpu"), Gpu().busy)
    request = ProfileRequest(members=[], known=[], steps_s=0.1)
    (usage,) = train(tmp_path, cases.SMOOTH, profile.run, gpu="GPU-x", profile=request)
    assert (usage["role"], usage["gpu_busy_s"], usage["gpu"]) == ("profile", 0.0, "GPU-x")


def test_on_the_cpu_nothing_is_measured(tmp_path: Path) -> None:
    assert open_gpu_busy(torch.device("cpu")) is None and describe_gpu_busy() == {}
    usage = train(tmp_path, cases.SMOOTH)
    assert usage and not any("gpu_busy_s" in event for event in usage)
