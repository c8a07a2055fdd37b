"""QSGD on the CPU: numba kernels that LLVM turns into vector instructions.

What keeps them fast: inner loops over whole planes (no shift that depends on the data), 32-bit integers throughout
(numba widens to 64 unless told), and all passes over a bucket while it is in the first-level cache. `fastmath`
stays off: a product and a sum contracted into one rounding would give other bits than the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ensemble.comm.codecs.kernels import inline, kernel
from ensemble.comm.codecs.qsgd import HUGE, TINY, QsgdFormat

_0, _2, _4, _8, _15, _16 = (np.uint32(x) for x in (0, 2, 4, 8, 15, 16))
_LOW = np.uint32(0xFFFF)
_GOLDEN, _MIX1, _MIX2 = np.uint32(0x9E3779B9), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_MAGNITUDE = np.int32(0x7FFFFFFF)


def encode(values: Tensor, wire: Tensor, error: Tensor | None, format: QsgdFormat, words: tuple[int, int]) -> None:
    """Pack fp32 [n] (n > 0), and compute the error if `error` is given."""
    source = values.numpy()
    residual = source[:0] if error is None else error.numpy()
    in_place = error is not None and error.data_ptr() == values.data_ptr()
    l2 = format.norm == "l2"
    scale = np.empty(1, np.float32)
    _encode(
        source,
        source.view(np.int32),
        wire.numpy(),
        residual,
        in_place,
        format.bits,
        format.bucket,
        l2,
        np.float32(TINY),
        np.float32(HUGE),
        np.uint32(words[0]),
        np.uint32(words[1]),
        scale,
        scale.view(np.int32),
        scale.view(np.uint8),
        np.empty(format.bucket, np.float32),
        np.empty(format.bucket if l2 else 0, np.float64),
    )


def decode(wire: Tensor, out: Tensor, format: QsgdFormat, add: bool) -> None:
    """Unpack into fp32 [n] (n > 0)."""
    step = np.empty(1, np.float32)
    _decode(wire.numpy(), out.numpy(), add, format.bits, format.bucket, step, step.view(np.uint8))


@inline
def _random(counter: Any, k0: Any, k1: Any) -> Any:
    """32 random bits: the mixer `lowbias32` (C. Wellons) over the counter, keyed twice."""
    x = np.uint32(np.uint32(counter * _GOLDEN) + k0)
    x = np.uint32(x ^ np.uint32(x >> _16))
    x = np.uint32(x * _MIX1)
    x = np.uint32(x ^ k1)
    x = np.uint32(x ^ np.uint32(x >> _15))
    x = np.uint32(x * _MIX2)
    return np.uint32(x ^ np.uint32(x >> _16))


@inline
def _code(value: Any, inverse: Any, random: Any, limit: Any, offset: Any) -> Any:
    """offset + ⌊value·inverse/2^16 + random/2^16⌋: `inverse` carries the factor 2^16."""
    fixed = np.int32(value * inverse)
    fixed = min(max(fixed, np.int32(-limit)), limit)
    return np.uint32(np.uint32(np.uint32(np.uint32(fixed) + offset) + random) >> _16)


@inline
def _pack2(values: Any, codes: Any, inverse: Any, limit: Any, offset: Any, start: Any, k0: Any, k1: Any) -> None:
    k = codes.size
    p0, p1, p2, p3 = values[:k], values[k : 2 * k], values[2 * k : 3 * k], values[3 * k : 4 * k]
    later = np.uint32(start + np.uint32(2 * k))
    for i in range(k):
        r = _random(np.uint32(start + np.uint32(i)), k0, k1)
        s = _random(np.uint32(later + np.uint32(i)), k0, k1)
        a = _code(p0[i], inverse, np.uint32(r & _LOW), limit, offset)
        b = _code(p1[i], inverse, np.uint32(r >> _16), limit, offset)
        c = _code(p2[i], inverse, np.uint32(s & _LOW), limit, offset)
        d = _code(p3[i], inverse, np.uint32(s >> _16), limit, offset)
        low = np.uint32(a | np.uint32(b << _2))
        high = np.uint32(c | np.uint32(d << _2))
        codes[i] = np.uint8(np.uint32(low | np.uint32(high << _4)))


@inline
def _pack4(values: Any, codes: Any, inverse: Any, limit: Any, offset: Any, start: Any, k0: Any, k1: Any) -> None:
    k = codes.size
    p0, p1 = values[:k], values[k : 2 * k]
    for i in range(k):
        r = _random(np.uint32(start + np.uint32(i)), k0, k1)
        a = _code(p0[i], inverse, np.uint32(r & _LOW), limit, offset)
        b = _code(p1[i], inverse, np.uint32(r >> _16), limit, offset)
        codes[i] = np.uint8(np.uint32(a | np.uint32(b << _4)))


@inline
def _pack8(values: Any, codes: Any, inverse: Any, limit: Any, offset: Any, start: Any, k0: Any, k1: Any) -> None:
    for i in range(codes.size):
        r = _random(np.uint32(start + np.uint32(i)), k0, k1)
        codes[i] = np.uint8(_code(values[i], inverse, np.uint32(r & _LOW), limit, offset))


@inline
def _pack16(values: Any, codes: Any, inverse: Any, limit: Any, offset: Any, start: Any, k0: Any, k1: Any) -> None:
    k = codes.size // 2
    low, high = codes[:k], codes[k:]
    for i in range(k):
        r = _random(np.uint32(start + np.uint32(i)), k0, k1)
        code = _code(values[i], inverse, np.uint32(r & _LOW), limit, offset)
        low[i], high[i] = np.uint8(code), np.uint8(np.uint32(code >> _8))


@inline
def _unpack(codes: Any, out: Any, step: Any, add: Any, bits: Any) -> None:
    """Out of a bucket's codes: set or add (signed level)·step."""
    k, m = codes.size, out.size
    if bits == 16:
        low, high = codes[:m], codes[m:]
        for i in range(m):
            code = np.uint32(np.uint32(low[i]) | np.uint32(np.uint32(high[i]) << _8))
            value = np.float32(np.int32(np.int32(code) - np.int32(0x8000))) * step
            out[i] = out[i] + value if add else value
        return
    mask = np.uint8((1 << bits) - 1)
    zero = np.int32(1 << (bits - 1))
    for plane in range(8 // bits):
        part = out[min(m, plane * k) : min(m, (plane + 1) * k)]
        shift = np.uint8(plane * bits)
        if add:
            for i in range(part.size):
                level = np.int32(np.int32(np.uint8(np.uint8(codes[i] >> shift) & mask)) - zero)
                part[i] += np.float32(level) * step
        else:
            for i in range(part.size):
                level = np.int32(np.int32(np.uint8(np.uint8(codes[i] >> shift) & mask)) - zero)
                part[i] = np.float32(level) * step


@inline
def _norm_max(bits: Any) -> Any:
    """The largest magnitude, as the integer of its bits: NaN lies above infinity, infinity above the rest."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return largest


@inline
def _norm_l2(values: Any, squares: Any) -> Any:
    """Euclidean norm, squares added in fp64 in a fixed tree over the bucket padded with zeros."""
    for i in range(values.size):
        wide = np.float64(values[i])
        squares[i] = wide * wide
    for i in range(values.size, squares.size):
        squares[i] = 0.0
    half = squares.size // 2
    while half:
        low, high = squares[:half], squares[half : 2 * half]
        for i in range(half):
            low[i] += high[i]
        half //= 2
    return np.float32(np.sqrt(squares[0]))


@inline
def _pad(values: Any, padded: Any) -> None:
    """A copy with zeros behind it."""
    for i in range(values.size):
        padded[i] = values[i]
    for i in range(values.size, padded.size):
        padded[i] = np.float32(0.0)


# Arrays and views of them are made by the callers: each that a kernel makes adds half a second to its compilation,
# as does an assignment to a slice.
@kernel
def _encode(
    values: Any,
    value_bits: Any,
    wire: Any,
    error: Any,
    in_place: Any,
    bits: Any,
    bucket: Any,
    l2: Any,
    tiny: Any,
    huge: Any,
    k0: Any,
    k1: Any,
    scale: Any,
    scale_bits: Any,
    scale_bytes: Any,
    padded: Any,
    squares: Any,
) -> None:
    levels = (1 << (bits - 1)) - 1
    limit = np.int32(levels << 16)
    offset = np.uint32(1 << (bits - 1 + 16))
    nothing = np.uint8(0x80 if bits >= 8 else 0x88 if bits == 4 else 0xAA)
    size = 4 + bucket * bits // 8
    for number in range((values.size + bucket - 1) // bucket):
        start = number * bucket
        part = values[start : start + bucket]
        k = (part.size * bits + 7) // 8
        block = wire[number * size : number * size + 4 + k]
        codes = block[4:]
        scale_bits[0] = _norm_max(value_bits[start : start + bucket])
        if l2 and scale[0] < np.inf:
            scale[0] = _norm_l2(part, squares)
        finite = scale[0] < huge
        if finite and scale[0] >= tiny:
            inverse = np.float32(np.float32(levels << 16) / scale[0])
            scale[0] = np.float32(scale[0] / np.float32(levels))
            source = part
            if part.size < bucket:
                _pad(part, padded)
                source = padded
            position = np.uint32(start)
            if bits == 4:
                _pack4(source, codes, inverse, limit, offset, position, k0, k1)
            elif bits == 8:
                _pack8(source, codes, inverse, limit, offset, position, k0, k1)
            elif bits == 16:
                _pack16(source, codes, inverse, limit, offset, position, k0, k1)
            else:
                _pack2(source, codes, inverse, limit, offset, position, k0, k1)
        else:
            scale[0] = np.float32(0.0 if finite else np.nan)
            for i in range(k):
                codes[i] = nothing
            for i in range(part.size if bits == 16 else 0):
                codes[i] = np.uint8(0)
        for i in range(4):
            block[i] = scale_bytes[i]
        if error.size:
            residual = error[start : start + part.size]
            if not finite:
                for i in range(residual.size):
                    residual[i] = np.float32(0.0)
            else:
                if not in_place:
                    for i in range(residual.size):
                        residual[i] = part[i]
                _unpack(codes, residual, np.float32(-scale[0]), True, bits)


@kernel
def _decode(wire: Any, out: Any, add: Any, bits: Any, bucket: Any, step: Any, step_bytes: Any) -> None:
    size = 4 + bucket * bits // 8
    for number in range((out.size + bucket - 1) // bucket):
        part = out[number * bucket : (number + 1) * bucket]
        block = wire[number * size : number * size + 4 + (part.size * bits + 7) // 8]
        for i in range(4):
            step_bytes[i] = block[i]
        _unpack(block[4:], part, step[0], add, bits)
