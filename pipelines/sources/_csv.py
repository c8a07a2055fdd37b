"""Source of the rows of CSV files, which are converted to Arrow (`_text_table`).

Python's `csv` parses them: Arrow's reader cannot skip a row that is not UTF-8, and takes a quote that is never
closed for the rest of the file. The types are found in columns of texts: Arrow's own inference reads "007" as 7.
"""

from __future__ import annotations

import csv as python_csv
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources._columns import resolve_type
from pipelines.sources._csv_types import TypeFinder, convert_column
from pipelines.sources._files import File, Paths, check_names, find_files
from pipelines.sources._text_table import TextTable, is_utf8, open_text

Columns = Sequence[str] | Mapping[str, Any]

_LONGEST_VALUE = 1 << 30  # that Python's csv reads
_END = "\0end\0"  # the value of a row after the last one, which is one only where no quote is open before it
_NOT_UTF8 = "is not UTF-8; convert the file, as with iconv -t utf-8"
_DELIMITERS = (";", "\t", "|", ",")


@known_as("pipelines.sources.csv")
class Csv(TextTable):
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
        self.delimiter, self.quote, self._has_header = delimiter, quote, names is None
        files = self.files = find_files(self.kind, paths)
        self._header = [names] if isinstance(names, str) else list(names or self._read_headers(files))
        chosen = [columns] if isinstance(columns, str) else columns or self._header
        twice = next((name for name in chosen if self._header.count(name) > 1), None)
        if twice is not None:
            raise PipelineError(
                f"csv({files[0].path!r}): two columns are called {twice!r}; give other names= to all"
            )
        self._form = [delimiter, quote, self._has_header, self._header, self.keeps_missing]
        self._choose(columns)
        self._load()

    def _read_headers(self, files: list[File]) -> list[str]:
        headers: list[list[str]] = []
        for file in files:
            header = next(self._parse_all(file), (0, 0, None))[2]
            if header is None:
                raise PipelineError(f"csv({file.path!r}): is empty")
            if isinstance(header, str):
                raise PipelineError(f"csv({file.path!r}): the header {header}")
            headers.append([name.strip() for name in header])
            if headers[-1] != headers[0]:
                raise PipelineError(
                    f"csv(): {file.path} begins with {', '.join(headers[-1])}, but {files[0].path} with "
                    f"{', '.join(headers[0])}"
                )
        with open_text(files[0]) as lines:
            is_quoted = self._is_quoted(next(line for line in lines if line.strip("\r\n")))
        self._check_header(files[0], headers[0], is_quoted)
        return headers[0]

    def _parse(self, file: File) -> Iterator[tuple[int, int, Any]]:
        count = len(self._header)
        for line, size, values in itertools.islice(self._parse_all(file), int(self._has_header), None):
            if not isinstance(values, str) and len(values) != count:
                values = f"has {len(values)} values, there are {count} columns"
            yield line, size, values

    def _parse_all(self, file: File) -> Iterator[tuple[int, int, list[str] | str]]:
        """The rows of a file, the header, too; blank lines are none.

        Raises:
            PipelineError: a quoted field is never closed.
        """
        python_csv.field_size_limit(max(python_csv.field_size_limit(), _LONGEST_VALUE))
        size, is_text = 0, True  # of the lines of a row

        def list_lines() -> Iterator[str]:
            nonlocal size, is_text
            with open_text(file) as lines:
                for line in lines:
                    size, is_text = size + len(line), is_text and (line.isascii() or is_utf8(line))
                    yield line
            yield from ("\n", _END)

        rows = python_csv.reader(
            list_lines(),
            delimiter=self.delimiter,
            quotechar=self.quote,
            quoting=python_csv.QUOTE_NONE if self.quote is None else python_csv.QUOTE_MINIMAL,
        )
        begin = 1
        for values in rows:
            if values == [_END]:
                return
            if values and values[-1].endswith(_END):
                break
            if values:
                yield begin, size, values if is_text else _NOT_UTF8
            begin, size, is_text = rows.line_num + 1, 0, True
        raise PipelineError(
            f"{file.path}, line {begin}: opens a quoted field that is never closed; if quotes mean nothing in "
            "this file, give quote=None"
        )

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
            if (resolved := resolve_type(kind)) is None:
                raise PipelineError(
                    f"csv(): the type of column {name!r} must be 'str', 'bool' or the name of a dtype of numbers "
                    f"('int64', 'float32' ...), got {kind!r}"
                )
            self.types[name] = resolved
        if undeclared := [name for name in asked if name not in self.types]:
            self.types.update(self._recall([self._form, undeclared], lambda: self._infer_types(undeclared)))

    def _infer_types(self, names: list[str]) -> dict[str, str]:
        finders = [TypeFinder() for _ in names]
        for file in self.files:
            for _, rows in self._iterate_blocks(file):
                for finder, texts in zip(finders, self._take_texts(names, rows), strict=True):
                    finder.add(texts)
        return {name: finder.choose(self.keeps_missing) for name, finder in zip(names, finders, strict=True)}

    def _take_texts(self, names: Sequence[str], rows: list[Any]) -> list[Any]:
        """An Arrow array of the texts of each of some columns; null in rows that are no records."""
        import pyarrow

        nothing = [None] * len(self._header)
        columns = list(zip(*(nothing if isinstance(values, str) else values for values in rows), strict=True))
        return [pyarrow.array(columns[self._header.index(name)], pyarrow.string()) for name in names]

    def _make_columns(self, rows: list[Any], where: Callable[[int], str]) -> tuple[list[Any], dict[int, str]]:
        fields, problems = [], dict[int, str]()
        for name, texts in zip(self.columns, self._take_texts(self.columns, rows), strict=True):
            values, wrong = convert_column(texts, self.types[name], self.keeps_missing)
            fields.append(values)
            for row, problem in wrong.items():
                problems.setdefault(row, f"column {name!r} {problem}")
        return fields, problems

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

    Each file is converted once to an Arrow file, in the folder that the environment variable
    `ENSEMBLE_SOURCES_DIR` names, and read from there.

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
