"""Training steps in fp32, bf16 and fp16, by the code that trains members: samples/s, peak memory, energy.

The LSTM of Svyatkovskiy et al. (two layers of 200 over 128 words, batches of 128), the large one of 79 million
weights, and a ResNet-50 on 224 px. Batches are on the device before the clock starts. fp32 is what a member
has: torch's defaults, with TF32 in cuDNN's kernels and without it in matrix products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import models
from benchmarks.training import RecipeTrainer
from ensemble.comm import SingleRank
from ensemble.spec import Recipe
from gpu_cases.common import GpuEnergy, PeakMemory, Row, Setting, attempt, check, row, time_calls
from gpu_cases.networks import MADE_UP, RESNET, image_batch, text_batch
from pipelines import Batch

_PRECISIONS = ("fp32", "bf16", "fp16")
# Steps go over one batch for seconds: rates are small, so that no weight becomes infinite.
_ADAMW = {"name": "adamw", "lr": 2e-4}
_RESNET_SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-5}


class Task(NamedTuple):
    """What is trained: a recipe, its hyperparameters, an optimizer, one batch."""

    recipe: Recipe
    params: dict[str, Any]
    optimizer: Any
    batch: Batch


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    energy = GpuEnergy(setting)
    tasks = {"lstm": _lstm, "resnet50": _resnet, "lstm-large": _lstm_large}
    seconds = setting.choose(setting.budget_s / (len(tasks) * len(_PRECISIONS)), 0.0)
    for name, make in tasks.items():
        task, full = make(setting), None
        for precision in _PRECISIONS:
            measure = functools.partial(_measure, setting, name, task, precision, seconds, energy)
            found = attempt(f"{name}, {precision}", measure)
            rate = found.get("samples_per_s")
            full = rate if precision == "fp32" else full
            yield {**found, "speedup": rate / full if rate and full else None}


def _lstm(setting: Setting) -> Task:
    net = setting.choose(models.NETS["lstm"], models.net_of("lstm", words=50, embed=8, hidden=8, length=8))
    return _text_task(setting, net, setting.choose(128, 4))


def _lstm_large(setting: Setting) -> Task:
    small = models.net_of("lstm-large", words=60, embed=16, hidden=16, length=8)
    return _text_task(setting, setting.choose(models.NETS["lstm-large"], small), setting.choose(64, 4))


def _text_task(setting: Setting, net: models.Net, size: int) -> Task:
    return Task(models.recipe(net), net.params(MADE_UP), _ADAMW, text_batch(net, size, setting.device))


def _resnet(setting: Setting) -> Task:
    full = {"width": 64, "blocks": [3, 4, 6, 3], "classes": 1000}
    params = setting.choose(full, {"width": 4, "blocks": [1, 1], "classes": 10})
    batch = image_batch(setting.choose(128, 2), setting.choose(224, 32), params["classes"], setting.device)
    return Task(RESNET, params, _RESNET_SGD, batch)


def _measure(
    setting: Setting, name: str, task: Task, precision: Any, seconds: float, energy: GpuEnergy
) -> dict[str, Any]:
    peak = PeakMemory(setting)
    trainer = RecipeTrainer(task.recipe, task.params, task.optimizer, precision, setting.device, SingleRank())
    timed = time_calls(setting, lambda: trainer.step(task.batch), seconds, energy, warm=8)
    size = len(task.batch["index"])
    finite = all(bool(torch.isfinite(weight).all()) for weight in trainer.model.parameters())
    return {
        **check(f"{name}, {precision}", finite),
        **row(
            f"{name}, {precision}",
            parameters=sum(weight.numel() for weight in trainer.model.parameters()),
            batch_size=size,
            step_ms=1000 * timed.each_s,
            samples_per_s=size / timed.each_s,
            peak_memory_mb=peak.megabytes(),
            joules_per_1000_samples=timed.energy_j and 1000 * timed.energy_j / (timed.count * size),
            watts=timed.watts,
            reasons={
                "peak_memory_mb": PeakMemory.reason,
                "joules_per_1000_samples": energy.reason or "",
                "watts": energy.reason or "",
            },
        ),
    }
