"""What a column of a table holds, by its values: numbers, categories, or something that only the user can name."""

from __future__ import annotations

import datetime
import re
import warnings
from collections import Counter
from decimal import Decimal
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError

Array = npt.NDArray[Any]

#: Texts that are no value in a column of numbers.
MISSING = frozenset(("", "NA", "N/A", "n/a", "#N/A", "NULL", "null"))
_EXACT = 2**53  # a float64 has all integers below it
_ISO_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d\d))([T ]+\d{1,2}:.*)?")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE)
#: Also with separators, a unit, or a sign of percent or currency; no codes such as 01234.
_NUMBER_LIKE = re.compile(
    r"[-+(]?\s*[$€£¥]?\s*[-+]?\s*(?!0\d)(\d[\d.,'_ \u00a0\u202f]*|[.,]\d+)([eE][-+]?\d+)?\s*"
    r"(%|[$€£¥]|[A-Z]{3})?\)?"
)
_NAMELESS = re.compile(r"\s*|Unnamed: \d+|index|level_\d+|__index_level_\d+__")  # as pandas writes an index
_FEW = 10  # categories that any column may have
_SOME = 0.05  # of the texts of a column


def is_missing(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and value.strip() in MISSING)


def is_date(value: Any) -> bool:
    """Whether a value is a date or a time of a day, also one that is written as 2024-01-31."""
    is_iso = isinstance(value, str) and _ISO_DATE.match(value) is not None
    return is_iso or isinstance(value, np.datetime64 | datetime.date)


def as_times(values: Array, what: str) -> Array:
    """Return numbers and datetimes as they are, dates and their texts as datetime64[us].

    Raises:
        PipelineError: a value is none of these; `what` has it.
    """
    if values.dtype.kind in "biufmM":
        return values
    wrong = [value for value in values.tolist() if not is_missing(value) and not is_date(value)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # times with a zone become those of UTC
            times = np.array([None if is_missing(value) else value for value in values], "datetime64[us]")
    except (ValueError, TypeError):
        times = None
    if times is None or wrong:
        raise PipelineError(
            f"{what} has {(wrong or values.tolist())[0]!r:.60}: times are numbers, numpy datetimes, or texts such "
            "as 2024-01-31T12:00"
        )
    return times


def find_kind(source: Any, name: str, values: Array) -> str:
    """Return "number", "text" or "value" (as `Block` has them) for a column that nobody declared.

    Raises:
        PipelineError: it has no value, or what it is cannot be seen.
    """
    if values.dtype.kind in "biuf" and values.ndim == 1:
        if values.dtype.kind in "iu":
            _check_integers(source, name, values)
        return "value" if values.dtype.kind == "b" else "number"
    present = {row: value for row, value in enumerate(values.tolist()) if not is_missing(value)}
    if not present:
        _refuse(name, "has no value at all")
    first = next(iter(present.values()))
    plain = [value.item() if isinstance(value, np.generic) else value for value in present.values()]
    if values.dtype.kind in "mM" or all(is_date(value) or _matches(_DATE, value) for value in plain):
        _refuse(name, f"holds dates, such as {first!s:.30} (numbers= takes 2024-01-31 as a time)")
    if wrong := [value for value in plain if not isinstance(value, str | bool | int | float | Decimal)]:
        _refuse(name, f"holds {type(wrong[0]).__name__}, which is neither a number nor a category")
    if not any(isinstance(value, str) for value in plain):
        return "value" if all(isinstance(value, bool) for value in plain) else "number"
    _check_texts(source, name, dict(zip(present, map(str, plain), strict=True)))
    return "text"


def _check_integers(source: Any, name: str, values: Array) -> None:
    """Refuse a column that counts the rows, and integers of which a float64 loses digits."""
    parts = [(values[places], origin.indices) for places, origin in source.find_origin().divide()]
    counts = len(values) > 2 and all(np.ptp(own.astype(np.int64) - np.asarray(rows)) == 0 for own, rows in parts)
    if counts or _NAMELESS.fullmatch(name):
        _refuse(name, f"numbers the rows, as an index does: {', '.join(map(str, values[:3]))} ...")
    if np.abs(values.astype(np.float64)).max() > _EXACT:
        _refuse(name, f"has integers beyond 2**53, of which digits would be lost, such as {values.max()}")


def _check_texts(source: Any, name: str, texts: dict[int, str]) -> None:
    """Refuse texts nearly all of which differ, and those that others than numbers stand among."""
    counts = Counter(text.strip() for text in texts.values())
    numbers = sum(count for text, count in counts.items() if _NUMBER_LIKE.fullmatch(text))
    are_codes = all(text.isdigit() for text in counts) and any(re.match(r"0\d", text) for text in counts)
    if numbers >= _SOME * len(texts) and not are_codes:
        what = f"holds texts, and {numbers:,} of {len(texts):,} look like numbers"
        spoilt = [row for row, text in texts.items() if not _NUMBER.fullmatch(text.strip())]
        if not spoilt and hasattr(root := source.find_origin().root, "column"):  # a record of another part does it
            source, texts = root, {row: str(text) for row, text in enumerate(root.column(name).tolist())}
            spoilt = [row for row, text in texts.items() if not is_missing(text) and not _matches(_NUMBER, text)]
        row = (spoilt or list(texts))[0]
        _refuse(
            name,
            f"{what}; {source.where(row)} has "
            f"{texts[row]!r:.40}: correct it, leave it empty (missing='nan'), or read separators with "
            "sources.csv(decimal=, thousands=)",
        )
    if len(counts) > max(_FEW, len(texts) / 2):
        shown = ", ".join(f"{text!r:.30}" for text in list(counts)[:3])
        _refuse(name, f"has {len(counts):,} different texts in {len(texts):,} records: {shown} ...")


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value.strip()) is not None


def _refuse(name: str, what: str) -> NoReturn:
    raise PipelineError(
        f"fit(): the column {name!r} {what}. Leave it out, drop=[{name!r}], or declare it, "
        f"categories=[{name!r}] or numbers=[{name!r}], with drop=[] if the other columns are inputs, too"
    )
