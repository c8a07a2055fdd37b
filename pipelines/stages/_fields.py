"""Which fields a sample has, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.stages._sample import Sample, Stage, get_value


@known_as("pipelines.stages.select")
@dataclass(frozen=True)
class Select(Stage):
    """See `select`."""

    fields: tuple[str, ...]

    def __call__(self, sample: Sample) -> Sample:
        return {field: get_value(sample, field) for field in self.fields}


@known_as("pipelines.stages.drop")
@dataclass(frozen=True)
class Drop(Stage):
    """See `drop`."""

    fields: tuple[str, ...]

    def __call__(self, sample: Sample) -> Sample:
        for field in self.fields:
            get_value(sample, field)
        return {field: value for field, value in sample.items() if field not in self.fields}


@known_as("pipelines.stages.rename")
@dataclass(frozen=True)
class Rename(Stage):
    """See `rename`."""

    names: tuple[tuple[str, str], ...]

    def __call__(self, sample: Sample) -> Sample:
        names = dict(self.names)
        for old in names:
            get_value(sample, old)
        renamed = {names.get(field, field): value for field, value in sample.items()}
        if len(renamed) < len(sample):
            taken = next(new for new in names.values() if new in sample)
            raise PipelineError(f"cannot rename to {taken!r}: the sample has that field already")
        return renamed


def select(*fields: str) -> Select:
    """Keep these fields, in this order, and no other."""
    return Select(_check_names("select", fields))


def drop(*fields: str) -> Drop:
    """Leave these fields out."""
    return Drop(_check_names("drop", fields))


def rename(**names: str) -> Rename:
    """Give fields other names: `rename(old="new")`."""
    if not names or len(set(names.values())) < len(names):
        raise PipelineError(f"rename: takes old='new' for one field or more, each new name once, got {names!r}")
    return Rename(tuple(names.items()))


def _check_names(stage: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    if not fields or not all(isinstance(field, str) for field in fields):
        raise PipelineError(f"{stage}: takes names of fields, got {fields!r}")
    return fields
