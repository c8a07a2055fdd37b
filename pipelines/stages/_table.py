"""The stage that makes numbers of the columns of a table: imputed, scaled, encoded.

What was fitted to the training records is kept as plain numbers and texts: so it is a part of the pipeline's
fingerprint, goes with the run and into artifacts, and no pickle is needed to apply it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipelines.errors import PipelineError, unknown_name
from pipelines.fingerprint import known_as
from pipelines.stages._column_kinds import MISSING, as_times, find_kind, is_date, is_missing
from pipelines.stages._sample import Sample, Transform, get_value

#: Columns, what each holds ("number", or as a category "text" or "value"), and what was fitted to them: of numbers
#: ("impute", medians, ()) and ("scale", means, deviations), of categories ("one_hot", those of each, "ignore"); of
#: columns that are dropped nothing.
Block = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[Any, ...], ...]]
#: A column, its kind, how many values differ, how many are missing.
Found = tuple[str, str, Any, Any]
_NUMBERS, _CATEGORIES, _DROPPED = list[str](["impute", "scale"]), ["one_hot"], list[str]()
_MOST_SHOWN = 30  # columns


@known_as("pipelines.stages.fit")
@dataclass(frozen=True)
class Table(Transform):
    """See `fit`.

    Attributes:
        field: that is made, float32 [size].
        blocks: columns that are made into numbers in the same way; see `Block`.
        fitted_to: the source of the records to which it was fitted, in the process that did so.
        found: what became of each column.
    """

    fitted_to: ClassVar[Any] = None
    found: ClassVar[tuple[Found, ...]] = ()

    field: str
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        known = (_NUMBERS, _CATEGORIES, _DROPPED)
        if any([step[0] for step in steps] not in known for _, _, steps in self.blocks):
            raise PipelineError("another version of ray-ensemble fitted this table: fit it again")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "found": self.found}

    def __repr__(self) -> str:
        rows = self.found or [(name, _name_kind(kind), "", "") for name, kind, _ in self.fitted_columns]
        cells = [
            ("column", "kind", "distinct", "missing"),
            *((name or "''", *map(str, rest)) for name, *rest in rows),
        ]
        sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, sizes)).rstrip() for row in cells]
        if len(lines) > _MOST_SHOWN:
            lines[_MOST_SHOWN:] = [f"... and {len(lines) - _MOST_SHOWN} columns more"]
        if self.found and not any(kind == "target" for _, kind, *_ in self.found):
            lines.append("there is no target=: a label that stands in this table is an input")
        return "\n".join([f"columns of the table -> {self.field!r}, float32 [{self.size}]", *lines])

    def __call__(self, sample: Sample) -> Sample:
        made: list[float] = []
        for name, kind, fitted in self.fitted_columns:
            if kind == "number":
                (fill, mean, std), value = fitted, _read_number(get_value(sample, name), name)
                made.append(((fill if value != value else value) - mean) / std)
            elif kind != "dropped":
                value = _READ[kind](get_value(sample, name), name)
                made += [float(value == category) for category in fitted]
        others = {name: value for name, value in sample.items() if name not in self.uses}
        return {**others, self.field: np.array(made, np.float32)}

    @functools.cached_property
    def fitted_columns(self) -> list[tuple[str, str, Any]]:
        """Columns, what each holds, and what was fitted to it: median, mean and deviation, or its categories."""
        rows: list[tuple[str, str, Any]] = []
        for columns, kinds, steps in self.blocks:
            numbers = zip(*(values for step in steps for values in step[1:] if values), strict=True)
            fitted = {0: [()] * len(columns), 1: steps[0][1] if steps else ()}.get(len(steps), numbers)
            rows += zip(columns, kinds, fitted, strict=True)
        return rows

    @property
    def names(self) -> tuple[str, ...]:
        """What each number is: a column, or `column=category`."""
        labels: list[str] = []
        for name, kind, fitted in self.fitted_columns:
            texts = ["missing" if category is None else category for category in fitted]
            labels += [name] if kind == "number" else [f"{name}={text}" for text in texts]
        return tuple(labels)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return len(self.names)

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The columns that numbers are made of."""
        return frozenset(name for name, kind, _ in self.fitted_columns if kind != "dropped")

    @functools.cached_property
    def uses(self) -> frozenset[str]:
        """The columns that are made into numbers or dropped."""
        return frozenset(name for name, *_ in self.fitted_columns)

    @property
    def texts(self) -> frozenset[str]:
        """Those that were texts in the training records, whatever they look like in others."""
        return frozenset(name for name, kind, _ in self.fitted_columns if kind == "text")

    def count_unseen(self, read: Callable[[str], Any]) -> dict[str, Counter[str]]:
        """Return, for each column of categories, how often each occurs that the training records do not have."""
        return {
            name: Counter(value for raw in read(name) if (value := _READ[kind](raw, name)) not in (None, *fitted))
            for name, kind, fitted in self.fitted_columns
            if kind in ("text", "value")
        }


def fit(
    source: Any,
    *,
    target: str | Sequence[str] = (),
    numbers: str | Sequence[str] | None = None,
    categories: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    to: str = "x",
) -> Table:
    """Fits a stage that turns the columns of a table into numbers, and prints what each column became.

    Numbers that are missing become the column's median, numbers have mean 0 and variance 1, as scikit-learn
    computes them, and categories are one-hot: a missing one is a category of its own where the training records
    have it, and one that they lack is all zeros.

    Args:
        source: the source of the *training* records alone, such as the first part of `source.split(...)`.
        target: fields that are no inputs: they stay in the sample as they are.
        numbers, categories: the columns, in order; a date among the numbers is a time. Without them, and with
            `drop=`, all other columns but the target are inputs as well: texts and booleans are categories.
        drop: columns that are left out, of the samples, too.
        to: the field that is made, float32 [size].

    Returns:
        A stage; its `names` say what each number is, its `size` how many there are. The fields that are read are
        not in the samples that it makes, all others are.

    Raises:
        PipelineError: a column is missing, is no number or category, or has no value at all; there is a field `to`
            already; or a column that is not declared may be several things: nearly all of its texts differ (ids,
            names), it numbers the rows, it holds dates, or some of its texts are numbers and others not.
        ImportError: scikit-learn is not installed.

    Examples:
        >>> train, valid = sources.csv("houses.csv", missing="nan").split(0.8, seed=0)
        >>> table = fit(train, target="price", drop="id")
        >>> pipe = Pipeline(train).map(table)
    """
    record, targets, dropped = source[0], _as_names(target), _as_names(drop)
    for name in (*targets, *dropped):
        if name not in record:
            what = "target" if name in targets else "column"
            raise PipelineError(unknown_name(f"fit(): the records have no {what}", name, list(record)))
    of_numbers, of_categories = list(_as_names(numbers)), list(_as_names(categories))
    declared, read = {*of_numbers, *of_categories, *targets, *dropped}, functools.cache(source.column)
    if drop is not None or (numbers is None and categories is None):
        for name in record:
            if name not in declared:
                (of_numbers if find_kind(source, name, read(name)) == "number" else of_categories).append(name)
    columns = (*of_numbers, *of_categories)
    if not columns:
        raise PipelineError("fit(): there is no column to turn into numbers")
    if shown := [name for name in columns if name in targets or name in dropped]:
        what = "a target" if shown[0] in targets else "dropped"
        raise PipelineError(f"fit(): the column {shown[0]!r} is {what}, not an input")
    blocks = [_fit_numbers(source, tuple(of_numbers), read)] if of_numbers else []
    blocks += [_fit_categories(tuple(of_categories), read)] if of_categories else []
    made = Table(to, (*blocks, *([(dropped, ("dropped",) * len(dropped), ())] if dropped else [])))
    if to in targets or (to in record and to not in made.uses):
        raise PipelineError(f"fit(): the records have a field {to!r} already: give to= another name")
    # No fields: they are no part of what the stage computes.
    object.__setattr__(made, "fitted_to", source)
    object.__setattr__(made, "found", tuple(_describe(made, name, targets, read) for name in record))
    print(made)
    return made


def _as_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def _describe(table: Table, name: str, targets: Sequence[str], read: Callable[[str], Any]) -> Found:
    """What a column became."""
    if name not in table.reads:
        return name, "target" if name in targets else "dropped" if name in table.uses else "left out", "", ""
    values, counts = read(name).tolist(), {of: len(fitted) for of, _, fitted in table.fitted_columns}
    distinct = len({str(value) for value in values if not is_missing(value)})
    kind = next(_name_kind(kind) for of, kind, _ in table.fitted_columns if of == name)
    kind += f", {counts[name]} numbers" if kind == "category" else ""
    return name, kind if distinct > 1 else f"{kind}, constant", distinct, sum(map(is_missing, values))


def _name_kind(kind: str) -> str:
    return kind if kind in ("number", "dropped") else "category"


def _fit_numbers(source: Any, columns: tuple[str, ...], read: Callable[[str], Any]) -> Block:
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    table = np.empty((len(source), len(columns)))
    for place, name in enumerate(columns):
        for row, value in enumerate(read(name).tolist()):
            try:
                table[row, place] = _read_number(value, name)
            except PipelineError as error:
                raise PipelineError(f"fit(): {source.where(row)}: {error}") from None
    empty = np.flatnonzero(np.isnan(table).all(axis=0))
    if empty.size:
        raise PipelineError(f"fit(): the column {columns[empty[0]]!r} has no value at all: drop=")
    try:
        imputer = SimpleImputer(strategy="median").fit(table)
        scaler = StandardScaler().fit(imputer.transform(table))
    except ValueError as error:  # infinite numbers
        reason = " ".join(str(error).split())
        raise PipelineError(f"fit(): {', '.join(columns)}: {reason:.300}") from error
    impute = "impute", tuple(imputer.statistics_.tolist()), ()
    scale = "scale", tuple(scaler.mean_.tolist()), tuple(scaler.scale_.tolist())
    return columns, ("number",) * len(columns), (impute, scale)


def _fit_categories(columns: tuple[str, ...], read: Callable[[str], Any]) -> Block:
    kinds, categories = [], []
    for name in columns:
        values = read(name)
        is_text = values.dtype.kind in "US" or any(isinstance(value, str) for value in values.tolist())
        kinds.append("text" if is_text else "value")
        seen = {_READ[kinds[-1]](value, name) for value in values.tolist()}
        categories.append((*sorted(seen - {None}), *([None] if None in seen else [])))
    return columns, tuple(kinds), (("one_hot", tuple(categories), "ignore"),)


def mean_std(source: Any, field: str) -> tuple[float, float]:
    """The mean and the standard deviation of a field of numbers, for `Recipe(target_scale=)`.

    Args:
        source: the source of the training records.
        field: a field of one number, or an array of numbers, in each record; NaN is left out.

    Raises:
        PipelineError: it holds no numbers, or all are the same.
    """
    values = np.asarray(source.column(field))
    if values.dtype.kind not in "biuf":
        raise PipelineError(f"mean_std(): the field {field!r} holds no numbers")
    numbers = values[~np.isnan(values.astype(np.float64))].astype(np.float64)
    numbers = numbers[numbers != -100] if values.dtype.kind in "iu" else numbers  # which takes no part as a target
    if not numbers.size or not numbers.std() > 0:
        raise PipelineError(f"mean_std(): the numbers of the field {field!r} are all the same, or there is none")
    return float(numbers.mean()), float(numbers.std())


def _read_number(value: Any, name: str) -> float:
    if is_missing(value):
        return math.nan
    try:
        return float(as_times(np.array([value]), name).astype(np.int64)[0] / 1e6 if is_date(value) else value)
    except (TypeError, ValueError, PipelineError):
        raise PipelineError(f"column {name!r} holds {value!r:.60}, which is not a number") from None


def _read_text(value: Any, name: str) -> str | None:
    if isinstance(value, str):
        return value if value.strip() else None
    return _read_value(value, name)


def _read_value(value: Any, name: str) -> str | None:
    """A category of a column of numbers or booleans, the same however it was read; None for a missing one."""
    if isinstance(value, bytes | np.ndarray | list | dict):
        raise PipelineError(f"column {name!r} holds {type(value).__name__}, which is not a category")
    if isinstance(value, str):
        if value.strip() in MISSING:
            return None
        if (word := value.strip().lower()) in ("true", "false"):
            return word
        try:
            value = float(value)
        except ValueError:
            return str(value)
    if value is None or value != value:
        return None
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if is_date(value):
        return str(value)
    return str(int(value)) if float(value).is_integer() else repr(float(value))


_READ: dict[str, Callable[[Any, str], Any]] = {"number": _read_number, "text": _read_text, "value": _read_value}
