"""Labels for the images of a flat folder: from a mapping, a CSV file or a function of the file's name."""

from __future__ import annotations

import csv
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._csv_types import FLOAT

_INTEGER = r"^[+-]?[0-9]{1,400}$"  # with leading zeros, as numbered classes have them

Labels = Mapping[str, Any] | Callable[[str], Any] | str | os.PathLike[str]


def find_labels(labels: Labels, names: Sequence[str]) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    """Returns the label of each file, int32, int64 or float64 [n], and the names of the classes.

    Args:
        labels: file name -> label, as a mapping, a function, or the path of a CSV file; a name may be without its
            extension. Labels are integers, floats, or texts, which name classes.
        names: of the files.

    Raises:
        PipelineError: a file has no label, labels are of several kinds, or the CSV file cannot be read.
    """
    if isinstance(labels, Mapping):
        found, where = _look_up(labels, names, "labels"), "labels"
    elif isinstance(labels, str | os.PathLike):
        where = os.fspath(labels)
        found = _look_up(_read_csv(os.path.expanduser(where), names), names, where)
    elif callable(labels):
        found, where = [labels(name) for name in names], getattr(labels, "__name__", "labels")
    else:
        raise PipelineError(
            "image_folder(): labels must be a mapping file name -> label (of pandas, series.to_dict()), the path "
            f"of a CSV file, or a function of the name, got {type(labels).__name__}"
        )
    found = [each.item() if isinstance(each, np.generic) else each for each in found]
    missing = [name for name, each in zip(names, found, strict=True) if each is None or _is_nan(each)]
    if missing:
        more = f", nor for {len(missing) - 1} more of the {len(names)} files" if len(missing) > 1 else ""
        raise PipelineError(f"image_folder(): {where}: no label for {missing[0]!r}{more}")
    return _convert(found, names, where)


def _is_nan(label: Any) -> bool:
    return isinstance(label, float) and math.isnan(label)


def _look_up(known: Mapping[str, Any], names: Sequence[str], where: str) -> list[Any]:
    stems = Counter(os.path.splitext(name)[0] for name in names)
    found, used = [], set()
    for name in names:
        stem = os.path.splitext(name)[0]
        key = name if name in known or stems[stem] > 1 else stem
        found.append(known.get(key))
        used.add(key)
    unused = [key for key in known if key not in used]
    if unused:
        warnings.warn(
            f"image_folder(): {where} has labels of {len(unused)} files that are not there: {unused[0]!r} ...",
            stacklevel=5,
        )
    return found


def _read_csv(path: str, names: Sequence[str]) -> dict[str, Any]:
    """File name -> label of a CSV file of these two columns, with or without a header."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise PipelineError(f"image_folder(): labels {path!r}: {said}") from None
    stems = {os.path.splitext(name)[0] for name in names}
    if rows and rows[0][0] not in names and rows[0][0] not in stems:
        rows = rows[1:]
    found: dict[str, str] = {}
    for row in rows:
        row = [value.strip() for value in row]
        if len(row) != 2:
            raise PipelineError(
                f"image_folder(): labels {path!r}: a row of {len(row)} values, where a file's name and its label "
                f"are to be: {', '.join(row)[:60]!r}; give a mapping or a function for other files"
            )
        if found.setdefault(row[0], row[1]) != row[1]:
            raise PipelineError(
                f"image_folder(): labels {path!r}: {row[0]!r} has the labels {found[row[0]]!r} and {row[1]!r}"
            )
    return _convert_texts(found)


def _convert_texts(found: dict[str, str]) -> dict[str, Any]:
    """Labels of a CSV file as integers if all are, else as floats if all are, else as texts; None where there is
    none."""
    given = {name: label for name, label in found.items() if label}
    for kind, pattern in ((int, _INTEGER), (float, rf"{_INTEGER}|{FLOAT}")):
        if all(re.match(pattern, label) for label in given.values()):
            return {name: kind(label) if label else None for name, label in found.items()}
    return {name: label or None for name, label in found.items()}


def _convert(found: list[Any], names: Sequence[str], where: str) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    kinds = {next((kind for kind in (str, int, float) if isinstance(each, kind)), type(each)) for each in found}
    if kinds == {str}:
        classes = tuple(sorted(set(found)))
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[each] for each in found], np.int32), classes
    if kinds <= {int, float}:
        wrong = [
            i for i, each in enumerate(found) if abs(each) == math.inf or (kinds == {int} and abs(each) >= 2**63)
        ]
        if wrong:
            raise PipelineError(
                f"image_folder(): {where}: the label of {names[wrong[0]]!r} is {found[wrong[0]]!r:.60}"
            )
        return np.array(found, np.int64 if kinds == {int} else np.float64), ()
    first = type(found[0])
    odd = next(i for i, each in enumerate(found) if type(each) is not first or not isinstance(each, int | float))
    raise PipelineError(
        f"image_folder(): {where}: labels must be all integers, all numbers, or all texts; {names[odd]!r} has "
        f"{found[odd]!r:.60}"
    )
