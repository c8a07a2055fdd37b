"""Sources made of another one: some of its records, or all of them with other values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import Description, known_as
from pipelines.sources._base import Groups, Source
from pipelines.sources._origin import Indices, Origin, digest_indices

if TYPE_CHECKING:
    from pipelines.sources._classes import ClassNames


def call_on_record(source: Source, index: int, function: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns what a function of the user's returns for a record; an error of it is a `SampleError`."""
    record = source[index]
    try:
        return function(record)
    except (PipelineError, MemoryError):
        raise
    except Exception as error:
        raise SampleError(index, source.where(index), f"{type(error).__name__}: {error}") from error


class Derived(Source):
    """The records of another source; a subclass says which, or what becomes of them."""

    source: Source

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return repr(self.source)

    def where(self, index: int) -> str:
        return self.source.where(index)

    def find_class_names(self, field: str) -> ClassNames | None:
        return self.source.find_class_names(field)

    def is_text(self, field: str) -> bool:
        return self.source.is_text(field)

    def find_origin(self) -> Origin:
        return self.source.find_origin()

    @property
    def groups(self) -> Groups | None:
        """See `Source.groups`."""
        return self.source.groups

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        self.source.will_read(indices)

    def forget(self) -> None:
        self.source.forget()

    def load_for_forks(self) -> None:
        self.source.load_for_forks()


@known_as("pipelines.sources.Subset")
class Subset(Derived):
    """The records of another source at `indices` (int64 [n], or a range), in that order.

    Args:
        source: the source of the records.
        indices: the indices of the records, from 0; an index may occur several times.
        ordered_by: the field by which the records were divided, such as a time.
    """

    kind = "subset"

    def __init__(
        self, source: Source, indices: np.ndarray[Any, Any] | range, ordered_by: str | None = None
    ) -> None:
        self.ordered_by = ordered_by or getattr(source, "ordered_by", None)
        self.source, self.indices = source, indices
        if isinstance(source, Subset):
            if not isinstance(indices, range):
                indices = np.arange(len(source))[indices]  # negative ones and masks, too; others are refused
            self.source, self.indices = source.source, source._find_in_whole(indices)
        if not isinstance(self.indices, range):
            self.indices = np.asarray(self.indices, np.int64)

    indices: Indices

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

    def where(self, index: int) -> str:
        return self.source.where(int(self.indices[index]))

    def column(self, field: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self.source.column(field)[np.asarray(self.indices)]
        return values

    def find_class_names(self, field: str) -> ClassNames | None:
        names = self.source.find_class_names(field)
        return None if names is None else names.select(self.indices)

    def number_classes(self, field: str, names: Sequence[str]) -> Source:
        whole = self.source.number_classes(field, names)
        return self if whole is self.source else Subset(whole, self.indices)

    def find_origin(self) -> Origin:
        return self.source.find_origin().select(self.indices)

    def _check_parts(self, parts: Sequence[Subset]) -> None:
        self.source._check_parts(parts)

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        self.source.will_read(np.asarray(self._find_in_whole(indices)))

    def copy_records(self, indices: npt.NDArray[np.int64], into: Mapping[str, npt.NDArray[Any]]) -> bool:
        if type(self) is not Subset:
            return False
        return self.source.copy_records(np.asarray(self._find_in_whole(indices)), into)

    def _find_in_whole(self, indices: Indices) -> Indices:
        """The indices in the source of some of these records."""
        own = self.indices
        if isinstance(indices, range):
            return own[indices.start : indices.stop : indices.step]
        return own.start + own.step * np.asarray(indices) if isinstance(own, range) else own[indices]

    def load_for_forks(self) -> None:
        if len(self) > len(self.source) // 2:  # else it may load much that nobody reads
            self.source.load_for_forks()

    def identity(self) -> Any:
        own, alone = self.indices, self.source.identify_records(self.indices)
        if alone is not None:
            return {"source": self._describe_class(), "of": alone}
        if (whole := self.source.identity()) is None:
            return None
        place = (
            {"range": [own.start, own.stop, own.step]}
            if isinstance(own, range)
            else {"indices": digest_indices(own)}
        )
        return {"source": self._describe_class(), "of": whole, **place}

    def describe_for_fingerprint(self) -> Description:
        if self.source.identify_records(self.indices) is not None:
            return Description(self.identity())
        whole = self.source.describe_for_fingerprint()
        return Description([self.identity(), whole.value], whole.gaps)

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


def filter_records(source: Source, function: Callable[[dict[str, Any]], Any]) -> Subset:
    """See `Source.filter`."""
    if not callable(function):
        raise PipelineError(f"filter() needs a function of a record, got {function!r:.60}")
    indices = range(len(source))
    kept = [index for index in indices if call_on_record(source, index, lambda record: bool(function(record)))]
    if not kept:
        raise PipelineError(f"filter(): the function is true for none of the records of {source!r}")
    return Subset(source, np.array(kept))
