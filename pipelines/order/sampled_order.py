"""An order in which the positions of an epoch draw records of the source, some of them several times or never."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from pipelines.fingerprint import describe_ours
from pipelines.order.epoch_order import Indices, Words, derive_bytes, mix

_CHUNK = 1 << 20  # positions that are looked through at once


class SampledOrder(ABC):
    """The order of the epochs of one pipeline: a function (epoch, start, stop) -> indices, int64 [stop - start].

    Attributes:
        positions: number of positions in an epoch.
        digest: identifies the weights or labels.
    """

    positions: int
    digest: str

    def __repr__(self) -> str:
        return f"{type(self).__name__.removesuffix('Order').lower()}({self.positions} positions)"

    @abstractmethod
    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        """The indices of the records at the positions [start, stop) of an epoch."""

    def describe(self) -> Any:
        """Describes the order as a JSON value, for fingerprints."""
        return [describe_ours(type(self)), self.digest, self.positions]

    def find_positions(self, epoch: int, index: int) -> list[int]:
        return [
            start + int(place)
            for start in range(0, self.positions, _CHUNK)
            for place in np.flatnonzero(self(epoch, start, min(self.positions, start + _CHUNK)) == index)
        ]


@functools.lru_cache(maxsize=256)
def _derive_words(*key: str | int) -> tuple[np.uint64, np.uint64]:
    first, second = np.frombuffer(derive_bytes(*key, size=16), np.uint64)
    return first, second


def draw_words(start: int, stop: int, *key: str | int) -> Words:
    first, second = _derive_words(*key)
    return mix(mix(np.arange(start, stop, dtype=np.uint64) + first) + second)


def group_by_class(codes: Indices, classes: int, *key: str | int) -> Indices:
    """The records of class 0 in a random order, then those of class 1, and so on, of the smallest dtype."""
    mixed = np.argsort(draw_words(0, len(codes), *key))  # no two words are equal
    mixed = mixed.astype(np.int32 if len(codes) < 1 << 31 else np.int64)
    # numpy sorts numbers of 16 bits by their digits, many times faster.
    codes = codes.astype(np.uint16 if classes < 1 << 16 else np.int64)
    return mixed[np.argsort(codes[mixed], kind="stable")]
