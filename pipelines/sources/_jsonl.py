"""Source of the lines of JSON Lines files, one JSON object each, which are converted to Arrow (`_text_table`)."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources import _json_types
from pipelines.sources._files import File, Paths, check_names, find_files
from pipelines.sources._json_types import Mismatch, Shape, check_shape, find_rare, find_shape
from pipelines.sources._text_table import TextTable, is_utf8, open_text

Columns = Sequence[str] | Mapping[str, Any]
#: Field -> shape of its values -> in how many lines, and where first: the file's path, and the line.
Shapes = dict[str, dict[Shape, tuple[int, tuple[str, int]]]]


@known_as("pipelines.sources.jsonl")
class Jsonl(TextTable):
    """See `jsonl`."""

    kind = "jsonl"

    def __init__(self, paths: Paths, columns: Columns | None) -> None:
        self.files = find_files(self.kind, paths)
        asked = check_names(self.kind, columns)
        given = columns.items() if isinstance(columns, Mapping) else ()
        self._declared = {name: _json_types.declare(name, kind) for name, kind in given}
        schema, dropped = self._recall([asked, self._declared], lambda: self._infer_types(asked))
        self._kinds = _json_types.read_schema(schema)
        if dropped:
            warnings.warn(
                f"jsonl({self.files[0].path!r}): left out, as most lines lack it: {', '.join(dropped)}; if "
                "a name is misspelt, correct it; columns= says which fields to read",
                stacklevel=4,
            )
        self.columns = tuple(self._kinds)
        self.types = {name: _json_types.describe(kind) for name, kind in self._kinds.items()}
        self.types |= {name: kind for name, kind in self._declared.items() if kind != "str"}
        self._form = [[str(kind), name in self._declared] for name, kind in self._kinds.items()]
        self._load()

    def _infer_types(self, asked: Sequence[str] | None) -> tuple[str, list[str]]:
        """The Arrow type of each field, of all lines, as a schema; and the fields that are left out.

        Lines that cannot be read have no part in it. Unless they are asked for, fields that less than half of the
        lines have are left out.
        """
        import pyarrow

        shapes, lines, problem = self._find_shapes(asked, self._declared)
        if unknown := [name for name in asked or () if name not in shapes and name not in self._declared]:
            has = ", ".join(self._find_shapes(None, {})[0])
            raise PipelineError(
                f"jsonl(): no line of {self.files[0].path} has a field {unknown[0]!r} (it has: {has})"
            )
        if not shapes and not self._declared:
            problem = problem or f"{self.files[0].path}: all lines are empty objects"
            raise PipelineError(f"jsonl(): no line is a JSON object with a field; {problem}")
        counts = {name: sum(count for count, _ in seen.values()) for name, seen in shapes.items()}
        dropped = []
        for name in find_rare(counts, lines) if asked is None else ():
            _, (path, line) = next(iter(shapes.pop(name).values()))
            dropped.append(f"{name} (in {counts[name]} of {lines} lines, the first is {path}, line {line})")
        kinds = [(name, self._choose_type(name, shapes.get(name, {}), dropped)) for name in asked or shapes]
        return pyarrow.schema(kinds).serialize().to_pybytes().hex(), dropped

    def _find_shapes(self, asked: Sequence[str] | None, declared: Mapping[str, str]) -> tuple[Shapes, int, str]:
        """Returns the fields' shapes, the number of lines, and what is wrong with the first that is no object.

        Where all types are declared, only so many lines are read that the depth of arrays is known.
        """
        shapes, count, problem = Shapes(), 0, ""
        numbers = {name for name, kind in declared.items() if kind not in ("any", "str")}
        is_declared = asked is not None and len(declared) == len(asked)
        for file in self.files:
            for lines, rows in self._iterate_blocks(file):
                for line, values in zip(lines, rows, strict=True):
                    if isinstance(values, str):
                        problem = problem or f"{file.path}, line {line}: {values}"
                        continue
                    count += 1
                    for name in values if asked is None else asked:
                        if name in values:
                            seen, shape = shapes.setdefault(name, {}), find_shape(values[name])
                            times, first = seen.get(shape, (0, (file.path, line)))
                            seen[shape] = times + 1, first
                if is_declared and shapes.keys() >= numbers:
                    return shapes, count, problem
        return shapes, count, problem

    def _choose_type(
        self, name: str, seen: Mapping[Shape, tuple[int, tuple[str, int]]], dropped: list[str]
    ) -> Any:
        import pyarrow

        counts, declared = {shape: count for shape, (count, _) in seen.items()}, self._declared.get(name)
        if declared in ("any", "str"):  # any value is kept as JSON
            return pyarrow.string()
        if declared is not None:
            return _json_types.declare_numbers(counts, declared)
        try:
            return _json_types.merge(counts, name, dropped)
        except Mismatch as mismatch:
            shapes = list(counts)  # in the order of the lines
            for number, shape in enumerate(shapes):
                try:
                    _json_types.merge(dict.fromkeys(shapes[: number + 1], 1), name, [])
                except Mismatch as first:
                    path, line = seen[shape][1]
                    raise _refuse(f"{path}, line {line}", str(first)) from None
            raise _refuse(self.files[0].path, str(mismatch)) from None

    def _parse(self, file: File) -> Iterator[tuple[int, int, Any]]:
        with open_text(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip("\r\n"):
                    yield number, len(line), _parse_line(line)

    def _make_columns(self, rows: list[Any], where: Callable[[int], str]) -> tuple[list[Any], dict[int, str]]:
        fields, problems = [], dict[int, str]()
        for name, kind in self._kinds.items():
            values = self._take_field(name, rows, problems)
            array, wrong = _make_array(values, kind, name in self._declared)
            for row, problem in wrong.items():
                if name not in self._declared:
                    raise _refuse(where(row), f"{name!r} {problem}")
                problems.setdefault(row, f"field {name!r} {problem}")
            fields.append(array)
        return fields, problems

    def _take_field(self, name: str, rows: list[Any], problems: dict[int, str]) -> list[Any]:
        """The values of a field; None where a row has none of the field's type, which is entered in `problems`."""
        values: list[Any] = [None] * len(rows)
        kind, is_any, checked = self._kinds[name], self.types[name] == "any", dict[Shape, str]()
        for row, record in enumerate(rows):
            if isinstance(record, str):
                continue
            if name not in record:
                problems.setdefault(row, f"has no field {name!r} (it has: {', '.join(record)})")
                continue
            value = record[name]
            shape = find_shape(value)
            if (problem := checked.get(shape)) is None:
                problem = checked[shape] = "" if is_any else check_shape(shape, kind)
            if problem:
                problems.setdefault(row, f"field {name!r} {problem}: {value!r:.60}")
            else:
                values[row] = json.dumps(value) if is_any else value
        return values

    def _make_reader(self, name: str, values: Any) -> Callable[[int], Any]:
        read = super()._make_reader(name, values)
        return read if self.types[name] != "any" else lambda row: json.loads(read(row))


def _refuse(place: str, problem: str) -> PipelineError:
    return PipelineError(
        f"{place}: field {problem}; declare its type, as in "
        "jsonl(..., columns={'label': 'int64', 'other': 'any'})"
    )


def _parse_line(line: str) -> dict[str, Any] | str:
    try:
        if not is_utf8(line):
            line.encode("utf-8", "surrogateescape").decode()  # which says what is wrong
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "is blank" if line.isspace() else f"is no JSON: {error}"
    return values if isinstance(values, dict) else f"is no JSON object, but {type(values).__name__}"


def _make_array(values: list[Any], kind: Any, is_declared: bool) -> tuple[Any, dict[int, str]]:
    """An Arrow array of values of a type's shapes, None for a missing one; row -> why it cannot hold a value."""
    import pyarrow
    from pyarrow import types

    problems: dict[int, str] = {}
    leaf = _json_types.find_leaf(kind)
    try:
        array = pyarrow.array(values, kind)
    except (pyarrow.ArrowInvalid, OverflowError, ValueError):
        for row, value in enumerate(values):
            try:
                if is_declared and types.is_floating(leaf):  # then it may lose digits
                    values[row] = _to_floats(value)
                pyarrow.array([values[row]], kind)
            except (pyarrow.ArrowInvalid, OverflowError, ValueError):
                problems[row], values[row] = _say_problem(value, kind, is_declared), None
        array = pyarrow.array(values, kind)
    if leaf in (pyarrow.float16(), pyarrow.float32()):
        for row, made in enumerate(array.to_pylist()):
            if made is not None and _overflows(values[row], made):
                problems[row] = _say_problem(values[row], kind, is_declared)
    if types.is_string(kind) or types.is_primitive(kind):  # a row without a value is an error anyway
        array = array.fill_null("" if types.is_string(kind) else False if types.is_boolean(kind) else 0)
    return array, problems


def _say_problem(value: Any, kind: Any, is_declared: bool) -> str:
    if is_declared or isinstance(value, str):
        return f"is {value!r:.60}, which is no {_json_types.describe(kind)}"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"is {value!r:.60}, an integer that an int64 does not hold"
    return f"has integers of which a float64 loses digits, beside other numbers, or too long ones: {value!r:.60}"


def _to_floats(value: Any) -> Any:
    return list(map(_to_floats, value)) if isinstance(value, list) else value if value is None else float(value)


def _overflows(value: Any, made: Any) -> bool:
    if isinstance(value, list):
        return any(map(_overflows, value, made))
    return math.isinf(made) and not math.isinf(value)


def jsonl(paths: Paths, columns: Columns | None = None) -> Jsonl:
    """Makes a source of JSON Lines files (UTF-8): each line is a JSON object, a record.

    Each file is converted once to an Arrow file, in the folder that the environment variable
    `ENSEMBLE_SOURCES_DIR` names, and read from there.

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
            numbers or for arrays, as most lines have them, or `"any"` for values as `json.loads` returns them.
            Then only the first lines are read to find the depth of arrays.

    Returns:
        A source of records with a field for each column: a numpy scalar, `str`, array, list or dict.

    Raises:
        PipelineError: a file is missing, compressed or without lines; no line is an object, or has a field; the
            values of a field have no type in common; a type is unknown.

    Examples:
        >>> source = jsonl("train-*.jsonl", columns=("text", "label"))
    """
    return Jsonl(paths, columns)
