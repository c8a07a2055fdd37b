"""Stages that select, drop and rename fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.samples.nested import Path, Slot, join_path, remove_at, require_path
from pipelines.stages._sample import Sample, Transform


@known_as("pipelines.stages.select")
@dataclass(frozen=True)
class Select(Transform):
    """See `select`."""

    fields: tuple[str, ...]

    def __call__(self, sample: Sample) -> Sample:
        selected: Sample = {}
        for field in self.fields:
            path = require_path(sample, field)
            if len(path) == 1:
                selected[field] = sample[field]
            else:
                selected = _insert(selected, sample, path)
        return selected


@known_as("pipelines.stages.drop")
@dataclass(frozen=True)
class Drop(Transform):
    """See `drop`."""

    fields: tuple[str, ...]

    def __call__(self, sample: Sample) -> Sample:
        paths = [require_path(sample, field) for field in self.fields]
        kept = {field: value for field, value in sample.items() if field not in self.fields}
        for path in paths:
            if len(path) > 1:
                kept = remove_at(kept, path)
        return kept


@known_as("pipelines.stages.rename")
@dataclass(frozen=True)
class Rename(Transform):
    """See `rename`."""

    names: tuple[tuple[str, str], ...]

    def __call__(self, sample: Sample) -> Sample:
        names = dict(self.names)
        for old in names:
            if old not in sample:
                raise PipelineError(f"no field {old!r} (the sample has: {', '.join(map(str, sample))})")
        renamed = {names.get(field, field): value for field, value in sample.items()}
        if len(renamed) < len(sample):
            taken = next(new for new in names.values() if new in sample)
            raise PipelineError(f"cannot rename to {taken!r}: the sample has that field already")
        return renamed

    def change_slots(self, slots: dict[str, Slot], within: str) -> dict[str, Slot]:
        names = {within + old: within + new for old, new in self.names}

        def change(path: str) -> str:
            old_path = next((old for old in names if path == old or path.startswith(f"{old}.")), None)
            return path if old_path is None else names[old_path] + path[len(old_path) :]

        return {change(path): slot for path, slot in slots.items()}


def select(*fields: str) -> Select:
    """Keeps these fields, in this order, and drops all others. A sample without one of them fails.

    Args:
        fields: names of fields; a path such as "target.boxes" names one inside another field.

    Raises:
        PipelineError: no field is given, or a name is not a str.
    """
    return Select(_check_names("select", fields))


def drop(*fields: str) -> Drop:
    """Drops these fields. A sample without one of them fails.

    Args:
        fields: names of fields; a path such as "target.boxes" names one inside another field.

    Raises:
        PipelineError: no field is given, or a name is not a str.
    """
    return Drop(_check_names("drop", fields))


def rename(**names: str) -> Rename:
    """Renames fields: `rename(old="new")`. A sample fails if it lacks an old name or has a new one already.

    Args:
        names: old name -> new name.

    Raises:
        PipelineError: no field is given, or two fields get the same name.
    """
    if not names or len(set(names.values())) < len(names):
        raise PipelineError(f"rename: takes old='new' for one field or more, each new name once, got {names!r}")
    return Rename(tuple(names.items()))


def _insert(selected: Any, sample: Any, path: Path) -> Any:
    first, inner = path[0], path[1:]
    if isinstance(sample, tuple) or not isinstance(sample[first], dict) or not inner:
        if inner:
            raise PipelineError(
                f"select: {join_path(path)!r} is one value of a tuple: select the tuple, or drop others"
            )
        return {**selected, first: sample[first]}
    return {**selected, first: _insert(selected.get(first, {}), sample[first], inner)}


def _check_names(stage: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    if not fields or not all(isinstance(field, str) for field in fields):
        raise PipelineError(f"{stage}: takes names of fields, got {fields!r}")
    return fields
