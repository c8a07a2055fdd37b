"""fp16 and bf16: each value rounded to the nearest (ties to even).

A value too large for fp16 (above 65,504) becomes an infinity on purpose: the step is then skipped and, under
dynamic loss scaling, the scale lowered, as for an overflow in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ensemble.comm.codecs.common import Codec

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CHUNK = 1 << 18  # values at a time where an intermediate result is needed: 1 MiB, which a core's cache holds


def _split(values: Tensor) -> range:
    """Where the parts begin. On a GPU all is one part: each would cost the launch of its kernels."""
    return range(0, len(values), _CHUNK if values.device.type == "cpu" else len(values))


class Cast(Codec):
    """Values in 16 bits. Rounded to the nearest, not at random: the bias is below 2^-11 (fp16), 2^-8 (bf16)."""

    granularity = 1

    def __init__(self, name: str, form: str | None = None) -> None:  # there is one form
        self.name = name
        self._dtype = _TYPES[name]

    def wire_bytes(self, n: int) -> int:
        """Two bytes a value."""
        return 2 * n

    def _encode(self, values: Tensor, wire: Tensor, error: Tensor | None, key: int) -> None:
        if error is None and _is_even(wire):
            wire.view(self._dtype).copy_(values)
            return
        for begin in (parts := _split(values)):
            part = values[begin : begin + parts.step]
            cast = part.to(self._dtype)
            wire[2 * begin : 2 * begin + 2 * len(part)] = cast.view(torch.uint8)
            if error is not None:
                loss = part - cast.float()
                error[begin : begin + len(part)] = loss.nan_to_num_(0.0, 0.0, 0.0)

    def _decode(self, wire: Tensor, out: Tensor, add: bool) -> None:
        packed = (wire if _is_even(wire) else wire.clone()).view(self._dtype)
        if not add:
            out.copy_(packed)
            return
        for begin in (parts := _split(out)):
            end = begin + parts.step
            out[begin:end] += packed[begin:end].float()


def _is_even(wire: Tensor) -> bool:
    """Whether bytes can be seen as 16-bit values where they lie."""
    return wire.storage_offset() % 2 == 0 and wire.data_ptr() % 2 == 0
