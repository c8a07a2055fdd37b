"""1-bit SGD (Seide et al. 2014) with reshaping: each value becomes one of two means of its column.

A tensor is read as columns of `column` consecutive values. Values of at least the threshold (the column's mean,
or zero) form the upper class. Wire, column by column: the two means as fp32, lower first, then a bit for each
value in 32-bit words. It is biased: without error feedback it does not converge.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from torch import Tensor

from ensemble.comm.codecs.common import GroupCodec, choose_form


@dataclass(frozen=True)
class OnebitFormat:
    """How a column is packed.

    Args:
        column: values that share the two means; powers of two from 32 on are packed fastest.
        threshold: `"mean"` or `"zero"`.
    """

    column: int
    threshold: str

    def wire_bytes(self, n: int) -> int:
        """Bytes of a message of n values."""
        full, remainder = divmod(n, self.column)
        return full * _column_bytes(self.column) + (_column_bytes(remainder) if remainder else 0)

    @property
    def padded(self) -> int:
        """The column in the tree of sums: the next power of two."""
        return 1 << (self.column - 1).bit_length()


def _column_bytes(values: int) -> int:
    return 8 + 4 * -(-values // 32)


class OneBit(GroupCodec):
    """1-bit SGD's quantizer: see the module's text.

    Args:
        format: column and threshold.
        form: `"numba"` or `"torch"`; by default numba on the CPU, torch elsewhere. Columns that are no power of
            two from 32 on are packed by torch in any case.
    """

    name = "onebit"

    def __init__(self, format: OnebitFormat, form: str | None = None) -> None:
        super().__init__(format)
        self.granularity = self._column = format.column
        self._padded = format.padded
        self._form = form

    def _kernels(self, values: Tensor) -> ModuleType:
        if self._column != self._padded or self._column < 32:
            return import_module("ensemble.comm.codecs.onebit_torch")
        form = self._form or choose_form("numba" if values.device.type == "cpu" else "")
        return import_module(f"ensemble.comm.codecs.onebit_{form}")


def make_onebit(name: str, column: int, threshold: str, form: str | None = None) -> OneBit:
    """The codec of the name `onebit`."""
    return OneBit(OnebitFormat(column, threshold), form)
