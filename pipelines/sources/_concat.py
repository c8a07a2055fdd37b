"""Source of the records of several sources, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_name
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import Description, is_ours, known_as
from pipelines.sources._base import Groups, Source
from pipelines.sources._classes import ClassNames, join_names
from pipelines.sources._labels import pack_values
from pipelines.sources._origin import Origin
from pipelines.sources._subset import Subset


@known_as("pipelines.sources.concat")
class Concat(Source):
    """See `concat`.

    Attributes:
        names: of the sources.
    """

    kind = "concat"

    def __init__(self, parts: Mapping[str, Source], field: str) -> None:
        self.names, self.parts, self.field = tuple(parts), tuple(parts.values()), field
        wholes = [part.source if type(part) is Subset else part for part in self.parts]
        self.is_fork_safe = all(whole.is_fork_safe and is_ours(type(whole)) for whole in wholes)
        self._bounds = np.cumsum([0, *map(len, self.parts)])

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def _find(self, index: int) -> tuple[int, int]:
        """Which source a record is of, and its index there."""
        number = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return number, index - int(self._bounds[number])

    def _divide(self, indices: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[Any], npt.NDArray[np.int64]]]:
        """Each source that has some of the records: its number, their places in `indices`, their indices there."""
        which = np.searchsorted(self._bounds, indices, side="right") - 1
        places = [(number, np.flatnonzero(which == number)) for number in np.unique(which).tolist()]
        return [(number, place, indices[place] - self._bounds[number]) for number, place in places]

    def _read(self, index: int) -> dict[str, Any]:
        number, inner = self._find(index)
        try:
            record = self.parts[number]._read(inner)
        except SampleError as error:
            raise SampleError(index, error.where, error.reason) from error.__cause__
        return {**record, self.field: np.int64(number)}

    def copy_records(self, indices: npt.NDArray[np.int64], into: Mapping[str, npt.NDArray[Any]]) -> bool:
        numbers = into.get(self.field)
        if numbers is None or numbers.dtype != np.int64:
            return False
        others = [(name, values) for name, values in into.items() if name != self.field]
        for number, places, inner in self._divide(indices):
            copied = {name: np.empty((len(places), *values.shape[1:]), values.dtype) for name, values in others}
            if not self.parts[number].copy_records(inner, copied):
                return False
            numbers[places] = number
            for name, values in others:
                values[places] = copied[name]
        return True

    def column(self, field: str) -> npt.NDArray[Any]:
        if field == self.field:
            return np.repeat(np.arange(len(self.parts)), np.diff(self._bounds))
        columns = [part.column(field) for part in self.parts]
        if len({(values.dtype, values.shape[1:]) for values in columns}) == 1:
            return np.concatenate(columns)
        return pack_values([value for values in columns for value in values])

    def where(self, index: int) -> str:
        number, inner = self._find(index)
        return self.parts[number].where(inner)

    @property
    def groups(self) -> Groups | None:
        """See `Source.groups`: those of all sources; None if one has none."""
        groups = [part.groups for part in self.parts]
        ends = [own[1:] + first for own, first in zip(groups, self._bounds, strict=False) if own is not None]
        return np.concatenate([[0], *ends]) if len(ends) == len(groups) else None

    def find_class_names(self, field: str) -> ClassNames | None:
        if field == self.field:
            return ClassNames((self.names,))
        named = [(part.find_class_names(field), len(part)) for part in self.parts]
        known = [(names, count) for names, count in named if names is not None]
        return join_names(known) if len(known) == len(named) else None

    def is_text(self, field: str) -> bool:
        return field != self.field and all(part.is_text(field) for part in self.parts)

    def find_origin(self) -> Origin:
        parts = tuple(part.find_origin() for part in self.parts)
        return Origin(self, self.describe_for_fingerprint, range(len(self)), parts=parts)

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:
        for number, _, inner in self._divide(indices):
            self.parts[number].will_read(inner)

    def renew(self, renewed: dict[int, Source]) -> Source:
        parts = [part.renew_in(renewed) for part in self.parts]
        if all(new is part for new, part in zip(parts, self.parts, strict=True)):
            return self
        return Concat(dict(zip(self.names, parts, strict=True)), self.field)

    def forget(self) -> None:
        for part in self.parts:
            part.forget()

    def load_for_forks(self) -> None:
        for part in self.parts:
            part.load_for_forks()

    def identity(self) -> Any:
        described = self.describe_for_fingerprint()
        return None if described.gaps else {"source": self._describe_class(), "of": described.value}

    def describe_for_fingerprint(self) -> Description:
        parts = [part.describe_for_fingerprint() for part in self.parts]
        value = [self._describe_class(), self.field, list(self.names), [part.value for part in parts]]
        return Description(value, tuple(dict.fromkeys(gap for part in parts for gap in part.gaps)))


def concat(parts: Mapping[str, Source], field: str = "source") -> Concat:
    """Makes a source of the records of several sources, one after the other.

    With `sampling.mixed` an epoch has a share of each.

    Args:
        parts: name -> source. Their records have the same fields, each with values of one kind.
        field: says which source a record is of: its number in `parts`, int64.

    Raises:
        PipelineError: the first records differ in their fields, or have `field` already; an argument is invalid.

    Examples:
        >>> both = concat({"reviews": sources.parquet("reviews.parquet"), "plots": sources.csv("plots.csv")})
        >>> pipe = Pipeline(both, sampling=sampling.mixed({"reviews": 0.7, "plots": 0.3}, samples=10_000))
    """
    if not isinstance(parts, Mapping) or not parts or not all(isinstance(part, Source) for part in parts.values()):
        raise PipelineError(f"concat() needs a mapping of names to sources, got {parts!r:.60}")
    check_name("concat(): field", field)
    first: tuple[str, dict[str, str]] | None = None
    for name, part in parts.items():
        check_name("concat(): the name of a source", name)
        if not len(part):
            raise PipelineError(f"concat(): {name!r} is empty: {part!r}")
        try:
            kinds = {key: _find_kind(value) for key, value in part[0].items()}
        except SampleError:
            continue  # which is found, and perhaps left out, when samples are prepared
        if field in kinds:
            raise PipelineError(f"concat(): records of {name!r} have a field {field!r}: give field= another name")
        own, first = (f"{name!r} ({part.where(0)})", kinds), first or (f"{name!r} ({part.where(0)})", kinds)
        if differing := [key for key in {**kinds, **first[1]} if kinds.get(key) != first[1].get(key)]:
            one, other = (f"{of.get(differing[0], 'nothing')} in {where}" for where, of in (first, own))
            raise PipelineError(
                f"concat(): the records differ: the field {differing[0]!r} has {one} and {other}; give both the "
                "same, or leave the field out, such as by columns="
            )
    made = Concat(parts, field)
    for key, kind in first[1].items() if first is not None else ():
        names = made.find_class_names(key) if kind == "numbers" else None
        if names is not None and not names.are_numbered_by(names.union):
            raise PipelineError(
                f"concat(): a number in {key!r} is not the same class in all sources: they have the classes "
                f"{' and '.join(map(str, names.lists))}; give each source.number_classes({key!r}, names)"
            )
    return made


def _find_kind(value: Any) -> str:
    if isinstance(value, str | bytes):
        return "a text" if isinstance(value, str) else "bytes"
    return type(value).__name__ if value is None or isinstance(value, dict | list | tuple) else "numbers"
