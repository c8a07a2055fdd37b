"""Members that each train low-rank adapters (Hu et al. 2021) on one frozen network: made once for all
(`Recipe(base=...)`), against a copy that each member makes and keeps for itself."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import models
from ensemble.executors.mps import ABSENT, BINARY
from ensemble.spec import Recipe
from gpu_cases.common import NO_GPU, Row, Setting, attempt, check, row
from gpu_cases.networks import image_pipeline
from gpu_cases.runs import Kept, compare_weights, declare_alike, train

_SHARED, _COPIES = "one base", "a copy each"
_SAME, _SMALL = "adapters learn the same on both", "a checkpoint on one base has the adapters alone"
_STATE_BYTES = 2**16  # of a checkpoint beside weights: generators, counters, names


class LowRank(nn.Module):
    """A frozen linear layer, and the change of it that a member learns."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, inputs] to [b, outputs]."""
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def make_base(width: int, layers: int) -> nn.Sequential:
    """The network that all stand on, with the same weights whoever makes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = [nn.Linear(width, width) for _ in range(layers)]
        for layer in made:
            nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(nn.Flatten(), *(module for layer in made for module in (layer, nn.ReLU())))


def large() -> nn.Sequential:
    """604 MB, for images of 32 px."""
    return make_base(3072, 16)


def small() -> nn.Sequential:
    """0.6 MB, for images of 8 px."""
    return make_base(192, 4)


def adapt(params: dict[str, Any], base: nn.Sequential) -> nn.Module:
    """A member: the base with adapters in all its linear layers, and a head."""
    for name, layer in list(base.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(base, name, LowRank(layer, params["rank"]))
    return nn.Sequential(base, nn.Linear(params["inputs"], 10))


def adapt_copy(params: dict[str, Any]) -> nn.Module:
    """The same member on a base of its own."""
    return adapt(params, {3072: large, 192: small}[params["inputs"]]().requires_grad_(False))


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    sides: dict[str, list[Kept]] = {_SHARED: [], _COPIES: []}
    for what, kept in sides.items():
        yield attempt(what, functools.partial(_measure, setting, what, kept, mps=False))
    yield attempt(_SAME, functools.partial(compare_weights, setting, _SAME, *sides.values()))
    yield attempt(_SMALL, functools.partial(_weigh, *sides.values()))
    for what in sides:
        if setting.on_gpu and shutil.which(BINARY) is not None:
            yield attempt(f"{what}, MPS", functools.partial(_measure, setting, what, None, mps=True))
        else:
            reason = ABSENT if setting.on_gpu else NO_GPU
            yield row(f"{what}, MPS", samples_per_s=None, reasons={"samples_per_s": reason})


def _measure(setting: Setting, what: str, kept: list[Kept] | None, mps: bool) -> Row:
    net, base = setting.choose((models.NETS["cnn"], large), (models.net_of("cnn", pixels=8), small))
    model, base = (adapt, base) if what == _SHARED else (adapt_copy, None)
    recipe = Recipe(model=model, base=base, loss=models.loss, task="classification")
    members, epochs, samples, rank = setting.choose((8, 9, 8192, 8), (2, 5, 256, 2))
    params, optimizer = {"rank": rank, "inputs": 3 * net.pixels**2}, {"name": "sgd", "lr": 3e-4}
    data, options = image_pipeline(samples, net.pixels), {"params": params, "recipe": recipe, "mps": mps}
    declared = declare_alike(setting, "adapters", net, data, members, epochs, optimizer=optimizer, **options)
    return row(f"{what}, MPS" if mps else what, **train(setting, declared, memory=True, kept=kept))


def _weigh(shared: list[Kept], copies: list[Kept]) -> Row:
    (weights, size), (_, size_with_copy) = shared[0], copies[0]
    trained = sum(value.nbytes for value in weights.values())
    holds = not any(".layer." in name for name in weights) and size < 1.1 * trained + _STATE_BYTES
    sizes = {"trained": trained, "checkpoint": size, "checkpoint_with_copy": size_with_copy}
    return check(_SMALL, holds, **{f"{name}_mb": value / 1e6 for name, value in sizes.items()})
