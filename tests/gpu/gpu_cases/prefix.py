"""Heads on one frozen convolutional network: its features as a batch stage, computed once for all of them where
samples are prepared (`Pipeline.map_batches`), against members that each compute it (`Recipe(base=...)`).

Images are flipped at random, so each epoch has features of its own. Both compute without TF32, as stages do.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import models
from ensemble.spec import Recipe
from gpu_cases.common import Row, Setting, attempt, row
from gpu_cases.networks import image_pipeline, resnet
from gpu_cases.runs import Kept, compare_weights, declare_alike, train
from pipelines import stages

_STAGE, _MEMBERS = "a stage, once for all", "each member for itself"
_SAME = "heads learn the same from both"


def resnet50() -> nn.Module:
    """The convolutions of a ResNet-50, with the same weights whoever makes it."""
    return _make_prefix(64, [3, 4, 6, 3])


def resnet14() -> nn.Module:
    """As few as that for a rehearsal."""
    return _make_prefix(4, [1, 1, 1, 1])


def _make_prefix(width: int, blocks: list[int]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return resnet({"classes": 1, "width": width, "blocks": blocks})[:-1].eval()  # type: ignore[index]


def head(params: dict[str, Any], base: nn.Module | None = None) -> nn.Module:
    """A member: a linear head on normalized features, which it computes itself where it has a base."""
    own = nn.Sequential(nn.BatchNorm1d(params["features"], affine=False), nn.Linear(params["features"], 10))
    if base is None:
        return nn.Sequential(OrderedDict(head=own))
    torch.backends.cudnn.allow_tf32 = False  # of the member's process
    return nn.Sequential(OrderedDict(base=base, head=own))


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    sides: dict[str, list[Kept]] = {_STAGE: [], _MEMBERS: []}
    for what, kept in sides.items():
        yield attempt(what, functools.partial(_measure, setting, what, kept))
    yield attempt(_SAME, functools.partial(compare_weights, setting, _SAME, *sides.values()))


def _measure(setting: Setting, what: str, kept: list[Kept]) -> Row:
    make, pixels, width = setting.choose((resnet50, 64, 64), (resnet14, 32, 4))
    net = models.net_of("cnn", pixels=pixels, width=width)
    data = image_pipeline(setting.choose(8192, 256), net.pixels).map(stages.random_flip("image"))
    if what == _STAGE:
        data = data.map_batches(make(), field="image", batch_size=32, device=setting.choose("auto", "cpu"))
    base = None if what == _STAGE else make
    recipe = Recipe(model=head, base=base, loss=models.loss, task="classification")
    members, epochs, workers = setting.choose((8, 6, 4), (2, 4, 1))
    options = {"params": {"features": 32 * width}, "recipe": recipe, "prep_workers": workers}
    declared = declare_alike(setting, "prefix", net, data, members, epochs, **options)
    return row(what, **train(setting, declared, kept=kept))
