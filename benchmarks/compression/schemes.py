"""Compressions by name: `qsgd4` as it is by default, `qsgd4+ef` with, `onebit-ef` without error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ensemble.spec import SpecError
from ensemble.spec.options import COMPRESSIONS, resolve

PLAIN = "none"


def parse_schemes(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The options of schemes, each once, by their names in tables; the plain exchange, the baseline, comes first.

    Without an ending, error feedback is the compression's default.

    Raises:
        SpecError: there is no such compression, or it has no error feedback; or it is chosen by measurement.
    """
    schemes = {}
    for name in (PLAIN, *names):
        base, ending = (name[:-3], name[-3:]) if name.endswith(("+ef", "-ef")) else (name, "")
        if base == "auto":
            raise SpecError("--schemes: 'auto' is one of the others, chosen by measurement; name those")
        feedback = {"error_feedback": ending == "+ef"} if ending else {}
        options = resolve("--schemes", {"name": base, **feedback}, COMPRESSIONS)
        schemes[base + ("+ef" if options.get("error_feedback") else "")] = options
    return schemes


def mean_bits(options: Mapping[str, Any], shapes: Iterable[Sequence[int]]) -> float:
    """Mean bits of a value of parameters of these shapes on the wire; small parameters are sent as fp32."""
    sent = values = 0.0
    for shape in shapes:
        n = math.prod(shape)
        values += n
        sent += _bits(options, n, shape) if n >= options.get("min_size", n + 1) else 32 * n
    return sent / values


def _bits(options: Mapping[str, Any], n: int, shape: Sequence[int]) -> float:
    from ensemble.comm.compressed_all_reduce import make_exchange_codec
    from ensemble.comm.powersgd import is_worth_compressing, matrix_shape

    if options["name"] != "powersgd":
        return 8 * make_exchange_codec(options).wire_bytes(n)
    rank = options["rank"]
    return 32 * rank * sum(matrix_shape(shape)) if is_worth_compressing(shape, rank) else 32 * n
