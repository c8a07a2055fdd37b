"""QSGD on CUDA: Triton kernels that write the bits of the other forms.

A program packs some buckets, a row each. The step is divided with correct rounding, products and sums are not
fused (`enable_fp_fusion=False`) and squares are added in the reference's tree: nothing depends on the device.

Checked in Triton's interpreter on CPU tensors against the reference. On hardware they have not run yet: tests/gpu
does it where there is a device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ensemble.comm.codecs.qsgd import HUGE, TINY, QsgdFormat

_PROGRAM = 4096  # values of a program


def encode(values: Tensor, wire: Tensor, error: Tensor | None, format: QsgdFormat, words: tuple[int, int]) -> None:
    """Pack fp32 [n] (n > 0), and compute the error if `error` is given."""
    residual = values if error is None else error
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        for first, buckets, m in _parts(values.numel(), format):
            rows = max(1, _PROGRAM // format.bucket) if buckets > 1 else 1
            k = format.code_bytes(m)
            _encode[(triton.cdiv(buckets, rows),)](
                values[first * format.bucket :],
                wire[first * format.wire_bytes(format.bucket) :],
                residual[first * format.bucket :],
                buckets,
                m,
                k,
                first * format.bucket,
                _signed(words[0]),
                _signed(words[1]),
                LEVELS=format.levels,
                BITS=format.bits,
                BUCKET=format.bucket,
                BYTES=triton.next_power_of_2(k),
                ROWS=rows,
                L2=format.norm == "l2",
                ERROR=error is not None,
                TINY=TINY,
                HUGE=HUGE,
                enable_fp_fusion=False,
            )


def decode(wire: Tensor, out: Tensor, format: QsgdFormat, add: bool) -> None:
    """Unpack into fp32 [n] (n > 0)."""
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        for first, buckets, m in _parts(out.numel(), format):
            rows = max(1, _PROGRAM // format.bucket) if buckets > 1 else 1
            k = format.code_bytes(m)
            _decode[(triton.cdiv(buckets, rows),)](
                wire[first * format.wire_bytes(format.bucket) :],
                out[first * format.bucket :],
                buckets,
                m,
                k,
                BITS=format.bits,
                BYTES=triton.next_power_of_2(k),
                ROWS=rows,
                ADD=add,
                enable_fp_fusion=False,
            )


def _parts(n: int, format: QsgdFormat) -> list[tuple[int, int, int]]:
    """Launches: number of the first bucket, how many, values of each."""
    full, remainder = divmod(n, format.bucket)
    return [part for part in ((0, full, format.bucket), (full, 1, remainder)) if part[1] and part[2]]


def _signed(word: int) -> int:
    """32 bits as the int32 that a kernel takes."""
    return word - (1 << 32) if word >> 31 else word


# Parameters bear no types: Triton takes an annotation for a part of the kernel.
@triton.jit
def _random(counter, k0, k1):  # type: ignore[no-untyped-def]
    """32 random bits of uint32 counters, as in the reference."""
    x = counter * 0x9E3779B9 + k0
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ k1
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


# Keys differ in each call: a kernel compiled for "divisible by 16" or "equal to 1" would be one of many.
@triton.jit(do_not_specialize=["start", "k0", "k1"])  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    values,
    wire,
    error,
    buckets,
    m,
    k,
    start,
    k0,
    k1,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    L2: tl.constexpr,
    ERROR: tl.constexpr,
    TINY: tl.constexpr,
    HUGE: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_bucket = row < buckets
    place = tl.arange(0, BUCKET)
    mask = is_bucket[:, None] & (place < m)[None, :]
    whole = tl.load(values + row[:, None] * m + place[None, :], mask=mask, other=0.0)
    largest = tl.max(whole.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = largest.to(tl.float32, bitcast=True)
    if L2:
        wide = whole.to(tl.float64)
        squares = wide * wide
        half: tl.constexpr = BUCKET // 2
        for level in tl.static_range(0, 16):
            if (half >> level) > 0:
                pairs = tl.reshape(squares, (ROWS, 2, half >> level))
                squares = tl.sum(pairs, axis=1)
        norm = tl.sqrt(tl.reshape(squares, (ROWS,))).to(tl.float32)
        scale = tl.where(largest < 0x7F800000, norm, scale)
    finite = scale < HUGE
    usable = finite & (scale >= TINY)
    safe = tl.where(usable, scale, 1.0)
    step = tl.div_rn(safe, tl.full((ROWS,), LEVELS, tl.float32))
    step = tl.where(usable, step, tl.where(finite, 0.0, float("nan")))
    inverse = tl.div_rn(tl.full((ROWS,), LEVELS * 65536, tl.float32), safe)

    block = wire + row * (4 + k)
    step_bits = step.to(tl.uint32, bitcast=True)
    for i in tl.static_range(0, 4):
        tl.store(block + i, ((step_bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=is_bucket)

    LIMIT: tl.constexpr = LEVELS * 65536
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    column = tl.arange(0, BYTES)
    inside = is_bucket[:, None] & (column < k)[None, :]
    packed = tl.zeros((ROWS, BYTES), tl.int32)
    word = tl.zeros((ROWS, BYTES), tl.uint32)
    for plane in tl.static_range(0, 8 // BITS):
        at = plane * k + column
        here = is_bucket[:, None] & ((column < k) & (at < m))[None, :]
        value = tl.load(values + row[:, None] * m + at[None, :], mask=here, other=0.0)
        value = tl.where(usable[:, None], value, 0.0)
        fixed = (value * inverse[:, None]).to(tl.int32)
        fixed = tl.minimum(tl.maximum(fixed, -LIMIT), LIMIT)
        if plane % 2 == 0:
            counter = start + row[:, None] * m + at[None, :]
            word = _random(counter.to(tl.uint32), k0, k1)
            chance = word & 0xFFFF
        else:
            chance = word >> 16
        code = (fixed + OFFSET * 65536 + chance.to(tl.int32)) >> 16
        code = tl.where(usable[:, None], code, OFFSET)
        packed = packed | (code << (plane * BITS))
        if ERROR:
            residual = value - (code - OFFSET).to(tl.float32) * step[:, None]
            original = tl.load(values + row[:, None] * m + at[None, :], mask=here, other=0.0)
            residual = tl.where(usable[:, None], residual, tl.where(finite[:, None], original, 0.0))
            tl.store(error + row[:, None] * m + at[None, :], residual, mask=here)
    tl.store(block[:, None] + 4 + column[None, :], packed.to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    wire,
    out,
    buckets,
    m,
    k,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_bucket = row < buckets
    block = wire + row * (4 + k)
    step_bits = tl.zeros((ROWS,), tl.uint32)
    for i in tl.static_range(0, 4):
        step_bits = step_bits | (tl.load(block + i, mask=is_bucket, other=0).to(tl.uint32) << (8 * i))
    step = step_bits.to(tl.float32, bitcast=True)

    column = tl.arange(0, BYTES)
    inside = is_bucket[:, None] & (column < k)[None, :]
    packed = tl.load(block[:, None] + 4 + column[None, :], mask=inside, other=0).to(tl.int32)
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    MASK: tl.constexpr = (1 << BITS) - 1
    for plane in tl.static_range(0, 8 // BITS):
        at = plane * k + column
        here = is_bucket[:, None] & ((column < k) & (at < m))[None, :]
        value = (((packed >> (plane * BITS)) & MASK) - OFFSET).to(tl.float32) * step[:, None]
        place = out + row[:, None] * m + at[None, :]
        if ADD:
            value = tl.load(place, mask=here, other=0.0) + value
        tl.store(place, value, mask=here)
