"""QSGD (Alistarh et al. 2017): values rounded at random to a few levels of their bucket's norm, without bias.

A bucket of values v becomes one scale, ‖v‖, and for each value a sign and a level ℓ of 0 ... s, which stands for
‖v‖·sgn(v)·ℓ/s. Of the two levels around s·|v|/‖v‖ one is drawn so that the mean is v itself; the variance is at
most min(n/s², √n/s)·‖v‖² for the Euclidean norm. With sign, `bits` bits hold s = 2^(bits−1) − 1 levels: 1, 7, 127,
32767.

`norm="l2"` is the theorem's; with buckets of 512 and 7 levels nearly all values then fall below the first level
and the relative error of a normal vector is about 1.8. `norm="max"` (the default, and what the paper's own
experiments use) scales by the largest magnitude: 0.19. Error feedback is stable then: residuals of 0.2 (4 bits,
buckets of 512), 4 (2 bits, 128) and 42 (2 bits, 8192) gradients after 20,000 steps of a normal gradient.

Wire, bucket by bucket: the step ‖v‖/s as fp32 (little endian), then the codes (signed level + 2^(bits−1)) in
⌈m·bits/8⌉ bytes for m values. Codes lie in *planes*: with k bytes, value i is in byte i mod k, at bit
(i div k)·bits, so that a plane is packed and unpacked with no shift that depends on i. Of 16 bits the low bytes of
all values come first, then the high ones.

Random numbers: 16 bits for each value, from a hash of (key, position), hence the same in every form and on every
device. A value's chance is thereby a multiple of 2^-16. A bucket whose norm is below `TINY` is sent as zeros, one
from `HUGE` on counts as an overflow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from ensemble.comm.codecs.common import GroupCodec
from ensemble.comm.reductions import splitmix64

#: Below this norm 1/step would leave fp32's normal range.
TINY = 2.0**-110
#: From this norm on the largest level could leave fp32's range.
HUGE = 2.0**127


@dataclass(frozen=True)
class QsgdFormat:
    """How a bucket is packed.

    Args:
        bits: of a value, 2, 4, 8 or 16.
        bucket: values that share a scale, a power of two.
        norm: `"max"` or `"l2"`.
    """

    bits: int
    bucket: int
    norm: str

    @property
    def levels(self) -> int:
        """s: levels above zero."""
        return (1 << (self.bits - 1)) - 1

    @property
    def offset(self) -> int:
        """The code of zero."""
        return 1 << (self.bits - 1)

    @property
    def planes(self) -> int:
        """Values of a byte, at least one."""
        return max(1, 8 // self.bits)

    def code_bytes(self, values: int) -> int:
        """Bytes of a bucket's codes."""
        return (values * self.bits + 7) // 8

    def wire_bytes(self, n: int) -> int:
        """Bytes of a message of n values."""
        full, rest = divmod(n, self.bucket)
        return full * (4 + self.code_bytes(self.bucket)) + (4 + self.code_bytes(rest) if rest else 0)


class Qsgd(GroupCodec):
    """QSGD of 2, 4, 8 or 16 bits: see the module's text.

    Args:
        format: bits, bucket and norm.
        form: `"numba"`, `"torch"` or `"triton"`; by default what is fastest on the values' device.
    """

    def __init__(self, format: QsgdFormat, form: str | None = None) -> None:
        super().__init__(format)
        self._format: QsgdFormat = format
        self.granularity = format.bucket
        self.name = f"qsgd{format.bits}"
        self._form = form

    def _kernels(self, values: Tensor) -> ModuleType:
        device = values.device.type
        triton = device == "cuda" and self._format.bits < 16 and _has_triton()
        usual = "numba" if device == "cpu" else "triton" if triton else "torch"
        return import_module(f"ensemble.comm.codecs.qsgd_{self._form or usual}")

    def _random(self, key: int) -> tuple[Any, ...]:
        x = splitmix64(key)
        return ((x & 0xFFFFFFFF, x >> 32),)  # two words of 32 bits


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
