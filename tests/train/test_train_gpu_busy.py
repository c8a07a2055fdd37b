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
        self.now_s = 0.0
        self.has_failed = False

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


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.reached_s: float | None = None

    def record(self, stream: Any) -> None:
        assert stream == "the stream"
        self.reached_s = None
        self.gpu.launched.append(self)

    def query(self) -> bool:
        if self.gpu.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.reached_s is not None

    def elapsed_time(self, end: Event, /) -> float:
        assert self.reached_s is not None and end.reached_s is not None
        return (end.reached_s - self.reached_s) * 1e3


def measure(gpu: Gpu) -> GpuBusy:
    return GpuBusy(gpu.make_event, lambda: "the stream")


def test_only_work_between_the_marks_counts_and_only_when_it_is_done() -> None:
    gpu = Gpu()
    busy = measure(gpu)
    for work_s in (2.0, 3.0):
        busy.begin()
        gpu.launched.append(work_s)
        busy.end()
        gpu.launched.append(10.0)  # of others, or idle
    assert busy.read() == 0.0
    gpu.do(3)
    assert busy.read() == 2.0
    gpu.do(3)
    assert busy.read() == 2.0, "the end of the second is not reached"
    gpu.do(2)
    assert busy.read() == pytest.approx(5.0)
    assert busy.read() == pytest.approx(5.0)


def test_events_are_used_again() -> None:
    gpu = Gpu()
    busy = measure(gpu)
    for _ in range(100):
        busy.begin()
        gpu.launched.append(0.5)
        busy.end()
        gpu.do(3)
    assert busy.read() == pytest.approx(50.0)
    assert len(gpu.events) <= 4


def test_work_that_was_left_counts_for_nothing() -> None:
    gpu = Gpu()
    busy = measure(gpu)
    busy.end()
    busy.begin()
    gpu.launched.append(7.0)
    busy.begin()
    gpu.launched.append(1.0)
    busy.end()
    gpu.do(5)
    assert busy.read() == 1.0


def test_a_gpu_that_fails_leaves_what_was_counted() -> None:
    gpu = Gpu()
    busy = measure(gpu)
    for _ in range(2):
        busy.begin()
        gpu.launched.append(1.0)
        busy.end()
        gpu.do(3)
    busy.begin()
    gpu.launched.append(1.0)
    gpu.has_failed = True
    with pytest.raises(RuntimeError):
        busy.end()
    assert [busy.read(), busy.read()] == [1.0, 1.0]


def evaluate_first(member: Any, model: Any, batch: Any) -> Any:
    losses = cases.loss(model, batch)
    member.evaluate(lambda model, batch: {"loss": cases.loss(model, batch)})
    return losses


@pytest.mark.parametrize("own_loop", [False, True])
def test_each_batch_is_measured_once_and_usage_is_the_sum(
    tmp_path: Path, own_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()

    class Busy(GpuBusy):
        def end(self) -> None:
            gpu.launched.append(1.0)  # a second of work for each batch
            super().end()
            gpu.do(3)

    busy = Busy(gpu.make_event, lambda: "the stream")
    monkeypatch.setattr("ensemble.train.state.open_gpu_busy", lambda device: busy)
    monkeypatch.setitem(gpu_busy._BY_DEVICE, torch.device("cpu"), busy)
    ensemble = cases.declare(plain_loop(losses=evaluate_first) if own_loop else cases.SMOOTH, 1)
    events: list[dict[str, Any]] = []
    job = cases.make_job(tmp_path, ensemble, gpu="GPU-x")
    assert work(job, ensemble, events.append, Inbox()) == "finished"
    said = [e["gpu_busy_s"] for e in events if e["type"] == "usage" and e["role"] == "train"]
    steps = 5  # and 13 samples of the validation set are three batches, which the recipe also predicts
    epochs = [steps, 2 * steps, 3 * steps] if own_loop else [steps + 3, 2 * (steps + 3), 3 * (steps + 3)]
    total = epochs[-1] + (0 if own_loop else 3)
    assert (said[0], said[-1]) == (0.0, total) and said == sorted(said)
    assert set(said) <= {0.0, *epochs, total}, "at the end of an epoch, if some time has passed since the last one"
    assert not any("gpu_busy_s" in e for e in events if e["type"] == "usage" and e["role"] != "train")
    assert {e.get("gpu") for e in events if "gpu_busy_s" in e} == {"GPU-x"}


def test_a_session_that_measures_says_which_gpu_it_kept_busy(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(gpu_busy._BY_DEVICE, torch.device("cpu"), measure(Gpu()))
    ensemble = cases.declare(cases.SMOOTH, 1)
    request = ProfileRequest(members=[], known=[], steps_s=0.1)
    events: list[dict[str, Any]] = []
    job = cases.make_job(tmp_path, ensemble, gpu="GPU-x", profile=request)
    assert profile.run(job, ensemble, events.append, Inbox()) == "finished"
    (told,) = [event for event in events if event["type"] == "usage"]
    assert (told["role"], told["gpu_busy_s"], told["gpu"]) == ("profile", 0.0, "GPU-x")


def test_on_the_cpu_nothing_is_measured(tmp_path: Path) -> None:
    assert open_gpu_busy(torch.device("cpu")) is None and describe_gpu_busy() == {}
    ensemble = cases.declare(cases.SMOOTH, 1)
    events: list[dict[str, Any]] = []
    assert work(cases.make_job(tmp_path, ensemble), ensemble, events.append, Inbox()) == "finished"
    usage = [event for event in events if event["type"] == "usage"]
    assert usage and not any("gpu_busy_s" in event for event in usage)
