"""Source of windows over a time series: some steps in a row, and those after them that are to be predicted."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.samples.exact import convert
from pipelines.sources._arrays import Arrays, arrays
from pipelines.sources._base import Source
from pipelines.sources._files import check_names
from pipelines.sources._origin import Origin, check_apart, digest_indices
from pipelines.sources._subset import Subset
from pipelines.stages._column_kinds import as_times, is_date

#: Where steps in time are regular, nearly all are at most so many times the median, and a gap is as much longer.
#: Where they are irregular, a gap is so many times as long as nearly all.
_REGULAR, _IRREGULAR = 1.5, 10


@known_as("pipelines.sources.windows", version=2)
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
        check_apart(
            parts,
            "overlapping windows would be in several parts, so that one part contains steps of another: split the "
            "table by time first, such as table.split(0.8, by='hour'), and make windows of each part; divide by "
            f"series (group=); or give stride= of at least length + horizon ({self.length + self.horizon})",
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
    gaps: bool = True,
) -> Windows:
    """Makes a source of the windows over a table whose records are steps in time, in their order.

    Split the table by time *first*, and make windows of each part: a split of windows that have steps in common is
    refused. No window goes across a gap in time. Warnings tell of gaps, and of series that are too short.

    Args:
        table: the steps, one in each record, such as `sources.csv(...)` or a part of its `split(by=...)`.
        length: steps of the past that a window has.
        horizon: steps after them that are to be predicted.
        stride: steps from the beginning of a window to that of the next one.
        inputs: fields of numbers that the past is of.
        target: field of numbers, or several, that the future is of; it may be among the inputs, too.
        series: field that tells several series apart, whose records each lie together: no window goes across.
        time: field of times, numbers or dates, that ascend within a series. Unless it is given: the field by which
            the table was split, or its only one of dates, and it tells of gaps only where its steps are regular.
            With irregular steps, only those far longer than nearly all others are gaps. A field that counts is
            not taken for one; a warning tells if it has gaps.
        gaps: whether no window goes across a gap in time; False: steps may be as far apart as they are. Rows that
            a split left out are gaps in any case.

    Returns:
        A source of records `x` [length, inputs] and `target` [horizon], or of several [horizon, targets], in the
        dtype of their fields, such as float64 of a CSV file, or the smallest that holds them all: subtract what is
        large, then `stages.cast` them. The fields are read once, now, and shared by all processes as those of
        `arrays` are. A window with a missing value is an error when it is read; `Pipeline(on_error="skip")` leaves
        it out.

    Raises:
        PipelineError: a number is below 1, a field is missing or holds no numbers, no dtype holds those of all
            fields, time runs backwards, or no series is long enough.

    Examples:
        >>> past, later = sources.csv("load.csv", missing="nan").split(0.8, by="hour")
        >>> train = windows(past, 48, 24, inputs=["load", "temperature"], target="load")
        >>> pipe = Pipeline(train).map(stages.cast("x", "float32"))
    """
    for name, value in (("length", length), ("horizon", horizon), ("stride", stride)):
        check_integer(f"windows(): {name}", value, 1)
    past = _read_columns(table, check_names("windows", inputs, "inputs must name each field"))
    wanted = check_names("windows", target, "target must name each field")
    future = _read_columns(table, wanted)
    starts = _find_starts(table, length + horizon, stride, series, time, gaps=gaps)
    is_one = wanted is not None and len(wanted) == 1
    steps = arrays(past=past, future=future[:, 0].copy() if is_one else future)
    return Windows(steps, length, horizon, starts, table.find_origin())


def _read_columns(table: Source, names: Sequence[str] | None) -> npt.NDArray[Any]:
    """Fields of all steps, [steps, fields]."""
    if not names:
        raise PipelineError("windows() needs the names of inputs= and target=")
    columns = {name: table.column(name) for name in names}
    for name, values in columns.items():
        if values.dtype.kind not in "biuf" or values.ndim != 1:
            raise PipelineError(f"windows(): the field {name!r} does not hold one number in each record")
    common = np.result_type(*columns.values())
    apart = f"no dtype holds the numbers of {', '.join(columns)}; cast the columns in the table"
    made = [convert(values, common, f"windows(): the field {name!r}", apart) for name, values in columns.items()]
    return np.stack(made, axis=1)


def _find_starts(
    table: Source, steps: int, stride: int, series: str | None, time: str | None, *, gaps: bool
) -> npt.NDArray[np.int64]:
    """Where windows of so many steps begin, int64 [windows]: none goes across series or gaps."""
    is_end = np.zeros(len(table) - 1, bool)  # whether a series ends after the row
    if series is not None:
        names = table.column(series)
        is_end = names[1:] != names[:-1]
        if int(is_end.sum()) + 1 > len(set(names.tolist())):
            raise PipelineError(
                f"windows(): records of a series, by {series!r}, must lie together: sort the table"
            )
    part = np.zeros(len(table), np.int64)  # of a concatenation, of which no window has steps of two sources
    for number, (places, _) in enumerate(table.find_origin().divide()):
        part[places] = number
    is_end = is_end | (part[1:] != part[:-1])
    is_end = is_end | _find_left_out(table, is_end)
    times = _read_times(table, time) if gaps or time is not None else None
    if times is None and gaps:
        _warn_of_counts(table, is_end)
    if times is not None and not is_end.all():
        is_gap = _find_gaps(table, *times, is_end, is_named=time is not None, warns=gaps)
        is_end = is_end | is_gap if gaps else is_end
    bounds = [0, *(np.flatnonzero(is_end) + 1).tolist(), len(table)]
    parts = [np.arange(first, last - steps + 1, stride) for first, last in itertools.pairwise(bounds)]
    starts = np.concatenate(parts).astype(np.int64)
    too_short = [first for first, part in zip(bounds, parts, strict=False) if not len(part)]
    if too_short and len(starts):
        name = "" if series is None else f" ({series!r} {names[too_short[0]]})"
        warnings.warn(
            f"windows(): {len(too_short):,} of {len(parts):,} series, or pieces of them between gaps, are shorter "
            f"than the {steps} records of a window and what follows, and are left out: the first begins at "
            f"{table.where(too_short[0])}{name}",
            stacklevel=3,
        )
    if not len(starts):
        raise PipelineError(
            f"windows(): no series has {steps} records without a gap, as a window and what follows need"
        )
    return starts


def _read_times(table: Source, name: str | None) -> tuple[str, npt.NDArray[Any]] | None:
    """Reads the field of times: the one named, that by which the table was split, or the only one of dates."""
    dates = [field for field, value in table[0].items() if is_date(value)]
    name = name or getattr(table, "ordered_by", None) or (dates[0] if len(dates) == 1 else None)
    if name is None:
        return None
    return name, as_times(table.column(name), f"windows(): the field {name!r}")


def _find_left_out(table: Source, is_end: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether a split left out the rows after each row; warns of it."""
    rows = table.find_origin().indices
    skipped = np.diff(rows) if not isinstance(rows, range) else np.ones_like(is_end, np.int64)
    is_left_out = (skipped > skipped.min(initial=1)) & (skipped.min(initial=1) > 0) & ~is_end
    if is_left_out.any():
        row = int(np.flatnonzero(is_left_out)[0]) + 1
        warnings.warn(
            f"windows(): {int(is_left_out.sum()):,} gaps where the split of the table left rows out, the first "
            f"before {table.where(row)}: no window crosses them; split the table by time",
            stacklevel=4,
        )
    return np.asarray(is_left_out)


def _warn_of_counts(table: Source, is_end: npt.NDArray[np.bool_]) -> None:
    """Warns if a field of integers, which nobody said to be times, counts with gaps."""
    for field, value in table[0].items() if not is_end.all() else ():
        if np.ndim(value) or np.asarray(value).dtype.kind not in "iu":
            continue
        with contextlib.suppress(PipelineError):  # a value is missing
            passed = np.diff(table.column(field).astype(np.int64))[~is_end]
            usual = np.median(passed)
            if usual < 0 and (passed == usual).all():
                warnings.warn(
                    f"windows(): {field!r} falls from row to row, as if time ran backwards: sort the table by it",
                    stacklevel=4,
                )
            if passed.min() > 0 and np.mean(passed == usual) > 0.9 and passed.max() > usual:
                warnings.warn(
                    f"windows(): {field!r} has gaps, and windows cross them, as time= is not given; give "
                    f"time={field!r}, or gaps=False",
                    stacklevel=4,
                )


def _find_gaps(
    table: Source,
    name: str,
    times: npt.NDArray[Any],
    is_end: npt.NDArray[np.bool_],
    *,
    is_named: bool,
    warns: bool,
) -> npt.NDArray[np.bool_]:
    """Whether time jumps after each row.

    Args:
        name: of the field of times.
        is_end: rows after which time may jump.
        is_named: whether the user named the field.
        warns: whether a warning tells of jumps.
    """
    passed = np.diff(times.astype(np.int64) if times.dtype.kind in "biu" else times)
    if passed.dtype.kind == "m":
        passed = passed.astype("timedelta64[us]").astype(np.int64)
    back = np.flatnonzero((passed < 0) & ~is_end) + 1
    if len(back):
        raise PipelineError(
            f"windows(): time runs backwards at {table.where(back[0])}, and {len(back) - 1:,} times more: "
            f"{name!r} is {times[back[0]]} after {times[back[0] - 1]}; sort the table by it, or where several "
            "series lie one after the other give series= the field that tells them apart"
        )
    again = np.flatnonzero((passed == 0) & ~is_end) + 1
    if len(again) and is_named:
        warnings.warn(
            f"windows(): {len(again):,} rows have the same {name!r} as the row before, first "
            f"{table.where(again[0])}: each counts as a step. Where several series alternate, sort the table by "
            "series and time, and give series= the field that tells them apart",
            stacklevel=4,
        )
    # Months, working days and jitter are no gaps: what counts is a step far longer than nearly all others.
    usual, median = (np.percentile(passed[~is_end], part, method="lower") for part in (95, 50))
    factor = _REGULAR
    if median <= 0 or usual > _REGULAR * median:
        if not is_named:
            return np.zeros_like(is_end)
        forward = passed[(passed > 0) & ~is_end]  # most steps may be 0, as those of hours that only have a date
        usual, factor = np.percentile(forward, 95, method="lower") if len(forward) else 0, _IRREGULAR
    is_gap: npt.NDArray[np.bool_] = (passed > factor * usual) & ~is_end
    if warns and is_gap.any():
        row = int(np.flatnonzero(is_gap)[0]) + 1
        warnings.warn(
            f"windows(): {int(is_gap.sum()):,} gaps in {name!r}, the first from {times[row - 1]} to {times[row]} "
            f"({table.where(row)}): no window crosses them, unless gaps=False",
            stacklevel=4,
        )
    return is_gap
