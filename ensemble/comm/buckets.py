"""Which parameters travel together: groups in the order in which a backward pass makes their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ensemble.comm.powersgd import is_worth_compressing

#: Plain parameters start at multiples of this many values: 64 bytes of fp32.
_ALIGN = 16


ChooseCompression = Callable[[int], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Group:
    """Parameters of one message.

    Attributes:
        parameters: in the order in which their gradients come.
        starts: where each one's values begin in the message.
        size: values of the message, presences aside.
        dtype: of the values.
        compression: what they travel as; None: as they are.
    """

    parameters: list[torch.nn.Parameter]
    starts: list[int]
    size: int
    dtype: torch.dtype
    compression: Mapping[str, Any] | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of this type are computed with: fp32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_compressible(parameter: torch.nn.Parameter, compression: Mapping[str, Any] | None) -> bool:
    """Whether a parameter travels compressed: it is summed in fp32, large enough, and what is left is less."""
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
    choose: ChooseCompression | None = None,
) -> list[Group]:
    """Parameters in reverse order, those that are compressed and those that are not each for themselves.

    A group ends where it is full or the type or device changes. Groups are in the order in which the last of their
    gradients comes.

    Args:
        compression: what large parameters travel as; None: as they are.
        choose: for the compression "auto", what so many values travel as.
    """
    backwards = list(reversed(parameters))
    place = {id(parameter): number for number, parameter in enumerate(backwards)}
    groups: list[Group] = []
    for compressed in (False, True):
        chosen = [p for p in backwards if is_compressible(p, compression) == compressed]
        for group in _cut(chosen, first_bytes, bytes_each):
            how = compression if compressed else None
            if how is not None and choose is not None:
                how = choose(sum(p.numel() for p in group))
            groups.append(_group(group, how))
    return sorted(groups, key=lambda group: place[id(group.parameters[-1])])


def _cut(
    parameters: Sequence[torch.nn.Parameter], first_bytes: int, bytes_each: int
) -> Iterator[list[torch.nn.Parameter]]:
    group: list[torch.nn.Parameter] = []
    size, limit = 0, first_bytes
    for parameter in parameters:
        kind = (accumulation_dtype(parameter.dtype), parameter.device)
        other = bool(group) and kind != (accumulation_dtype(group[-1].dtype), group[-1].device)
        if group and (other or size >= limit):
            yield group
            group, size, limit = [], 0, bytes_each
        group.append(parameter)
        size += parameter.numel() * kind[0].itemsize
    if group:
        yield group


def _group(parameters: list[torch.nn.Parameter], compression: Mapping[str, Any] | None) -> Group:
    # What lies between parameters would be encoded with them, so only plain ones are aligned.
    align = _ALIGN if compression is None else 1
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // align) * align
    return Group(parameters, starts, end, accumulation_dtype(parameters[0].dtype), compression)
