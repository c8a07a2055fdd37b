"""Source of the lines of JSON Lines files, one JSON object each."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._files import Paths, check_names, find_files
from pipelines.sources._json_types import NONE, JsonType, Mismatch, describe, drop_rare, find_rare, merge
from pipelines.sources._rows import TextRows, find_rows

Columns = Sequence[str] | Mapping[str, Any]


@known_as("pipelines.sources.jsonl")
class Jsonl(TextRows):
    """See `jsonl`."""

    kind = "jsonl"

    def __init__(self, paths: Paths, columns: Columns | None) -> None:
        files = find_files(self.kind, paths)
        super().__init__(files, [find_rows(file) for file in files])
        asked = check_names(self.kind, columns)
        declared = dict(columns) if isinstance(columns, Mapping) else {}
        self._types = {name: JsonType.declared(name, kind) for name, kind in declared.items()}
        if asked is None or len(declared) < len(asked):
            found = self._infer_types(asked)
            if unknown := [name for name in asked or () if name not in found]:
                has = ", ".join(self._infer_types(None))
                raise PipelineError(
                    f"jsonl(): no line of {files[0].path} has a field {unknown[0]!r} (it has: {has})"
                )
            self._types = {name: found[name] for name in asked or found}
        self.columns = tuple(self._types)
        self.types = {name: str(kind) for name, kind in self._types.items()}

    def _infer_types(self, asked: Sequence[str] | None) -> dict[str, JsonType]:
        """The type of each field, of all lines; lines that cannot be read are left out: reading them is an
        error. So are, unless they are asked for, fields that less than half of the lines have: it is said."""
        types: dict[str, JsonType] = {}
        counts: Counter[str] = Counter()
        firsts: dict[str, int] = {}  # where a field is met first
        reason, lines = "", 0
        for first, data, bounds in self._iterate_blocks():
            for index, (begin, end) in enumerate(pairwise(bounds), first):
                try:
                    values = _parse(data[begin:end])
                    lines += 1
                    counts.update(values.keys())
                    firsts.update(dict.fromkeys(values.keys() - firsts.keys(), index))
                    _widen(types, values, values if asked is None else asked)
                except NotObject as error:
                    reason = reason or f"{self.where(index)}: {error}"
                except Mismatch as mismatch:
                    raise PipelineError(
                        f"{self.where(index)}: field {mismatch}; declare its type, as in "
                        "jsonl(..., columns={'label': 'int64', 'other': 'any'})"
                    ) from None
        if not types and not asked:
            raise PipelineError(f"jsonl(): no line is a JSON object with a field; {reason or self.where(0)}")
        said: list[str] = []
        for name in find_rare(counts, lines) if asked is None else ():
            types.pop(name)
            said.append(f"{name} (in {counts[name]} of {lines} lines, the first is {self.where(firsts[name])})")
        for name, kind in types.items():
            types[name], more = drop_rare(kind, name)
            said += more
        if said:
            warnings.warn(
                f"jsonl({self.files[0].path!r}): left out, as most lines lack it: {', '.join(said)}; if "
                "a name is misspelt, correct it; columns= says which fields to read",
                stacklevel=5,
            )
        return types

    def _read(self, index: int) -> dict[str, Any]:
        try:
            values = _parse(self._read_bytes(index))
        except NotObject as error:
            raise SampleError(index, self.where(index), str(error)) from None
        record = {}
        for name, kind in self._types.items():
            if name not in values:
                reason = f"has no field {name!r} (it has: {', '.join(values)})"
                raise SampleError(index, self.where(index), reason)
            try:
                record[name] = kind.convert(values[name])
            except Mismatch as mismatch:
                raise SampleError(index, self.where(index), f"field {name!r} {mismatch}") from None
        return record


class NotObject(Exception):
    """A line is no JSON object; the message says what it is."""


def _parse(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotObject("is blank" if line.isspace() else f"is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise NotObject(f"is no JSON object, but {type(values).__name__}")
    return values


def _widen(types: dict[str, JsonType], values: dict[str, Any], names: Iterable[str]) -> None:
    """Widens the types of fields so that they hold the values of a line, too."""
    for name in names:
        if name not in values:
            continue
        kind = types.get(name, NONE)
        try:
            types[name] = kind if kind.is_surely(values[name]) else merge(kind, describe(values[name]))
        except Mismatch as mismatch:
            raise Mismatch(f"{name!r} {mismatch}") from None


def jsonl(paths: Paths, columns: Columns | None = None) -> Jsonl:
    """Makes a source of JSON Lines files (UTF-8): each line is a JSON object, a record.

    A field that is not declared has the type that holds its values in all lines: bool, int64, float64, text, an
    array of numbers (lists, nested to one depth), a list of other values, or a dict of such. A field of integers
    in some lines and other numbers in others is float64, unless it has integers that a float64 does not hold.
    A field that less than half of the lines have is left out, with a warning, unless `columns` asks for it.
    Empty lines are no records. A line that lacks a field, has null there, is blank or is no JSON object is an
    error when it is read, which `Pipeline(on_error="skip")` leaves out.

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either.
        columns: names of the fields to read; unless given, all that a line has. A mapping name -> type declares
            their types: `"str"`, `"bool"`, numpy's name of a dtype of numbers, such as `"float32"`, for single
            numbers and for arrays, or `"any"` for values as `json.loads` returns them. Then no line is read to
            find them out.

    Returns:
        A source of records with a field for each column: a numpy scalar, `str`, array, list or dict.

    Raises:
        PipelineError: a file is missing, compressed or without lines; no line is an object, or has a field; the
            values of a field have no type in common; a type is unknown.

    Examples:
        >>> source = jsonl("train-*.jsonl", columns=("text", "label"))
    """
    return Jsonl(paths, columns)
