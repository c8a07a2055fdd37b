"""Types of columns of texts: the narrowest that holds all values, and texts as numbers of a type."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.sources._columns import make_number

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


@dataclass
class TypeFinder:
    """Finds the type that holds all values of a column.

    Attributes:
        left: types that hold all values so far, the narrowest first.
        is_seen: whether there was a value at all.
        is_missing: whether a value was missing.
        is_exact: whether a float64 holds all integers.
    """

    left: list[str] = field(default_factory=lambda: ["int64", "float64", "bool"])
    is_seen: bool = False
    is_missing: bool = False
    is_exact: bool = True

    def add(self, texts: Any) -> None:
        """Takes some texts into account, an Arrow array; a null is none."""
        from pyarrow import compute

        def is_all(pattern: str) -> bool:
            return bool(compute.all(compute.match_substring_regex(values, pattern)).as_py())

        left, texts = self.left, texts.drop_null()
        if not left:
            return
        values = texts.filter(compute.invert(compute.match_substring_regex(texts, _MISSING_PATTERN)))
        self.is_missing |= len(values) < len(texts)
        if not len(values):
            return
        self.is_seen = True
        if "int64" in left and not is_all(_INTEGER):
            left.remove("int64")
        if "int64" in left or "float64" in left:
            is_in_64_bits, is_exact = _check_long_integers(values)
            self.is_exact &= is_exact
            if "int64" in left and not is_in_64_bits:
                left.clear()
        if "float64" in left and not (("int64" in left or self.is_exact) and is_all(FLOAT)):
            left.remove("float64")
        if "bool" in left and not is_all(_BOOL):
            left.remove("bool")

    def choose(self, keeps_missing: bool) -> str:
        """The type of all values that were added; of none it is text."""
        chosen = self.left[0] if self.left and self.is_seen else "str"
        if not keeps_missing or not self.is_missing or chosen not in ("int64", "bool"):
            return chosen
        # Neither integers nor booleans have a NaN; as a float64 an integer must lose no digit.
        return "float64" if chosen == "int64" and self.is_exact else "str"


def _check_long_integers(column: Any) -> tuple[bool, bool]:
    """Whether all integers of many digits fit into 64 bits, and whether a float64 holds them."""
    from pyarrow import compute

    for pattern in (_LONG, _INTEGER):
        column = column.filter(compute.match_substring_regex(column, pattern))
    texts = column.to_pylist()
    if any(len(text.strip(" \t+-")) > _MOST_DIGITS for text in texts):
        return False, False
    found = [int(text) for text in texts]
    return all(-(2**63) <= each < 2**63 for each in found), all(int(float(each)) == each for each in found)


def convert_column(texts: Any, kind: str, keeps_missing: bool) -> tuple[Any, dict[int, str]]:
    """An Arrow array of a type, with 0 where there is no value; row -> what is wrong with its text."""
    import pyarrow
    from pyarrow import compute

    if kind == "str":
        return texts.fill_null(""), {}
    values, problems = np.zeros(len(texts), kind), dict[int, str]()
    is_missing = np.asarray(compute.fill_null(compute.match_substring_regex(texts, _MISSING_PATTERN), False))
    if keeps_missing and values.dtype.kind == "f":
        values[is_missing] = np.nan
    else:
        problems = dict.fromkeys(np.flatnonzero(is_missing).tolist(), "has no value")
    rows = np.flatnonzero(np.asarray(texts.is_valid()) & ~is_missing)
    present = texts if len(rows) == len(texts) else texts.take(pyarrow.array(rows))
    converted = _cast(present, values.dtype)
    if converted is not None:
        values[rows] = converted
    else:
        for row, text in zip(rows.tolist(), present.to_pylist(), strict=True):
            try:
                values[row] = _convert_text(text, kind)
            except ValueError as error:
                problems[row] = str(error)
    return pyarrow.array(values), problems


def _cast(texts: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """All texts as numbers; None where one is not of the usual form, or the dtype does not hold it."""
    import pyarrow
    from pyarrow import compute

    pattern = {"b": _BOOL, "f": FLOAT}.get(dtype.kind, _INTEGER)
    if not compute.all(compute.match_substring_regex(texts, pattern)).as_py():
        return None
    kind = pyarrow.float64() if dtype.kind == "f" else pyarrow.from_numpy_dtype(dtype)
    try:
        numbers: np.ndarray[Any, Any] = compute.utf8_trim(texts, " \t").cast(kind).to_numpy(zero_copy_only=False)
    except pyarrow.ArrowInvalid:
        return None
    with np.errstate(over="ignore"):
        converted = numbers.astype(dtype)
    return converted if dtype.kind != "f" or np.array_equal(np.isinf(converted), np.isinf(numbers)) else None


def _convert_text(text: str, kind: str) -> Any:
    """Returns a numpy scalar of the dtype `kind`.

    Raises:
        ValueError: the text is no such number; says so.
    """
    try:
        if kind == "bool":
            return np.bool_(_BOOLS[text.strip(" \t")])
        if "_" in text or not text.isascii():
            raise ValueError
        return make_number(np.dtype(kind), float(text) if kind.startswith("float") else int(text))
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"is {text!r:.60}, which is no {kind}") from None
