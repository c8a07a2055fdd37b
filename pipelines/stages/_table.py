"""The stage that makes numbers of the columns of a table: imputed, scaled, encoded.

What it does was fitted by scikit-learn to the training records, and is kept as plain numbers and texts: so it is a
part of the pipeline's fingerprint, goes with the run and into artifacts, and no pickle is needed to apply it. What
scikit-learn has fitted is checked, once it is converted, against scikit-learn itself, on the records given.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipelines.errors import PipelineError, unknown_name
from pipelines.fingerprint import known_as
from pipelines.stages._sample import Array, Sample, Transform, get_value

#: Records on which a conversion is checked.
_CHECKED = 1000
#: A step of a block: its name, then what was fitted for each of its columns.
Step = tuple[Any, ...]
#: Columns, what each holds ("number", or as a category "text" or "value"), and steps.
Block = tuple[tuple[str, ...], tuple[str, ...], tuple[Step, ...]]
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

    def __call__(self, sample: Sample) -> Sample:
        made: list[float] = []
        for columns, kinds, steps in self.blocks:
            values: list[Any] = [
                _READ[kind](get_value(sample, name), name) for name, kind in zip(columns, kinds, strict=True)
            ]
            for step in steps:
                values = _APPLY[step[0]](values, columns, *step[1:])
            if any(value != value for value in values):
                raise PipelineError(f"one of the columns {', '.join(columns)} has no value, and none is imputed")
            made += values
        left = {name: value for name, value in sample.items() if name not in self.reads}
        return {**left, self.field: np.array(made, np.float32)}

    @property
    def names(self) -> tuple[str, ...]:
        """What each number is: a column, `column=category`, or `column is missing`."""
        found: list[str] = []
        for columns, _, steps in self.blocks:
            names = list(columns)
            for step in steps:
                names = _NAME[step[0]](names, *step[1:]) if step[0] in _NAME else names
            found += names
        return tuple(found)

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
    transformer: Any = None,
    *,
    target: str | Sequence[str] = (),
    numbers: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    to: str = "x",
) -> Table:
    """Fits what makes numbers of the columns of a table to its records, by scikit-learn.

    Unless a transformer is given, numbers that are missing become the column's median, numbers have mean 0 and
    variance 1, and categories are one-hot: a missing one is a category of its own where the training records have
    it, and one that they lack is all zeros.

    Args:
        source: of the *training* records alone, such as the first part of `source.split(...)`.
        transformer: a `sklearn.compose.ColumnTransformer` instead, of columns by name, fitted or not, of the steps
            SimpleImputer, StandardScaler, MinMaxScaler, MaxAbsScaler, RobustScaler, OneHotEncoder, OrdinalEncoder,
            "passthrough" and "drop", alone or in a Pipeline. One that is not fitted is left as it is.
        target: fields that are no inputs: they stay in the sample as they are.
        numbers, categories: the columns, in order. Unless one of them is given, all but the target: those of texts
            and booleans are categories.
        to: the field that is made, float32 [size].

    Returns:
        A stage; its `names` say what each number is, its `size` how many there are. The fields that are read are
        not in the samples that it makes, all others are.

    Raises:
        PipelineError: a column is missing, is no number or category, or has no value at all; a transformer has a
            step or an option that is not known here; there is a field `to` already.
        ImportError: scikit-learn is not installed.

    Examples:
        >>> train, valid = sources.csv("houses.csv", missing="nan").split(0.8, seed=0)
        >>> table = fit(train, target="price")
        >>> pipe = Pipeline(train).map(table)
    """
    others = (target,) if isinstance(target, str) else tuple(target)
    for name in others:
        if name not in (record := source[0]):
            raise PipelineError(unknown_name("fit(): the records have no target", name, list(record)))
    if transformer is None:
        parts = _choose_parts(source, others, numbers, categories)
    elif numbers is not None or categories is not None:
        raise PipelineError("fit(): a transformer has its own columns: leave numbers= and categories= out")
    else:
        parts = _list_parts(transformer)
    blocks = []
    for steps, columns in parts:
        if shown := [name for name in columns if name in others]:
            raise PipelineError(f"fit(): the column {shown[0]!r} is a target, and no input")
        blocks.append(_fit_block(source, steps, columns))
    if not blocks:
        raise PipelineError("fit(): there is no column to make numbers of")
    made = Table(to, tuple(blocks))
    if not hasattr(transformer, "transformers_"):  # nobody knows what a fitted one was fitted to
        object.__setattr__(made, "fitted_to", source)  # no field: neither in what the stage computes nor pickled
    if to in others or (to in source[0] and to not in made.reads):
        raise PipelineError(f"fit(): the records have a field {to!r} already: give to= another name")
    return made


def mean_std(source: Any, field: str) -> tuple[float, float]:
    """The mean and the standard deviation of a field of numbers, for `Recipe(target_scale=)`.

    Args:
        source: of the training records.
        field: of one number, or an array of numbers, in each record; NaN is left out.

    Raises:
        PipelineError: it holds no numbers, or all are the same.
    """
    values = np.asarray(source.column(field))
    if values.dtype.kind not in "biuf":
        raise PipelineError(f"mean_std(): the field {field!r} holds no numbers")
    known = values[~np.isnan(values.astype(np.float64))].astype(np.float64)
    known = known[known != -100] if values.dtype.kind in "iu" else known  # which takes no part as a target
    if not known.size or not known.std() > 0:
        raise PipelineError(f"mean_std(): the numbers of the field {field!r} are all the same, or there is none")
    return float(known.mean()), float(known.std())


# --- applying -----------------------------------------------------------------------------------------------


def _read_number(value: Any, name: str) -> float:
    if value is None or (isinstance(value, str) and value.strip() in _MISSING):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise PipelineError(f"column {name!r} holds {value!r:.60}, which is no number") from None


def _read_text(value: Any, name: str) -> str | None:
    """A category of a column of texts; None for a missing one."""
    if isinstance(value, str):
        return value if value.strip() else None
    return _read_value(value, name)


def _read_value(value: Any, name: str) -> str | None:
    """A category of a column of numbers or booleans, the same however it was read; None for a missing one."""
    if isinstance(value, bytes | np.ndarray | list | dict):
        raise PipelineError(f"column {name!r} holds {type(value).__name__}, which is no category")
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


def _impute(values: list[Any], columns: Sequence[str], fill: Sequence[Any], shown: Sequence[int]) -> list[Any]:
    is_missing = [value is None or value != value for value in values]
    filled = [
        fill[i] if missing else value for i, (value, missing) in enumerate(zip(values, is_missing, strict=True))
    ]
    return [*filled, *(float(is_missing[i]) for i in shown)]


def _scale(values: list[Any], columns: Sequence[str], shift: Sequence[float], by: Sequence[float]) -> list[Any]:
    return [(value - low) / each for value, low, each in zip(values, shift, by, strict=True)]


def _one_hot(values: list[Any], columns: Sequence[str], known: Sequence[Any], unknown: str) -> list[Any]:
    made: list[float] = []
    for name, value, of in zip(columns, values, known, strict=True):
        place = _find_place(name, value, of, unknown)
        made += [float(i == place) for i in range(len(of))]
    return made


def _ordinal(values: list[Any], columns: Sequence[str], known: Sequence[Any], unknown: Any) -> list[Any]:
    places = [
        _find_place(name, value, of, unknown) for name, value, of in zip(columns, values, known, strict=True)
    ]
    return [float(unknown) if place is None else float(place) for place in places]


def _find_place(name: str, value: Any, of: Sequence[Any], unknown: Any) -> int | None:
    if value in of:
        return of.index(value)
    if unknown == "error":
        raise PipelineError(f"column {name!r} holds {value!r:.60}, which the training records do not have")
    return None


_APPLY: dict[str, Callable[..., list[Any]]] = {
    "impute": _impute,
    "scale": _scale,
    "one_hot": _one_hot,
    "ordinal": _ordinal,
}
_NAME: dict[str, Callable[..., list[str]]] = {
    "impute": lambda names, fill, shown: [*names, *(f"{names[i]} is missing" for i in shown)],
    "one_hot": lambda names, known, unknown: [
        f"{name}={'missing' if each is None else each}"
        for name, of in zip(names, known, strict=True)
        for each in of
    ],
}


# --- fitting ------------------------------------------------------------------------------------------------


def _choose_parts(
    source: Any, others: Sequence[str], numbers: Sequence[str] | None, categories: Sequence[str] | None
) -> list[tuple[list[Any], tuple[str, ...]]]:
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    if numbers is None and categories is None:
        left = [name for name in source[0] if name not in others]
        kinds = {name: source.column(name).dtype.kind for name in left}
        numbers = [name for name in left if kinds[name] in "iuf"]
        categories = [name for name in left if kinds[name] not in "iuf"]
    parts: list[tuple[list[Any], tuple[str, ...]]] = []
    if numbers:
        parts.append(([SimpleImputer(strategy="median"), StandardScaler()], tuple(numbers)))
    if categories:
        parts.append(([OneHotEncoder(handle_unknown="ignore")], tuple(categories)))
    return parts


def _list_parts(transformer: Any) -> list[tuple[list[Any], tuple[str, ...]]]:
    """The steps and columns of a ColumnTransformer's parts; of a fitted one, those that are fitted."""
    from sklearn.compose import ColumnTransformer

    if not isinstance(transformer, ColumnTransformer):
        raise PipelineError(f"fit(): a transformer is a ColumnTransformer, got {type(transformer).__name__}")
    parts = []
    for name, steps, columns in getattr(transformer, "transformers_", transformer.transformers):
        if isinstance(steps, str) and steps == "drop":
            continue
        names = [columns] if isinstance(columns, str) else list(columns)
        fields = list(getattr(transformer, "feature_names_in_", ()))
        names = [fields[each] if isinstance(each, int) and fields else each for each in names]
        if not all(isinstance(each, str) for each in names):
            raise PipelineError(f"fit(): the part {name!r} of the transformer must have its columns by name")
        if names:
            parts.append((_flatten(steps), tuple(map(str, names))))
    if not hasattr(transformer, "transformers_") and transformer.remainder != "drop":
        raise PipelineError("fit(): give all columns by name: remainder= is known of a fitted transformer alone")
    if getattr(transformer, "transformer_weights", None):
        raise PipelineError("fit(): transformer_weights are not known here")
    return parts


def _flatten(steps: Any) -> list[Any]:
    from sklearn.pipeline import Pipeline

    if isinstance(steps, Pipeline):
        return [each for _, step in steps.steps for each in _flatten(step)]
    passes = (
        type(steps).__name__ == "FunctionTransformer" and steps.func is None
    )  # "passthrough", once it is fitted
    return [] if steps is None or passes or (isinstance(steps, str) and steps == "passthrough") else [steps]


def _fit_block(source: Any, steps: Iterable[Any], columns: tuple[str, ...]) -> Block:
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    def is_fitted(step: Any) -> bool:
        try:
            check_is_fitted(step)
        except NotFittedError:
            return False
        return True

    steps = list(steps)
    has_categories = any(type(step).__name__ in ("OneHotEncoder", "OrdinalEncoder") for step in steps)
    kinds = tuple(_find_kind(source, name) if has_categories else "number" for name in columns)
    wanted: Any = _read_columns(source, columns, kinds, as_they_are=any(map(is_fitted, steps)))
    converted = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        for step in steps:
            try:
                fitted = step if is_fitted(step) else clone(step).fit(wanted)
                converted.append(_convert(fitted, columns))
                wanted = fitted.transform(wanted)
            except (ValueError, TypeError) as error:  # of scikit-learn
                reason = " ".join(str(error).split())
                raise PipelineError(
                    f"fit(): {type(step).__name__} of {', '.join(columns)}: {reason:.300}"
                ) from error
    wanted = wanted.toarray() if hasattr(wanted, "toarray") else np.asarray(wanted, np.float64)
    block = columns, kinds, tuple(converted)
    _check(block, source, wanted)
    return block


def _find_kind(source: Any, name: str) -> str:
    """Whether a column of categories holds texts, or values of another type."""
    values = source.column(name)
    is_text = values.dtype.kind in "US" or any(isinstance(value, str) for value in values[:1000].tolist())
    return "text" if is_text else "value"


def _read_columns(source: Any, columns: Sequence[str], kinds: Sequence[str], *, as_they_are: bool) -> Array:
    """The columns for scikit-learn, [n, columns]: numbers, or categories, as texts unless they are as they are."""
    rows = [source.column(name).tolist() for name in columns]
    if "number" in kinds:
        table = [[_read_number(value, name) for value in of] for name, of in zip(columns, rows, strict=True)]
        return np.array(table, np.float64).T
    made = np.empty((len(rows[0]), len(columns)), object)
    for place, (name, kind, of) in enumerate(zip(columns, kinds, rows, strict=True)):
        read = [_READ[kind](value, name) for value in of]
        made[:, place] = [
            math.nan if each is None else value if as_they_are else each
            for value, each in zip(of, read, strict=True)
        ]
    return made


def _check(block: Block, source: Any, wanted: Array) -> None:
    """Raises for a block that gives other numbers than scikit-learn."""
    made = Table("x", (block,))
    columns = {name: source.column(name) for name in block[0]}
    for row in range(0, len(wanted), max(1, len(wanted) // _CHECKED)):
        own = made({name: values[row] for name, values in columns.items()})["x"]
        if own.shape != wanted[row].shape or not np.allclose(
            own, wanted[row], rtol=1e-5, atol=1e-6, equal_nan=True
        ):
            raise PipelineError(
                f"fit(): the columns {', '.join(block[0])} are not made into numbers as by scikit-learn: record "
                f"{row} gives {own[:8]}, and {wanted[row][:8]} there"
            )


def _convert(step: Any, columns: Sequence[str]) -> Step:
    """A fitted step of scikit-learn as plain values.

    Raises:
        PipelineError: it is none that is known, or has an option that is not.
    """
    name = type(step).__name__
    if not type(step).__module__.startswith("sklearn.") or name not in _CONVERT:
        raise PipelineError(f"fit(): the step {name} is not known here ({', '.join(_CONVERT)} are)")
    return _CONVERT[name](step, columns)


def _convert_imputer(step: Any, columns: Sequence[str]) -> Step:
    fill = [_to_plain(value) for value in step.statistics_]
    if any(value is None or value != value for value in fill):
        where = next(i for i, value in enumerate(fill) if value is None or value != value)
        raise PipelineError(f"fit(): the column {columns[where]!r} has no value at all: leave it out")
    if not (step.missing_values is None or step.missing_values != step.missing_values):
        raise PipelineError(f"fit(): SimpleImputer(missing_values={step.missing_values!r}) is not known here")
    shown = () if step.indicator_ is None else tuple(map(int, step.indicator_.features_))
    return "impute", tuple(fill), shown


def _convert_affine(shift: str | None, by: str) -> Callable[[Any, Sequence[str]], Step]:
    def convert(step: Any, columns: Sequence[str]) -> Step:
        low = getattr(step, shift) if shift else None
        scale = getattr(step, by)
        lows = [0.0] * step.n_features_in_ if low is None else [float(each) for each in low]
        scales = [1.0] * step.n_features_in_ if scale is None else [float(each) for each in scale]
        return "scale", tuple(lows), tuple(scales)

    return convert


def _convert_min_max(step: Any, columns: Sequence[str]) -> Step:
    if step.clip:
        raise PipelineError("fit(): MinMaxScaler(clip=True) is not known here")
    by = 1 / np.asarray(step.scale_, np.float64)  # x * scale + min is (x - (-min / scale)) / (1 / scale)
    return "scale", tuple(map(float, -step.min_ * by)), tuple(map(float, by))


def _convert_categories(step: Any) -> tuple[tuple[str | None, ...], ...]:
    return tuple(
        tuple(_READ["text" if isinstance(value, str) else "value"](value, "") for value in of.tolist())
        for of in step.categories_
    )


def _convert_one_hot(step: Any, columns: Sequence[str]) -> Step:
    if step.drop is not None or step.min_frequency is not None or step.max_categories is not None:
        raise PipelineError("fit(): drop=, min_frequency=, max_categories= of OneHotEncoder are not known here")
    if step.handle_unknown not in ("ignore", "error"):
        raise PipelineError(f"fit(): OneHotEncoder(handle_unknown={step.handle_unknown!r}) is not known here")
    return "one_hot", _convert_categories(step), step.handle_unknown


def _convert_ordinal(step: Any, columns: Sequence[str]) -> Step:
    if step.min_frequency is not None or step.max_categories is not None:
        raise PipelineError("fit(): min_frequency=, max_categories= of OrdinalEncoder are not known here")
    known = _convert_categories(step)
    if any(None in of for of in known):
        raise PipelineError("fit(): impute missing categories before an OrdinalEncoder")
    return "ordinal", known, "error" if step.handle_unknown == "error" else float(step.unknown_value)


_CONVERT: dict[str, Callable[[Any, Sequence[str]], Step]] = {
    "SimpleImputer": _convert_imputer,
    "StandardScaler": _convert_affine("mean_", "scale_"),
    "RobustScaler": _convert_affine("center_", "scale_"),
    "MaxAbsScaler": _convert_affine(None, "scale_"),
    "MinMaxScaler": _convert_min_max,
    "OneHotEncoder": _convert_one_hot,
    "OrdinalEncoder": _convert_ordinal,
}


def _to_plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
