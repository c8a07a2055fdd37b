"""The order of samples: epoch permutations, bounds of batches and ranks, random generators of samples.

Everything here is a pure function of integers, so that every process can compute what any other one sees.

The order of an epoch is a keyed permutation of `range(n)`, which is computed where it is needed and never stored:
a Feistel network over the smallest power of two of at least n, applied repeatedly until the value is below n
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). An order of 10^9 samples needs as much memory
as one of ten.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.fingerprint import known_as

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# With fewer rounds, orders of small sources are not equally likely; these take a fifth of a microsecond a sample.
_ROUNDS = 16
_TABLE = 2**13  # values of which the network is computed at once


# Of splitmix64, as arrays: numpy converts a scalar anew at each call.
_SHIFTS = [np.array(shift, np.uint64) for shift in (30, 27, 31)]
_FACTORS = [np.array(factor, np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]


@known_as("pipelines.order.epoch_indices")
def epoch_indices(n: int, seed: int, epoch: int, start: int, stop: int, *, shuffle: bool = True) -> Indices:
    places = np.arange(start, stop, dtype=np.uint64)
    if not shuffle:
        return places.astype(np.int64)
    return permute(places, n, "order", seed, epoch).astype(np.int64)


def permute(values: Words, n: int, *key: str | int) -> Words:
    """Apply the permutation of range(n) that the key selects to `values`."""
    if n < 2:
        return values
    bits = (n - 1).bit_length()
    keys = _round_keys(*key)
    apply: Callable[[Words], Words] = functools.partial(_apply_feistel, bits=bits, keys=keys)
    if 1 << bits <= _TABLE and len(values) * 4 > n:  # the network of all values once, then it is looked up
        apply = apply(np.arange(1 << bits, dtype=np.uint64)).__getitem__
    values = apply(values)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = apply(values[outside])
        outside = outside[values[outside] >= n]
    return values


@known_as("pipelines.order.BlockOrder")
class BlockOrder:
    """The order of a *block shuffle*, for a source that is read in groups of consecutive records.

    Each epoch puts the groups in a new random order and divides that into windows of `window` groups; samples are
    shuffled within their window only. So a reader needs the groups of one window at a time, and each group once an
    epoch (as `py1br` of MosaicML Streaming does with shards).

    Unlike with a full shuffle, two samples of a group are never further apart than a window. If the groups differ,
    as in a file that is sorted by class, a batch is a sample of its window and not of the data; a larger window,
    or shuffling the records once when the file is written, helps.

    The order is a pure function of (bounds, seed, window, epoch). A few numbers are stored for each group.

    Args:
        bounds: int64 [groups + 1], ascending from 0: group g holds the indices [bounds[g], bounds[g + 1]).
        window: groups that are mixed.
    """

    def __init__(self, bounds: Indices, seed: int, window: int) -> None:
        self._bounds, self._seed, self._window = bounds, seed, window
        self._epoch = -1

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        if epoch != self._epoch:
            self._start_epoch(epoch)
        edges, pieces = self._edges, [np.empty(0, np.int64)]
        number = int(np.searchsorted(edges, start, side="right")) - 1
        while start < stop:
            first, last = int(edges[number]), int(edges[number + 1])
            until = min(stop, last)
            inside = np.arange(start - first, until - first, dtype=np.uint64)
            mixed = permute(inside, last - first, "window", self._seed, epoch, number)
            # Positions count as if the groups of this epoch followed each other in their new order.
            pieces.append(self._locate(first + mixed.astype(np.int64)))
            start, number = until, number + 1
        return np.concatenate(pieces)

    def _start_epoch(self, epoch: int) -> None:
        count = len(self._bounds) - 1
        groups = permute(np.arange(count, dtype=np.uint64), count, "groups", self._seed, epoch).astype(np.int64)
        sizes = np.diff(self._bounds)[groups]
        self._firsts = self._bounds[groups]
        self._ends = np.cumsum(sizes)
        whole = self._ends[self._window - 1 :: self._window]
        self._edges = np.unique(np.concatenate([[0], whole, self._ends[-1:]]))
        self._epoch = epoch

    def _locate(self, places: Indices) -> Indices:
        at = np.searchsorted(self._ends, places, side="right")
        sizes_before = np.where(at > 0, self._ends[at - 1], 0)
        return self._firsts[at] + places - sizes_before


def _apply_feistel(values: Words, bits: int, keys: Words) -> Words:
    """A Feistel network: a permutation of range(2**bits) in which each half changes the other in turn."""
    right_bits = np.uint64(bits // 2)
    left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    right_mask = np.uint64((1 << (bits // 2)) - 1)
    left, right = values >> right_bits, values & right_mask
    for key in keys.reshape(-1, 2, 1):
        changed = mix(right + key[0])
        changed &= left_mask
        left ^= changed
        changed = mix(left + key[1])
        changed &= right_mask
        right ^= changed
    left <<= right_bits
    left |= right
    return left


def mix(x: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): a permutation of the 64-bit words."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x


@functools.lru_cache(maxsize=256)
def _round_keys(*key: str | int) -> Words:
    halves = (derive_bytes(*key, half, size=4 * _ROUNDS) for half in range(2))
    return np.frombuffer(b"".join(halves), np.uint64)


def derive_bytes(*words: str | int, size: int) -> bytes:
    """A digest of the words of `size` bytes, at most 64."""
    return hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=size).digest()


def steps_per_epoch(n: int, batch_size: int, *, drop_last: bool = False) -> int:
    """Global batches in an epoch over n samples."""
    return n // batch_size if drop_last else -(-n // batch_size)


def batch_bounds(n: int, batch_size: int, step: int) -> tuple[int, int]:
    """The positions [start, stop) of the global batch `step`; the last batch may be smaller."""
    return step * batch_size, min(n, (step + 1) * batch_size)


def rank_bounds(start: int, stop: int, rank: int, world: int) -> tuple[int, int]:
    rows = stop - start
    return start + rows * rank // world, start + rows * (rank + 1) // world


@known_as("pipelines.order.Generators")
class Generators:
    """The random generator of each (epoch, sample index, stage, place), in one reused object for each stage.

    Philox is counter-based (Salmon et al. 2011): key and counter determine the start of its sequence, so that a
    generator is set instead of seeded.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[int, _StateStream] = {}

    def __reduce__(self) -> tuple[type[Generators], tuple[int]]:
        return Generators, (self._seed,)

    def at(self, epoch: int, index: int, stage: int, place: int = 0) -> np.random.Generator:
        """The generator for one stage of one sample in one epoch; it is valid until the stage's next one is made.

        Args:
            place: the sample's position in the epoch, in a pipeline that may have a record several times in an
                epoch; 0 in all others.
        """
        stream = self._streams.get(stage)
        if stream is None:
            key = np.frombuffer(derive_bytes("sample", self._seed, stage, size=16), np.uint64)
            stream = self._streams[stage] = (_PhiloxStream if _is_philox_known() else _StateStream)(key)
        stream.move(place, index, epoch)
        return stream.generator


class _StateStream:
    """A Philox generator that is set by its state."""

    def __init__(self, key: Words) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": np.zeros(4, np.uint64), "key": key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self.move(0, 0, 0)

    def move(self, *counter: int) -> None:
        """Begin the sequence of a counter, of which these are the upper three words."""
        self._state["state"]["counter"][1:] = counter
        self.bits.state = self._state


class _PhiloxStream(_StateStream):
    """Sets counter and key in the generator's memory: a fraction of the time, which counts for small samples.

    The key, too, because a stage may have assigned another state.

    numpy/random/src/philox: the state is {counter*, key*, int buffer_pos, uint64 buffer[4], int has_uint32}.
    """

    _counter: Any = None

    def __init__(self, key: Words) -> None:
        super().__init__(key)
        at = self.bits.ctypes.state_address
        self._counter = (ctypes.c_uint64 * 4).from_address(ctypes.c_void_p.from_address(at).value or 0)
        self._key = (ctypes.c_uint64 * 2).from_address(ctypes.c_void_p.from_address(at + 8).value or 0)
        self._key_words = tuple(key.tolist())
        self._buffer_place, self._has_half = ctypes.c_int.from_address(at + 16), ctypes.c_int.from_address(at + 56)

    def move(self, *counter: int) -> None:
        if self._counter is None:
            super().move(*counter)
            return
        words = self._counter
        words[0] = 0
        words[1], words[2], words[3] = counter
        self._key[0], self._key[1] = self._key_words
        self._buffer_place.value, self._has_half.value = 4, 0


@functools.cache
def _is_philox_known() -> bool:
    """Whether this version of numpy has Philox in memory as `_PhiloxStream` takes it to be."""
    key = np.frombuffer(derive_bytes("layout", size=16), np.uint64)
    by_state, other = _StateStream(key), _StateStream(key)
    other.generator.integers(1 << 32, dtype=np.uint32)
    state: Any = other.bits.state
    raw = ctypes.string_at(other.bits.ctypes.state_address, 64)
    counter, key_place = (int.from_bytes(raw[at : at + 8], sys.byteorder) for at in (0, 8))
    for at, size in ((counter, 32), (key_place, 16)):  # they lie in the object itself
        if not 0 <= at - id(other.bits) <= np.random.Philox.__basicsize__ - size:
            return False
    place, half = (int.from_bytes(raw[at : at + 4], sys.byteorder) for at in (16, 56))
    expected = [*state["state"]["counter"], *state["state"]["key"], state["buffer_pos"]]
    expected += [*state["buffer"], state["has_uint32"]]
    words = [
        *np.frombuffer(ctypes.string_at(counter, 32), np.uint64),
        *np.frombuffer(ctypes.string_at(key_place, 16), np.uint64),
        place,
        *np.frombuffer(raw[24:56], np.uint64),
    ]
    if [*words, half] != expected:
        return False
    fast = _PhiloxStream(key)
    fast.bits.state = _StateStream(key + np.uint64(1)).bits.state
    fast.generator.integers(1 << 32, dtype=np.uint32)
    for stream in (by_state, fast):
        stream.move(5, 1 << 40, 7)
    return bool(np.array_equal(by_state.generator.random(9), fast.generator.random(9)))
