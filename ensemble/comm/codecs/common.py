"""The `Codec` protocol: packs fp32 values into few bytes and unpacks them.

A *codec* does not communicate. Its *wire* is a byte string whose size depends on the number of values alone, so
that a receiver knows it in advance. Values are packed in groups of `granularity` (QSGD's bucket, 1-bit SGD's
column), each with its own scale and whole by itself: the wire of a message is the wires of its pieces one after
the other, if it is cut at multiples of the granularity.

A group that holds a NaN or an infinity unpacks to at least one value that is not finite: the skipping of a step
after an overflow depends on it. The error of such a group is 0, so that residuals stay finite.

All forms of a codec (numba on the CPU, Triton on CUDA, plain torch anywhere) write the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Packs fp32 values into bytes. Stateless: what comes out is a function of the arguments alone.

    May be used by several threads at once; the kernels release the interpreter lock.
    """

    @property
    def name(self) -> str:
        """`"fp16"`, `"bf16"`, `"qsgd4"`, `"onebit"` and so on."""

    @property
    def granularity(self) -> int:
        """Values of a group: a message is cut at multiples of it only."""

    @property
    def contracts(self) -> bool:
        """Whether the error is smaller than the values, so that error feedback is stable.

        Otherwise a residual that is added to the next values grows from step to step without end.
        """

    def wire_bytes(self, n: int) -> int:
        """Exact size of `n` packed values, in bytes; the last group may be a partial one."""

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

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Unpack `wire`, uint8 [wire_bytes(n)], into `out`, fp32 [n], contiguous: set it, or add to it.

        Raises:
            ValueError: a shape, type or layout differs from the above.
        """


class WireFormat(Protocol):
    """How a codec's groups lie in its wire."""

    def wire_bytes(self, n: int) -> int:
        """See `Codec`."""


class CheckedCodec:
    """The base class of all codecs: checks the arguments of `encode` and `decode`."""

    def wire_bytes(self, n: int) -> int:
        """See `Codec`."""
        raise NotImplementedError

    def encode(self, values: Tensor, wire: Tensor, *, key: int, error: Tensor | None = None) -> None:
        """See `Codec`."""
        n = check_values("values", values)
        check_wire(wire, self.wire_bytes(n), values)
        if error is not None:
            check_error(error, values)
        if n:
            self._encode(values.detach(), wire, None if error is None else error.detach(), key)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False) -> None:
        """See `Codec`."""
        n = check_values("out", out)
        check_wire(wire, self.wire_bytes(n), out)
        if n:
            self._decode(wire, out.detach(), add)

    def _encode(self, values: Tensor, wire: Tensor, error: Tensor | None, key: int) -> None:
        raise NotImplementedError

    def _decode(self, wire: Tensor, out: Tensor, add: bool) -> None:
        raise NotImplementedError


class GroupCodec(CheckedCodec):
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


def read_options(options: Mapping[str, Any], name: str, **defaults: Any) -> dict[str, Any]:
    """Fill in the defaults of a codec's options.

    Raises:
        ValueError: an option is unknown.
    """
    for option in options:
        if option != "name" and option not in defaults:
            valid = ", ".join(defaults) or "none"
            raise ValueError(f"compression {name!r} has no option {option!r} (valid: {valid})")
    return {option: options.get(option, default) for option, default in defaults.items()}


def check_group(name: str, option: str, size: Any) -> int:
    """Check a group's size: a power of two, so that packed groups are whole words and sums have a fixed order."""
    if isinstance(size, bool) or not isinstance(size, int) or not 32 <= size <= 65536 or size & (size - 1):
        raise ValueError(
            f"compression {name!r}: {option} must be a power of two from 32 to 65536 (values), got {size!r}"
        )
    return size


def check_choice(name: str, option: str, value: Any, valid: tuple[str, ...]) -> str:
    """Check that an option has one of its valid values."""
    if value not in valid:
        raise ValueError(f"compression {name!r}: {option} must be one of {', '.join(valid)}, got {value!r}")
    return str(value)


def check_values(what: str, values: Tensor) -> int:
    """Check that a tensor is fp32 [n], contiguous; returns n."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous fp32 [n], got {values.dtype} {list(values.shape)}"
            f"{'' if values.is_contiguous() else ', strided'}"
        )
    return values.numel()


def check_wire(wire: Tensor, size: int, like: Tensor) -> None:
    """Check that a wire is uint8 [size], contiguous, on the device of the values."""
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != size or not wire.is_contiguous():
        raise ValueError(
            f"wire must be contiguous uint8 [{size}] for {like.numel()} values, "
            f"got {wire.dtype} {list(wire.shape)}"
        )
    if wire.device != like.device:
        raise ValueError(f"wire lies on {wire.device}, the values on {like.device}: put them on one device")


def check_error(error: Tensor, values: Tensor) -> None:
    """Check that an error tensor has the shape and device of its values."""
    if check_values("error", error) != values.numel() or error.device != values.device:
        raise ValueError(
            f"error must be like the values ([{values.numel()}] on {values.device}), "
            f"got {list(error.shape)} on {error.device}"
        )
