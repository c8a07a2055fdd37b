"""Source of the rows of CSV files.

A file is read twice when the source is made: where its rows begin, and what the columns hold, of all rows. After
that a row is one `pread` at a known offset, in any order.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._columns import make_number, resolve_type
from pipelines.sources._files import File, Paths, check_names, find_files
from pipelines.sources._rows import RowSplitter, TextRows, find_rows

Columns = Sequence[str] | Mapping[str, Any]

_DELIMITERS = (";", "\t", "|", ",")

#: What is no value, in a column of numbers. In a column of texts they are texts.
_MISSING = frozenset(("", "NA", "N/A", "n/a", "#N/A", "NULL", "null"))

_BLANK = r"[ \t]*"
_DIGITS = r"(0|[1-9][0-9]*)"
_EXPONENT = r"([eE][+-]?[0-9]+)?"
_INTEGER = rf"^{_BLANK}[+-]?{_DIGITS}{_BLANK}$"
FLOAT = (
    rf"^{_BLANK}[+-]?({_DIGITS}{_EXPONENT}|[0-9]+\.[0-9]*{_EXPONENT}|\.[0-9]+{_EXPONENT}"
    rf"|[nN][aA][nN]|[iI][nN][fF]([iI][nN][iI][tT][yY])?){_BLANK}$"
)
_BOOL = rf"^{_BLANK}([tT]rue|TRUE|[fF]alse|FALSE){_BLANK}$"
_LONG = r"[0-9]{16}"  # what an int64 or a float64 may not hold
_MOST_DIGITS = 308  # of an integer that a float64 may hold
_MISSING_PATTERN = rf"^{_BLANK}({'|'.join(map(re.escape, sorted(_MISSING)))}){_BLANK}$"
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@known_as("pipelines.sources.csv")
class Csv(TextRows):
    """See `csv`. A type is `"str"`, or numpy's name of a dtype."""

    kind = "csv"

    def __init__(
        self,
        paths: Paths,
        columns: Columns | None,
        names: Sequence[str] | None,
        delimiter: str,
        quote: str | None,
        missing: str = "error",
    ) -> None:
        if missing not in ("error", "nan"):
            raise PipelineError(f"csv(): missing must be 'error' or 'nan', got {missing!r}")
        self.keeps_missing = missing == "nan"
        for name, value in (("delimiter", delimiter), ("quote", quote)):
            if value is not None and (len(value) != 1 or not value.isascii() or value in "\r\n"):
                raise PipelineError(f"csv(): {name} must be one ASCII character, got {value!r}")
        if delimiter == quote:
            raise PipelineError(f"csv(): delimiter and quote must differ, got {delimiter!r} for both")
        self.delimiter, self.quote = delimiter, quote
        self._split = RowSplitter(delimiter, quote)
        files = find_files(self.kind, paths)
        offsets = [find_rows(f, delimiter.encode(), quote.encode() if quote else None) for f in files]
        if names is None:
            header = self._read_headers(files, offsets)
            offsets = [each[1:] for each in offsets]
        else:
            header = [names] if isinstance(names, str) else list(names)
        self._header = header
        chosen = [columns] if isinstance(columns, str) else columns or header
        twice = next((name for name in chosen if header.count(name) > 1), None)
        if twice is not None:
            raise PipelineError(
                f"csv({files[0].path!r}): two columns are called {twice!r}; give other names= to all"
            )
        super().__init__(files, offsets)
        self._choose(columns)

    def _read_headers(self, files: list[File], offsets: list[Any]) -> list[str]:
        headers = []
        for file, rows in zip(files, offsets, strict=True):
            if len(rows) < 2:
                raise PipelineError(f"csv({file.path!r}): is empty")
            with file.open() as handle:
                handle.seek(int(rows[0]))
                data = handle.read(int(rows[1] - rows[0]))
            try:
                text = data.decode().rstrip("\r\n")
                headers.append([name.strip() for name in self._split(text)])
            except UnicodeDecodeError as error:
                raise PipelineError(f"csv({file.path!r}): the header is not UTF-8: {error}") from None
            if headers[-1] != headers[0]:
                raise PipelineError(
                    f"csv(): {file.path} begins with {', '.join(headers[-1])}, but {files[0].path} with "
                    f"{', '.join(headers[0])}"
                )
            if len(headers) == 1:
                self._check_header(file, headers[0], self._is_quoted(text))
        return headers[0]

    def _is_quoted(self, text: str) -> bool:
        """Whether a row is one quoted value and no more."""
        quote, text = self.quote, text.strip()
        if quote is None or len(text) < 2 or not text[0] == text[-1] == quote:
            return False
        return quote not in text[1:-1].replace(2 * quote, "")

    def _check_header(self, file: File, header: list[str], is_quoted: bool) -> None:
        """Refuses a header that another delimiter divides, and warns of one that looks like a record."""
        others = [each for each in _DELIMITERS if each != self.delimiter and each in header[0]]
        if len(header) == 1 and others and not is_quoted:
            raise PipelineError(
                f"csv({file.path!r}): the header is one column, {header[0][:60]!r}; if {others[0]!r} divides the "
                f"columns, give delimiter={others[0]!r}, else rename the column"
            )
        # Columns that are numbered from 0 are what pandas writes for an array.
        named = [name for name in header if name]
        if all(map(_is_number, named)) and named != [str(number) for number in range(len(named))]:
            warnings.warn(
                f"csv({file.path!r}): the first row, {', '.join(header)[:60]}, is taken for a header; if it is a "
                "record, give names=",
                stacklevel=5,
            )

    def _choose(self, columns: Columns | None) -> None:
        declared = dict(columns) if isinstance(columns, Mapping) else {}
        asked = check_names(self.kind, columns) or tuple(self._header)
        if unknown := [name for name in asked if name not in self._header]:
            raise PipelineError(
                f"{self.files[0].path}: has no column {unknown[0]!r} (it has: {', '.join(self._header)})"
            )
        self.columns = asked
        self.types = {}
        for name, kind in declared.items():
            if (found := resolve_type(kind)) is None:
                raise PipelineError(
                    f"csv(): the type of column {name!r} must be 'str', 'bool' or the name of a dtype of numbers "
                    f"('int64', 'float32' ...), got {kind!r}"
                )
            self.types[name] = found
        if missing := [name for name in asked if name not in self.types]:
            self.types.update(self._infer_types(missing))
        self._chosen = [(name, self._header.index(name), self.types[name]) for name in asked]

    def _infer_types(self, names: list[str]) -> dict[str, str]:
        finder = _TypeFinder(self._header, names, self.delimiter, self.quote, self.keeps_missing)
        # In a thread of its own, because Arrow's CSV reader takes over the signals of a main thread, and keeps a
        # pipe for them open.
        with ThreadPoolExecutor(1) as thread:
            for first, data, bounds in self._iterate_blocks():
                try:
                    thread.submit(finder.add, data).result()
                except ValueError as error:  # pyarrow.ArrowInvalid is one
                    here = f"{self.where(first)} and {len(bounds) - 2} rows after it"
                    raise PipelineError(f"{here}: cannot be parsed: {error}") from error
        return finder.types()

    def _read(self, index: int) -> dict[str, Any]:
        data = self._read_bytes(index)
        try:
            values = self._split(data.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8: {error}; convert the file, as with iconv -t utf-8"
            raise SampleError(index, self.where(index), reason) from None
        if len(values) != len(self._header):
            reason = f"has {len(values)} values, there are {len(self._header)} columns"
            raise SampleError(index, self.where(index), reason)
        record = {}
        for name, position, kind in self._chosen:
            try:
                record[name] = (
                    values[position] if kind == "str" else _convert(values[position], kind, self.keeps_missing)
                )
            except ValueError as error:
                raise SampleError(index, self.where(index), f"column {name!r} {error}") from None
        return record

    def identity(self) -> Any:
        keeps = ["nan"] if self.keeps_missing else []  # else it is what it was before there was a choice
        return {**super().identity(), "form": [self.delimiter, self.quote, self._header, *keeps]}


def csv(
    paths: Paths,
    columns: Columns | None = None,
    *,
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    quote: str | None = '"',
    missing: Literal["error", "nan"] = "error",
) -> Csv:
    """Makes a source of the rows of CSV files (RFC 4180, UTF-8), without loading them.

    A column that is not declared has the type that holds all of its values in all rows: int64, float64, bool
    (`true`, `false`) or else text. Where digits would be lost, the column is text: integers of more than 64 bits
    or with leading zeros (`007`), and integers among other numbers that a float64 does not hold. A blank
    value, `NA`, `N/A`, `NULL` or `null` among numbers is missing: reading that row is an error, which
    `Pipeline(on_error="skip")` leaves out, unless it is `missing="nan"`. An error, too, is a row of more or fewer
    values than columns, and a number that the declared type does not hold. Empty lines are no rows. A header of
    numbers is warned of, because it may be a record.

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

    Returns:
        A source of records with a field for each column: a numpy scalar or `str`.

    Raises:
        PipelineError: a file is missing, compressed, without rows or with another header than the first; the
            header is one column that holds another usual delimiter; a quoted value is never closed; a column does
            not exist; a type is unknown.

    Examples:
        >>> source = csv("train-*.csv", columns={"text": "str", "label": "int64"})
    """
    return Csv(paths, columns, names, delimiter, quote, missing)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _convert(text: str, kind: str, keeps_missing: bool) -> Any:
    """Returns a numpy scalar of the dtype `kind`.

    Raises:
        ValueError: the text is no such number; says so.
    """
    if text.strip(" \t") in _MISSING:
        if keeps_missing and kind.startswith("float"):
            return np.dtype(kind).type(np.nan)
        raise ValueError("has no value")
    try:
        if kind == "bool":
            return np.bool_(_BOOLS[text.strip(" \t")])
        if "_" in text or not text.isascii():
            raise ValueError
        return make_number(np.dtype(kind), float(text) if kind.startswith("float") else int(text))
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"is {text!r:.60}, which is no {kind}") from None


class _TypeFinder:
    """Finds the type that holds all values of each column.

    Args:
        header: names of all columns of the file.
        names: of the columns whose types are to be found.
        delimiter, quote: of the file.
        keeps_missing: whether a number that is missing is NaN.
    """

    def __init__(
        self, header: Sequence[str], names: Sequence[str], delimiter: str, quote: str | None, keeps_missing: bool
    ) -> None:
        import pyarrow
        import pyarrow.csv

        keys = [str(number) for number in range(len(header))]
        self._wanted = {name: keys[header.index(name)] for name in names}
        # The types that hold all values so far, the narrowest first.
        self._left = {name: ["int64", "float64", "bool"] for name in names}
        self._is_seen = dict.fromkeys(names, False)  # whether there was a value at all
        self._keeps_missing = keeps_missing
        self._is_missing = dict.fromkeys(names, False)  # whether a value was
        self._is_exact = dict.fromkeys(names, True)  # whether a float64 holds all integers
        self._read = pyarrow.csv.ReadOptions(column_names=keys, use_threads=False)
        self._parse = pyarrow.csv.ParseOptions(
            delimiter=delimiter,
            quote_char=quote if quote is not None else False,
            newlines_in_values=quote is not None,
            invalid_row_handler=lambda _: "skip",  # it is an error when it is read
        )
        self._binary = pyarrow.binary()

    def add(self, rows: bytes) -> None:
        """Takes some whole rows into account; one that is not UTF-8 is an error when it is read.

        Raises:
            ArrowInvalid: they are no CSV.
        """
        import pyarrow
        import pyarrow.csv

        undecided = [name for name, left in self._left.items() if left]
        if not undecided:
            return
        keys = [self._wanted[name] for name in undecided]
        options = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(keys, self._binary), include_columns=keys, strings_can_be_null=False
        )
        try:
            rows.decode()
        except UnicodeDecodeError:  # Arrow cannot skip such a row
            rows = rows.decode(errors="replace").encode()
        self._read.block_size = len(rows) + 1
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(rows), self._read, parse_options=self._parse, convert_options=options
        )
        for name, key in zip(undecided, keys, strict=True):
            self._narrow(name, table.column(key))

    def _narrow(self, name: str, column: Any) -> None:
        from pyarrow import compute

        rows = len(column)
        column = column.filter(compute.invert(compute.match_substring_regex(column, _MISSING_PATTERN)))
        self._is_missing[name] |= len(column) < rows
        if not len(column):
            return
        self._is_seen[name] = True

        def is_all(pattern: str) -> bool:
            return bool(compute.all(compute.match_substring_regex(column, pattern)).as_py())

        left = self._left[name]
        if "int64" in left and not is_all(_INTEGER):
            left.remove("int64")
        if "int64" in left or "float64" in left:
            is_in_64_bits, is_exact = _check_long_integers(column)
            self._is_exact[name] &= is_exact
            if "int64" in left and not is_in_64_bits:
                left.clear()
        if "float64" in left and not (("int64" in left or self._is_exact[name]) and is_all(FLOAT)):
            left.remove("float64")
        if "bool" in left and not is_all(_BOOL):
            left.remove("bool")

    def types(self) -> dict[str, str]:
        """Field -> type, of all rows that were added; a column without any value is text."""
        found = {name: left[0] if left and self._is_seen[name] else "str" for name, left in self._left.items()}
        if not self._keeps_missing:
            return found
        # Neither integers nor booleans have a NaN; as a float64 an integer must lose no digit.
        for name in (name for name, is_missing in self._is_missing.items() if is_missing):
            if found[name] == "int64":
                found[name] = "float64" if self._is_exact[name] else "str"
            elif found[name] == "bool":
                found[name] = "str"
        return found


def _check_long_integers(column: Any) -> tuple[bool, bool]:
    """Whether all integers of many digits fit into 64 bits, and whether a float64 holds them."""
    from pyarrow import compute

    for pattern in (_LONG, _INTEGER):
        column = column.filter(compute.match_substring_regex(column, pattern))
    texts = column.to_pylist()
    if any(len(text.strip(b" \t+-")) > _MOST_DIGITS for text in texts):
        return False, False
    found = [int(text) for text in texts]
    return all(-(2**63) <= each < 2**63 for each in found), all(int(float(each)) == each for each in found)
