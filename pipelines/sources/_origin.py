"""What the records of a source are of, by which two sources can be seen to share some."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError
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
        steps: of windows, packed rows and pieces: where the rows of their table are from; record i has `width`
            rows from `indices[i]` on.
        width: of all records, or of each, int64 [n].
        parts: of sources one after the other: the origin of each.
    """

    root: Any
    describe: Callable[[], Description]
    indices: Indices
    steps: Origin | None = None
    width: int | npt.NDArray[np.int64] = 1
    parts: tuple[Origin, ...] = ()

    def select(self, indices: Indices) -> Origin:
        """That of some of the records."""
        if isinstance(indices, range):
            chosen = self.indices[indices.start : indices.stop : indices.step]
        else:
            chosen = np.asarray(self.indices)[indices]
        width = self.width if isinstance(self.width, int) else self.width[np.asarray(indices)]
        return dataclasses.replace(self, indices=chosen, width=width)

    def divide(self) -> Iterable[tuple[Any, Origin]]:
        """Its parts that are of one root each, and before them which of the records they have."""
        return _divide(self) if self.parts else [(slice(None), self)]

    def list_roots(self) -> Iterator[Origin]:
        """What the records have of each root: of windows the rows of their table, of pieces their records."""
        if self.parts:
            for _, part in self.divide():
                yield from part.list_roots()
        elif self.steps is None:
            yield self
        else:
            changes = np.zeros(len(self.steps.indices) + 1, np.int64)
            np.add.at(changes, np.asarray(self.indices), 1)
            np.add.at(changes, (np.asarray(self.indices) + self.width).astype(np.int64), -1)
            yield from self.steps.select(np.flatnonzero(np.cumsum(changes[:-1]))).list_roots()

    def have(self, roots: Sequence[Origin]) -> npt.NDArray[np.bool_]:
        """Whether each record has something of these, as `list_roots` lists them."""
        if self.parts or self.steps is not None:
            return self._have_parts(roots)
        rows = [np.empty(0, np.int64)]
        for root in roots:
            if _is_same_root(root, self):
                rows.append(np.asarray(root.indices))
        return np.isin(np.asarray(self.indices), np.concatenate(rows))

    def _have_parts(self, roots: Sequence[Origin]) -> npt.NDArray[np.bool_]:
        if self.steps is None:
            made = np.zeros(len(self.indices), bool)
            for places, part in self.divide():
                made[places] = part.have(roots)
            return made
        count = np.concatenate([[0], np.cumsum(self.steps.have(roots))])
        return np.asarray(count[np.asarray(self.indices) + self.width] > count[np.asarray(self.indices)])


def _divide(whole: Origin) -> Iterator[tuple[Any, Origin]]:
    indices, ends = np.asarray(whole.indices), np.cumsum([len(part.indices) for part in whole.parts])
    which = np.searchsorted(ends, indices, side="right")
    for number, part in enumerate(whole.parts):
        places = np.flatnonzero(which == number)
        own = part.select(indices[places] - (ends[number] - len(part.indices)))
        yield from ((places[inner], origin) for inner, origin in own.divide())


def find_shared_records(one: Any, other: Any) -> npt.NDArray[np.bool_]:
    """Which of the other source's records are also records of this one, by `Source.find_origin`.

    Equal records of other sources do not count. A window is shared by a source that has one of its steps.
    """
    mine = _find_origin(one)
    is_whole = mine.steps is None and not mine.parts
    return _find_origin(other).have([mine] if is_whole else [*mine.list_roots()])


def find_windows(source: Any) -> list[Origin]:
    """Where the records are from that have rows of a table in common with others."""
    return [part for _, part in _find_origin(source).divide() if part.steps is not None]


def share_steps(one: Any, other: Any) -> bool:
    """Whether both are of windows that have steps in common."""
    mine, theirs = map(_find_origin, (one, other))
    are_plain = not (mine.steps or mine.parts) or not (theirs.steps or theirs.parts)
    return not are_plain and _share_steps(mine, theirs)


def _share_steps(mine: Origin, theirs: Origin) -> bool:
    pairs = itertools.product(find_windows(mine), find_windows(theirs))
    return any(find_shared_records(*pair).any() for pair in pairs)


def check_apart(parts: Sequence[Any], message: str) -> None:
    """Raises PipelineError if two parts of a source are of windows that have steps in common."""
    if any(share_steps(one, other) for one, other in itertools.combinations(parts, 2)):
        raise PipelineError(message)


def is_same_records(one: Any, other: Any) -> bool:
    """Whether two sources are known to have the same records in the same order (see `find_shared_records`)."""
    mine, theirs = map(_find_origin, (one, other))
    return _is_same_root(mine, theirs) and np.array_equal(np.asarray(mine.indices), np.asarray(theirs.indices))


def _find_origin(source: Any) -> Origin:
    if isinstance(source, Origin):
        return source
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
