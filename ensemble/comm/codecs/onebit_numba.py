"""1-bit SGD's quantizer on the CPU: numba kernels, over strips of columns long enough for vector loops.

A sum over a column adds neighbours, then neighbouring sums: each step is one vector loop for all columns of a
strip. Columns that are no power of two, or short, are packed in plain torch (`onebit.OneBit`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ensemble.comm.codecs.kernels import inline, kernel
from ensemble.comm.codecs.onebit import OnebitFormat

_0, _1, _2, _4, _24 = (np.uint32(x) for x in (0, 1, 2, 4, 24))
_PAIRS, _FOURS, _BYTES = np.uint32(0x33333333), np.uint32(0x0F0F0F0F), np.uint32(0x01010101)
_ODD = np.uint32(0x55555555)
_NONE = np.float32(0.0)
_STRIP = 4096  # values: 16 KiB


def encode(values: Tensor, wire: Tensor, error: Tensor | None, format: OnebitFormat) -> None:
    """Pack fp32 [n] (n > 0), and compute the error if `error` is given."""
    source = values.numpy()
    residual = source[:0] if error is None else error.numpy()
    in_place = error is not None and error.data_ptr() == values.data_ptr()
    columns = max(1, _STRIP // format.column)
    strip = columns * format.column
    table = _table(columns, format)
    scratch = np.empty((2, strip), np.float32)
    sums = np.empty((3, columns), np.float32)
    _encode(
        source,
        wire.numpy(),
        residual,
        in_place,
        format.column,
        format.threshold == "mean",
        table,
        table.view(np.float32),
        table.reshape(-1).view(np.uint8),
        scratch[0],
        scratch[0].reshape(columns, -1, 32),
        scratch[1],
        np.empty(strip // 2, np.float32),
        np.empty(strip // 2, np.float32),
        sums[0],
        sums[1],
        sums[2],
    )


def decode(wire: Tensor, out: Tensor, format: OnebitFormat, add: bool) -> None:
    """Unpack into fp32 [n] (n > 0)."""
    table = _table(max(1, _STRIP // format.column), format)
    packed = table.reshape(-1).view(np.uint8)
    _decode(wire.numpy(), out.numpy(), add, format.column, table, table.view(np.float32), packed)


def _table(columns: int, format: OnebitFormat) -> Any:
    return np.empty((columns, 2 + -(-format.column // 32)), np.uint32)


@inline
def _sums(values: Any, column: Any, sums: Any, a: Any, b: Any) -> None:
    """The sum of each column of `values` into `sums`, by neighbours; `a` and `b` are scratch."""
    half = values.size // 2
    for i in range(half):
        a[i] = values[2 * i] + values[2 * i + 1]
    width = column // 2
    while width > 1:
        half //= 2
        width //= 2
        for i in range(half):
            b[i] = a[2 * i] + a[2 * i + 1]
        a, b = b, a
    for i in range(half):
        sums[i] = a[i]


@inline
def _ones(word: Any) -> Any:
    """How many bits are set."""
    x = np.uint32(word - np.uint32(np.uint32(word >> _1) & _ODD))
    x = np.uint32(np.uint32(x & _PAIRS) + np.uint32(np.uint32(x >> _2) & _PAIRS))
    x = np.uint32(np.uint32(x + np.uint32(x >> _4)) & _FOURS)
    return np.int32(np.uint32(np.uint32(x * _BYTES) >> _24))


@inline
def _split(values: Any, thresholds: Any, table: Any, upper: Any) -> None:
    """Of columns [c, words, 32]: their bits into `table`, the values of the upper class (else 0) into `upper`."""
    for c in range(values.shape[0]):
        threshold = thresholds[c]
        for w in range(values.shape[1]):
            word = _0
            for i in range(32):
                value = values[c, w, i]
                above = value >= threshold
                upper[c, w, i] = value if above else _NONE
                word = np.uint32(word | np.uint32(np.uint32(above) << np.uint32(i)))
            table[c, 2 + w] = word


@inline
def _fill(table: Any, means: Any, out: Any, column: Any, add: Any) -> None:
    """Into `out`, whole columns and perhaps a partial one: set or add the means that the table's bits choose."""
    whole, words = out.size // column, column // 32
    columns = out[: whole * column].reshape((whole, words, 32))
    for c in range(whole):
        low, high = means[c, 0], means[c, 1]
        for w in range(words):
            word = table[c, 2 + w]
            if add:
                for i in range(32):
                    columns[c, w, i] += high if np.uint32(word >> np.uint32(i)) & _1 else low
            else:
                for i in range(32):
                    columns[c, w, i] = high if np.uint32(word >> np.uint32(i)) & _1 else low
    for i in range(whole * column, out.size):
        place = i - whole * column
        word = table[whole, 2 + place // 32]
        value = means[whole, 1] if np.uint32(word >> np.uint32(place % 32)) & _1 else means[whole, 0]
        out[i] = out[i] + value if add else value


# Arrays and views of them are made by the callers: each that a kernel makes adds half a second to its compilation,
# as does an assignment to a slice.
@kernel
def _encode(
    values: Any,
    wire: Any,
    error: Any,
    in_place: Any,
    column: Any,
    by_mean: Any,
    table: Any,
    means: Any,
    packed: Any,
    upper: Any,
    upper_words: Any,
    padded: Any,
    a: Any,
    b: Any,
    totals: Any,
    highs: Any,
    thresholds: Any,
) -> None:
    strip, words = padded.size, column // 32
    for start in range(0, values.size, strip):
        here = values[start : start + strip]
        count = (here.size + column - 1) // column
        source = here
        if here.size < count * column:
            source = padded[: count * column]
            for i in range(here.size):
                source[i] = here[i]
            for i in range(here.size, source.size):
                source[i] = _NONE
        last = here.size - (count - 1) * column
        _sums(source, column, totals, a, b)
        for c in range(count):
            m = last if c == count - 1 else column
            thresholds[c] = np.float32(totals[c] / np.float32(m)) if by_mean else _NONE
        _split(source.reshape((count, words, 32)), thresholds, table, upper_words)
        for w in range(words):  # zeros of the padding are in no class
            kept = min(max(last - 32 * w, 0), 32)
            table[count - 1, 2 + w] = np.uint32(table[count - 1, 2 + w] & np.uint32((1 << kept) - 1))
        _sums(upper[: count * column], column, highs, a, b)
        for c in range(count):
            m = last if c == count - 1 else column
            ones = 0
            for w in range(words):
                ones += _ones(table[c, 2 + w])
            means[c, 0] = np.float32(totals[c] - highs[c]) / np.float32(max(m - ones, 1))
            means[c, 1] = highs[c] / np.float32(max(ones, 1))
        first = start // column * (8 + 4 * words)
        block = wire[first : first + packed.size]
        for i in range(block.size):
            block[i] = packed[i]
        if error.size:
            residual = error[start : start + here.size]
            if not in_place:
                for i in range(residual.size):
                    residual[i] = here[i]
            for c in range(count):
                if abs(means[c, 0]) < np.inf and abs(means[c, 1]) < np.inf:
                    means[c, 0], means[c, 1] = -means[c, 0], -means[c, 1]
                else:
                    means[c, 0], means[c, 1] = _NONE, _NONE
                    for i in range(c * column, min((c + 1) * column, residual.size)):
                        residual[i] = _NONE
            _fill(table, means, residual, column, True)


@kernel
def _decode(wire: Any, out: Any, add: Any, column: Any, table: Any, means: Any, packed: Any) -> None:
    columns = table.shape[0]
    size = 8 + column // 8
    for start in range(0, out.size, columns * column):
        block = wire[start // column * size : (start // column + columns) * size]
        for i in range(block.size):
            packed[i] = block[i]
        _fill(table, means, out[start : start + columns * column], column, add)
