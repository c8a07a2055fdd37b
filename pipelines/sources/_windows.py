"""Source of windows over a time series: some steps in a row, and those after them that are to be predicted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._arrays import Arrays, arrays
from pipelines.sources._base import Source
from pipelines.sources._files import check_names
from pipelines.sources._origin import digest_indices


@known_as("pipelines.sources.windows")
class Windows(Source):
    """See `windows`.

    Attributes:
        steps: columns `past` [steps, inputs] and `future` [steps] or [steps, targets].
    """

    kind = "windows"
    is_fork_safe = True

    def __init__(self, steps: Arrays, length: int, horizon: int, starts: npt.NDArray[np.int64]) -> None:
        self.steps, self.length, self.horizon, self._starts = steps, length, horizon, starts

    def __len__(self) -> int:
        return len(self._starts)

    def _read(self, index: int) -> dict[str, Any]:
        start = int(self._starts[index])
        middle, end = start + self.length, start + self.length + self.horizon
        past: Any = self.steps.columns["past"]
        future: Any = self.steps.columns["future"]
        record = {"x": np.array(past[start:middle]), "target": np.array(future[middle:end])}
        if not all(np.isfinite(values).all() for values in record.values()):
            raise SampleError(index, self.where(index), "a value of the window is missing or infinite")
        return record

    def where(self, index: int) -> str:
        start = int(self._starts[index])
        return f"windows: steps {start} to {start + self.length + self.horizon - 1}"

    def identity(self) -> Any:
        how = [self.length, self.horizon, digest_indices(self._starts)]
        return {"source": self._describe_class(), "of": self.steps.identity(), "windows": how}


def windows(
    table: Source,
    length: int,
    horizon: int = 1,
    *,
    stride: int = 1,
    inputs: Sequence[str],
    target: str | Sequence[str],
    series: str | None = None,
) -> Windows:
    """Makes a source of the windows over a table whose records are steps in time, in their order.

    Split the table by time *first*, and make windows of each part: windows of one part that are split at random
    have most of their steps in common.

    Args:
        table: of the steps, one in each record, such as `sources.csv(...)` or a part of its `split(by=...)`.
        length: steps of the past that a window has.
        horizon: steps after them that are to be predicted.
        stride: steps from the beginning of a window to that of the next one.
        inputs: fields of numbers that the past is of.
        target: field of numbers, or several, that the future is of; it may be among the inputs, too.
        series: field that tells several series apart, whose records each lie together: no window goes across.

    Returns:
        A source of records `x`, float32 [length, inputs], and `target`, float32 [horizon], or of several
        [horizon, targets]. The fields are read once, now, and shared by all processes as those of `arrays` are.
        A window with a missing value is an error when it is read; `Pipeline(on_error="skip")` leaves it out.

    Raises:
        PipelineError: a number is below 1, a field is missing or holds no numbers, or no series is long enough.

    Examples:
        >>> past, later = sources.csv("load.csv", missing="nan").split(0.8, by="hour")
        >>> train = windows(past, 48, 24, inputs=["load", "temperature"], target="load")
    """
    for name, value in (("length", length), ("horizon", horizon), ("stride", stride)):
        check_integer(f"windows(): {name}", value, 1)
    past = _read_columns(table, check_names("windows", inputs, "inputs must name each field"))
    wanted = check_names("windows", target, "target must name each field")
    future = _read_columns(table, wanted)
    starts = _find_starts(table, length + horizon, stride, series)
    is_one = wanted is not None and len(wanted) == 1
    return Windows(arrays(past=past, future=future[:, 0].copy() if is_one else future), length, horizon, starts)


def _read_columns(table: Source, names: Sequence[str] | None) -> npt.NDArray[np.float32]:
    """Fields of all steps, float32 [steps, fields].

    Raises:
        PipelineError: none is named, or one holds no numbers.
    """
    if not names:
        raise PipelineError("windows() needs the names of inputs= and target=")
    columns = []
    for name in names:
        values = table.column(name)
        if values.dtype.kind not in "biuf" or values.ndim != 1:
            raise PipelineError(f"windows(): the field {name!r} does not hold one number in each record")
        columns.append(values.astype(np.float32))
    return np.stack(columns, axis=1)


def _find_starts(table: Source, steps: int, stride: int, series: str | None) -> npt.NDArray[np.int64]:
    """Where windows of so many steps begin, int64 [windows]."""
    bounds = [0, len(table)]
    if series is not None:
        values = table.column(series)
        changes = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
        bounds = [0, *changes, len(table)]
        if len(changes) + 1 > len(set(values.tolist())):
            raise PipelineError(
                f"windows(): records of a series, by {series!r}, must lie together: sort the table"
            )
    parts = [np.arange(first, last - steps + 1, stride) for first, last in itertools.pairwise(bounds)]
    starts = np.concatenate(parts).astype(np.int64)
    if not len(starts):
        raise PipelineError(f"windows(): no series has {steps} records, as a window and what follows need")
    return starts
