"""Nested samples: the paths of their values, and what stages declare of them.

A path names a value inside dicts and tuples: "target.boxes" is the value "boxes" of the dict "target", and
"target.labels.0" the first of the tuple "labels" in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipelines.errors import PipelineError

Kind = Literal["array", "ragged", "text", "binary"]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Slot:
    """What a stage declares of a field (`pipelines.stages.text`, `binary`, `ragged`).

    Attributes:
        kind: of its values.
        most: entries or bytes that a sample has at most.
    """

    kind: Kind
    most: int

    def fits(self, value: Any) -> bool:
        """Whether a value is of the declared kind."""
        if self.kind == "ragged":
            return getattr(value, "ndim", 0) > 0
        return isinstance(value, str if self.kind == "text" else bytes)


def join_path(path: Path) -> str:
    """The name of a path, such as "target.labels.0"."""
    return ".".join(map(str, path))


def find_path(sample: Any, name: str) -> Path | None:
    """The path of a field, which a name with dots may be: the field of just that name, or one inside another.

    Raises:
        PipelineError: the sample has both.
    """
    if "." not in name:
        return (name,) if isinstance(sample, Mapping) and name in sample else None
    found = list(_find_paths(sample, name))
    if len(found) > 1:
        raise PipelineError(f"{name!r} is the name of a field and the path of another: rename one")
    return found[0] if found else None


def require_path(sample: Any, name: str) -> Path:
    """`find_path` of a field that the sample must have.

    Raises:
        PipelineError: it has none of that name.
    """
    path = find_path(sample, name)
    if path is None:
        raise PipelineError(f"no field {name!r} (the sample has: {', '.join(map(str, sample))})")
    return path


def _find_paths(sample: Any, name: str) -> Iterator[Path]:
    """All paths that have this name: keys of dicts may hold dots, too."""
    if isinstance(sample, Mapping):
        if name in sample:
            yield (name,)
        for key, value in sample.items():
            if isinstance(key, str) and name.startswith(f"{key}."):
                yield from ((key, *rest) for rest in _find_paths(value, name[len(key) + 1 :]))
    elif type(sample) is tuple:
        head, dot, tail = name.partition(".")
        number = int(head) if head.isdecimal() and str(int(head)) == head else len(sample)
        if number < len(sample) and not dot:
            yield (number,)
        elif number < len(sample):
            yield from ((number, *rest) for rest in _find_paths(sample[number], tail))


def get_at(sample: Any, path: Path) -> Any:
    """The value at a path."""
    for part in path:
        sample = sample[part]
    return sample


def set_at(sample: Any, path: Path, value: Any) -> Any:
    """The sample with another value at a path; the dicts and tuples on the way are made anew."""
    first: Any
    first, rest = path[0], path[1:]
    new = set_at(sample[first], rest, value) if rest else value
    if isinstance(sample, tuple):
        return (*sample[:first], new, *sample[first + 1 :])
    return {**sample, first: new}


def remove_at(sample: Any, path: Path) -> Any:
    """The sample without the value at a path; what follows it in a tuple moves up."""
    first: Any
    first, rest = path[0], path[1:]
    if rest:
        return set_at(sample, (first,), remove_at(sample[first], rest))
    if isinstance(sample, tuple):
        return (*sample[:first], *sample[first + 1 :])
    return {name: value for name, value in sample.items() if name != first}


def map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with its arrays changed, those inside dicts and tuples included; itself where none was."""
    kind = type(value)
    if kind is np.ndarray:
        return change(value)
    if kind is dict:
        changed = {name: map_arrays(each, change) for name, each in value.items()}
        return changed if any(changed[name] is not each for name, each in value.items()) else value
    if kind is tuple:
        made = tuple(map_arrays(each, change) for each in value)
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    return value


def iterate_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The path of each value that is no dict or tuple, and the value."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from iterate_leaves(each, (*path, name))
    elif type(value) is tuple:
        for number, each in enumerate(value):
            yield from iterate_leaves(each, (*path, number))
    else:
        yield path, value
