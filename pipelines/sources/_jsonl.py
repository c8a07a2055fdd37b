"""Source of the lines of JSON Lines files, which pyarrow converts to Arrow (`_text_table`)."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources import _text_table
from pipelines.sources._columns import (
    cast_floats,
    check_missing,
    fill_missing,
    find_kept_type,
    find_leaf,
    flatten,
    is_list,
    replace_leaf,
)
from pipelines.sources._files import File, Paths, check_names, find_files
from pipelines.sources._text_table import TextTable, explain, open_binary, read_declared

Columns = Sequence[str] | Mapping[str, Any]

_EXACT = 2.0**53  # a float64 has all integers below it
_LEFT_OUT = b"left out"  # in the metadata of a schema: fields that few lines have
_READ_AS = b"read as"  # in that of a field: the type before missing values are filled in


@known_as("pipelines.sources.jsonl")
class Jsonl(TextTable):
    """See `jsonl`."""

    kind = "jsonl"

    def __init__(self, paths: Paths, columns: Columns | None, missing: str) -> None:
        self.keeps_missing = check_missing(self.kind, missing)
        files = find_files(self.kind, paths)
        self._asked = check_names(self.kind, columns)
        self._declared = read_declared(self.kind, columns)
        keeps = ["nan"] if self.keeps_missing else []
        self._load(files, [self._asked, list(self._declared.items()), *keeps])
        self.types = {field.name: _describe(field.type) for field in self._schema}
        self.types |= {name: kind for name, kind in self._declared.items() if kind != "str"}
        if dropped := (self._schema.metadata or {}).get(_LEFT_OUT):
            warnings.warn(
                f"jsonl({files[0].path!r}): left out, as most lines lack it: {dropped.decode()}; if a name is "
                "misspelt, correct it; columns= says which fields to read",
                stacklevel=4,
            )

    def _find_schema(self) -> Any:
        import pyarrow

        merged, counts, rows = pyarrow.schema([]), Counter[str](), 0
        for file in self.files:
            for table in _read_blocks(file, None):
                kinds = pyarrow.schema([(field.name, _without_times(field.type)) for field in table.schema])
                try:
                    merged = pyarrow.unify_schemas([merged, kinds], promote_options="permissive")
                except pyarrow.ArrowException as error:
                    raise explain(file, error) from None
                rows += len(table)
                counts.update({name: len(table) - table[name].null_count for name in kinds.names})
        if not merged.names:
            raise PipelineError(f"jsonl(): {self.files[0].path}: no line is a JSON object with a field")
        if unknown := [name for name in self._asked or () if name not in merged.names]:
            raise PipelineError(
                f"jsonl(): no line of {self.files[0].path} has a field {unknown[0]!r} (it has: "
                f"{', '.join(merged.names)})"
            )
        rare = [name for name in merged.names if 2 * counts[name] < rows]
        dropped = rare if self._asked is None and len(rare) < len(merged.names) else []
        names = self._asked or [name for name in merged.names if name not in dropped]
        chosen = {name: self._choose_type(name, merged.field(name).type) for name in names}
        lacking = {name for name in names if self.keeps_missing and counts[name] < rows}
        kinds = [
            pyarrow.field(name, find_kept_type(kind), metadata={_READ_AS: str(kind).encode()})
            if name in lacking and name not in self._declared
            else pyarrow.field(name, kind)
            for name, kind in chosen.items()
        ]
        left_out = ", ".join(f"{name} (in {counts[name]} of {rows} lines)" for name in dropped)
        return pyarrow.schema(kinds, metadata={_LEFT_OUT: left_out.encode()})

    def _choose_type(self, name: str, kind: Any) -> Any:
        """The type of a field; one that is declared is of single numbers, or of those in its lists."""
        import pyarrow

        declared = self._declared.get(name)
        if declared in (None, "str"):
            return kind if declared is None else pyarrow.string()
        return replace_leaf(kind, pyarrow.from_numpy_dtype(np.dtype(declared)))

    def _convert(self, file: File, schema: Any) -> Iterator[Any]:
        import pyarrow
        from pyarrow import types

        floats = {f.name for f in schema if types.is_floating(find_leaf(f.type))}
        read = [(f.name, replace_leaf(f.type, pyarrow.float64()) if f.name in floats else f.type) for f in schema]
        bools = {f.name for f in schema if (f.metadata or {}).get(_READ_AS) == b"bool"}
        read = [(name, pyarrow.bool_() if name in bools else kind) for name, kind in read]
        for table in _read_blocks(file, pyarrow.schema(read)):
            for number, field in enumerate(schema):
                name, column = f"{file.path}: field {field.name!r}", table.column(number)
                if field.name not in self._declared:
                    _check_exact(column, name)
                if field.name in floats:
                    column = cast_floats(column, field.type, name)
                if self.keeps_missing and find_kept_type(field.type) == field.type:
                    column = fill_missing(column)
                table = table.set_column(number, field.name, column)
            yield from table.combine_chunks().cast(schema).to_batches()

    def identity(self) -> Any:
        return {**super().identity(), **({"missing": "nan"} if self.keeps_missing else {})}


def _read_blocks(file: File, schema: Any) -> Iterator[Any]:
    """Yields tables of the lines of a file, some megabytes at a time.

    Args:
        schema: of the fields to read; None: all, of the types that Arrow infers.
    """
    import pyarrow
    from pyarrow import json

    unexpected = "infer" if schema is None else "ignore"
    parse = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    first = 1
    with open_binary(file) as handle:
        while lines := handle.readlines(_text_table.BLOCK_BYTES):
            text = b"".join(lines)
            try:
                table = json.read_json(
                    pyarrow.BufferReader(text), json.ReadOptions(block_size=len(text) + 1), parse
                )
                if schema is not None:  # lists that begin with null are broken where Arrow infers their types
                    table.validate(full=True)  # texts are UTF-8
            except pyarrow.ArrowException as error:
                start = first

                def number(match: re.Match[str], start: int = start) -> str:
                    return f"in record {start + int(match[1])}"

                raise explain(file, ValueError(re.sub(r"in row (\d+)", number, str(error)))) from None
            first += len(table)
            yield table


def jsonl(paths: Paths, columns: Columns | None = None, *, missing: Literal["error", "nan"] = "error") -> Jsonl:
    """Makes a source of JSON Lines files (UTF-8): each line is a JSON object, a record.

    Each file is converted once to an Arrow file, in the folder that the environment variable
    `ENSEMBLE_SOURCES_DIR` names, and read from there. A line that is no JSON object, or has a value of another
    type than the lines before it, is an error then.

    A field that is not declared has the type that holds its values in all lines: bool, int64, float64, text, an
    array of numbers (lists, nested to one depth), a list of other values, or a dict of such. A field of integers
    in some lines and other numbers in others is float64; with numbers of 2**53 or more it has to be declared, and
    in a dict, where no type can be declared, they are an error.
    A field that less than half of the lines have is left out, with a warning, unless `columns` asks for it.
    Empty lines are no records. A line that lacks a field, or has null there, is an error when it is read, which
    `Pipeline(on_error="skip")` leaves out.

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either.
        columns: names of the fields to read; unless given, all that a line has. A mapping name -> type declares
            their types: `"str"`, `"bool"`, or numpy's name of a dtype of numbers, such as `"float32"`, for single
            numbers or for arrays.
        missing: "nan": a number that is null, or not in its line, is NaN, and another single value an empty text,
            as in `csv`; for `stages.fit`.

    Returns:
        A source of records with a field for each column: a numpy scalar, `str`, array, list or dict.

    Raises:
        PipelineError: a file is missing, compressed or without lines; a line cannot be converted; no line has a
            field; the values of a field have no type in common; a type is unknown.

    Examples:
        >>> source = jsonl("train-*.jsonl", columns=("text", "label"))
    """
    return Jsonl(paths, columns, missing)


def _check_exact(column: Any, name: str) -> None:
    """Refuses numbers, in dicts and lists, too, that may have been integers of which a float64 has lost digits."""
    from pyarrow import compute, types

    values = flatten(column)
    if types.is_struct(values.type):
        for field, part in zip(values.type, values.flatten(), strict=True):
            _check_exact(part, f"{name}, {field.name!r} in its dict,")
    if not types.is_floating(values.type):
        return
    values = values.filter(compute.is_finite(values))
    if len(values) and compute.max(compute.abs(values)).as_py() >= _EXACT:
        raise PipelineError(
            f"{name} has numbers of 2**53 or more, of which a float64 may lose digits; declare its type, as in "
            'columns={"label": "float64"}; in a dict, write them as texts'
        )


def _without_times(kind: Any) -> Any:
    """A type as Arrow infers it, with texts where it takes them for times."""
    import pyarrow
    from pyarrow import types

    if types.is_temporal(kind):
        return pyarrow.string()
    if is_list(kind):
        return pyarrow.list_(_without_times(kind.value_type))
    if types.is_struct(kind):
        return pyarrow.struct([(field.name, _without_times(field.type)) for field in kind])
    return kind


def _describe(kind: Any) -> str:
    """An Arrow type in the words of messages and identities."""
    from pyarrow import types

    if types.is_struct(kind):
        return "{" + ", ".join(f"{field.name}: {_describe(field.type)}" for field in kind) + "}"
    if types.is_null(kind):
        return "none"
    if types.is_string(kind):
        return "text"
    if not is_list(kind):
        return str(np.dtype(kind.to_pandas_dtype()))
    leaf, depth = find_leaf(kind), str(kind).count("list<")
    is_array = not (types.is_struct(leaf) or types.is_string(leaf) or types.is_null(leaf))
    return f"{_describe(leaf)}[{', '.join('?' * depth)}]" if is_array else f"list of {_describe(kind.value_type)}"
