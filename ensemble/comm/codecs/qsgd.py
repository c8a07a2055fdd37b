"""QSGD (Alistarh et al. 2017): values rounded at random to a few levels of their bucket's norm, without bias.

A bucket becomes its step, norm / levels, as fp32, and for each value a code of `bits` bits: level and sign.
Codes lie in planes: with k bytes, value i is in byte i mod k, at bit (i div k)·bits; of 16 bits the low bytes
come first. Random numbers are 16 bits a value, hashed from (key, position). `norm="max"` has a tenth of the
error of the theorem's `"l2"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from ensemble.comm.codecs.common import GroupCodec, choose_form
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
        full, remainder = divmod(n, self.bucket)
        return full * (4 + self.code_bytes(self.bucket)) + (4 + self.code_bytes(remainder) if remainder else 0)


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
        compiler = "numba" if device == "cpu" else "triton" if device == "cuda" and self._format.bits < 16 else ""
        return import_module(f"ensemble.comm.codecs.qsgd_{self._form or choose_form(compiler)}")

    def _random(self, key: int) -> tuple[Any, ...]:
        x = splitmix64(key)
        return ((x & 0xFFFFFFFF, x >> 32),)  # two words of 32 bits


def make_qsgd(name: str, bucket: int, norm: str, form: str | None = None) -> Qsgd:
    """The codec of a name such as `qsgd4`."""
    return Qsgd(QsgdFormat(int(name.removeprefix("qsgd")), bucket, norm), form)
