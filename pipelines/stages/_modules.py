"""Twins of stages in torch: the same arithmetic on whole batches [b, ...], bitwise equal on the CPU.

A twin maps a batch (field -> tensor [b, ...]) to a new one, so that an exported program can begin with the last
stages of a pipeline. Fields that a stage only passes on, drops or renames may be missing: a program is not given
those that its model does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipelines.stages._fields import Drop, Rename, Select
from pipelines.stages._geometry import CenterCrop
from pipelines.stages._sample import Transform
from pipelines.stages._values import FULL, Cast, Scale

Batch = dict[str, Tensor]


class ScaleModule(nn.Module):
    """`scale`: (x / 255 - mean) / std, each operation rounded to float32; see `FULL` for 255."""

    full: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, field: str, mean: Sequence[float], std: Sequence[float], dtype: str) -> None:
        super().__init__()
        self.field = field
        self.dtype: torch.dtype = getattr(torch, dtype)
        # As a tensor: by a number, CUDA would multiply by its reciprocal, which rounds differently.
        for name, numbers in (("full", (255.0,)), ("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1, 1))

    def forward(self, batch: Batch) -> Batch:
        """Images [b, C, H, W] of the dtype."""
        image = batch[self.field]
        scaled = image.to(torch.float32)
        if (full := FULL.get(str(image.dtype).removeprefix("torch."), 1)) > 1:
            scaled = scaled / (self.full * (full // 255))
        scaled = (scaled - self.mean) / self.std
        return {**batch, self.field: scaled.to(self.dtype)}


class CastModule(nn.Module):
    """`cast` to a floating-point dtype."""

    def __init__(self, field: str, dtype: str) -> None:
        super().__init__()
        self.field = field
        self.dtype: torch.dtype = getattr(torch, dtype)

    def forward(self, batch: Batch) -> Batch:
        """The field in the dtype."""
        return {**batch, self.field: batch[self.field].to(self.dtype)}


class CenterCropModule(nn.Module):
    """`center_crop`, of images of any size that is not below the crop's."""

    def __init__(self, field: str, size: tuple[int, int]) -> None:
        super().__init__()
        self.field = field
        self.size = size

    def forward(self, batch: Batch) -> Batch:
        """Images [b, C, height, width]."""
        image = batch[self.field]
        for axis, length in zip((2, 3), self.size, strict=True):
            # By index: a slice would bind an exported program to the sizes of its example.
            kept = torch.arange(length, device=image.device) + (image.shape[axis] - length) // 2
            image = image.index_select(axis, kept)
        return {**batch, self.field: image}


class FieldsModule(nn.Module):
    """`select` or `drop`: those fields in their order, or all but them."""

    def __init__(self, fields: Sequence[str], *, is_drop: bool) -> None:
        super().__init__()
        self.fields = tuple(fields)
        self.is_drop = is_drop

    def forward(self, batch: Batch) -> Batch:
        kept = [field for field in batch if field not in self.fields] if self.is_drop else self.fields
        return {field: batch[field] for field in kept if field in batch}


class RenameModule(nn.Module):
    """`rename`."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.names = dict(names)

    def forward(self, batch: Batch) -> Batch:
        """The same values under their new names."""
        return {self.names.get(field, field): value for field, value in batch.items()}


_TWINS: dict[type[Transform], Callable[[Any], nn.Module | None]] = {
    Scale: lambda stage: ScaleModule(stage.field, stage.mean, stage.std, stage.dtype),
    # In other casts of floats numpy and torch may differ.
    Cast: lambda stage: CastModule(stage.field, stage.dtype) if stage.dtype in ("float32", "float64") else None,
    CenterCrop: lambda stage: CenterCropModule(stage.field, stage.size),
    Select: lambda stage: FieldsModule(stage.fields, is_drop=False),
    Drop: lambda stage: FieldsModule(stage.fields, is_drop=True),
    Rename: lambda stage: RenameModule(stage.names),
}


def find_twin(stage: Transform) -> nn.Module | None:
    """The twin of a stage; None where it has none, as of a user's class that computes something else than ours."""
    for cls, make in _TWINS.items():
        if isinstance(stage, cls) and type(stage).__call__ is cls.__call__:
            return make(stage)
    return None
