"""1-bit SGD (Seide et al. 2014) with reshaping: each value becomes one of two means of its column.

A tensor is read as columns of `column` consecutive values, whatever its shape (*reshaping*). With a layer's own
columns, `column="tensor"` (its last dimension), a column of height 3 saves nothing and one of height 1 costs three
times as much. Values of at least the threshold form the upper class, the others the lower one; each is sent as its
class and unpacked as the mean of it. This is biased: without error feedback it does not converge. The threshold is
the column's mean (the default) or zero: relative errors over 150 steps of 0.48 and 0.70 (a CNN on digits), 0.54
and 0.54 (an LSTM); residuals with error feedback of 1.01 and 1.29, 0.74 and 0.75 gradients.

Wire, column by column: mean of the lower class, mean of the upper one (fp32, little endian; 0 for an empty class),
then 32-bit words in which bit i mod 32 of word i div 32 is 1 if value i is in the upper class: 8 + 4·⌈m/32⌉ bytes
for m values. The lower class's sum is the column's less the upper one's; sums are fp32 in a fixed tree. One that
leaves fp32's range counts as an overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from torch import Tensor

from ensemble.comm.codecs.common import GroupCodec


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
        full, rest = divmod(n, self.column)
        return full * _column_bytes(self.column) + (_column_bytes(rest) if rest else 0)

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
        form: `"numba"` or `"torch"`; by default numba on the CPU, torch elsewhere.
    """

    name = "onebit"

    def __init__(self, format: OnebitFormat, form: str | None = None) -> None:
        super().__init__(format)
        self.granularity = format.column
        self._form = form

    def _kernels(self, values: Tensor) -> ModuleType:
        form = self._form or ("numba" if values.device.type == "cpu" else "torch")
        return import_module(f"ensemble.comm.codecs.onebit_{form}")
