"""Source of the rows of CSV files, which pyarrow converts to Arrow (`_text_table`).

The types are found in columns of texts: Arrow's own inference reads "007" as 7.
"""

from __future__ import annotations

import csv as python_csv
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources import _text_table
from pipelines.sources._columns import cast_floats, check_missing
from pipelines.sources._files import File, Paths, check_names, find_files
from pipelines.sources._text_table import TextTable, explain, open_binary, read_declared
from pipelines.stages._column_kinds import MISSING

Columns = Sequence[str] | Mapping[str, Any]

_DELIMITERS = (";", "\t", "|", ",")
_BOOL = r"^([tT]rue|TRUE|[fF]alse|FALSE)$"  # as Arrow reads them
_LONG = r"^[ \t]*-?[0-9]{16,}[ \t]*$"  # an integer that a float64 may not hold


@known_as("pipelines.sources.csv")
class Csv(TextTable):
    """See `csv`. A type is `"str"`, or numpy's name of a dtype."""

    kind = "csv"
    keeps_missing: bool

    def __init__(
        self,
        paths: Paths,
        columns: Columns | None,
        names: Sequence[str] | None,
        delimiter: str,
        quote: str | None,
        missing: str,
        decimal: str,
        thousands: str | None,
    ) -> None:
        self.keeps_missing = check_missing(self.kind, missing)
        if decimal == thousands or any(mark in "+-0123456789eE" for mark in (decimal, thousands or decimal)):
            raise PipelineError(f"csv(): no number has decimal={decimal!r} and thousands={thousands!r}")
        marks = (("delimiter", delimiter), ("quote", quote), ("decimal", decimal), ("thousands", thousands))
        for name, value in marks:
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n"):
                raise PipelineError(f"csv(): {name} must be one ASCII character, got {value!r}")
        if delimiter == quote:
            raise PipelineError(f"csv(): delimiter and quote must differ, got {delimiter!r} for both")
        self._delimiter, self._quote, self._marks = delimiter, quote, _Marks(decimal, thousands)
        self._has_header = names is None
        files = find_files(self.kind, paths)
        self._skipped_rows = [0] * len(files)
        if names is None:
            self._header = self._read_headers(files)
        else:
            self._header = [names] if isinstance(names, str) else list(names)
        self._declared = self._choose(files[0], columns)
        self.files = files
        form = [delimiter, quote, self._has_header, self._header, self.keeps_missing, *self._marks.unusual]
        self._load(files, [form, list(self._declared.items())])
        self.types = {field.name: _get_type_name(field.type) for field in self._schema}

    def _read_headers(self, files: list[File]) -> list[str]:
        """The names in the first row of each file, which are the same."""
        headers: list[list[str]] = []
        for number, file in enumerate(files):
            lines = io.TextIOWrapper(open_binary(file), "utf-8-sig", newline="")
            try:
                with lines:
                    rows = enumerate(python_csv.reader(lines, delimiter=self._delimiter, **self._quoting), 1)
                    self._skipped_rows[number], header = next((row for row in rows if row[1]), (0, []))
            except (ValueError, python_csv.Error) as error:
                raise explain(file, error) from None
            if not header:
                raise PipelineError(f"csv({file.path!r}): is empty")
            headers.append([name.strip() for name in header])
            if headers[-1] != headers[0]:
                raise PipelineError(
                    f"csv(): {file.path} begins with {', '.join(headers[-1])}, but {files[0].path} with "
                    f"{', '.join(headers[0])}; give names= if there is no header"
                )
        _check_header(files[0], headers[0], self._delimiter)
        return headers[0]

    @property
    def _quoting(self) -> dict[str, Any]:
        is_quoted = self._quote is not None
        return {
            "quotechar": self._quote,
            "quoting": python_csv.QUOTE_MINIMAL if is_quoted else python_csv.QUOTE_NONE,
        }

    def _choose(self, first: File, columns: Columns | None) -> dict[str, str | None]:
        """The columns to read, and the types that are declared."""
        chosen = check_names(self.kind, columns) or tuple(self._header)
        if unknown := [name for name in chosen if name not in self._header]:
            raise PipelineError(f"{first.path}: has no column {unknown[0]!r} (it has: {', '.join(self._header)})")
        if twice := [name for name in chosen if self._header.count(name) > 1]:
            raise PipelineError(
                f"csv({first.path!r}): two columns are called {twice[0]!r}; give other names= to all"
            )
        return {**dict.fromkeys(chosen), **read_declared(self.kind, columns)}

    def _find_schema(self) -> Any:
        import pyarrow

        finders = {name: _TypeFinder(self._marks) for name, kind in self._declared.items() if kind is None}
        for file in self.files if finders else ():
            for batch in self._parse(file, list(finders)):
                for name, finder in finders.items():
                    finder.add(batch.column(name))
        kinds = {name: kind or finders[name].choose(self.keeps_missing) for name, kind in self._declared.items()}
        return pyarrow.schema([(name, _get_arrow_type(kind)) for name, kind in kinds.items()])

    def _parse(self, file: File, names: list[str]) -> Iterator[Any]:
        """Yields record batches of some columns, as texts.

        The last column is parsed in any case: a quote that is never closed is in it, or a row has too few values.
        """
        import pyarrow
        from pyarrow import csv

        # After the last row comes one that is empty: it is found only where no quote is open before it.
        end = self._delimiter * (len(self._header) - 1) or 2 * (self._quote or "")
        last_name = self._header[-1] if self._header[-1] in names else "\0"
        read = csv.ReadOptions(
            column_names=[*self._header[:-1], last_name],
            skip_rows_after_names=self._skipped_rows[self.files.index(file)],
            block_size=_text_table.BLOCK_BYTES,
            use_threads=False,  # then errors name the row
        )
        parse = csv.ParseOptions(
            delimiter=self._delimiter, quote_char=self._quote or False, newlines_in_values=True
        )
        parsed = {last_name: pyarrow.binary(), **dict.fromkeys(names, pyarrow.string())}
        convert = csv.ConvertOptions(column_types=parsed, include_columns=list(parsed), strings_can_be_null=False)
        last = None
        with open_binary(file) as handle:
            text = pyarrow.PythonFile(io.BufferedReader(_Joined(handle, f"\n{end}\n".encode())), mode="r")
            try:
                for batch in csv.open_csv(text, read, parse, convert):
                    if last is not None and batch.num_rows:
                        yield last.select(names)
                    last = batch if batch.num_rows else last
            except pyarrow.ArrowException as error:
                raise explain(file, error) from None
        if not end:
            yield from () if last is None else (last.select(names),)
            return
        if last is None or last.column(last_name)[-1].as_py() not in (None, "", b""):
            raise PipelineError(
                f"{file.path}: opens a quoted field that is never closed; if quotes mean nothing in this file, "
                "give quote=None"
            )
        yield last.slice(0, last.num_rows - 1).select(names)

    def _convert(self, file: File, schema: Any) -> Iterator[Any]:
        import pyarrow

        rows = 0
        for batch in self._parse(file, schema.names):
            columns = zip(schema, batch.columns, strict=True)
            converted = [self._convert_texts(file, rows, field, texts) for field, texts in columns]
            rows += batch.num_rows
            yield pyarrow.record_batch(converted, schema=schema)

    def _convert_texts(self, file: File, row: int, field: Any, texts: Any) -> Any:
        """A column of texts, of which the first is that of a row, in its type; null where a number is missing."""
        import pyarrow
        from pyarrow import compute, types

        if types.is_string(field.type):
            return texts
        # Numbers are read as float64 and then rounded, by numpy.
        kind = pyarrow.float64() if types.is_floating(field.type) else field.type
        made, wrong = self._marks.cast(texts, kind)
        if wrong is not None:
            raise PipelineError(
                f"{file.path}:record {row + wrong + 1}: column {field.name!r} to {kind}: invalid value "
                f"{texts[wrong].as_py()!r:.60}"
            )
        if not types.is_floating(kind):
            return made
        made = compute.fill_null(made, float("nan")) if self.keeps_missing else made
        return cast_floats(made, field.type, f"{file.path}: column {field.name!r}")

    def identity(self) -> Any:
        keeps: list[str | None] = ["nan"] if self.keeps_missing else []
        keeps += [*([] if self._has_header else ["no header"]), *self._marks.unusual]
        return {**super().identity(), "form": [self._delimiter, self._quote, self._header, *keeps]}


@dataclass(frozen=True)
class _Marks:
    """What is written in numbers beside digits."""

    decimal: str
    thousands: str | None

    @property
    def unusual(self) -> list[str | None]:
        return [] if (self.decimal, self.thousands) == (".", None) else [self.decimal, self.thousands]

    @property
    def patterns(self) -> dict[str, str]:
        """What texts of a type look like."""
        point, exponent = re.escape(self.decimal), r"([eE][+-]?[0-9]+)?"
        groups = rf"|[1-9][0-9]{{0,2}}({re.escape(self.thousands)}[0-9]{{3}})+" if self.thousands else ""
        digits, words = rf"(0|[1-9][0-9]*{groups})", "[nN][aA][nN]|[iI][nN][fF]([iI][nN][iI][tT][yY])?"
        number = rf"({digits}|([0-9]+{groups}){point}[0-9]*|{point}[0-9]+){exponent}"
        blanks = r"[ \t]*"
        return {
            "int64": f"^{blanks}-?{digits}{blanks}$",
            "float64": f"^{blanks}-?({number}|{words}){blanks}$",
            "bool": _BOOL,
        }

    def make_plain(self, texts: Any) -> Any:
        """Numbers as Arrow writes them, null where they are missing."""
        import pyarrow
        from pyarrow import compute

        texts = compute.utf8_trim(texts, " \t")
        texts = compute.if_else(compute.is_in(texts, pyarrow.array(sorted(MISSING))), None, texts)
        texts = compute.replace_substring(texts, self.thousands, "") if self.thousands else texts
        return compute.replace_substring(texts, self.decimal, ".") if self.unusual else texts

    def cast(self, texts: Any, kind: Any) -> tuple[Any, int | None]:
        """Texts as numbers of a type; or the place of the first that is none."""
        import pyarrow
        from pyarrow import compute, types

        plain = self.make_plain(texts)
        if self.unusual and not types.is_boolean(kind):  # 1,23 is no number with groups of three digits
            pattern = self.patterns["int64" if types.is_integer(kind) else "float64"]
            fits = compute.or_(compute.match_substring_regex(texts, pattern), plain.is_null())
            plain = compute.if_else(fits, plain, "")
        try:
            return plain.cast(kind), None
        except pyarrow.ArrowInvalid:
            if len(texts) == 1:
                return None, 0
        return None, next(n for n in range(len(texts)) if self.cast(texts.slice(n, 1), kind)[1] is not None)


class _TypeFinder:
    """Finds the narrowest type that holds all values of a column of texts."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks
        self._candidates = ["int64", "float64", "bool"]
        self._is_seen = self._is_missing = self._is_long = False

    def add(self, texts: Any) -> None:
        """Takes an Arrow array of texts into account."""
        import pyarrow
        from pyarrow import compute

        if not self._candidates:
            return
        plain = self._marks.make_plain(texts)
        values, plain = texts.filter(plain.is_valid()), plain.drop_null()
        self._is_missing |= len(values) < len(texts)
        if not len(values):
            return
        self._is_seen = True
        self._is_long |= bool(compute.any(compute.match_substring_regex(plain, _LONG)).as_py())
        self._candidates = [
            kind
            for kind in self._candidates
            if compute.all(compute.match_substring_regex(values, self._marks.patterns[kind])).as_py()
        ]
        if self._is_long and "int64" in self._candidates:
            try:
                plain.cast("int64")
            except pyarrow.ArrowInvalid:  # more than 64 bits
                self._candidates = []

    def choose(self, keeps_missing: bool) -> str:
        """The type of all values that were added; of none it is text."""
        kinds = [kind for kind in self._candidates if self._is_seen and not (kind == "float64" and self._is_long)]
        if keeps_missing and self._is_missing:  # neither integers nor booleans have a NaN
            kinds = [kind for kind in kinds if kind == "float64"]
        return kinds[0] if kinds else "str"


def csv(
    paths: Paths,
    columns: Columns | None = None,
    *,
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    quote: str | None = '"',
    missing: Literal["error", "nan"] = "error",
    decimal: str = ".",
    thousands: str | None = None,
) -> Csv:
    """Makes a source of the rows of CSV files (RFC 4180, UTF-8), without loading them.

    Each file is converted once to an Arrow file, in the folder that the environment variable
    `ENSEMBLE_SOURCES_DIR` names, and read from there. A row with more or fewer values than there are columns, or
    with a value that its column's type does not hold, is an error then.

    A column that is not declared has the type that holds all of its values in all rows: int64, float64, bool
    (`true`, `false`) or else text. Where digits would be lost, the column is text: integers of more than 64 bits
    or with leading zeros (`007`), numbers with a plus (`+1`), and integers of 16 digits or more among other
    numbers. An empty value, `NA`, `N/A`, `NULL` or `null` among numbers is missing: reading that row is an error,
    which `Pipeline(on_error="skip")` leaves out, unless it is `missing="nan"`. Empty lines are no rows. A header
    of numbers is warned of, because it may be a record.

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either. All have the same columns.
        columns: names of the columns to read; all unless given. A mapping name -> type declares their types:
            `"str"`, `"bool"` or numpy's name of a dtype of numbers, such as `"float32"`. Then no row is read to
            find them out.
        names: names of all columns, of files whose first row is no header.
        delimiter: between the values, such as `"\\t"`.
        quote: around values that contain delimiters, line breaks, or quotes (doubled). None: a quote means
            nothing.
        missing: "nan": a number that is missing is NaN, and a column of integers with one is float64; for
            `stages.fit`.
        decimal: the mark before the fraction of a number, such as `","`.
        thousands: the mark between groups of three digits: `","` reads `1,234.50`.

    Returns:
        A source of records with a field for each column: a numpy scalar or `str`.

    Raises:
        PipelineError: a file is missing, compressed, without rows, not UTF-8 or with another header than the
            first; the header is one column that holds another usual delimiter; a quoted value is never closed; a
            row cannot be converted; a column does not exist; a type is unknown.

    Examples:
        >>> source = csv("train-*.csv", columns={"text": "str", "label": "int64"})
    """
    return Csv(paths, columns, names, delimiter, quote, missing, decimal, thousands)


class _Joined(io.RawIOBase):
    """A file, and some bytes after it."""

    def __init__(self, file: io.BufferedReader, end: bytes) -> None:
        self._parts = [file, io.BytesIO(end)]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return next((size for part in self._parts if (size := part.readinto(buffer))), 0)


def _check_header(file: File, header: list[str], delimiter: str) -> None:
    """Refuses a header that another delimiter divides, and warns of one that looks like a record."""
    others = [other for other in _DELIMITERS if other != delimiter and other in header[0]]
    if len(header) == 1 and others:
        raise PipelineError(
            f"csv({file.path!r}): the header is one column, {header[0][:60]!r}; if {others[0]!r} divides the "
            f"columns, give delimiter={others[0]!r}, else rename the column"
        )
    # Columns that are numbered from 0 are what pandas writes for an array.
    names = [name for name in header if name]
    if all(map(_is_number, names)) and names != [str(number) for number in range(len(names))]:
        warnings.warn(
            f"csv({file.path!r}): the first row, {', '.join(header)[:60]}, is taken for a header; if it is a "
            "record, give names=",
            stacklevel=5,
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _get_arrow_type(name: str) -> Any:
    import pyarrow

    return pyarrow.string() if name == "str" else pyarrow.from_numpy_dtype(np.dtype(name))


def _get_type_name(kind: Any) -> str:
    from pyarrow import types

    return "str" if types.is_string(kind) else np.dtype(kind.to_pandas_dtype()).name
