"""Types of the columns of CSV files: what all values of a column are, and one value as that type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.sources._columns import make_number

#: What is no value, in a column of numbers. In a column of texts they are texts.
MISSING = frozenset(("", "NA", "N/A", "n/a", "#N/A", "NULL", "null"))

_BLANK = r"[ \t]*"
_DIGITS = r"(0|[1-9][0-9]*)"
_EXPONENT = r"([eE][+-]?[0-9]+)?"
INTEGER = rf"^{_BLANK}[+-]?{_DIGITS}{_BLANK}$"
FLOAT = (
    rf"^{_BLANK}[+-]?({_DIGITS}{_EXPONENT}|[0-9]+\.[0-9]*{_EXPONENT}|\.[0-9]+{_EXPONENT}"
    rf"|[nN][aA][nN]|[iI][nN][fF]([iI][nN][iI][tT][yY])?){_BLANK}$"
)
_BOOL = rf"^{_BLANK}([tT]rue|TRUE|[fF]alse|FALSE){_BLANK}$"
_LONG = r"[0-9]{16}"  # what an int64 or a float64 may not hold
_MOST_DIGITS = 308  # of an integer that a float64 may hold
_MISSING = rf"^{_BLANK}({'|'.join(map(re.escape, sorted(MISSING)))}){_BLANK}$"
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def convert(text: str, kind: str) -> Any:
    """Returns a numpy scalar of the dtype `kind`.

    Raises:
        ValueError: the text is no such number; says so.
    """
    if text.strip(" \t") in MISSING:
        raise ValueError("has no value")
    try:
        if kind == "bool":
            return np.bool_(_BOOLS[text.strip(" \t")])
        if "_" in text or not text.isascii():
            raise ValueError
        return make_number(np.dtype(kind), float(text) if kind.startswith("float") else int(text))
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"is {text!r:.60}, which is no {kind}") from None


class TypeFinder:
    """Finds the type that holds all values of each column.

    Args:
        header: names of all columns of the file.
        names: of the columns whose types are to be found.
        delimiter, quote: of the file.
    """

    def __init__(self, header: Sequence[str], names: Sequence[str], delimiter: str, quote: str | None) -> None:
        import pyarrow
        import pyarrow.csv

        keys = [str(number) for number in range(len(header))]
        self._wanted = {name: keys[header.index(name)] for name in names}
        # The types that hold all values so far, the narrowest first.
        self._left = {name: ["int64", "float64", "bool"] for name in names}
        self._is_seen = dict.fromkeys(names, False)  # whether there was a value at all
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

        column = column.filter(compute.invert(compute.match_substring_regex(column, _MISSING)))
        if not len(column):
            return
        self._is_seen[name] = True

        def is_all(pattern: str) -> bool:
            return bool(compute.all(compute.match_substring_regex(column, pattern)).as_py())

        left = self._left[name]
        if "int64" in left and not is_all(INTEGER):
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
        return {name: left[0] if left and self._is_seen[name] else "str" for name, left in self._left.items()}


def _check_long_integers(column: Any) -> tuple[bool, bool]:
    """Whether all integers of many digits fit into 64 bits, and whether a float64 holds them."""
    from pyarrow import compute

    for pattern in (_LONG, INTEGER):
        column = column.filter(compute.match_substring_regex(column, pattern))
    texts = column.to_pylist()
    if any(len(text.strip(b" \t+-")) > _MOST_DIGITS for text in texts):
        return False, False
    found = [int(text) for text in texts]
    return all(-(2**63) <= each < 2**63 for each in found), all(int(float(each)) == each for each in found)
