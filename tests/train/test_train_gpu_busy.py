"""How long a rank keeps its GPU busy: the sum over pairs of events, waiting for none; the GPU is a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import own_loop as plain_loop

from ensemble.train import Inbox, gpu_busy, profile, work
from ensemble.train.gpu_busy import GpuBusy, describe_gpu_busy, open_gpu_busy
from ensemble.train.job import ProfileRequest


class Gpu:
    """Does the work that was launched when it is told to, and has events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.launched: list[float | Event] = []
        self.now_s, self.has_failed = 0.0, False
        self.busy = GpuBusy(self.make_event, lambda: "the stream")

    def make_event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def do(self, items: int) -> None:
        for item in self.launched[:items]:
            if isinstance(item, Event):
                item.reached_s = self.now_s
            else:
                self.now_s += item
        del self.launched[:items]

    def measure(self, work_s: float) -> None:
        self.busy.begin()
        self.launched.append(work_s)
        self.busy.end()


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.reached_s = gpu, None

    def record(self, stream: Any) -> None:
        assert stream == "the stream"
        self.reached_s = None
        self.gpu.launched.append(self)

    def query(self) -> bool:
        if self.gpu.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.reached_s is not None

    def elapsed_time(self, end: Event, /) -> float:
        return (end.reached_s - self.reached_s) * 1e3


def test_only_work_between_the_marks_counts_and_only_when_it_is_done() -> None:
    gpu = Gpu()
    for work_s in (2.0, 3.0):
        gpu.measure(work_s)
        gpu.launched.append(10.0)  # of others, or idle
    for items, total in (
        (0, 0.0),
        (3, 2.0),
        (3, 2.0),
        (2, 5.0),
        (0, 5.0),
    ):  # the end of the second is reached last
        gpu.do(items)
        assert gpu.busy.read() == pytest.approx(total)


def test_events_are_used_again() -> None:
    gpu = Gpu()
    for _ in range(100):
        gpu.measure(0.5)
        gpu.do(3)
    assert gpu.busy.read() == pytest.approx(50.0) and len(gpu.events) <= 4


def test_work_that_was_left_counts_for_nothing() -> None:
    gpu = Gpu()
    gpu.busy.end()
    gpu.busy.begin()
    gpu.launched.append(7.0)
    gpu.measure(1.0)
    gpu.do(5)
    assert gpu.busy.read() == 1.0


def test_a_gpu_that_fails_leaves_what_was_counted() -> None:
    gpu = Gpu()
    for _ in range(2):
        gpu.measure(1.0)
        gpu.do(3)
    gpu.has_failed = True
    with pytest.raises(RuntimeError):
        gpu.measure(1.0)
    assert [gpu.busy.read(), gpu.busy.read()] == [1.0, 1.0]


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
