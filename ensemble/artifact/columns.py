"""Lays out predictions as columns of a table, by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ensemble.combine.conformal import Conformal, ConformalInterval
from ensemble.spec.task import Task

if TYPE_CHECKING:
    import pyarrow

Array = npt.NDArray[Any]


def make_columns(
    index: Array,
    outputs: Mapping[str, Array],
    task: Task,
    classes: Sequence[str],
    conformal: Sequence[Conformal] = (),
) -> pyarrow.Table:
    """A table of predictions with a row for each sample.

    Args:
        index: int64 [b].
        outputs: `values` [b, ...], laid out by the task; `decision`, of a model that has thresholds; any other
            name is an uncertainty [b, ...].
        classes: names of the classes or labels; others than there are columns of values are not used.
        conformal: what predicts sets and intervals from the values.

    Returns:
        `index`, and by task:

        - classification: `class`, `class_name` where names are known, `probabilities`.
        - multilabel: `labels` (numbers of those of at least 0.5), `label_names` where known, `probabilities`.
          Classes and labels are those of the outputs' `decision`, where the model decides by thresholds.
        - regression: `prediction`.  gaussian: `mean`, `variance`.  quantiles: `quantiles`.  free: `values`.

        What has more axes than one row is a list, or a list of lists. Then the uncertainties, by name, and
        conformal predictions: `set_thr`, `set_aps` (numbers of the classes in it) and, where known,
        `set_thr_names` ..., or `low`, `high`.
        Where values are NaN, classes, labels and sets are null, and uncertainties NaN.
    """
    import pyarrow

    values = outputs["values"]
    is_named = values.ndim > 1 and len(classes) == values.shape[-1]
    columns: dict[str, Any] = {"index": pyarrow.array(index)}
    lost = find_lost(values)
    if task.kind == "classification":
        best, unknown = outputs.get("decision", values.argmax(axis=-1)), np.any(lost, axis=-1)
        columns["class"] = to_arrow(best, unknown)
        if is_named:
            columns["class_name"] = _name(best, unknown, classes)
        columns["probabilities"] = to_arrow(values)
    elif task.kind == "multilabel":
        decided = outputs.get("decision", values >= 0.5)
        chosen = [None if bad.any() else np.flatnonzero(row) for row, bad in zip(decided, lost, strict=True)]
        columns["labels"] = pyarrow.array(chosen, pyarrow.list_(pyarrow.int64()))
        if is_named:
            names = [None if row is None else [classes[int(label)] for label in row] for row in chosen]
            columns["label_names"] = pyarrow.array(names, pyarrow.list_(pyarrow.string()))
        columns["probabilities"] = to_arrow(values)
    elif task.kind == "gaussian":
        columns["mean"], columns["variance"] = to_arrow(values[..., 0]), to_arrow(values[..., 1])
    else:
        name = {"regression": "prediction", "quantiles": "quantiles"}.get(task.kind, "values")
        columns[name] = to_arrow(values)
    for name, value in outputs.items():
        if name not in ("values", "decision"):
            columns[name] = to_arrow(np.where(lost.reshape(len(value), -1).any(axis=1), np.nan, value))
    for method in conformal:
        columns |= _predict_conformal(method, values, classes if is_named else ())
    return pyarrow.table(columns)


def _predict_conformal(conformal: Conformal, values: Array, classes: Sequence[str]) -> dict[str, Any]:
    """Columns of sets of classes, where a sample has one position and one label, or of the bounds of intervals."""
    import pyarrow

    if isinstance(conformal, ConformalInterval):
        low, high = conformal.predict(values)
        return {"low": to_arrow(low), "high": to_arrow(high)}
    inside = conformal.predict(values)
    if inside.ndim != 2:
        return {}
    lost: Array = np.any(find_lost(values), axis=-1)
    sets = [None if bad else np.flatnonzero(row) for row, bad in zip(inside, lost, strict=True)]
    made = {f"set_{conformal.method}": pyarrow.array(sets, pyarrow.list_(pyarrow.int64()))}
    if classes:
        names = [None if one is None else [classes[int(number)] for number in one] for one in sets]
        made[f"set_{conformal.method}_names"] = pyarrow.array(names, pyarrow.list_(pyarrow.string()))
    return made


def find_lost(values: Array) -> Array:
    """Which numbers are NaN, of the shape of the values; integers never are."""
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)


def _name(best: Array, unknown: Array, classes: Sequence[str]) -> Any:
    import pyarrow

    codes = pyarrow.array(best.reshape(-1), mask=unknown.reshape(-1))
    return _fold(pyarrow.array(list(classes), pyarrow.string()).take(codes), best.shape)


def to_arrow(values: Array, unknown: Array | None = None) -> Any:
    """An array [b, ...] as a column of b numbers, or of b lists of equal lengths; null where it is `unknown`."""
    import pyarrow

    flat = np.ascontiguousarray(values).reshape(-1)
    return _fold(pyarrow.array(flat, mask=None if unknown is None else unknown.reshape(-1)), values.shape)


def loosen(table: pyarrow.Table, positions: int) -> pyarrow.Table:
    """A table whose lists of positions, along so many axes, may be longer or shorter in that of another batch."""
    import pyarrow

    def change(kind: Any, axes: int) -> Any:
        is_fixed = axes and pyarrow.types.is_fixed_size_list(kind)
        return pyarrow.list_(change(kind.value_type, axes - 1)) if is_fixed else kind

    return table.cast(pyarrow.schema([(column.name, change(column.type, positions)) for column in table.schema]))


def _fold(column: Any, shape: Sequence[int]) -> Any:
    """A column of b * ... numbers as one of b lists of equal lengths."""
    import pyarrow

    for length in reversed(shape[1:]):
        column = pyarrow.FixedSizeListArray.from_arrays(column, length)
    return column
