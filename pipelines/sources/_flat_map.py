"""Source of the pieces of other records: windows of a document, patches of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import Description, describe, describe_array, known_as
from pipelines.sources._base import Groups, Source
from pipelines.sources._classes import ClassNames
from pipelines.sources._origin import Origin
from pipelines.sources._recent import RecentlyUsed
from pipelines.sources._subset import Derived, call_on_record
from pipelines.sources._values import copy_value

Pieces = Callable[[dict[str, Any]], Iterable[dict[str, Any]]]
_KEPT = 16  # records whose pieces a process keeps


@known_as("pipelines.sources.flat_map")
class FlatMap(Derived):
    """See `flat_map`."""

    kind = "flat_map"
    __repr__ = Source.__repr__

    def __init__(self, source: Source, function: Pieces) -> None:
        self.source, self.function = source, function
        self._recent: RecentlyUsed[int, list[dict[str, Any]]] = RecentlyUsed(_KEPT)
        counts = [len(self._make(owner)) for owner in range(len(source))]
        self._bounds = np.cumsum([0, *counts])
        if not len(self):
            raise PipelineError(f"flat_map(): the function makes nothing of the records of {source!r}")

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def _find_owners(self, indices: Any) -> Any:
        return np.searchsorted(self._bounds, indices, side="right") - 1

    def _make(self, owner: int) -> list[dict[str, Any]]:
        pieces = call_on_record(self.source, owner, lambda record: list(self.function(record)))
        if not all(isinstance(piece, dict) for piece in pieces):
            raise SampleError(owner, self.source.where(owner), "the function of flat_map() must make dicts")
        return pieces

    def _read(self, index: int) -> dict[str, Any]:
        owner = int(self._find_owners(index))
        first, stop = self._bounds[owner : owner + 2].tolist()
        try:
            pieces = self._recent.get(owner, lambda owner: (self._make(owner), 1))
        except SampleError as error:
            raise SampleError(index, error.where, error.reason) from error.__cause__
        if len(pieces) != stop - first:
            raise SampleError(index, self.where(index), f"the function makes {len(pieces)} pieces now")
        piece: dict[str, Any] = copy_value(pieces[index - first])
        return piece

    def where(self, index: int) -> str:
        owner = int(self._find_owners(index))
        return f"piece {index - int(self._bounds[owner])} of {self.source.where(owner)}"

    def find_class_names(self, field: str) -> ClassNames | None:
        names = self.source.find_class_names(field)
        return None if names is None else names.select(self._find_owners(range(len(self))))

    @property
    def groups(self) -> Groups | None:
        """See `Source.groups`: the pieces of a record, or of a group of records."""
        bounds = self._bounds if self.source.groups is None else self._bounds[self.source.groups]
        return np.unique(bounds)

    def find_origin(self) -> Origin:
        owners = self._find_owners(range(len(self)))
        return replace(Source.find_origin(self), indices=owners, steps=self.source.find_origin())

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        self.source.will_read(self._find_owners(indices))

    def renew(self, renewed: dict[int, Source]) -> Source:
        source = self.source.renew_in(renewed)
        return self if source is self.source else FlatMap(source, self.function)

    def identity(self) -> Any:
        described = self.describe_for_fingerprint()
        return None if described.gaps else {"source": self._describe_class(), "of": described.value}

    def describe_for_fingerprint(self) -> Description:
        whole, function = self.source.describe_for_fingerprint(), describe(self.function)
        value = [self._describe_class(), whole.value, function.value, describe_array(self._bounds)]
        return Description(value, (*whole.gaps, *function.gaps))


def flat_map(source: Source, function: Pieces) -> FlatMap:
    """Makes a source of the pieces that a function makes of each record: windows, sentences, patches.

    The function is called once for each record now, to count the pieces, and again when one of them is read. A
    process keeps the pieces of the last 16 records; with `Pipeline(shuffle="blocks")` the pieces of a record are
    read close to each other. Split the records *first*: a split that parts pieces of one record is refused.

    Args:
        source: the records.
        function: returns the pieces of a record, dicts, or yields them; always the same.

    Raises:
        PipelineError: the function makes nothing of any record.
        SampleError: a record cannot be read, or the function fails.

    Examples:
        >>> def halve(record):
        ...     return [{**record, "text": half} for half in record["text"].split("|")]
        >>> halves = flat_map(sources.jsonl("texts.jsonl"), halve)
    """
    if not callable(function):
        raise PipelineError(f"flat_map() needs a function of a record, got {function!r:.60}")
    return FlatMap(source, function)
