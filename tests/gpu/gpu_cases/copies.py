"""Batches on their way to the GPU while a network trains: by pinned buffers without waiting, as members get them
(`pipelines.loader.batch.Staging`), against copies that block, from pinned and from pageable memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks import models
from benchmarks.training import RecipeTrainer
from ensemble.comm import SingleRank
from gpu_cases.common import NO_GPU, Row, Setting, attempt, check, row, time_calls
from gpu_cases.networks import MADE_UP, image_pipeline
from pipelines import Batch


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    size, pixels = setting.choose(256, 4), setting.choose(224, 8)
    loader = image_pipeline(2 * size, pixels).loader(size, epochs=10**6)
    batches = iter(loader)
    batch = next(batches).clone()  # keeps the loader's pinned buffers
    ways: dict[str, Callable[[], Batch]] = {
        "pageable, blocking": lambda: _copy_pageable(batch, setting.device),
        "pinned, blocking": lambda: _wait(setting, batch.to(setting.device)),
        "pinned, asynchronous": lambda: batch.to(setting.device, non_blocking=True),
    }
    net = models.net_of("cnn", pixels=pixels, width=setting.choose(None, 2))
    trainer = RecipeTrainer(
        models.recipe(net), net.params(MADE_UP), {"name": "sgd", "lr": 1e-3}, "bf16", setting.device, SingleRank()
    )
    for what, copy in ways.items():
        same = all(torch.equal(copy()[name].cpu(), value) for name, value in batch.items())
        yield check(f"{what}: the values arrive", same)
        yield attempt(what, functools.partial(_measure, setting, what, batch, copy, trainer))
    loader.close()


def _copy_pageable(batch: Batch, device: str) -> Batch:
    fields = {name: value.to(device, copy=True) for name, value in batch.items()}
    return Batch(fields, epoch=batch.epoch, step=batch.step, global_size=batch.global_size)


def _wait(setting: Setting, batch: Batch) -> Batch:
    setting.synchronize()
    return batch


def _measure(setting: Setting, what: str, batch: Batch, copy: Callable[[], Batch], trainer: RecipeTrainer) -> Row:
    seconds = setting.budget_s / 12
    size = sum(value.numel() * value.element_size() for value in batch.values())
    copied = time_calls(setting, copy, seconds)
    resident = copy()
    alone = time_calls(setting, lambda: trainer.step(resident), seconds)
    both = time_calls(setting, lambda: trainer.step(copy()), seconds)
    return row(
        what,
        batch_mb=size / 1e6,
        copy_ms=1000 * copied.each_s,
        copy_gb_s=size / copied.each_s / 1e9 if setting.on_gpu else None,
        step_ms=1000 * alone.each_s,
        copy_and_step_ms=1000 * both.each_s,
        samples_per_s=len(batch["index"]) / both.each_s,
        reasons={"copy_gb_s": NO_GPU},
    )
