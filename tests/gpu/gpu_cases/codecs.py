"""The codecs on the GPU: they write the bits that they write on the CPU, but for a NaN's own, and how fast.

The Triton form is compared with torch's on the CPU bit by bit, and timed beside torch's own form on the GPU. GB/s
are of fp32 values read (encoding) or written (decoding). In a rehearsal numba stands for Triton.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu_cases.common import Row, Setting, Timed, attempt, check, row, time_calls

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "comm"))

import codec_child

from ensemble.comm.codecs import make_codec

_SIZES = (1, 3, 127, 512, 1000, 5003)
_CASTS = ("onebit", "fp16", "bf16")


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    fast = setting.choose("triton", "numba")
    forms = ["torch", fast] if importlib.util.find_spec(fast) else ["torch"]
    if fast not in forms:
        yield check(f"{fast} is installed", False)
    for form in forms:
        for options in codec_child.OPTIONS:
            what = f"{form}: {', '.join(map(str, options.values()))}"
            yield attempt(what, functools.partial(_compare, setting, what, form, options))
    for name in _CASTS:
        yield attempt(name, functools.partial(_compare_cast, setting, name))
    names = [("qsgd4", form) for form in forms] + [("qsgd8", forms[-1]), ("qsgd2", forms[-1])]
    timed = names + [(name, None) for name in _CASTS]
    for name, form in timed:
        what = f"{name}, {form or 'the usual form'}"
        yield attempt(what, functools.partial(_time, setting, what, name, form, setting.budget_s / 4 / len(timed)))


def _compare(setting: Setting, what: str, form: str, options: dict[str, object]) -> Row:
    different = []
    for n in (*_SIZES, *setting.choose((100_003,), ())):
        values = codec_child.values_of(n)
        wanted = codec_child.outcome(options, "torch", values)
        found = codec_child.outcome(options, form, values.to(setting.device))
        if not all(torch.equal(a, b.cpu()) for a, b in zip(wanted, found, strict=True)):
            different.append(n)
    return check(f"{what}: the bits of the CPU", not different, sizes_that_differ=different)


def _compare_cast(setting: Setting, name: str) -> Row:
    codec, differ = make_codec({"name": name}), {}
    for kind, values in (("finite", codec_child.values_of(500)), ("not finite", codec_child.values_of(5003))):
        wires, others = [], []
        for device in ("cpu", setting.device):
            error = values.to(device, copy=True)
            wire = torch.zeros(codec.wire_bytes(len(values)), dtype=torch.uint8, device=device)
            codec.encode(error, wire, key=0, error=error)
            out = torch.empty_like(error)
            codec.decode(wire, out)
            wires.append(wire.cpu())
            others.append([error.cpu().view(torch.int32), out.cpu().nan_to_num(codec_child.NOT_FINITE)])
        unlike = [int((a != b).sum()) for a, b in zip(*others, strict=True)]
        differ[f"{kind}: bytes, errors, values that differ"] = [int((wires[0] != wires[1]).sum()), *unlike]
    (finite, (_, *rest)) = differ.values()
    return check(f"{name}: the bits of the CPU", not any([*finite, *rest]), **differ)


def _time(setting: Setting, what: str, name: str, form: str | None, seconds: float) -> Row:
    n = setting.choose(2**24, 2**12)
    codec, values = make_codec({"name": name}, form), torch.randn(n, device=setting.device)
    wire = torch.zeros(codec.wire_bytes(n), dtype=torch.uint8, device=setting.device)
    error, out = torch.zeros_like(values), torch.empty_like(values)

    def rate(timed: Timed) -> float:
        return 4 * n / timed.each_s / 1e9

    return row(
        what,
        values=n,
        wire_mb=len(wire) / 1e6,
        encode_gb_s=rate(time_calls(setting, lambda: codec.encode(values, wire, key=1), seconds)),
        encode_with_error_gb_s=rate(
            time_calls(setting, lambda: codec.encode(values, wire, key=1, error=error), seconds)
        ),
        decode_gb_s=rate(time_calls(setting, lambda: codec.decode(wire, out), seconds)),
        copy_gb_s=rate(time_calls(setting, lambda: out.copy_(values), seconds / 4)),
    )
