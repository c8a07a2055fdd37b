"""Names of classes, and sources whose classes have the numbers that other data have given them.

A source that knows the names of its classes numbers them by what it holds: a folder with the sub-folders `b` and
`c` gives `b` the number 0, whatever another folder gives it. Where two of them are to mean the same,
`Source.number_classes` gives the classes of the one the numbers of the other, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import Description, is_ours, known_as
from pipelines.sources._base import Source
from pipelines.sources._labels import format_classes
from pipelines.sources._origin import digest_indices
from pipelines.sources._subset import Derived

Names = tuple[str, ...]


@dataclass(frozen=True)
class ClassNames:
    """What the numbers of a field stand for.

    Attributes:
        lists: names of classes in the order of their numbers. Parts of a source, such as the files of a data set
            or the members of a concatenation, may have lists of their own.
        which: the list that each record's number is of, int64 [n]; None: all are of the first.
    """

    lists: tuple[Names, ...]
    which: npt.NDArray[np.int64] | None = None

    @property
    def union(self) -> Names:
        """All names: those of the first list, then what the others add."""
        return tuple(dict.fromkeys(name for names in self.lists for name in names))

    def are_numbered_by(self, names: Sequence[str]) -> bool:
        return all(list_of_names == tuple(names[: len(list_of_names)]) for list_of_names in self.lists)

    def select(self, indices: Any) -> ClassNames:
        """Those of some of the records."""
        return self if self.which is None else ClassNames(self.lists, self.which[np.asarray(indices)])

    def find_name(self, index: int, number: Any) -> str | None:
        names = self.lists[0 if self.which is None else int(self.which[index])]
        return names[int(number)] if 0 <= int(number) < len(names) and int(number) == number else None


def join_names(parts: Sequence[tuple[ClassNames, int]]) -> ClassNames:
    """Those of sources one after the other, each with its number of records."""
    lists = list(dict.fromkeys(names for part, _ in parts for names in part.lists))
    if len(lists) == 1:
        return ClassNames((lists[0],))
    numbers = {names: number for number, names in enumerate(lists)}
    which = []
    for part, count in parts:
        own = np.array([numbers[names] for names in part.lists], np.int64)
        which.append(np.repeat(own[:1], count) if part.which is None else own[part.which])
    return ClassNames(tuple(lists), np.concatenate(which))


def find_names_of_items(items: Any) -> ClassNames | None:
    """The names that a map-style Dataset of another library has, through torch's Subset and ConcatDataset.

    None for one that gives its labels other values (`target_transform`).
    """
    kind = type(items).__name__
    if kind == "Subset" and hasattr(items, "dataset") and hasattr(items, "indices"):
        whole = find_names_of_items(items.dataset)
        return None if whole is None else whole.select(items.indices)
    if kind == "ConcatDataset" and hasattr(items, "datasets"):
        parts = [(find_names_of_items(inner), len(inner)) for inner in items.datasets]
        named = [(part, count) for part, count in parts if part is not None]
        return join_names(named) if named and len(named) == len(parts) else None
    names = getattr(items, "classes", None)
    if not isinstance(names, list | tuple) or not names or getattr(items, "target_transform", None) is not None:
        return None
    return ClassNames((tuple(map(str, names)),))


@known_as("pipelines.sources.class_numbers")
class ClassNumbers(Derived):
    """The records of another source, with the numbers that the classes of a field have in `names`.

    Reading a record of a class that is none of them is a `SampleError`. A number without a name, such as -1 for
    none, stays.

    Args:
        source: whose `field` is a number with a name, or a text.
        names: of the classes, in the order of their numbers.

    Attributes:
        classes: the names.
    """

    def __init__(self, source: Source, field: str, names: Sequence[str]) -> None:
        self.source, self.field, self.classes = source, field, tuple(names)
        self.kind, self.is_fork_safe = source.kind, source.is_fork_safe and is_ours(type(source))
        self._known = source.find_class_names(field)  # None: they are texts
        self._numbers = {name: number for number, name in enumerate(self.classes)}

    def _read(self, index: int) -> dict[str, Any]:
        record = self.source._read(index)
        value = record.get(self.field)
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        if isinstance(value, int | np.integer | str):
            record[self.field] = self._number(index, value)
        return record

    def _number(self, index: int, value: Any) -> Any:
        name = value if self._known is None else self._known.find_name(index, value)
        if name is None:
            return value
        if name not in self._numbers:
            reason = f"the class {name!r} is not one of {format_classes(list(self.classes))}"
            raise SampleError(index, self.where(index), reason)
        return self._numbers[name] if isinstance(value, int | str) else np.int64(self._numbers[name])

    def column(self, field: str) -> npt.NDArray[Any]:
        values = self.source.column(field)
        if field != self.field:
            return values
        return np.array([self._number(index, value) for index, value in enumerate(values.tolist())], np.int64)

    def find_class_names(self, field: str) -> ClassNames | None:
        return ClassNames((self.classes,)) if field == self.field else self.source.find_class_names(field)

    def is_text(self, field: str) -> bool:
        return field != self.field and self.source.is_text(field)

    def identify_records(self, indices: Any) -> Any:
        alone = self.source.identify_records(indices)
        return None if alone is None else [alone, self.describe_numbering()]

    def identity(self) -> Any:
        whole = self.source.identity()
        if whole is None:
            return None
        return {"source": self._describe_class(), "of": whole, "numbering": self.describe_numbering()}

    def describe_for_fingerprint(self) -> Description:
        whole = self.source.describe_for_fingerprint()
        return Description([self._describe_class(), self.describe_numbering(), whole.value], whole.gaps)

    def describe_numbering(self) -> list[Any]:
        """Which number a class had, and has now, as a JSON value."""
        names = self._known
        if names is None:
            return [self.field, self.classes, "texts"]
        return [self.field, self.classes, names.lists, digest_indices(names.which)]


def list_classes(source: Source, field: str) -> Names:
    """The names of a source's classes, in the order of their numbers; sorted, where they are texts."""
    class_names = source.find_class_names(field)
    if class_names is not None:
        return class_names.union
    names = sorted(set(source.column(field).tolist())) if source.is_text(field) else []
    if empty := [name for name in names if not name.strip()]:
        index = source.column(field).tolist().index(empty[0])
        raise PipelineError(
            f"{source.where(index)}: the text in {field!r} is empty, and the classes are "
            f"{format_classes([name for name in names if name.strip()])}: correct it, or leave such records out, "
            f"source.filter(lambda record: record[{field!r}].strip())"
        )
    return tuple(names)


def find_foreign_class(source: Source, field: str, names: Sequence[str]) -> tuple[int, str] | None:
    class_names = source.find_class_names(field)
    if class_names is not None and set(class_names.union) <= set(names):
        return None
    if class_names is None and not source.is_text(field):
        return None
    allowed = set(names)
    for index, value in enumerate(source.column(field).tolist()):
        name = value if class_names is None else class_names.find_name(index, value)
        if name is not None and name not in allowed:
            return index, name
    return None


def number_classes(source: Source, field: str, names: Sequence[str]) -> Source:
    """See `Source.number_classes`."""
    class_names = source.find_class_names(field)
    if class_names is None and not source.is_text(field):
        raise PipelineError(f"{source!r} does not know the classes of {field!r}")
    return (
        source
        if class_names is not None and class_names.are_numbered_by(names)
        else ClassNumbers(source, field, names)
    )
