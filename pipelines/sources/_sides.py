"""Tells which records of divided data have changed sides when the data or the division are others than before.

A *sketch* of a part has the smallest hashes of its records, at most `MOST`. Hashes are uniform, so that what two
sketches have below the lower of their limits is a random sample of the same records. Records are known by their
keys, or, within the same data alone, by their numbers.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MOST, ENOUGH = 4096, 512  # hashes of a part that are looked at, and that are kept of the smallest part
_CHUNK = 1 << 20
_ALL = 2**64 - 1

Hashes = npt.NDArray[np.uint64]


class Sketch(NamedTuple):
    """A sample of the records of a part.

    Attributes:
        by: what the records are known by, for a sentence; sketches by another are of no use to each other.
        hashes: of different records, ascending.
        limit: no record is left out whose hash is at most that.
    """

    by: str
    hashes: Hashes
    limit: int = _ALL

    def cut(self, limit: int) -> Sketch:
        """The same up to another limit, which is not above its own."""
        return Sketch(self.by, self.hashes[self.hashes <= np.uint64(limit)], limit)

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


def sketch_numbers(indices: np.ndarray[Any, Any] | range, by: str) -> Sketch:
    """A sketch of records that are known by their numbers in the whole source, int64 [n] or a range."""
    chunks = (indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK))
    numbers = (np.arange(c.start, c.stop, c.step) if isinstance(c, range) else c for c in chunks)
    return _sketch((each.astype(np.uint64) for each in numbers), by)


def cut_together(parts: Mapping[str, Sketch]) -> dict[str, Sketch]:
    """The sketches of all parts up to the limit at which the smallest part has `ENOUGH`, if it has as many."""
    limit = min((sketch.limit for sketch in parts.values()), default=_ALL)
    enough = [int(each.hashes[ENOUGH - 1]) if len(each.hashes) >= ENOUGH else _ALL for each in parts.values()]
    return {name: sketch.cut(min(limit, max(enough, default=_ALL))) for name, sketch in parts.items()}


def _sketch(chunks: Iterator[Hashes], by: str) -> Sketch:
    found, is_whole = np.empty(0, np.uint64), True
    for chunk in chunks:
        hashes = mix(chunk)
        if len(found) == MOST:
            hashes = hashes[hashes <= found[-1]]
        found = np.unique(np.concatenate([found, hashes]))
        is_whole &= len(found) <= MOST
        found = found[:MOST]
    return Sketch(by, found, _ALL if is_whole else int(found[-1]))


def mix(values: Hashes) -> Hashes:
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
        return f"about {count / of:.0%} ({count:,} of {of:,} that were looked at)"


def find_moves(before: Mapping[str, Sketch], now: Mapping[str, Sketch]) -> Moves | None:
    """Compares the sketches of parts, by their names; None where they have nothing in common by which to tell."""
    sketches = [*before.values(), *now.values()]
    if not before or not now or len({sketch.by for sketch in sketches}) > 1:
        return None
    limit = min(sketch.limit for sketch in sketches)
    then, here = ({part: each.cut(limit).hashes for part, each in parts.items()} for parts in (before, now))
    counts = {
        (old, new): int(np.isin(one, other).sum()) for old, one in then.items() for new, other in here.items()
    }
    sizes = {part: len(hashes) for part, hashes in here.items()}
    return Moves(counts, sizes, limit == _ALL, sketches[0].by) if any(counts.values()) else None
