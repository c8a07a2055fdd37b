"""Small models of several kinds for batches {"x": [b, 7, 6], "length": [b]}, and untrained ensembles of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensemble.combine import Combination
from ensemble.combine.member_calls import MemberCall
from ensemble.combine.model import EnsembleModel
from ensemble.spec import Recipe
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.train.call import Call, Observation

STEPS, FEATURES, OUTPUTS = 7, 6, 3


def mlp(width: int, outputs: int = OUTPUTS) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(STEPS * FEATURES, width), nn.Dropout(), nn.ReLU(), nn.Linear(width, outputs)
    )


class ConvNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(FEATURES, width, 3, padding=1), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout()
        )
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(1, 2)).mean(dim=2))


class Lstm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.LSTM(FEATURES, width, 2, batch_first=True)
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.body(x)
        return self.head(state[-1])


class Transformer(nn.Module):
    """An encoder whose padding, the steps from `length` on, is masked where it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.first = nn.Linear(FEATURES, width)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor, length: Tensor | None = None) -> Tensor:
        mask = None if length is None else torch.arange(STEPS, device=x.device) >= length[:, None]
        return self.head(self.body(self.first(x), src_key_padding_mask=mask).mean(dim=1))


NETS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": mlp,
    "conv": ConvNet,
    "lstm": Lstm,
    "transformer": Transformer,
}


def build(params: dict[str, Any]) -> nn.Module:
    return NETS[params["net"]](params["width"])


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def scaled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"] * 0.5), batch["label"], reduction="none")


KNOWN = Observation(Call(("x",)), CLASSIFICATION, ("int64", ()), -1)
COMPUTED = Observation(None, CLASSIFICATION, ("int64", ()), -1)
WEIGHTED = Combination("weighted", np.array([0.2, 0.3, 0.5]), 1.7)


def batch_of(samples: int, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, STEPS, FEATURES, generator=torch.Generator().manual_seed(seed))}


def ensemble_of(
    net: str | Callable[[int], nn.Module],
    widths: Sequence[int] = (8, 8, 8),
    combination: Combination = WEIGHTED,
    seen: Observation = KNOWN,
    recipe: Recipe | None = None,
    task: Task = CLASSIFICATION,
    **options: Any,
) -> EnsembleModel:
    """Members with random weights, large enough that they disagree, and with statistics of their own."""
    torch.manual_seed(0)
    make = NETS[net] if isinstance(net, str) else net
    members = {f"member-{number}": make(width) for number, width in enumerate(widths)}
    for model in members.values():
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean, module.running_var = torch.randn(8), torch.rand(8) + 0.5
    if recipe is None:
        recipe = Recipe(model=build, loss=loss if seen.call is not None else scaled_loss, task="classification")
    calls = dict.fromkeys(members, MemberCall(recipe, seen))
    return EnsembleModel(members, calls, replace(combination, task=task), **options)
