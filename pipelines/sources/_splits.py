"""Divides the records of a source into parts: at random, by class, by group, by time, by key.

Everything here is a function of (number of records, classes, groups, fractions, seed), for all versions of numpy:
records and groups are ranked by the raw output of the Philox generator, whose stream numpy guarantees (NEP 19).
With keys the part of a record is a function of (its key, fractions, seed) alone: other records do not move it.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import PipelineError
from pipelines.order.epoch_order import mix
from pipelines.sources._labels import Records, Values, encode_classes, format_classes, read_values
from pipelines.stages._column_kinds import as_times

Indices = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

# A part that is further than this from what was asked for, relative to it, is warned of.
_FAR_OFF = 0.25
_WHY_FAR = {
    "groups": "the groups are too large or too few to meet the fractions",
    "keys": "there are too few different keys to meet the fractions",
}


def split(
    source: Records,
    fractions: float | Sequence[float],
    seed: int,
    stratify: Values | None,
    group: Values | None,
    by: Values | None,
    key: Values | None,
) -> list[Indices]:
    """Returns the indices of each part, ascending; see `Source.split`."""
    if isinstance(seed, float):
        raise PipelineError(f"split() takes several fractions as one argument: split(({fractions}, {seed}))")
    count, seed = len(source), check_integer("split(): seed", seed, 0)
    shares = _check_fractions(fractions)
    if key is not None:
        if any(other is not None for other in (stratify, group, by)):
            raise PipelineError("split(key=) divides by the key alone: leave out stratify=, group= and by=")
        keys = read_values(source, key, "key=")
        digests = np.fromiter(_digest_keys(keys), np.uint64, count)
        return _collect(_assign_digests(digests, shares, seed), shares, fractions, what="keys")
    if by is not None:
        if stratify is not None or group is not None:
            raise PipelineError("split(by=) divides the ordered records: leave out stratify= and group=")
        order = _rank(read_values(source, by, "by="))
    elif stratify is None and group is None:
        order = _shuffle(count, seed)
    else:
        codes, groups = _read_classes(source, stratify, group)
        parts = _assign(codes, groups, shares, seed)
        return _collect(parts, shares, fractions, what="records" if group is None else "groups")
    inner = [round(count * math.fsum(shares[:part])) for part in range(1, len(shares))]
    parts = np.empty(count, np.int64)
    parts[order] = np.repeat(np.arange(len(shares)), np.diff([0, *inner, count]))
    return _collect(parts, shares, fractions, what="records")


def assign_folds(
    source: Records,
    k: int,
    seed: int,
    stratify: Values | None = None,
    group: Values | None = None,
    assigned: Values | None = None,
) -> npt.NDArray[np.int64]:
    count, seed = len(source), check_integer("folds(): seed", seed, 0)
    k = check_integer("k", k, 2)
    if k > count:
        raise PipelineError(f"folds({k}) of {count} records leaves folds empty")
    if assigned is not None:
        folds, names = encode_classes(read_values(source, assigned, "assigned="), "assigned=")
        if len(names) != k:
            raise PipelineError(f"assigned= must have {k} folds, it has {len(names)}: {format_classes(names)}")
        return folds
    if stratify is None and group is None:
        folds = np.empty(count, np.int64)
        folds[_shuffle(count, seed)] = np.arange(count) * k // count
        return folds
    codes, groups = _read_classes(source, stratify, group)
    if groups is None:
        # Dealt out like cards, class by class: each fold has its share of every class, and of the whole.
        assert codes is not None
        order = _shuffle(count, seed)
        folds = np.empty(count, np.int64)
        folds[order[np.argsort(codes[order], kind="stable")]] = np.arange(count) % k
        return folds
    shares = [1 / k] * k
    folds = _assign(codes, groups, shares, seed)
    _collect(folds, shares, k, what="groups", call="folds")
    return folds


def _shuffle(count: int, seed: int) -> Indices:
    """Returns range(count) in a random order, int64 [count]."""
    return np.argsort(np.random.Philox(seed).random_raw(count), kind="stable")


def _assign(
    codes: Indices | None, groups: Indices | None, shares: Sequence[float], seed: int
) -> npt.NDArray[np.int64]:
    """Assigns records to parts by class, by group or by both; returns the part of each record, int64 [n]."""
    if groups is not None:
        codes = np.zeros(len(groups), np.int64) if codes is None else codes
        return _assign_groups(codes, groups, shares, seed)[groups]
    assert codes is not None
    return _assign_records(codes, shares, seed)


def _assign_records(codes: Indices, shares: Sequence[float], seed: int) -> npt.NDArray[np.int64]:
    """Divides each class: a part gets the class's size * share, rounded down or up.

    What rounding down leaves of a class goes to the parts that have had too little of the classes so far.
    """
    order = _shuffle(len(codes), seed)
    order = order[np.argsort(codes[order], kind="stable")]
    parts = np.empty(len(codes), np.int64)
    wanted, placed, start = np.zeros(len(shares)), np.zeros(len(shares)), 0
    for size in np.bincount(codes).tolist():
        exact = size * np.asarray(shares)
        counts = np.floor(exact + 1e-9)
        wanted += exact
        lacking = wanted - placed - counts
        # A part whose share of this class is a whole number gets no record more than that.
        lacking[exact - counts < 1e-9] = -np.inf
        remainder = size - int(counts.sum())
        counts[np.argsort(-lacking, kind="stable")[:remainder]] += 1
        placed += counts
        parts[order[start : start + size]] = np.repeat(np.arange(len(shares)), counts.astype(np.int64))
        start += size
    return parts


def _assign_groups(codes: Indices, groups: Indices, shares: Sequence[float], seed: int) -> npt.NDArray[np.int64]:
    """Places one group after the other, the large ones first; groups of similar size in a random order.

    A group goes to the part for which the sum over classes and parts of (count - wanted)^2 / wanted grows least.
    With one class that is the part with the smallest (count + size / 2 - wanted) / wanted. As the mean of that,
    weighted by `wanted`, is at most (parts / 2 - 1) * size / records, no part gets more than
    size / 2 * (1 + share * (parts - 2)) too much, for the size of the largest group.
    """
    count, parts = int(groups.max()) + 1, len(shares)
    if count < parts:
        raise PipelineError(f"{count} groups cannot be divided into {parts} parts, none of them empty")
    sizes = np.bincount(groups)
    order = _shuffle(count, seed)
    order = order[np.argsort(-np.frexp(sizes[order].astype(np.float64))[1], kind="stable")]
    by_group = np.argsort(groups, kind="stable")
    starts = np.cumsum(sizes) - sizes
    wanted = np.outer(np.asarray(shares), np.bincount(codes))  # [parts, classes]
    counts = np.zeros_like(wanted)
    placed = np.full(count, -1, np.int64)
    is_empty = np.ones(parts, bool)
    for number, one in enumerate(order.tolist()):
        here, own = np.unique(codes[by_group[starts[one] : starts[one] + sizes[one]]], return_counts=True)
        growth = (own * (2 * (counts[:, here] - wanted[:, here]) + own) / wanted[:, here]).sum(axis=1)
        if int(is_empty.sum()) >= count - number:
            growth[~is_empty] = np.inf
        part = int(np.argmin(growth))
        counts[part, here] += own
        placed[one], is_empty[part] = part, False
    return placed


def _assign_digests(digests: Hashes, shares: Sequence[float], seed: int) -> npt.NDArray[np.int64]:
    inner = [math.fsum(shares[:part]) for part in range(1, len(shares))]
    bounds = np.array([min(int(share * 2**64), 2**64 - 1) for share in inner], np.uint64)
    by_seed = int.from_bytes(
        hashlib.blake2b(b"%d" % seed, digest_size=8, person=b"ensemble.split").digest(), "big"
    )
    # A step of SplitMix64 (Steele et al., OOPSLA 2014), which is bijective.
    mixed = mix((digests ^ np.uint64(by_seed)) + np.uint64(0x9E3779B97F4A7C15))
    return np.searchsorted(bounds, mixed, side="right")


def _digest_keys(keys: npt.NDArray[Any]) -> Iterator[int]:
    """Yields of each key 64 bits: BLAKE2b of the key as text, so that 7 and "7" are one key."""
    base = hashlib.blake2b(digest_size=8, person=b"ensemble.split")
    for record in range(len(keys)):  # one by one: a list of all would take ten times the memory
        key = keys[record]
        if isinstance(key, str):
            encoded = key.encode("utf-8", "surrogatepass")
        elif isinstance(key, bytes):
            encoded = key
        elif isinstance(key, int | np.integer) and not isinstance(key, bool):
            encoded = b"%d" % key
        else:
            raise PipelineError(f"split(key=) needs texts, bytes or integers: record {record} has {key!r:.60}")
        digest = base.copy()
        digest.update(encoded)
        yield int.from_bytes(digest.digest(), "big")


def _read_classes(
    source: Records, stratify: Values | None, group: Values | None
) -> tuple[Indices | None, Indices | None]:
    codes, groups = (
        None if values is None else encode_classes(read_values(source, values, name), name)[0]
        for name, values in (("stratify=", stratify), ("group=", group))
    )
    return codes, groups


def find_places(source: Records, by: Values) -> Indices:
    """Returns the place of each record in the order of `by`, int64 [n]; see `Source.rank`."""
    places = np.empty(len(source), np.int64)
    places[_rank(read_values(source, by, "by="), call="rank")] = np.arange(len(source))
    return places


def _rank(values: npt.NDArray[Any], call: str = "split") -> Indices:
    values = as_times(values, f"{call}(by=)")
    missing = np.flatnonzero(values != values)  # NaN, NaT
    if missing.size:
        raise PipelineError(f"{call}(by=): record {int(missing[0])} has {values[missing[0]]}")
    return np.argsort(values, kind="stable")


def _check_fractions(fractions: float | Sequence[float]) -> list[float]:
    is_one = not isinstance(fractions, list | tuple | np.ndarray)
    listed: list[Any] = [fractions] if is_one else list(fractions)  # type: ignore[arg-type]
    try:
        shares = [math.nan if isinstance(share, str) else float(share) for share in listed]
    except (TypeError, ValueError):
        shares = []
    if len(shares) < 2 - is_one or not all(0 < share < 1 for share in shares):
        what = "a fraction between 0 and 1, or several" if is_one else "at least two fractions between 0 and 1"
        raise PipelineError(f"split() needs {what}, got {fractions!r}")
    if is_one:
        return [shares[0], 1 - shares[0]]
    if abs(math.fsum(shares) - 1) > 1e-6:
        raise PipelineError(
            f"split() needs fractions that sum to 1, so that every record has its part; {fractions!r} sum to "
            f"{math.fsum(shares):.6g}"
        )
    return shares


def _collect(
    parts: npt.NDArray[np.int64], shares: Sequence[float], fractions: Any, *, what: str, call: str = "split"
) -> list[Indices]:
    """Returns the indices of each part; warns of groups that cannot come near the fractions."""
    count, sizes = len(parts), np.bincount(parts, minlength=len(shares))
    if not sizes.all():
        raise PipelineError(f"{call}({fractions!r}) of {count} records leaves one part empty")
    wanted = count * np.asarray(shares)
    if what != "records" and (np.abs(sizes - wanted) > np.maximum(1, _FAR_OFF * wanted)).any():
        warnings.warn(
            f"{call}({fractions!r}): the parts have {', '.join(map(str, sizes.tolist()))} of {count} records: "
            f"{_WHY_FAR[what]}",
            stacklevel=4,
        )
    return [np.flatnonzero(parts == part) for part in range(len(shares))]
