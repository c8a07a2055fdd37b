"""1-bit SGD's quantizer in plain torch, on any device: the reference of the kernels, and what CUDA uses."""

from __future__ import annotations

import torch
from torch import Tensor

from ensemble.comm.codecs.common import split_into_blocks
from ensemble.comm.codecs.onebit import OnebitFormat


def encode(values: Tensor, wire: Tensor, error: Tensor | None, format: OnebitFormat) -> None:
    """Pack fp32 [n] (n > 0), and compute the error if `error` is given."""
    for start, end, block in split_into_blocks(
        values.numel(), wire, format.column, format.wire_bytes(format.column)
    ):
        part = values[start:end].view(len(block), -1)
        upper, means = _classes(part, format)
        block[:, :8] = means.view(torch.uint8)
        block[:, 8:] = _pack(upper)
        if error is not None:
            residual = part - torch.where(upper, means[:, 1:], means[:, :1])
            finite = means.isfinite().all(1, keepdim=True)
            error[start:end] = torch.where(finite, residual, torch.zeros_like(residual)).view(-1)


def decode(wire: Tensor, out: Tensor, format: OnebitFormat, add: bool) -> None:
    """Unpack into fp32 [n] (n > 0)."""
    for start, end, block in split_into_blocks(out.numel(), wire, format.column, format.wire_bytes(format.column)):
        part = out[start:end].view(len(block), -1)
        means = block[:, :8].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = torch.where(_unpack(block[:, 8:], part.shape[1]), means[:, 1:], means[:, :1])
        part.copy_(part + values if add else values)


def _classes(part: Tensor, format: OnebitFormat) -> tuple[Tensor, Tensor]:
    """Which values of fp32 [columns, m] are in the upper class, and the means, fp32 [columns, 2], lower first."""
    number = torch.full_like(part[:, :1], part.shape[1])
    total = _sum(part, format.padded)
    threshold = total / number if format.threshold == "mean" else torch.zeros_like(total)
    upper = part >= threshold  # false for NaN, which therefore ends in the lower mean
    high = _sum(torch.where(upper, part, torch.zeros_like(part)), format.padded)
    count = upper.sum(1, keepdim=True).float()
    return upper, torch.cat(((total - high) / (number - count).clamp(min=1), high / count.clamp(min=1)), 1)


def _sum(part: Tensor, padded: int) -> Tensor:
    """Sums [columns, 1] in the kernels' order: neighbours, then neighbouring sums, over the padded column."""
    sums = torch.nn.functional.pad(part, (0, padded - part.shape[1]))
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums


def _pack(upper: Tensor) -> Tensor:
    """Bits of bool [columns, m] as bytes: little-endian words, the first value in the lowest bit."""
    columns, m = upper.shape
    bits = torch.nn.functional.pad(upper.to(torch.uint8), (0, -m % 32)).view(columns, -1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=upper.device)
    return (bits * weights).sum(2, dtype=torch.uint8)


def _unpack(packed: Tensor, m: int) -> Tensor:
    """The other way: bool [columns, m]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, :m].bool()
