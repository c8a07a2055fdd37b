"""Runs the combined members as one torch module. Imports torch, so `load` imports it only when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.combine.combination import Combination
from ensemble.combine.metrics import EPSILON, SUM_TOLERANCE, CombineError
from ensemble.combine.stack import Stacker
from ensemble.spec import Recipe
from ensemble.train.outputs import compute_probabilities

ONE_SAMPLE = "samples lie along the first axis: one sample x is the batch x[None]"


class EnsembleModel(nn.Module):
    """Maps a batch dict to class probabilities float32 [b, C], by all members that have a weight.

    The batch is moved to where the weights are: `.to("cuda")` moves the whole ensemble. Members compute in float32
    (their outputs under autocast while training differs by its rounding). Parameters are frozen, so that no graph
    is kept; gradients with respect to the batch still flow.

    Attributes:
        member_ids: of the members in it, in the order of `weights`.
        method: average, weighted, greedy or stack.
        temperature: of the calibration, 1.0 for none.
    """

    weights: Tensor

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        members: Mapping[str, nn.Module],
        combination: Combination,
        axes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.recipes = dict(recipes)  # of each member: they may have been trained with other code
        self.axes = dict(axes or {})  # of each field of a batch, its first one included; what is known of them
        self.member_ids = list(members)
        self.members = nn.ModuleDict(members)
        self.method = combination.method
        self.temperature = combination.temperature
        self.register_buffer("weights", torch.tensor(combination.weights, dtype=torch.float32))
        self.stack = None if combination.stacker is None else StackModel(combination.stacker)
        self.requires_grad_(False)
        self.eval()

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Probabilities float32 [b, C] of a batch with the fields that the recipe's loss (or predict) reads.

        Raises:
            CombineError: a field lacks its first axis (one sample is a batch [1, ...]), or a member's answers are
                no probabilities of classes, one row a sample.
        """
        self._check_axes(batch)
        batch = _move(batch, self.weights.device)
        each = [self._predict_member(name, batch) for name in self.member_ids]
        pooled = torch.stack([w * p for w, p in zip(self.weights, each, strict=True)]).sum(dim=0)
        if self.stack is not None:
            pooled = self.stack(each)
        if self.temperature == 1.0:
            return pooled
        return torch.softmax(pooled.clamp_min(EPSILON).log() / self.temperature, dim=1)

    def _predict_member(self, name: str, batch: Mapping[str, Any]) -> Tensor:
        p = compute_probabilities(self.recipes[name], self.members[name], batch)
        if p.dim() != 2 or p.shape[1] < 2:
            raise CombineError(
                f"{name} gives outputs of shape {list(p.shape)}, not probabilities [b, classes]; "
                "declare Recipe.predict(model, batch) -> probabilities"
            )
        if len(p) not in {len(value) for value in batch.values() if isinstance(value, Tensor)}:
            raise CombineError(f"{name} gives {len(p)} rows for a batch of another size; {ONE_SAMPLE}")
        if self.recipes[name].predict is not None and p.device.type != "meta":  # else they are of a softmax
            sums, least = p.detach().sum(dim=1), p.detach().min()
            if not (bool(((sums - 1).abs() <= SUM_TOLERANCE).all()) and least >= -1e-6):
                raise CombineError(
                    f"Recipe.predict gives {name} rows that are no probabilities of classes (they sum to "
                    f"{sums.min():.3g} ... {sums.max():.3g}): several labels a sample are not combined"
                )
        return p / p.sum(dim=1, keepdim=True)

    def _check_axes(self, batch: Mapping[str, Any]) -> None:
        for field, value in batch.items():
            if isinstance(value, Tensor) and value.dim() != self.axes.get(field, max(1, value.dim())):
                shape = list(value.shape)
                wanted = f"{self.axes[field]} axes" if field in self.axes else "one axis or more"
                raise CombineError(f"the batch's {field!r} has shape {shape}, not {wanted}; {ONE_SAMPLE}")

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


def _move(batch: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """The batch with its tensors on `device`; itself when they are there."""
    if all(value.device == device for value in batch.values() if isinstance(value, Tensor)):
        return batch
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
