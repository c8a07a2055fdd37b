"""Assigns parameters to buckets, in the order in which a backward pass computes their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ensemble.comm.codecs import options_for
from ensemble.comm.powersgd import is_worth_compressing

#: Uncompressed parameters start at multiples of this many values: 64 bytes of fp32.
_ALIGN = 16


@dataclass(frozen=True)
class BucketLayout:
    """The layout of one bucket, which is exchanged as one message.

    Attributes:
        parameters: in the order in which their gradients are computed.
        starts: the offset of each parameter's values.
        size: values of the bucket, padding included, presence flags excluded.
        dtype: of the values.
        compression: options of the compression; None for none.
    """

    parameters: list[torch.nn.Parameter]
    starts: list[int]
    size: int
    dtype: torch.dtype
    compression: Mapping[str, Any] | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of this type are summed: fp32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_compressible(parameter: torch.nn.Parameter, compression: Mapping[str, Any] | None) -> bool:
    """Whether to compress a parameter: it is summed in fp32, large enough, and becomes smaller."""
    if compression is None or parameter.numel() < compression["min_size"]:
        return False
    if accumulation_dtype(parameter.dtype) != torch.float32:
        return False
    return compression["name"] != "powersgd" or is_worth_compressing(parameter.shape, compression["rank"])


def assign_buckets(
    parameters: Sequence[torch.nn.Parameter],
    compression: Mapping[str, Any] | None,
    first_bytes: int,
    bytes_each: int,
) -> list[BucketLayout]:
    """Assign parameters, in reverse order, to buckets; compressed and uncompressed ones do not share a bucket.

    A bucket ends where it is full, or where the type, the device or the height of 1-bit columns changes. Buckets
    are in the order in which the last of their gradients is computed.

    Args:
        compression: options for large parameters; None for none.
        first_bytes, bytes_each: size of the first and of the other buckets.
    """
    backwards = list(reversed(parameters))
    place = {id(parameter): number for number, parameter in enumerate(backwards)}
    layouts: list[BucketLayout] = []
    for compressed in (False, True):
        chosen = [p for p in backwards if is_compressible(p, compression) == compressed]
        for group in _fill_buckets(chosen, first_bytes, bytes_each, (compression or {}) if compressed else {}):
            options = options_for(compression, group[0].shape) if compression and compressed else None
            layouts.append(_lay_out(group, options))
    return sorted(layouts, key=lambda layout: place[id(layout.parameters[-1])])


def _fill_buckets(
    parameters: Sequence[torch.nn.Parameter], first_bytes: int, bytes_each: int, compression: Mapping[str, Any]
) -> Iterator[list[torch.nn.Parameter]]:
    group: list[torch.nn.Parameter] = []
    size, limit = 0, first_bytes

    def kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device, object]:
        column = options_for(compression, parameter.shape).get("column")
        return accumulation_dtype(parameter.dtype), parameter.device, column

    for parameter in parameters:
        if group and (kind(parameter) != kind(group[-1]) or size >= limit):
            yield group
            group, size, limit = [], 0, bytes_each
        group.append(parameter)
        size += parameter.numel() * kind(parameter)[0].itemsize
    if group:
        yield group


def _lay_out(parameters: list[torch.nn.Parameter], compression: Mapping[str, Any] | None) -> BucketLayout:
    # Padding between parameters would be encoded with them, so only uncompressed ones are aligned.
    align = _ALIGN if compression is None else 1
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // align) * align
    return BucketLayout(parameters, starts, end, accumulation_dtype(parameters[0].dtype), compression)
