"""Compressions by name: `qsgd4` as it is by default, `qsgd4+ef` with, `onebit-ef` without error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.spec import SpecError
from ensemble.spec.options import COMPRESSIONS, resolve

PLAIN = "none"
UNLIMITED = "unlimited"
_WITH, _WITHOUT = "+ef", "-ef"


@dataclass(frozen=True)
class Scheme:
    """A compression as a declaration has it (`ensemble.spec.options.COMPRESSIONS`), all options filled in."""

    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The compression's name."""
        return str(self.options["name"])

    @property
    def feedback(self) -> bool:
        """Whether the compression error is added to the next step's gradient."""
        return bool(self.options.get("error_feedback", False))

    @property
    def label(self) -> str:
        """Its name in options and tables."""
        return self.name + (_WITH if self.feedback else "")

    def bits(self, shapes: Iterable[Sequence[int]]) -> float:
        """Mean bits of a value of parameters of these shapes on the wire; small parameters are sent as fp32."""
        sent = values = 0.0
        for shape in shapes:
            n = math.prod(shape)
            values += n
            sent += self._bits(n, shape) if n >= self.options.get("min_size", n + 1) else 32 * n
        return sent / values

    def _bits(self, n: int, shape: Sequence[int]) -> float:
        if self.name == "powersgd":
            from ensemble.comm.powersgd import is_worth_compressing, matrix_shape

            rank = self.options["rank"]
            return 32 * rank * sum(matrix_shape(shape)) if is_worth_compressing(shape, rank) else 32 * n
        from ensemble.comm.compressed_all_reduce import make_exchange_codec

        return 8 * make_exchange_codec(self.options).wire_bytes(n)


def parse_scheme(name: str) -> Scheme:
    """A scheme by its name; without an ending, error feedback is the compression's default.

    Raises:
        SpecError: there is no such compression, or it has no error feedback; or it is chosen by measurement.
    """
    base, options = name, dict[str, Any]()
    for ending, value in ((_WITH, True), (_WITHOUT, False)):
        if name.endswith(ending):
            base, options = name.removesuffix(ending), {"error_feedback": value}
    if base == "auto":
        raise SpecError("--schemes: 'auto' is one of the others, chosen by measurement; name those")
    return Scheme(resolve("--schemes", {"name": base, **options}, COMPRESSIONS))


def parse_schemes(names: Sequence[str]) -> list[Scheme]:
    """Schemes by name, each once; the plain exchange, the baseline, comes first."""
    return list({scheme.label: scheme for scheme in map(parse_scheme, (PLAIN, *names))}.values())
