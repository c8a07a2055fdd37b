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
    """The path of a field, which a name with dots may be: the field of just that name, or one inside another."""
    if "." not in name:
        return (name,) if isinstance(sample, Mapping) and name in sample else None
    paths = list(_find_paths(sample, name))
    if len(paths) > 1:
        raise PipelineError(f"{name!r} is the name of a field and the path of another: rename one")
    return paths[0] if paths else None


def require_path(sample: Any, name: str) -> Path:
    """`find_path` of a field that the sample must have."""
    path = find_path(sample, name)
    if path is None:
        raise PipelineError(f"no field {name!r} (the sample has: {', '.join(map(str, sample))})")
    return path


def _find_paths(value: Any, name: str) -> Iterator[Path]:
    """All paths that have this name: keys of dicts may hold dots, too."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) is tuple else ()
    for key, part in parts:
        if name == str(key):
            yield (key,)
        elif name.startswith(f"{key}."):
            yield from ((key, *deeper) for deeper in _find_paths(part, name[len(str(key)) + 1 :]))


def get_at(sample: Any, path: Path) -> Any:
    """The value at a path."""
    for part in path:
        sample = sample[part]
    return sample


def set_at(sample: Any, path: Path, value: Any) -> Any:
    """The sample with another value at a path; the dicts and tuples on the way are made anew."""
    first: Any = path[0]
    new = set_at(sample[first], path[1:], value) if path[1:] else value
    if isinstance(sample, tuple):
        return (*sample[:first], new, *sample[first + 1 :])
    return {**sample, first: new}


def remove_at(sample: Any, path: Path) -> Any:
    """The sample without the value at a path; what follows it in a tuple moves up."""
    first: Any = path[0]
    if path[1:]:
        return set_at(sample, (first,), remove_at(sample[first], path[1:]))
    if isinstance(sample, tuple):
        return (*sample[:first], *sample[first + 1 :])
    return {name: value for name, value in sample.items() if name != first}


def map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with its arrays changed, those inside dicts and tuples included; itself where none was."""
    kind = type(value)
    if kind is np.ndarray:
        return change(value)
    if kind is dict:
        changed = {name: map_arrays(part, change) for name, part in value.items()}
        return changed if any(changed[name] is not part for name, part in value.items()) else value
    if kind is tuple:
        made = tuple(map_arrays(part, change) for part in value)
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    return value


def iterate_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The path of each value that is no dict or tuple, and the value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is tuple else None
    if parts is None:
        yield path, value
        return
    for name, part in parts:
        yield from iterate_leaves(part, (*path, name))
