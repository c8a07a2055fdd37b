"""What gradients travel as, by one word: `qsgd4`, `qsgd4+ef` and `onebit-ef` with and without error feedback."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.spec import SpecError
from ensemble.spec.options import COMPRESSIONS, resolve

PLAIN = "none"
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
        """Whether what is lost is added to the next step's gradient."""
        return bool(self.options.get("error_feedback", False))

    @property
    def word(self) -> str:
        """For people, and as it may be given."""
        return self.name + (_WITH if self.feedback else "")

    def bits(self, shapes: Iterable[Sequence[int]]) -> float:
        """Bits that a value of such parameters takes on the wire, on the average; small ones travel as fp32."""
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


def scheme(word: str) -> Scheme:
    """A scheme by its word; without an ending, error feedback is as the compression has it by default.

    Raises:
        SpecError: there is no such compression, or it has no error feedback; or it is chosen by measurement.
    """
    name, options = word, dict[str, Any]()
    for ending, value in ((_WITH, True), (_WITHOUT, False)):
        if word.endswith(ending):
            name, options = word.removesuffix(ending), {"error_feedback": value}
    if name == "auto":
        raise SpecError("--schemes: 'auto' is one of the others, chosen by measurement; name those")
    return Scheme(resolve("--schemes", {"name": name, **options}, COMPRESSIONS))


def schemes(words: Sequence[str]) -> list[Scheme]:
    """Schemes by their words, each once; the plain exchange, against which all are measured, comes first."""
    return list({made.word: made for made in map(scheme, (PLAIN, *words))}.values())
