"""Compares two forms of QSGD on a device, bit for bit: `python codec_child.py DEVICE FORM SIZE...`."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ensemble.comm.codecs import make_codec

NOT_FINITE = 7.0  # stands for NaN in what is compared
OPTIONS: list[dict[str, Any]] = [{"name": f"qsgd{bits}"} for bits in (2, 4, 8)]
OPTIONS += [{"name": "qsgd4", "norm": "l2"}, {"name": "qsgd8", "bucket": 32, "norm": "l2"}]


def values_of(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp() * 1e-3
    if n > 600:
        values[5], values[130:390], values[600] = math.nan, 0.0, math.inf
        values[n - 3 :] = 1e-37
    return values


def outcome(options: dict[str, Any], form: str, values: torch.Tensor) -> list[torch.Tensor]:
    codec = make_codec(options, form)
    wire = torch.zeros(codec.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    in_place, error = values.clone(), torch.full_like(values, 3.0)
    out, added = torch.empty_like(values), torch.ones_like(values)
    codec.encode(in_place, wire, key=-11, error=in_place)
    codec.encode(values, wire, key=-11, error=error)
    codec.decode(wire, out)
    codec.decode(wire, added, add=True)
    lost = [each.view(torch.int32) for each in (error, in_place)]
    return [wire, *lost, *(each.nan_to_num(NOT_FINITE) for each in (out, added))]


def main(device: str, form: str, sizes: list[int]) -> None:
    for options in OPTIONS:
        for n in sizes:
            wanted = outcome(options, "torch", values_of(n))
            found = outcome(options, form, values_of(n).to(device))
            names = ("wire", "error", "error in place", "values", "added values")
            for name, a, b in zip(names, wanted, found, strict=True):
                if not torch.equal(a, b.cpu()):
                    print(f"{options}: {name} of {n} values differ")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3:]])
