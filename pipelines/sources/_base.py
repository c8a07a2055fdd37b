"""`Source`: reads records by index and says where each is stored.

Many processes read a source at once. It is made once, which indexes all files, and then pickled to each process
that prepares samples. Open files and caches are made at first use in each process and never pickled.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import Unsure, describe, is_ours, known_as

Groups = npt.NDArray[np.int64]


class Source(ABC):
    """Records by index: `source[i]` returns a new dict of raw values, which the caller may keep and change.

    A subclass implements `__len__`, `_read`, `where` and `identity`.

    Attributes:
        kind: the name of the function that makes such a source.
    """

    kind: str

    @abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abstractmethod
    def _read(self, index: int) -> dict[str, Any]:
        """Reads the record at `index`, 0 to `len(self) - 1`."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Says where the record at `index` is stored, for error messages: the file, and the row or member."""

    @abstractmethod
    def identity(self) -> Any:
        """Returns a JSON value that is equal only for sources with equal records; None if that is unknown."""

    def _describe_class(self) -> Any:
        """Describes the class of the source, for `identity`.

        Returns:
            A JSON value: name and version of a class of ours, the code of a user's subclass of one.

        Raises:
            Unsure: a user's subclass cannot be described, or has attributes that the `identity` which it inherits
                says nothing of.
        """
        cls = type(self)
        definer = next(base for base in cls.__mro__ if "identity" in vars(base))
        if not is_ours(cls) and is_ours(definer):
            used = {name for base in cls.__mro__ if is_ours(base) for name in _names_in(base)}
            if unknown := sorted(set(vars(self)) - used):
                raise Unsure(
                    f"the source {cls.__qualname__}, of which {definer.__qualname__}.identity() does not cover "
                    f"{', '.join(map(repr, unknown))} (override identity())"
                )
        return describe(cls)

    @property
    def groups(self) -> Groups | None:
        """Bounds of the groups of consecutive records that are best read together, for a block shuffle.

        int64 [groups + 1], strictly ascending from 0 to the number of records; None if each record costs the same.
        """
        return None

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:  # noqa: B027 - most sources have no use for it
        """Announces the records that are read next, int64 [n]: a source may prefetch their groups."""

    def forget(self) -> None:  # noqa: B027 - most sources keep nothing
        """Frees what was cached for further reads, because this process may not read again."""

    def __repr__(self) -> str:
        return f"{self.kind}({len(self)} records)"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Reads a record.

        Args:
            index: an integer; a negative one counts from the end.

        Raises:
            IndexError: there is no such record.
            SampleError: the record cannot be read.
        """
        position = operator.index(index)
        count = len(self)
        if not -count <= position < count:
            raise IndexError(f"record {position} of a source of {count}")
        return self._read(position % count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Reads all records in order."""
        for index in range(len(self)):
            yield self._read(index)

    def split(self, fraction: float, seed: int) -> tuple[Subset, Subset]:
        """Divides the records at random into two sources: about `fraction` of them, and the rest.

        The division depends on (number of records, fraction, seed) alone, for all versions of numpy: records are
        ranked by the raw output of the Philox generator, whose stream numpy guarantees (NEP 19). Each part keeps
        its records in ascending order. Needs about 30 bytes of memory per record, of which 8 stay in use.

        Args:
            fraction: of the records that the first part receives, between 0 and 1.
            seed: an integer of at least 0.

        Raises:
            PipelineError: an argument is invalid, or a part would be empty.

        Example:
            >>> train, valid = source.split(0.9, seed=0)
        """
        count = len(self)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise PipelineError(f"split() needs a seed that is an integer of at least 0, got {seed!r}")
        if not 0 < fraction < 1:
            raise PipelineError(f"split() needs a fraction between 0 and 1, got {fraction!r}")
        first = round(count * fraction)
        if not 0 < first < count:
            raise PipelineError(f"split({fraction!r}) of {count} records leaves one part empty")
        draws = np.random.Philox(int(seed)).random_raw(count)
        order = np.argsort(draws, kind="stable")
        return Subset(self, np.sort(order[:first])), Subset(self, np.sort(order[first:]))

    def take(self, n: int) -> Subset:
        """Returns a source of the first `n` records.

        Raises:
            PipelineError: there are fewer than `n`, or `n` is below 1.
        """
        if not 0 < n <= len(self):
            raise PipelineError(f"take({n!r}) of a source of {len(self)} records")
        return Subset(self, range(n))


def _names_in(cls: type) -> set[str]:
    """The names that a class defines, and those of the attributes that its methods use."""
    methods = [getattr(item, "func", item) for item in vars(cls).values()]  # `func`: of a cached property
    used = {name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names}
    return used | set(vars(cls))


@known_as("pipelines.sources.Subset")
class Subset(Source):
    """The records of another source at `indices` (int64 [n], or a range), in that order."""

    kind = "subset"

    def __init__(self, source: Source, indices: np.ndarray[Any, Any] | range) -> None:
        self.source: Source = source
        self.indices: np.ndarray[Any, Any] | range
        if isinstance(source, Subset):
            self.source = source.source
            if isinstance(indices, range):
                self.indices = source.indices[indices.start : indices.stop : indices.step]
            else:
                self.indices = np.asarray(source.indices)[indices]
        else:
            self.indices = indices if isinstance(indices, range) else np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"{len(self)} of {self.source!r}"

    def _read(self, index: int) -> dict[str, Any]:
        try:
            return self.source._read(int(self.indices[index]))
        except SampleError as error:
            # `index` is what the user's batches carry; the place in the whole source is in `where`.
            raise SampleError(index, error.where, error.reason) from error.__cause__

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        own = self.indices
        self.source.will_read(own.start + own.step * indices if isinstance(own, range) else own[indices])

    def forget(self) -> None:
        self.source.forget()

    def where(self, index: int) -> str:
        return self.source.where(int(self.indices[index]))

    def identity(self) -> Any:
        whole = self.source.identity()
        if whole is None:
            return None
        if isinstance(self.indices, range):
            of = [self.indices.start, self.indices.stop, self.indices.step]
            return {"source": self._describe_class(), "of": whole, "range": of}
        digest = hashlib.sha256(self.indices.astype("<i8").tobytes()).hexdigest()
        return {"source": self._describe_class(), "of": whole, "indices": digest}

    @functools.cached_property
    def groups(self) -> Groups | None:
        """See `Source.groups`: the groups of the whole source, as far as they are in the subset."""
        whole = self.source.groups
        if whole is None:
            return None
        if isinstance(self.indices, range) and self.indices.step == 1:
            inner = whole[(whole > self.indices.start) & (whole < self.indices.stop)] - self.indices.start
        else:
            group = np.searchsorted(whole, np.asarray(self.indices), side="right")
            inner = np.flatnonzero(np.diff(group)) + 1
        return np.concatenate([[0], inner, [len(self)]]).astype(np.int64)
