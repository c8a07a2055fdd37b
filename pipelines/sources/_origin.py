"""What the records of a source are of, by which two sources can be seen to share some."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.fingerprint import Description

Indices = np.ndarray[Any, Any] | range


def digest_indices(indices: np.ndarray[Any, Any] | None) -> str | None:
    return None if indices is None else hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class Origin:
    """Where the records of a source are from.

    Attributes:
        root: what all of them are of: a source, a table, a Dataset of another library.
        describe: describes the root; equal without gaps only for roots with equal records.
        indices: of the records in the root, int64 [n] or a range.
        steps: of windows: where the rows of their table are from; record i has `width` rows from `indices[i]` on.
    """

    root: Any
    describe: Callable[[], Description]
    indices: Indices
    steps: Origin | None = None
    width: int = 1

    def select(self, indices: Indices) -> Origin:
        """That of some of the records."""
        if isinstance(indices, range):
            chosen = self.indices[indices.start : indices.stop : indices.step]
        else:
            chosen = np.asarray(self.indices)[indices]
        return dataclasses.replace(self, indices=chosen)

    def list_rows(self) -> npt.NDArray[Any]:
        """The records of the root, or of windows the rows of their table's root, that the records have, [rows]."""
        if self.steps is None:
            return np.asarray(self.indices)
        changes = np.zeros(len(self.steps.indices) + 1, np.int64)
        np.add.at(changes, np.asarray(self.indices), 1)
        np.add.at(changes, np.asarray(self.indices) + self.width, -1)
        return np.asarray(self.steps.indices)[np.cumsum(changes[:-1]) > 0]

    def have(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        if self.steps is None:
            return np.isin(np.asarray(self.indices), rows)
        count = np.concatenate([[0], np.cumsum(np.isin(np.asarray(self.steps.indices), rows))])
        return np.asarray(count[np.asarray(self.indices) + self.width] > count[np.asarray(self.indices)])


def count_shared_records(one: Any, other: Any) -> int:
    """The number of the other source's records that are records of this one, too.

    They are found by what they are of (`Source.find_origin`): the same source, or sources of one identity, such as
    those of the same files. Equal records of sources that are not known to be the same do not count. A window is
    shared by a source that has one of its steps.
    """
    return int(find_shared_records(one, other).sum())


def find_shared_records(one: Any, other: Any) -> npt.NDArray[np.bool_]:
    mine, theirs = (one if isinstance(one, Origin) else _find_origin(one)), _find_origin(other)
    if not _is_same_root(mine.steps or mine, theirs.steps or theirs):
        return np.zeros(len(theirs.indices), bool)
    return theirs.have(mine.list_rows())


def share_steps(one: Any, other: Any) -> bool:
    """Whether both are of windows that have steps in common."""
    are_windows = all(_find_origin(source).steps is not None for source in (one, other))
    return are_windows and bool(find_shared_records(one, other).any())


def is_same_records(one: Any, other: Any) -> bool:
    """Whether two sources are known to have the same records in the same order (see `count_shared_records`)."""
    mine, theirs = map(_find_origin, (one, other))
    return _is_same_root(mine, theirs) and np.array_equal(np.asarray(mine.indices), np.asarray(theirs.indices))


def _find_origin(source: Any) -> Origin:
    if hasattr(source, "find_origin"):
        origin: Origin = source.find_origin()
        return origin
    return Origin(source, lambda: Description(None, ("it has no identity",)), range(len(source)))


def _is_same_root(mine: Origin, theirs: Origin) -> bool:
    if mine.root is theirs.root:
        return True
    if type(mine.root) is not type(theirs.root) or len(mine.root) != len(theirs.root):
        return False
    described = mine.describe()
    return not described.gaps and described == theirs.describe()
