"""Source of windows over a time series: some steps in a row, and those after them that are to be predicted."""

from __future__ import annotations

import datetime
import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._arrays import Arrays, arrays
from pipelines.sources._base import Source, Subset
from pipelines.sources._files import check_names
from pipelines.sources._origin import Origin, digest_indices, share_steps

#: A jump to another series goes so many times as far as nearly all steps, and the medians of so many steps on both
#: sides differ by half of that. Of few steps nobody can say.
_FAR, _NEAR, _FEW = 8, 9, 30
#: Where steps in time are regular, nearly all are at most so many times the median, and a gap is as much longer.
_REGULAR = 1.5


@known_as("pipelines.sources.windows")
class Windows(Source):
    """See `windows`.

    Attributes:
        steps: columns `past` [steps, inputs] and `future` [steps] or [steps, targets].
    """

    kind = "windows"
    is_fork_safe = True

    def __init__(
        self, steps: Arrays, length: int, horizon: int, starts: npt.NDArray[np.int64], table: Origin | None = None
    ) -> None:
        self.steps, self.length, self.horizon, self._starts = steps, length, horizon, starts
        self._table = table  # where the steps are from, while the process lives that made the windows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

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

    def find_origin(self) -> Origin:
        own = super().find_origin()
        if self._table is None:
            return own
        return replace(own, indices=self._starts, steps=self._table, width=self.length + self.horizon)

    def _check_parts(self, parts: Sequence[Subset]) -> None:
        if any(share_steps(one, other) for one, other in itertools.combinations(parts, 2)):
            raise PipelineError(
                "windows that overlap would be in several parts, and tell one part what is in another: split the "
                "table by time first, such as table.split(0.8, by='hour'), and make windows of each part; divide "
                "by series (group=); or give stride= of at least length + horizon "
                f"({self.length + self.horizon})"
            )

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
    time: str | None = None,
) -> Windows:
    """Makes a source of the windows over a table whose records are steps in time, in their order.

    Split the table by time *first*, and make windows of each part: a split of windows that have steps in common is
    refused. No window goes across a gap in time, of which a warning tells.

    Args:
        table: of the steps, one in each record, such as `sources.csv(...)` or a part of its `split(by=...)`.
        length: steps of the past that a window has.
        horizon: steps after them that are to be predicted.
        stride: steps from the beginning of a window to that of the next one.
        inputs: fields of numbers that the past is of.
        target: field of numbers, or several, that the future is of; it may be among the inputs, too.
        series: field that tells several series apart, whose records each lie together: no window goes across.
        time: field of times, numbers or dates, that ascend within a series. Unless it is given: the field by which
            the table was split, or its only one of dates. Only among regular steps there are gaps.

    Returns:
        A source of records `x`, float32 [length, inputs], and `target`, float32 [horizon], or of several
        [horizon, targets]. The fields are read once, now, and shared by all processes as those of `arrays` are.
        A window with a missing value is an error when it is read; `Pipeline(on_error="skip")` leaves it out.

    Raises:
        PipelineError: a number is below 1, a field is missing or holds no numbers, time runs backwards, or no
            series is long enough.

    Examples:
        >>> past, later = sources.csv("load.csv", missing="nan").split(0.8, by="hour")
        >>> train = windows(past, 48, 24, inputs=["load", "temperature"], target="load")
    """
    for name, value in (("length", length), ("horizon", horizon), ("stride", stride)):
        check_integer(f"windows(): {name}", value, 1)
    past = _read_columns(table, check_names("windows", inputs, "inputs must name each field"))
    wanted = check_names("windows", target, "target must name each field")
    future = _read_columns(table, wanted)
    starts = _find_starts(table, length + horizon, stride, series, _read_times(table, time), future)
    is_one = wanted is not None and len(wanted) == 1
    steps = arrays(past=past, future=future[:, 0].copy() if is_one else future)
    return Windows(steps, length, horizon, starts, table.find_origin())


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


def _find_starts(
    table: Source,
    steps: int,
    stride: int,
    series: str | None,
    times: tuple[str, npt.NDArray[Any]] | None,
    values: npt.NDArray[Any],
) -> npt.NDArray[np.int64]:
    """Where windows of so many steps begin, int64 [windows]: none goes across series, gaps, or rows left out."""
    is_end = np.zeros(len(table) - 1, bool)  # whether a series ends after the row
    if series is not None:
        names = table.column(series)
        is_end = names[1:] != names[:-1]
        if int(is_end.sum()) + 1 > len(set(names.tolist())):
            raise PipelineError(
                f"windows(): records of a series, by {series!r}, must lie together: sort the table"
            )
    rows = table.find_origin().indices
    if not isinstance(rows, range) and (least := np.diff(rows).min(initial=1)) > 0:
        is_end = is_end | (np.diff(rows) > least)  # a split left out the rows between
    if times is not None and not is_end.all():
        is_end = is_end | _find_gaps(table, *times, is_end)
    if series is None:
        _warn_of_series(table, is_end, values)
    bounds = [0, *(np.flatnonzero(is_end) + 1).tolist(), len(table)]
    parts = [np.arange(first, last - steps + 1, stride) for first, last in itertools.pairwise(bounds)]
    starts = np.concatenate(parts).astype(np.int64)
    if not len(starts):
        raise PipelineError(
            f"windows(): no series has {steps} records without a gap, as a window and what follows need; split "
            "the table by time"
        )
    return starts


def _read_times(table: Source, name: str | None) -> tuple[str, npt.NDArray[Any]] | None:
    """The field of times: the one named, that by which the table was split, or the only one of dates, if any."""
    dates = [field for field, value in table[0].items() if _is_date(value)]
    name = name or getattr(table, "ordered_by", None) or (dates[0] if len(dates) == 1 else None)
    if name is None:
        return None
    times = table.column(name)
    try:
        return name, times if times.dtype.kind in "biufmM" else times.astype("datetime64[us]")
    except (ValueError, TypeError) as error:
        raise PipelineError(
            f"windows(): the field {name!r} has {times[0]!r:.60}: times are numbers, numpy datetimes, or texts "
            "such as 2024-01-31T12:00"
        ) from error


def _is_date(value: Any) -> bool:
    return isinstance(value, np.datetime64 | datetime.date) or (
        isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value) is not None
    )


def _find_gaps(
    table: Source, name: str, times: npt.NDArray[Any], is_end: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Whether there is a gap in time after each row; warns of it.

    Raises:
        PipelineError: time runs backwards within a series.
    """
    passed = np.diff(times.astype(np.int64) if times.dtype.kind in "biu" else times)
    if passed.dtype.kind == "m":
        passed = passed.astype("timedelta64[us]").astype(np.int64)
    back = np.flatnonzero((passed < 0) & ~is_end) + 1
    if len(back):
        raise PipelineError(
            f"windows(): time runs backwards at {table.where(int(back[0]))}, and {len(back) - 1:,} times more: "
            f"{name!r} is {times[back[0]]} after {times[back[0] - 1]}; sort the table by it, or where several "
            "series lie one after the other give series= the field that tells them apart"
        )
    # Months, working days and jitter are no gaps: what counts is a step far longer than nearly all others.
    usual, median = (np.percentile(passed[~is_end], part, method="lower") for part in (95, 50))
    is_gap: npt.NDArray[np.bool_] = (passed > _REGULAR * usual) & ~is_end & (0 < usual <= _REGULAR * median)
    if len(rows := np.flatnonzero(is_gap) + 1):
        warnings.warn(
            f"windows(): {len(rows):,} gaps in {name!r}, the first from {times[rows[0] - 1]} to {times[rows[0]]} "
            f"({table.where(int(rows[0]))}): no window goes across",
            stacklevel=4,
        )
    return is_gap


def _warn_of_series(table: Source, is_end: npt.NDArray[np.bool_], values: npt.NDArray[Any]) -> None:
    """Warn where another series seems to begin: a value jumps and stays there."""
    if len(values) <= _FEW:
        return
    steps = np.abs(np.diff(values, axis=0))
    with np.errstate(invalid="ignore"):
        usual = np.nanpercentile(steps, 99, axis=0, method="lower")
        jumps = np.argwhere((steps > _FAR * usual) & (usual > 0) & ~is_end[:, None])
    for row, column in jumps[:1000]:
        before, after = values[max(0, row - _NEAR) : row + 1, column], values[row + 1 : row + 2 + _NEAR, column]
        if abs(np.median(after) - np.median(before)) > _FAR / 2 * usual[column]:
            warnings.warn(
                f"windows() go across a jump that looks like another series, from {before[-1]:.6g} to "
                f"{after[0]:.6g} ({table.where(int(row) + 1)}): if several series lie one after the other, "
                "give series=",
                stacklevel=4,
            )
            return
