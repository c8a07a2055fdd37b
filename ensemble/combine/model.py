"""The combined members as one torch module. Imports torch: imported by `load`, when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.combine.combination import Combination
from ensemble.combine.errors import CombineError
from ensemble.combine.metrics import EPSILON
from ensemble.combine.stack import Stacker
from ensemble.spec import Recipe
from ensemble.train.outputs import probabilities_of


class EnsembleModel(nn.Module):
    """Maps a batch dict to class probabilities float32 [b, C], by all members that have a weight.

    The batch is moved to where the weights are: `.to("cuda")` moves the whole ensemble. Members compute in float32
    (what they said under autocast while training differs by its rounding). Parameters are frozen, so that no graph
    is kept; gradients with respect to the batch still flow.

    Attributes:
        member_ids: of the members in it, in the order of `weights`.
        method: average, weighted, greedy or stack.
        temperature: of the calibration, 1.0 for none.
    """

    weights: Tensor

    def __init__(self, recipe: Recipe, members: Mapping[str, nn.Module], combination: Combination) -> None:
        super().__init__()
        self.recipe = recipe
        self.member_ids = list(members)
        self.members = nn.ModuleDict(members)
        self.method = combination.method
        self.temperature = combination.temperature
        self.register_buffer("weights", torch.tensor(combination.weights, dtype=torch.float32))
        self.stack = None if combination.stacker is None else StackModel(combination.stacker)
        self.requires_grad_(False)
        self.eval()

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Probabilities float32 [b, C] of a batch with the fields that the recipe's loss (or predict) reads."""
        batch = _moved(batch, self.weights.device)
        each = [self._member(name, batch) for name in self.member_ids]
        pooled = torch.stack([w * p for w, p in zip(self.weights, each, strict=True)]).sum(dim=0)
        if self.stack is not None:
            pooled = self.stack(each)
        if self.temperature == 1.0:
            return pooled
        return torch.softmax(pooled.clamp_min(EPSILON).log() / self.temperature, dim=1)

    def _member(self, name: str, batch: Mapping[str, Any]) -> Tensor:
        p = probabilities_of(self.recipe, self.members[name], batch)
        if p.dim() != 2 or p.shape[1] < 2:
            raise CombineError(
                f"{name} gives outputs of shape {list(p.shape)}, not probabilities [b, classes]; "
                "declare Recipe.predict(model, batch) -> probabilities"
            )
        return p / p.sum(dim=1, keepdim=True)

    def extra_repr(self) -> str:
        """The combination in a line, for print(model)."""
        shares = ", ".join(f"{m}: {w:.3f}" for m, w in zip(self.member_ids, self.weights.tolist(), strict=True))
        return f"method={self.method!r}, temperature={self.temperature:.4g}, weights={{{shares}}}"


class StackModel(nn.Module):
    """`Stacker.predict` in torch: members' probabilities, [b, C] each, to one [b, C]."""

    coefficients: Tensor
    intercept: Tensor
    seen: Tensor

    def __init__(self, stacker: Stacker) -> None:
        super().__init__()
        self.register_buffer("coefficients", torch.tensor(stacker.coefficients, dtype=torch.float32))
        self.register_buffer("intercept", torch.tensor(stacker.intercept, dtype=torch.float32))
        self.register_buffer("seen", torch.tensor(stacker.seen, dtype=torch.int64))
        self.classes = stacker.classes

    def forward(self, each: list[Tensor]) -> Tensor:
        """Probabilities float32 [b, C]; classes without validation rows keep their average share."""
        logs = torch.cat([p.clamp_min(EPSILON).log() for p in each], dim=1)
        fitted = torch.softmax(logs @ self.coefficients.T + self.intercept, dim=1)
        if len(self.seen) == self.classes:
            return fitted
        out = torch.stack(each).mean(dim=0)
        return out.index_copy(1, self.seen, fitted * out[:, self.seen].sum(dim=1, keepdim=True))


def _moved(batch: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """The batch with its tensors on `device`; itself when they are there."""
    if all(value.device == device for value in batch.values() if isinstance(value, Tensor)):
        return batch
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
