"""QSGD in plain torch, on any device: the reference of the other forms, and CUDA's where Triton is absent.

Rounding is spelled out as in the kernels: one division for the step, one for its inverse (by tensors: a Python
number would be turned into a multiplication by the reciprocal on CUDA), products truncated to fixed point with 16
bits behind the point, whole-number sums from there on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ensemble.comm.codecs.common import split_into_blocks
from ensemble.comm.codecs.qsgd import HUGE, TINY, QsgdFormat

_MASK = 0xFFFFFFFF


def encode(values: Tensor, wire: Tensor, error: Tensor | None, format: QsgdFormat, words: tuple[int, int]) -> None:
    """Pack fp32 [n] (n > 0), and compute the error if `error` is given."""
    for start, end, block in split_into_blocks(
        values.numel(), wire, format.bucket, format.wire_bytes(format.bucket)
    ):
        part = values[start:end].view(len(block), -1)
        codes, step = _codes(part, format, words, start)
        block[:, :4] = step.view(torch.uint8)
        block[:, 4:] = codes
        if error is not None:
            residual = part - _levels(codes, part.shape[1], format) * step
            residual = torch.where(step.isfinite(), residual, torch.zeros_like(residual))
            error[start:end] = residual.view(-1)


def decode(wire: Tensor, out: Tensor, format: QsgdFormat, add: bool) -> None:
    """Unpack into fp32 [n] (n > 0)."""
    for start, end, block in split_into_blocks(out.numel(), wire, format.bucket, format.wire_bytes(format.bucket)):
        part = out[start:end].view(len(block), -1)
        step = block[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = _levels(block[:, 4:], part.shape[1], format) * step
        part.copy_(part + values if add else values)


def _codes(part: Tensor, format: QsgdFormat, words: tuple[int, int], start: int) -> tuple[Tensor, Tensor]:
    """Packed codes, uint8 [buckets, bytes], and steps, fp32 [buckets, 1], of fp32 [buckets, m]."""
    buckets, m = part.shape
    scale = _scale(part, format)
    finite, tiny = scale < HUGE, scale < TINY  # neither, if it is NaN
    usable = finite & ~tiny
    safe = torch.where(usable, scale, torch.ones_like(scale))
    step = torch.where(usable, safe / _like(safe, format.levels), torch.where(tiny, 0.0, torch.nan)).float()
    inverse = _like(safe, format.levels << 16) / safe

    k, planes = -(-m // format.planes), format.planes
    padded = torch.nn.functional.pad(torch.where(usable, part, torch.zeros_like(part)), (0, k * planes - m))
    limit = format.levels << 16
    integers = torch.int64 if format.bits == 16 else torch.int32
    fixed = (padded * inverse).to(integers).clamp_(-limit, limit).view(buckets, planes, k)
    random = _random(buckets, m, k, start, format, words, part.device).view(buckets, planes, k)
    codes = (fixed + (format.offset << 16) + random) >> 16
    codes = torch.where(usable[:, :, None], codes, torch.full_like(codes, format.offset))
    packed = codes[:, 0]
    for plane in range(1, planes):
        packed = packed | codes[:, plane] << plane * format.bits
    if format.bits == 16:
        packed = torch.cat((packed & 0xFF, packed >> 8), 1)
    return packed.to(torch.uint8), step


def _scale(part: Tensor, format: QsgdFormat) -> Tensor:
    """The norm of each bucket, fp32 [buckets, 1]; NaN where a value is not finite."""
    largest = (part.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    if format.norm == "max":
        scale = largest.view(torch.float32)
    else:
        wide = torch.nn.functional.pad(part, (0, format.bucket - part.shape[1])).double()
        squares = wide * wide
        while squares.shape[1] > 1:
            half = squares.shape[1] // 2
            squares = squares[:, :half] + squares[:, half:]
        scale = squares.sqrt().float()
    return torch.where(largest < 0x7F800000, scale, torch.full_like(scale, torch.nan))


def _random(
    buckets: int, m: int, k: int, start: int, format: QsgdFormat, words: tuple[int, int], device: torch.device
) -> Tensor:
    """16 random bits for each value, int32 [buckets, planes * k]: a plane pair shares the hash of its position."""
    planes = format.planes
    first = start + torch.arange(buckets, device=device)[:, None, None] * m
    pair = 2 * k * torch.arange((planes + 1) // 2, device=device)[None, :, None]
    x = first + pair + torch.arange(k, device=device)
    x = (x * 0x9E3779B9 + words[0]) & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ words[1]
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    x = x ^ (x >> 16)
    both = torch.stack((x & 0xFFFF, x >> 16), 2).flatten(1, 2)
    return both[:, :planes].to(torch.int32)


def _levels(codes: Tensor, m: int, format: QsgdFormat) -> Tensor:
    """Signed levels as fp32 [buckets, m] of packed codes, uint8 [buckets, bytes]."""
    if format.bits == 16:
        return (codes[:, :m].int() + (codes[:, m:].int() << 8) - format.offset).float()
    mask = (1 << format.bits) - 1
    planes = [(codes >> plane * format.bits) & mask for plane in range(format.planes)]
    return (torch.stack(planes, 1).flatten(1)[:, :m].to(torch.int32) - format.offset).float()


def _like(tensor: Tensor, number: int) -> Tensor:
    return torch.full_like(tensor, number)
