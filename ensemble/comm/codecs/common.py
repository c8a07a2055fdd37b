"""The base of all codecs, which pack fp32 values into few bytes and unpack them; they send nothing.

A *wire* is a byte string whose size depends on the number of values alone. Values are packed in groups of
`granularity`, each whole by itself. A group with a NaN or an infinity unpacks to one that is not finite, and its
error is 0. All forms of a codec (numba, Triton, torch) write the same bits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

#: Values at a time in plain torch, whose intermediate results are 8 bytes a value. A GPU has the memory for more,
#: and each chunk costs it the launches of its kernels.
_CHUNK, _CHUNK_ON_GPU = 1 << 20, 1 << 23

log = logging.getLogger(__name__)


class Codec:
    """Packs fp32 values into bytes. Stateless: what comes out is a function of the arguments alone.

    May be used by several threads at once; the kernels release the interpreter lock.

    Attributes:
        name: `"fp16"`, `"bf16"`, `"qsgd4"`, `"onebit"` and so on.
        granularity: values of a group: a message is cut at multiples of it only.
    """

    name: str
    granularity: int

    def wire_bytes(self, n: int) -> int:
        """Exact size of `n` packed values, in bytes; the last group may be a partial one."""
        raise NotImplementedError

    def encode(self, values: Tensor, wire: Tensor, *, key: int, error: Tensor | None = None) -> None:
        """Pack `values` into `wire`.

        Args:
            values: fp32 [n], contiguous; not changed unless `error` is the same memory.
            wire: uint8 [wire_bytes(n)], contiguous, on the same device; overwritten. It need not be aligned.
            key: of the random numbers, any integer; another one for each message and rank. Codecs that draw none
                ignore it.
            error: fp32 [n], contiguous: becomes `values` minus what `decode` will give, to the bit; 0 in groups
                that are not finite. It may be `values` itself (residual in place), not a shifted view of it.

        Raises:
            ValueError: a shape, type or layout differs from the above.
        """
        n = _check_values("values", values)
        _check_wire(wire, self.wire_bytes(n), values)
        if error is not None:
            _check_error(error, values)
        if n:
            self._encode(values.detach(), wire, None if error is None else error.detach(), key)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Unpack `wire`, uint8 [wire_bytes(n)], into `out`, fp32 [n], contiguous: set it, or add to it.

        Raises:
            ValueError: a shape, type or layout differs from the above.
        """
        n = _check_values("out", out)
        _check_wire(wire, self.wire_bytes(n), out)
        if n:
            self._decode(wire, out.detach(), add)

    def _encode(self, values: Tensor, wire: Tensor, error: Tensor | None, key: int) -> None:
        raise NotImplementedError

    def _decode(self, wire: Tensor, out: Tensor, add: bool) -> None:
        raise NotImplementedError


class WireFormat(Protocol):
    """How a codec's groups lie in its wire."""

    def wire_bytes(self, n: int) -> int:
        """See `Codec`."""


class GroupCodec(Codec):
    """A codec that calls kernels; the base class of QSGD and 1-bit SGD."""

    def __init__(self, format: WireFormat) -> None:
        self._format = format

    def wire_bytes(self, n: int) -> int:
        """See `Codec`."""
        return self._format.wire_bytes(n)

    def _encode(self, values: Tensor, wire: Tensor, error: Tensor | None, key: int) -> None:
        self._kernels(values).encode(values, wire, error, self._format, *self._random(key))

    def _decode(self, wire: Tensor, out: Tensor, add: bool) -> None:
        self._kernels(out).decode(wire, out, self._format, add)

    def _kernels(self, values: Tensor) -> ModuleType:
        """The module with the kernels for tensors of this device."""
        raise NotImplementedError

    def _random(self, key: int) -> tuple[Any, ...]:
        """The arguments of encoding that depend on the key; empty without random numbers."""
        return ()


@functools.cache
def choose_form(compiler: str) -> str:
    """The compiler if it is installed, else `"torch"`."""
    if compiler and find_spec(compiler) is not None:
        return compiler
    if compiler == "numba":
        slow = "without numba, packing gradients takes 10 to 30 times as long on a CPU"
        log.warning("%s: pip install 'ray-ensemble[compression]'", slow)
    return "torch"


def split_into_blocks(n: int, wire: Tensor, group: int, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """Runs of whole groups, then the partial one: their values' start and end, and uint8 [groups, bytes].

    Args:
        group: values of a group.  size: bytes of its wire.
    """
    chunk = _CHUNK if wire.device.type == "cpu" else _CHUNK_ON_GPU
    whole, stride = n - n % group, max(1, chunk // group) * group
    for start in range(0, whole, stride):
        end = min(whole, start + stride)
        yield start, end, wire[start // group * size : end // group * size].view(-1, size)
    if whole < n:
        yield whole, n, wire[whole // group * size :].view(1, -1)


def _check_values(what: str, values: Tensor) -> int:
    """Check that a tensor is fp32 [n], contiguous; returns n."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        strided = "" if values.is_contiguous() else ", strided"
        raise ValueError(f"{what} must be contiguous fp32 [n], got {values.dtype} {list(values.shape)}{strided}")
    return values.numel()


def _check_wire(wire: Tensor, size: int, like: Tensor) -> None:
    """Check that a wire is uint8 [size], contiguous, on the device of the values."""
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != size or not wire.is_contiguous():
        expected = f"wire must be contiguous uint8 [{size}] for {like.numel()} values"
        raise ValueError(f"{expected}, got {wire.dtype} {list(wire.shape)}")
    if wire.device != like.device:
        raise ValueError(f"wire lies on {wire.device}, the values on {like.device}: put them on one device")


def _check_error(error: Tensor, values: Tensor) -> None:
    """Check that an error tensor has the shape and device of its values."""
    if _check_values("error", error) != values.numel() or error.device != values.device:
        expected = f"error must be like the values ([{values.numel()}] on {values.device})"
        raise ValueError(f"{expected}, got {list(error.shape)} on {error.device}")
