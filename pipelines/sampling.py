"""Sampled orders: the positions of an epoch draw records by weight, equally from each class, or by length.

`Pipeline(source, sampling=...)` takes what `weighted`, `balanced` and `bucketed` return. An epoch then has a
number of *positions*, which need not be that of the records: a record may have several positions in an epoch, or
none. Each position comes exactly once.

The record at a position is a function of (seed, epoch, position), computed where it is needed. What is stored does
not depend on the length of an epoch: a table of up to 10 bytes for each record (4 to 8 for `balanced` and
`bucketed`), which the preparation processes of a feeder share.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_flag, check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import describe_array, describe_ours, digest, known_as
from pipelines.order.epoch_order import Indices, Words, derive_bytes, mix, permute
from pipelines.sources._labels import Records, Values, encode_classes, format_classes, pack_values, read_values

__all__ = ["SampledOrder", "Sampling", "balanced", "bucketed", "consecutive", "weighted"]

_BITS = 53  # of a double's mantissa
_CHUNK = 1 << 16
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")


@dataclass(frozen=True)
class Sampling:
    """How an epoch chooses its records; made by `weighted` and `balanced`, used by one or several pipelines.

    Attributes:
        resolve: (source, seed) -> the order over a source; raises `PipelineError` where weights or labels do not
            fit the source.
    """

    resolve: Callable[[Records, int], SampledOrder]


class SampledOrder(ABC):
    """The order of the epochs of one pipeline: a function (epoch, start, stop) -> indices, int64 [stop - start].

    Attributes:
        positions: number of positions in an epoch.
        digest: identifies the weights or labels.
    """

    positions: int
    digest: str

    @abstractmethod
    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        """The indices of the records at the positions [start, stop) of an epoch."""

    def describe(self) -> Any:
        """Describes the order as a JSON value, for fingerprints."""
        return [describe_ours(type(self)), self.digest, self.positions]

    def find_positions(self, epoch: int, index: int) -> list[int]:
        """The positions of an epoch at which a record is, ascending; it computes the order of the whole epoch."""
        step = 16 * _CHUNK
        return [
            start + int(place)
            for start in range(0, self.positions, step)
            for place in np.flatnonzero(self(epoch, start, min(self.positions, start + step)) == index)
        ]


@known_as("pipelines.sampling.weighted")
class WeightedOrder(SampledOrder):
    """Draws with replacement: each position draws a record with probability weight / sum of weights.

    The inverse of the cumulative distribution, in units of 2^-53, at a random word keyed by (seed, epoch,
    position). A guide table (Chen and Asau, "On generating random variates from an empirical distribution", 1974)
    says where to search: O(1) a position on average, O(log n) at most.
    """

    def __init__(self, weights: npt.NDArray[np.float64], positions: int, seed: int) -> None:
        self.positions = positions
        self.digest = digest(describe_array(weights))
        self._seed = seed
        # `cumsum` adds one after the other, unlike `sum`: the same bits on each machine.
        below = np.cumsum(weights)
        below /= below[-1]
        below *= 2.0**_BITS
        self._bounds: Words = below.astype(np.uint64)
        bits = max(0, len(weights).bit_length() - 3)
        self._shift = np.uint64(_BITS - bits)
        edges = np.arange((1 << bits) + 1, dtype=np.uint64) << self._shift
        self._guide = np.searchsorted(self._bounds, edges, side="right")

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        draws = _draw_words(start, stop, "weighted", self._seed, epoch) >> np.uint64(64 - _BITS)
        bucket = (draws >> self._shift).astype(np.int64)
        # The first record whose bound is above the draw, by bisection of [low, high].
        low, high = self._guide[bucket], self._guide[bucket + 1]
        while (low < high).any():
            middle = (low + high) >> 1
            is_above = self._bounds[middle] > draws
            low, high = np.where(is_above, low, middle + 1), np.where(is_above, middle, high)
        return low.astype(np.int64, copy=False)

    def __repr__(self) -> str:
        return f"weighted({self.positions} positions)"


@known_as("pipelines.sampling.weighted_without_replacement")
class WeightedSubsetOrder(SampledOrder):
    """Draws without replacement: the records with the smallest keys -log(u) / weight, in a random order.

    Such keys draw one record after the other, each with probability proportional to its weight among those that
    are left (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). They are computed once
    an epoch, in each process that prepares samples.
    """

    def __init__(self, weights: npt.NDArray[np.float64], positions: int, seed: int) -> None:
        self.positions = positions
        self.digest = digest(describe_array(weights))
        self._weights = weights
        self._seed = seed
        # Of the last two epochs: around an epoch's end threads ask for both in turn. Replaced as a whole.
        self._held: tuple[tuple[int, Indices], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": ()}

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        held = self._held
        chosen = next((chosen for known, chosen in held if known == epoch), None)
        if chosen is None:
            chosen = self._choose(epoch)
            self._held = (*held[-1:], (epoch, chosen))
        places = permute(np.arange(start, stop, dtype=np.uint64), self.positions, "order", self._seed, epoch)
        return chosen[places.astype(np.int64)]

    def _choose(self, epoch: int) -> Indices:
        """The records of an epoch, ascending."""
        n = len(self._weights)
        keys = np.empty(n)
        for start in range(0, n, _CHUNK):
            stop = min(n, start + _CHUNK)
            words = _draw_words(start, stop, "subset", self._seed, epoch) >> np.uint64(64 - _BITS)
            uniform = (words.astype(np.float64) + 0.5) * 2.0**-_BITS
            with np.errstate(divide="ignore", over="ignore"):
                keys[start:stop] = -_log(uniform) / self._weights[start:stop]
        # The keys of tiny weights overflow; only those of weight 0 may stay infinite.
        np.minimum(keys, np.finfo(np.float64).max, out=keys, where=self._weights > 0)
        last = np.partition(keys, self.positions - 1)[self.positions - 1]
        chosen = np.flatnonzero(keys < last)
        ties = np.flatnonzero(keys == last)[: self.positions - len(chosen)]
        return np.sort(np.concatenate([chosen, ties])) if len(ties) else chosen

    def __repr__(self) -> str:
        return f"weighted({self.positions} positions, without replacement)"


@known_as("pipelines.sampling.balanced")
class BalancedOrder(SampledOrder):
    """Draws from each class equally often: the positions of all epochs take the classes in turns.

    Position p of epoch e is the use number t = e * positions + permutation_e(p) of the stream. It draws from the
    class t mod classes, and from that the record t // classes mod records of the class, in a random order that is
    the same for all epochs. So within an epoch, and over all epochs so far, uses differ by at most one between
    classes, and by at most one between the records of a class.
    """

    def __init__(self, codes: Indices, classes: int, positions: int, seed: int) -> None:
        self.positions = positions
        self.digest = digest(describe_array(codes))
        self._seed, self._classes = seed, classes
        mixed = np.argsort(_draw_words(0, len(codes), "balanced", seed))  # no two words are equal
        mixed = mixed.astype(np.int32 if len(codes) < 1 << 31 else np.int64)
        # numpy sorts numbers of 16 bits by their digits, many times faster.
        codes = codes.astype(np.uint16 if classes < 1 << 16 else np.int64)
        self._records = mixed[np.argsort(codes[mixed], kind="stable")]
        self._sizes = np.bincount(codes, minlength=classes).astype(np.int64)
        self._firsts = np.cumsum(self._sizes) - self._sizes

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        places = permute(np.arange(start, stop, dtype=np.uint64), self.positions, "order", self._seed, epoch)
        uses = places.astype(np.int64) + epoch * self.positions
        of = uses % self._classes
        return self._records[self._firsts[of] + uses // self._classes % self._sizes[of]].astype(np.int64)

    def __repr__(self) -> str:
        return f"balanced({self._classes} classes, {self.positions} positions)"


@known_as("pipelines.sampling.bucketed")
class BucketedOrder(SampledOrder):
    """Has each record once, beside records of about its length.

    A permutation of the records is cut into windows of some buckets, each window is sorted by length and cut into
    buckets, and these are put in a random order. So a bucket has other records in each epoch, and its positions
    are in a random order, too. Batches are cut from the positions: the order knows no batch size.
    """

    def __init__(self, lengths: npt.NDArray[np.float64], bucket: int, window: int, seed: int) -> None:
        self.positions = len(lengths)
        self.digest = digest([describe_array(lengths), bucket, window])
        self._ranks = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")  # all different
        self._ranks = self._ranks.astype(np.int32 if len(lengths) < 1 << 31 else np.int64)
        self._bucket, self._window, self._seed = bucket, bucket * window, seed
        # The last two windows: around the end of one, threads ask for both in turn. Replaced as a whole.
        self._held: tuple[tuple[int, int, Indices], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": ()}

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        found = []
        for window in range(start // self._window, -(-stop // self._window)):
            first = window * self._window
            found.append(self._read(epoch, window)[max(0, start - first) : stop - first])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _read(self, epoch: int, window: int) -> Indices:
        """The records of a window, in their order."""
        held = self._held
        for known, number, records in held:
            if (known, number) == (epoch, window):
                return records
        records = self._make(epoch, window)
        self._held = (*held[-1:], (epoch, window, records))
        return records

    def _make(self, epoch: int, window: int) -> Indices:
        n, first = self.positions, window * self._window
        places = np.arange(first, min(n, first + self._window), dtype=np.uint64)
        records = permute(places, n, "order", self._seed, epoch).astype(np.int64)
        ordered = records[np.argsort(self._ranks[records])]
        buckets = [ordered[at : at + self._bucket] for at in range(0, len(ordered), self._bucket)]
        key = ("bucketed", self._seed, epoch, window)
        mixed = [_shuffle(each, *key, number) for number, each in enumerate(buckets)]
        whole = (
            len(ordered) // self._bucket
        )  # what is left over stays at the end, so that batches fit into buckets
        turns = _shuffle(np.arange(whole), *key).tolist()
        return np.concatenate([mixed[turn] for turn in (*turns, *range(whole, len(mixed)))])

    def __repr__(self) -> str:
        return f"bucketed({self.positions} positions)"


@known_as("pipelines.sampling.consecutive")
class ConsecutiveOrder(SampledOrder):
    """Has in each epoch the records that follow those of the epoch before, in a random order."""

    def __init__(self, records: int, positions: int, seed: int) -> None:
        self.positions = positions
        self.digest = digest([records])
        self._records, self._seed = records, seed

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        places = permute(np.arange(start, stop, dtype=np.uint64), self.positions, "order", self._seed, epoch)
        found: Indices = (places.astype(np.int64) + epoch * self.positions) % self._records
        return found

    def __repr__(self) -> str:
        return f"consecutive({self.positions} positions)"


def _resolve_consecutive(samples: int, source: Records, seed: int) -> SampledOrder:
    if samples > len(source):
        raise PipelineError(f"sampling.consecutive({samples}) of {len(source)} records: an epoch has each once")
    return ConsecutiveOrder(len(source), samples, seed)


def _shuffle(values: Indices, *key: str | int) -> Indices:
    places: Indices = permute(np.arange(len(values), dtype=np.uint64), len(values), *key).astype(np.int64)
    return values[places]


def _resolve_bucketed(lengths: Values, bucket: int, window: int, source: Records, seed: int) -> SampledOrder:
    if isinstance(lengths, str):
        values = source.column(lengths)
        if values.dtype.kind not in "biuf" or values.ndim > 1:
            values = np.array([_measure(value, lengths) for value in values])
    else:
        values = read_values(source, lengths, "the lengths of sampling.bucketed()")
    if values.dtype.kind not in "biuf" or not np.isfinite(values.astype(np.float64)).all():
        raise PipelineError("sampling.bucketed() needs a length, a finite number, of each record")
    return BucketedOrder(values.astype(np.float64), bucket, window, seed)


def _measure(value: Any, field: str) -> int:
    if not hasattr(value, "__len__"):
        raise PipelineError(f"sampling.bucketed(): the field {field!r} holds {value!r:.60}, which has no length")
    return len(value)


def _resolve_weighted(
    given: Any, samples: int | None, replacement: bool, field: str, source: Records, seed: int
) -> SampledOrder:
    weights = _find_weights(given, field, source)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if wrong.size:
        first = int(wrong[0])
        raise PipelineError(
            "sampling.weighted() needs finite weights of at least 0, but the weight of record "
            f"{first} is {weights[first]}"
        )
    positive = int(np.count_nonzero(weights))
    with np.errstate(over="ignore"):
        total = float(np.cumsum(weights)[-1])
    if not positive or not np.isfinite(total):
        reason = "all weights are 0" if not positive else "the sum of the weights is too large for a float64"
        raise PipelineError(f"sampling.weighted(): {reason}")
    positions = len(source) if samples is None else samples
    if replacement:
        return WeightedOrder(weights, positions, seed)
    if positions > positive:
        raise PipelineError(
            f"sampling.weighted(replacement=False) cannot draw {positions} different records: {positive} have "
            "a weight above 0; give samples= at most that"
        )
    return WeightedSubsetOrder(weights, positions, seed)


def _find_weights(given: Any, field: str, source: Records) -> npt.NDArray[np.float64]:
    what = "the weights of sampling.weighted()"
    if not callable(given) and not isinstance(given, Mapping):
        values = read_values(source, given, what)
    else:
        labels = read_values(source, field, what)
        codes, classes = encode_classes(labels, f"the field {field!r} that sampling.weighted() reads")
        if isinstance(given, Mapping) and (missing := [each for each in classes if each not in given]):
            raise PipelineError(
                f"sampling.weighted(): no weight for the label {format_classes(missing)} of the field {field!r}"
            )
        by_class = [given[each] if isinstance(given, Mapping) else given(each) for each in classes]
        values = np.asarray(by_class)[codes]
    if values.dtype.kind not in "biuf":
        raise PipelineError(f"{what} must be numbers, got {values.dtype} {values[:1]!r:.60}")
    return values.astype(np.float64)


def _resolve_balanced(labels: Values, samples: int | None, source: Records, seed: int) -> SampledOrder:
    what = "the labels of sampling.balanced()"
    codes, classes = encode_classes(read_values(source, labels, what), what)
    if len(classes) < 2:
        raise PipelineError(
            f"sampling.balanced() needs at least two classes; all records have {format_classes(classes)}"
        )
    positions = len(source) if samples is None else samples
    return BalancedOrder(codes, len(classes), positions, seed)


def weighted(
    weights: Any, samples: int | None = None, replacement: bool = True, *, field: str = "label"
) -> Sampling:
    """Draws the records of an epoch by weight.

    Args:
        weights: finite numbers of at least 0, which need not sum to 1: an array [n], one for each record; or a
            function or a mapping from a label to the weight of the records with that label, which is read once for
            each distinct value of `field`. A record of weight 0 is never drawn.
        samples: number of positions in an epoch; the number of records unless given.
        replacement: if True, each position draws from all records. If False, an epoch has `samples` different
            records, chosen by weight; where that is all records, the weights change nothing. Each process that
            prepares samples then computes a key for every record once an epoch; this takes 16 bytes for each
            record while it does, and 8 for each position until the next epoch.
        field: the field with the labels, if `weights` is a function or a mapping.

    Returns:
        An order for `Pipeline(source, sampling=...)`. Its table takes 9 to 10 bytes for each record.

    Raises:
        PipelineError: an argument is invalid; some are checked when the pipeline is made.

    Examples:
        >>> pipe = Pipeline(source, sampling=sampling.weighted({0: 1.0, 1: 9.0}, samples=10_000))
    """
    if isinstance(weights, str) or weights is None:
        raise PipelineError(
            f"sampling.weighted() needs weights [n], or a function or mapping of labels, got {weights!r}"
        )
    check_flag("replacement", replacement)
    if samples is None and not replacement:
        raise PipelineError(
            "sampling.weighted(replacement=False) needs samples=: an epoch of all records has each once, "
            "whatever its weight"
        )
    if not callable(weights) and not isinstance(weights, Mapping | np.ndarray):
        weights = pack_values(weights)
    return Sampling(functools.partial(_resolve_weighted, weights, _check_samples(samples), replacement, field))


def balanced(labels: Values, samples: int | None = None) -> Sampling:
    """Draws equally often from each class.

    In an epoch the numbers of positions of two classes differ by at most one, and so do the numbers of uses of two
    records of a class: each is used before any is used again. The next epoch goes on where this one has ended, so
    that all records of a large class are used in turn. An epoch is balanced, not each of its batches.

    Args:
        labels: the name of a field of the source, which is read once; or the labels themselves: an array [n] of
            integers, booleans, texts or bytes; or a function from a record to its label.
        samples: number of positions in an epoch; the number of records unless given.

    Returns:
        An order for `Pipeline(source, sampling=...)`. Its table takes 4 bytes for each record (8 from 2^31 on).

    Raises:
        PipelineError: an argument is invalid; labels are checked when the pipeline is made.

    Examples:
        >>> pipe = Pipeline(source, sampling=sampling.balanced("label"))
    """
    if not isinstance(labels, str | np.ndarray) and not callable(labels):
        labels = pack_values(labels)
    return Sampling(functools.partial(_resolve_balanced, labels, _check_samples(samples)))


def bucketed(lengths: Values, *, bucket: int = 256, window: int = 64) -> Sampling:
    """Puts records of about equal length beside each other, so that little of a padded batch is padding.

    Each record comes exactly once an epoch. The order is a function of the seed and the epoch, independent of the
    batch size, so that members with other batch sizes share it, and a resume goes on at any position. Batches of
    up to `bucket` samples, on all ranks together, mostly lie within one bucket.

    Args:
        lengths: the name of a field of the source, which is read once: numbers, or texts or arrays, of which the
            lengths are taken; an array [n]; or a function from a record to its length.
        bucket: number of neighbours of about equal length.
        window: buckets that are sorted together. More: lengths are more alike, and neighbours more often the same.

    Returns:
        An order for `Pipeline(source, sampling=...)`. Its table takes 4 bytes for each record (8 from 2^31 on).

    Raises:
        PipelineError: an argument is invalid; lengths are checked when the pipeline is made.

    Examples:
        >>> pipe = Pipeline(source, sampling=sampling.bucketed("text"))
    """
    bucket, window = check_integer("bucket", bucket, 1), check_integer("window", window, 1)
    if not isinstance(lengths, str | np.ndarray) and not callable(lengths):
        lengths = pack_values(lengths)
    return Sampling(functools.partial(_resolve_bucketed, lengths, bucket, window))


def consecutive(samples: int) -> Sampling:
    """Lets an epoch be a number of samples: each has the records after those of the epoch before, shuffled.

    After the last record comes the first one again. It is for data that are too many for an epoch of all, and for
    streams that do not end (`sources.iterable(endless=True)`).

    Args:
        samples: number of positions in an epoch, at most that of the records.

    Returns:
        An order for `Pipeline(source, sampling=...)`. It has no table.

    Raises:
        PipelineError: `samples` is no number, or, once a pipeline is made, more than there are records.

    Examples:
        >>> pipe = Pipeline(source, sampling=sampling.consecutive(100_000))
    """
    return Sampling(functools.partial(_resolve_consecutive, check_integer("samples", samples, 1)))


def check_sampling(sampling: Any, shuffle: Any) -> None:
    """Checks the argument `sampling` of a pipeline.

    Raises:
        PipelineError: it is no sampling, or does not go with `shuffle`.
    """
    if not isinstance(sampling, Sampling):
        is_foreign = hasattr(sampling, "__iter__") and not isinstance(sampling, str)
        hint = (
            ": a sampler, or batch sampler, of torch decides for one process and one batch size; an order here is "
            "of positions, which all members read whatever their batch sizes (by length: sampling.bucketed)"
        )
        raise PipelineError(
            "sampling must be made by sampling.weighted, balanced, bucketed or consecutive, got "
            f"{sampling!r:.60}{hint * is_foreign}"
        )
    if shuffle == "blocks":
        raise PipelineError(
            "sampling= draws records from the whole source, so its groups cannot be read one after the other: "
            "leave shuffle='blocks' out"
        )
    if shuffle is not True:
        raise PipelineError("sampling= draws a new random order in each epoch: leave shuffle=False out")


def _check_samples(samples: int | None) -> int | None:
    return None if samples is None else check_integer("samples", samples, 1)


@functools.lru_cache(maxsize=256)
def _derive_words(*key: str | int) -> tuple[np.uint64, np.uint64]:
    first, second = np.frombuffer(derive_bytes(*key, size=16), np.uint64)
    return first, second


def _draw_words(start: int, stop: int, *key: str | int) -> Words:
    """The random words number start to stop - 1 of a key, uint64 [stop - start]."""
    first, second = _derive_words(*key)
    return mix(mix(np.arange(start, stop, dtype=np.uint64) + first) + second)


def _log(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The natural logarithm of normal numbers, by exactly rounded operations alone.

    numpy's own differs in the last bit between processors, and one bit may exchange two records.
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < float.fromhex("0x1.6a09e667f3bcdp-1")  # the square root of 1/2
    mantissa = np.where(low, 2 * mantissa, mantissa)
    exponent = exponent - low
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.full_like(s, 1 / 23)
    for odd in range(21, 0, -2):
        series = series * square + 1 / odd
    logarithm: npt.NDArray[np.float64] = exponent * _LN2_HIGH + (2 * s * series + exponent * _LN2_LOW)
    return logarithm
