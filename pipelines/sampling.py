"""Sampled orders: the positions of an epoch draw records by weight, from each class its share, or by length.

A record may have several *positions* in an epoch, or none; each position comes exactly once. The record at a
position is a function of (seed, epoch, position). All processes share a table of up to 8 bytes for each record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import describe_array, digest, known_as
from pipelines.order.epoch_order import Indices, Words, permute
from pipelines.order.mixed_order import MixedOrder, count_positions
from pipelines.order.sampled_order import SampledOrder, draw_words, group_by_class
from pipelines.sources._labels import (
    Records,
    Values,
    encode_classes,
    encode_keys,
    format_classes,
    pack_values,
    read_values,
)

_BITS = 53  # of a double's mantissa


@dataclass(frozen=True)
class Sampling:
    """How an epoch chooses its records; made by `weighted` and others, used by one or several pipelines."""

    resolve: Callable[[Records, int], SampledOrder]  # (source, seed) -> the order over a source


@known_as("pipelines.sampling.weighted")
class WeightedOrder(SampledOrder):
    """Draws with replacement: each position draws a record with probability weight / sum of weights.

    The inverse of the cumulative distribution, in units of 2^-53, at a random word keyed by (seed, epoch,
    position).
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

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        draws = draw_words(start, stop, "weighted", self._seed, epoch) >> np.uint64(64 - _BITS)
        return np.searchsorted(self._bounds, draws, side="right")


@known_as("pipelines.sampling.balanced")
class BalancedOrder(SampledOrder):
    """Draws from each class equally often: the positions of all epochs take the classes in turns.

    Position p of epoch e is the use number t = e * positions + permutation_e(p) of the stream. It draws from the
    class t mod classes the record t // classes mod records of the class, in a random order that all epochs share.
    So uses differ by at most one between classes, and between the records of a class, over all epochs so far.
    """

    def __init__(self, codes: Indices, classes: int, positions: int, seed: int) -> None:
        self.positions = positions
        self.digest = digest(describe_array(codes))
        self._seed, self._classes = seed, classes
        self._records = group_by_class(codes, classes, "balanced", seed)
        self._sizes = np.bincount(codes, minlength=classes).astype(np.int64)
        self._firsts = np.cumsum(self._sizes) - self._sizes

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        places = permute(np.arange(start, stop, dtype=np.uint64), self.positions, "order", self._seed, epoch)
        uses = places.astype(np.int64) + epoch * self.positions
        of = uses % self._classes
        return self._records[self._firsts[of] + uses // self._classes % self._sizes[of]].astype(np.int64)


@known_as("pipelines.sampling.bucketed")
class BucketedOrder(SampledOrder):
    """Has each record once, beside records of about its length.

    A permutation of the records is cut into windows, each window is sorted by length and cut into buckets; these,
    and the records in each, are put in a random order. The order knows no batch size.
    """

    def __init__(self, lengths: npt.NDArray[np.float64], bucket: int, window: int, seed: int) -> None:
        self.positions = len(lengths)
        self.digest = digest([describe_array(lengths), bucket, window])
        self._ranks = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")  # all different
        self._ranks = self._ranks.astype(np.int32 if len(lengths) < 1 << 31 else np.int64)
        self._bucket, self._window, self._seed = bucket, bucket * window, seed
        self._last: tuple[tuple[int, int] | None, Indices] = None, np.empty(0, np.int64)  # window

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": (None, np.empty(0, np.int64))}

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        parts = []
        for window in range(start // self._window, -(-stop // self._window)):
            first = window * self._window
            parts.append(self._read(epoch, window)[max(0, start - first) : stop - first])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _read(self, epoch: int, window: int) -> Indices:
        key, records = self._last
        if key != (epoch, window):
            records = self._make(epoch, window)
            self._last = (epoch, window), records  # replaced as a whole, for the sake of threads
        return records

    def _make(self, epoch: int, window: int) -> Indices:
        n, first = self.positions, window * self._window
        places = np.arange(first, min(n, first + self._window), dtype=np.uint64)
        records = permute(places, n, "order", self._seed, epoch).astype(np.int64)
        ordered = records[np.argsort(self._ranks[records])]
        buckets = [ordered[at : at + self._bucket] for at in range(0, len(ordered), self._bucket)]
        key = ("bucketed", self._seed, epoch, window)
        mixed = [_shuffle(bucket, *key, number) for number, bucket in enumerate(buckets)]
        whole = len(ordered) // self._bucket  # what is left over stays at the end: batches fit into buckets
        turns = _shuffle(np.arange(whole), *key).tolist()
        return np.concatenate([mixed[turn] for turn in (*turns, *range(whole, len(mixed)))])


@known_as("pipelines.sampling.consecutive")
class ConsecutiveOrder(SampledOrder):
    """Has in each epoch the records that follow those of the epoch before, in a random order."""

    def __init__(self, positions: int, records: int, seed: int) -> None:
        if positions > records:
            raise PipelineError(
                f"sampling.consecutive({positions}): there are {records} records, and an epoch has each once"
            )
        self.positions, self._records, self._seed = positions, records, seed
        self.digest = digest([self._records])

    def __call__(self, epoch: int, start: int, stop: int) -> Indices:
        places = permute(np.arange(start, stop, dtype=np.uint64), self.positions, "order", self._seed, epoch)
        records: Indices = (places.astype(np.int64) + epoch * self.positions) % self._records
        return records


def _shuffle(values: Indices, *key: str | int) -> Indices:
    places: Indices = permute(np.arange(len(values), dtype=np.uint64), len(values), *key).astype(np.int64)
    return values[places]


def _read_lengths(source: Records, lengths: Values) -> npt.NDArray[np.float64]:
    if isinstance(lengths, str):
        values = source.column(lengths)
        if values.dtype.kind not in "biuf" or values.ndim > 1:
            if odd := [value for value in values if not hasattr(value, "__len__")]:
                raise PipelineError(
                    f"sampling.bucketed(): the field {lengths!r} holds {odd[0]!r:.60}, which has no length"
                )
            values = np.array([len(value) for value in values])
    else:
        values = read_values(source, lengths, "the lengths of sampling.bucketed()")
    if values.dtype.kind not in "biuf" or not np.isfinite(values.astype(np.float64)).all():
        raise PipelineError("sampling.bucketed() needs a length, a finite number, of each record")
    return values.astype(np.float64)


def _read_weights(source: Records, weights: Any, field: str) -> npt.NDArray[np.float64]:
    what = "the weights of sampling.weighted()"
    if not callable(weights) and not isinstance(weights, Mapping):
        values = read_values(source, weights, what)
    else:
        labels = read_values(source, field, what)
        codes, classes = encode_classes(labels, f"the field {field!r} that sampling.weighted() reads")
        if isinstance(weights, Mapping) and (missing := [name for name in classes if name not in weights]):
            raise PipelineError(
                f"sampling.weighted(): no weight for the label {format_classes(missing)} of the field {field!r}"
            )
        values = np.asarray([weights[c] if isinstance(weights, Mapping) else weights(c) for c in classes])[codes]
    if values.dtype.kind not in "biuf":
        raise PipelineError(f"{what} must be numbers, got {values.dtype} {values[:1]!r:.60}")
    values = values.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        first = int(wrong[0])
        raise PipelineError(
            "sampling.weighted() needs finite weights of at least 0, but the weight of record "
            f"{first} is {values[first]}"
        )
    with np.errstate(over="ignore"):
        total = float(np.cumsum(values)[-1])
    if not total or not np.isfinite(total):
        reason = "all weights are 0" if not total else "the sum of the weights is too large for a float64"
        raise PipelineError(f"sampling.weighted(): {reason}")
    return values


def weighted(weights: Any, samples: int | None = None, *, field: str = "label") -> Sampling:
    """Draws the record of each position by weight, from all records.

    Args:
        weights: finite numbers of at least 0, which need not sum to 1: an array [n], one for each record; or a
            function or a mapping from a label to the weight of the records with that label, which is read once for
            each distinct value of `field`. A record of weight 0 is never drawn.
        samples: number of positions in an epoch; the number of records unless given.
        field: the field with the labels, if `weights` is a function or a mapping.

    Returns:
        An order for `Pipeline(source, sampling=...)`. Its table takes 8 bytes for each record.

    Raises:
        PipelineError: an argument is invalid; some are checked when the pipeline is made.

    Examples:
        >>> pipe = Pipeline(source, sampling=sampling.weighted({0: 1.0, 1: 9.0}, samples=10_000))
    """
    if isinstance(weights, str) or weights is None:
        raise PipelineError(
            f"sampling.weighted() needs weights [n], or a function or mapping of labels, got {weights!r}"
        )
    if not callable(weights) and not isinstance(weights, Mapping | np.ndarray):
        weights = pack_values(weights)
    return Sampling(functools.partial(_resolve_weighted, weights, _check_samples(samples), field))


def _resolve_weighted(weights: Any, samples: int | None, field: str, source: Records, seed: int) -> SampledOrder:
    return WeightedOrder(_read_weights(source, weights, field), samples or len(source), seed)


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


def _resolve_balanced(labels: Values, samples: int | None, source: Records, seed: int) -> SampledOrder:
    what = "the labels of sampling.balanced()"
    codes, classes = encode_classes(read_values(source, labels, what), what)
    if len(classes) < 2:
        raise PipelineError(
            f"sampling.balanced() needs at least two classes; all records have {format_classes(classes)}"
        )
    return BalancedOrder(codes, len(classes), samples or len(source), seed)


def mixed(shares: Mapping[Any, float], samples: int | None = None, *, field: str = "source") -> Sampling:
    """Draws from each class its share: exactly in each epoch, up to rounding in each batch.

    The classes follow each other in a fixed, even pattern; the records that they draw differ between epochs. Each
    record of a class is used before any is used again: the next epoch goes on where this one has ended.

    Args:
        shares: label or name of each class -> its share, a number of at least 0; they need not sum to 1.
        samples: number of positions in an epoch; unless given, as many as give no record twice: an epoch ends with
            the class that is used up first.
        field: has the labels, and is read once.

    Returns:
        An order for `Pipeline(source, sampling=...)`. Its table takes 4 bytes for each record, and up to 6 for
        each position: fewer for round shares.

    Raises:
        PipelineError: an argument is invalid; some are checked when the pipeline is made.

    Examples:
        >>> both = sources.concat({"reviews": reviews, "plots": plots})
        >>> pipe = Pipeline(both, sampling=sampling.mixed({"reviews": 0.7, "plots": 0.3}))
    """
    if not isinstance(shares, Mapping):
        raise PipelineError(f"sampling.mixed() needs a mapping of classes to shares, got {shares!r:.60}")
    return Sampling(functools.partial(_resolve_mixed, dict(shares), _check_samples(samples), field))


def _resolve_mixed(
    shares: dict[Any, float], samples: int | None, field: str, source: Records, seed: int
) -> SampledOrder:
    codes, keys = encode_keys(source, field, shares, "share")
    counts = count_positions([shares[key] for key in keys], np.bincount(codes).tolist(), samples)
    if lost := [key for key, count in zip(keys, counts, strict=True) if shares[key] and not count]:
        raise PipelineError(
            f"sampling.mixed(): the share of {lost[0]!r} is less than one of {sum(counts)} positions, so it would "
            "never be drawn: give more samples=, or leave the class out by the share 0"
        )
    return MixedOrder(codes, counts, seed)


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


def _resolve_bucketed(lengths: Values, bucket: int, window: int, source: Records, seed: int) -> SampledOrder:
    return BucketedOrder(_read_lengths(source, lengths), bucket, window, seed)


def consecutive(samples: int) -> Sampling:
    """An epoch of a number of records: each epoch takes the records after the last one's, shuffled.

    After the last record comes the first one again. It is for data that are too many for an epoch of all.

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


def _resolve_consecutive(samples: int, source: Records, seed: int) -> SampledOrder:
    return ConsecutiveOrder(samples, len(source), seed)


def check_sampling(sampling: Any, shuffle: Any) -> None:
    """Checks the argument `sampling` of a pipeline."""
    if not isinstance(sampling, Sampling):
        is_foreign = hasattr(sampling, "__iter__") and not isinstance(sampling, str)
        hint = (
            ": a sampler or batch sampler of torch serves one process and one batch size; here all members read "
            "the same order, whatever their batch sizes (to sort by length: sampling.bucketed)"
        )
        raise PipelineError(
            "sampling must be made by sampling.weighted, balanced, mixed, bucketed or consecutive, got "
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
