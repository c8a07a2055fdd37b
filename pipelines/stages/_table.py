"""The stage that makes numbers of the columns of a table: imputed, scaled, encoded.

What was fitted to the training records is kept as plain numbers and texts: so it is a part of the pipeline's
fingerprint, goes with the run and into artifacts, and no pickle is needed to apply it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipelines.errors import PipelineError, unknown_name
from pipelines.fingerprint import known_as
from pipelines.stages._sample import Sample, Transform, get_value

#: Columns, what each holds ("number", or as a category "text" or "value"), and what was fitted to them: of numbers
#: ("impute", medians, ()) and ("scale", means, deviations), of categories ("one_hot", those of each, "ignore").
Block = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[Any, ...], ...]]
_NUMBERS, _CATEGORIES = ["impute", "scale"], ["one_hot"]
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
#: What is no value in a column of numbers.
_MISSING = frozenset(("", "NA", "N/A", "n/a", "#N/A", "NULL", "null"))


@known_as("pipelines.stages.fit")
@dataclass(frozen=True)
class Table(Transform):
    """See `fit`.

    Attributes:
        field: that is made, float32 [size].
        blocks: columns that are made into numbers in the same way; see `Block`.
        fitted_to: the source of the records to which it was fitted, in the process that did so.
    """

    fitted_to: ClassVar[Any] = None

    field: str
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if any([step[0] for step in steps] not in (_NUMBERS, _CATEGORIES) for _, _, steps in self.blocks):
            raise PipelineError("another version of ray-ensemble fitted this table: fit it again")

    def __call__(self, sample: Sample) -> Sample:
        made: list[float] = []
        for columns, kinds, steps in self.blocks:
            values = [
                _READ[kind](get_value(sample, name), name) for name, kind in zip(columns, kinds, strict=True)
            ]
            if len(steps) == 2:
                fitted = zip(values, steps[0][1], *steps[1][1:], strict=True)
                made += [((fill if value != value else value) - mean) / std for value, fill, mean, std in fitted]
            else:
                for value, categories in zip(values, steps[0][1], strict=True):
                    made += [float(value == category) for category in categories]
        others = {name: value for name, value in sample.items() if name not in self.reads}
        return {**others, self.field: np.array(made, np.float32)}

    @property
    def names(self) -> tuple[str, ...]:
        """What each number is: a column, or `column=category`."""
        labels: list[str] = []
        for columns, _, steps in self.blocks:
            if len(steps) == 2:
                labels += columns
                continue
            for name, categories in zip(columns, steps[0][1], strict=True):
                labels += [f"{name}={'missing' if category is None else category}" for category in categories]
        return tuple(labels)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return len(self.names)

    @functools.cached_property
    def reads(self) -> frozenset[str]:
        """The columns that numbers are made of."""
        return frozenset(name for columns, _, _ in self.blocks for name in columns)

    @property
    def texts(self) -> frozenset[str]:
        """Those that were texts in the training records, whatever they look like in others."""
        pairs = (pair for columns, kinds, _ in self.blocks for pair in zip(columns, kinds, strict=True))
        return frozenset(name for name, kind in pairs if kind == "text")


def fit(
    source: Any,
    *,
    target: str | Sequence[str] = (),
    numbers: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    to: str = "x",
) -> Table:
    """Fits a stage that turns the columns of a table into numbers.

    Numbers that are missing become the column's median, numbers have mean 0 and variance 1, as scikit-learn
    computes them, and categories are one-hot: a missing one is a category of its own where the training records
    have it, and one that they lack is all zeros.

    Args:
        source: the source of the *training* records alone, such as the first part of `source.split(...)`.
        target: fields that are no inputs: they stay in the sample as they are.
        numbers, categories: the columns, in order. By default all except the target: those of texts
            and booleans are categories.
        to: the field that is made, float32 [size].

    Returns:
        A stage; its `names` say what each number is, its `size` how many there are. The fields that are read are
        not in the samples that it makes, all others are.

    Raises:
        PipelineError: a column is missing, is no number or category, or has no value at all; there is a field `to`
            already.
        ImportError: scikit-learn is not installed.

    Examples:
        >>> train, valid = sources.csv("houses.csv", missing="nan").split(0.8, seed=0)
        >>> table = fit(train, target="price")
        >>> pipe = Pipeline(train).map(table)
    """
    record, targets = source[0], (target,) if isinstance(target, str) else tuple(target)
    for name in targets:
        if name not in record:
            raise PipelineError(unknown_name("fit(): the records have no target", name, list(record)))
    if numbers is None and categories is None:
        inputs = {name: source.column(name).dtype.kind for name in record if name not in targets}
        numbers = [name for name, kind in inputs.items() if kind in "iuf"]
        categories = [name for name, kind in inputs.items() if kind not in "iuf"]
    columns = (*(numbers or ()), *(categories or ()))
    if not columns:
        raise PipelineError("fit(): there is no column to turn into numbers")
    if shown := [name for name in columns if name in targets]:
        raise PipelineError(f"fit(): the column {shown[0]!r} is a target, not an input")
    blocks = [_fit_numbers(source, tuple(numbers))] if numbers else []
    blocks += [_fit_categories(source, tuple(categories))] if categories else []
    made = Table(to, tuple(blocks))
    object.__setattr__(made, "fitted_to", source)  # no field: neither in what the stage computes nor pickled
    if to in targets or (to in record and to not in made.reads):
        raise PipelineError(f"fit(): the records have a field {to!r} already: give to= another name")
    return made


def _fit_numbers(source: Any, columns: tuple[str, ...]) -> Block:
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import StandardScaler

    rows = [[_read_number(value, name) for value in source.column(name).tolist()] for name in columns]
    table = np.array(rows, np.float64).T
    empty = np.flatnonzero(np.isnan(table).all(axis=0))
    if empty.size:
        raise PipelineError(f"fit(): the column {columns[empty[0]]!r} has no value at all: leave it out")
    try:
        imputer = SimpleImputer(strategy="median").fit(table)
        scaler = StandardScaler().fit(imputer.transform(table))
    except ValueError as error:  # infinite numbers
        reason = " ".join(str(error).split())
        raise PipelineError(f"fit(): {', '.join(columns)}: {reason:.300}") from error
    impute = "impute", tuple(imputer.statistics_.tolist()), ()
    scale = "scale", tuple(scaler.mean_.tolist()), tuple(scaler.scale_.tolist())
    return columns, ("number",) * len(columns), (impute, scale)


def _fit_categories(source: Any, columns: tuple[str, ...]) -> Block:
    kinds, categories = [], []
    for name in columns:
        values = source.column(name)
        is_text = values.dtype.kind in "US" or any(isinstance(value, str) for value in values[:1000].tolist())
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
    if value is None or (isinstance(value, str) and value.strip() in _MISSING):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
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
        if value.strip() in _MISSING:
            return None
        if value.strip() in (*_TRUE, *_FALSE):
            return "true" if value.strip() in _TRUE else "false"
        try:
            value = float(value)
        except ValueError:
            return str(value)
    if value is None or value != value:
        return None
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


_READ: dict[str, Callable[[Any, str], Any]] = {"number": _read_number, "text": _read_text, "value": _read_value}
