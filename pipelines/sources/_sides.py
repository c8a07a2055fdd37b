"""Tells which records of divided data have changed sides when the data or the division are others than before.

A *sketch* of a part has the smallest hashes of its records, at most `MOST`. Records are known by the key by which
they were divided, else by their number in the whole source. Hashes are uniform, so that what two sketches have
below the lower of their limits is a random sample of the same records.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MOST = 512  # hashes of a part: a share of 10 % is found within 1.3 points
_CHUNK = 1 << 20
_ALL = 2**64 - 1

Hashes = npt.NDArray[np.uint64]
NUMBER = "number"


class Sketch(NamedTuple):
    """A sample of the records of a part.

    Attributes:
        by: what the records are known by; sketches by another are of no use to each other.
        hashes: of different records, ascending.
        limit: no record is left out whose hash is at most that.
    """

    by: str
    hashes: Hashes
    limit: int = _ALL

    def as_json(self) -> dict[str, Any]:
        """A JSON object; the hashes are little-endian, in base64."""
        text = base64.b64encode(self.hashes.astype("<u8").tobytes()).decode("ascii")
        return {"by": self.by, "limit": self.limit, "hashes": text}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sketch:
        """The sketch of which `as_json` made this."""
        hashes = np.frombuffer(base64.b64decode(value["hashes"]), "<u8").astype(np.uint64)
        return cls(value["by"], hashes, value["limit"])


def sketch_keys(digests: Hashes, by: str) -> Sketch:
    """A sketch of records that are known by the digests of their keys, uint64 [n]."""
    return _sketch(iter([digests]), by)


def sketch_numbers(indices: np.ndarray[Any, Any] | range) -> Sketch:
    """A sketch of records that are known by their numbers in the whole source, int64 [n] or a range."""
    chunks = (indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK))
    numbers = (np.arange(c.start, c.stop, c.step) if isinstance(c, range) else c for c in chunks)
    return _sketch((each.astype(np.uint64) for each in numbers), NUMBER)


def _sketch(chunks: Iterator[Hashes], by: str) -> Sketch:
    found, is_whole = np.empty(0, np.uint64), True
    for chunk in chunks:
        hashes = _mix(chunk)
        if len(found) == MOST:
            hashes = hashes[hashes <= found[-1]]
        found = np.unique(np.concatenate([found, hashes]))
        is_whole &= len(found) <= MOST
        found = found[:MOST]
    return Sketch(by, found, _ALL if is_whole else int(found[-1]))


def _mix(values: Hashes) -> Hashes:
    """Bijective: equal hashes are of equal values (the finalizer of SplitMix64, Steele et al., OOPSLA 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Moves(NamedTuple):
    """How the records that two divisions both have are divided now.

    Attributes:
        counts: (part before, part now) -> records, of those that were compared.
        sizes: part now -> records that were looked at, new ones included.
        is_exact: whether these are all records, not a sample.
        by: what the records are known by.
    """

    counts: dict[tuple[str, str], int]
    sizes: dict[str, int]
    is_exact: bool
    by: str

    def describe(self, count: int, of: int) -> str:
        """So many of the records that were looked at, in words."""
        if self.is_exact:
            return f"{count:,} of {of:,}"
        return f"about {count / of:.0%}" if count == 0 or count / of >= 0.005 else "fewer than 1%"


def find_moves(before: Mapping[str, Sketch], now: Mapping[str, Sketch]) -> Moves | None:
    """Compares the sketches of parts, by their names; None where they have nothing in common by which to tell."""
    sketches = [*before.values(), *now.values()]
    if not before or not now or len({sketch.by for sketch in sketches}) > 1:
        return None
    limit = min(sketch.limit for sketch in sketches)
    then, here = (
        {part: sketch.hashes[sketch.hashes <= np.uint64(limit)] for part, sketch in parts.items()}
        for parts in (before, now)
    )
    counts = {
        (old, new): int(np.isin(one, other).sum()) for old, one in then.items() for new, other in here.items()
    }
    sizes = {part: len(hashes) for part, hashes in here.items()}
    return Moves(counts, sizes, limit == _ALL, sketches[0].by) if any(counts.values()) else None
