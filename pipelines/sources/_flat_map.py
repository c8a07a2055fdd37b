"""Source of the pieces of other records: windows of a document, patches of an image."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources._base import Source
from pipelines.sources._classes import ClassNames
from pipelines.sources._iterable import IterableRecords
from pipelines.sources._origin import Origin
from pipelines.sources._subset import call_on_record

Pieces = Callable[[dict[str, Any]], Iterable[dict[str, Any]]]


@known_as("pipelines.sources.flat_map")
class FlatMap(IterableRecords):
    """See `flat_map`."""

    kind = "flat_map"

    def __init__(self, source: Source, function: Pieces) -> None:
        self._source, self._function = source, function
        counts = [len(_make_pieces(source, function, index)) for index in range(len(source))]
        self._bounds = np.cumsum([0, *counts])
        if not self._bounds[-1]:
            raise PipelineError(f"flat_map(): the function makes nothing of the records of {source!r}")
        super().__init__(functools.partial(_iterate, source, function), int(self._bounds[-1]), None, None)

    def _find_owners(self, indices: Any) -> Any:
        return np.searchsorted(self._bounds, indices, side="right") - 1

    def where(self, index: int) -> str:
        owner = int(self._find_owners(index))
        return f"piece {index - int(self._bounds[owner])} of {self._source.where(owner)}"

    def find_class_names(self, field: str) -> ClassNames | None:
        names = self._source.find_class_names(field)
        return None if names is None else names.select(self._find_owners(range(len(self))))

    def find_origin(self) -> Origin:
        owners = self._find_owners(range(len(self)))
        return replace(super().find_origin(), steps=self._source.find_origin().select(owners))

    def renew(self, renewed: dict[int, Source]) -> Source:
        source = self._source.renew_in(renewed)
        return self if source is self._source else FlatMap(source, self._function)


def _make_pieces(source: Source, function: Pieces, index: int) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = call_on_record(source, index, lambda record: list(function(record)))
    return pieces


def _iterate(source: Source, function: Pieces) -> Iterator[dict[str, Any]]:
    for index in range(len(source)):
        yield from _make_pieces(source, function, index)


def flat_map(source: Source, function: Pieces) -> FlatMap:
    """Makes a source of the pieces that a function makes of each record: windows, sentences, patches.

    The pieces are made now, twice: they are counted, then written to a file as `iterable` does. Split the records
    *first*: a split that would part pieces of one record is refused.

    Args:
        source: the records.
        function: returns the pieces of a record, dicts, or yields them; always the same.

    Raises:
        PipelineError: the function makes nothing of any record, or what cannot be stored.
        SampleError: a record cannot be read, or the function fails.

    Examples:
        >>> def halve(record):
        ...     return [{**record, "text": half} for half in record["text"].split("|")]
        >>> halves = flat_map(sources.jsonl("texts.jsonl"), halve)
    """
    if not callable(function):
        raise PipelineError(f"flat_map() needs a function of a record, got {function!r:.60}")
    return FlatMap(source, function)
