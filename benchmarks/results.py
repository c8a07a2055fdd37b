"""What studies have in common: how a study is described, what it returns, and statistics of its measurements.

A study measures rows, instances of a dataclass, of which `outcome_of` makes a table and JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ensemble.spec.validation import check_choice

Rows = list[dict[str, Any]]
#: Receives a line of progress.
Report = Callable[[str], None]
RowT = TypeVar("RowT")
KeyT = TypeVar("KeyT")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a study, or a part of it, found.

    Attributes:
        tables: printed one below the other; each a title ("" for none) and rows with the same keys. One without
            rows is left out.
        rows: written as JSON; they may have more keys than the tables, and differ in them.
        findings: conclusions, one line each.
    """

    tables: Sequence[tuple[str, Rows]]
    rows: Rows
    findings: Sequence[str] = ()

    def __add__(self, other: Outcome) -> Outcome:
        """Both, one after the other."""
        return Outcome(
            tables=[*self.tables, *other.tables],
            rows=[*self.rows, *other.rows],
            findings=[*self.findings, *other.findings],
        )


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study of `python -m benchmarks`.

    Attributes:
        name: in the command line.
        summary: a few words for the list of studies.  description: at the head of its help.
        add_options: adds its own options; `--json` and `--record` are added for all studies.
        run: runs it. Mistakes of the user are raised as `SpecError`. Heavy imports are inside.
    """

    name: str
    summary: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Report], Outcome]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper claims, beside what was measured here on the same question.

    Attributes:
        paper: such as "Grubic et al. 2018".  claim: in one sentence.
        published, measured: its figure and ours, as text with units.
        ratio: of ours to the published one; None where they are not of one kind.
        spread: of ours, as text: an interval over seeds, or the least and the most; "" where one was measured.
        loses: where the method loses, in one sentence; "" where nothing was seen to.
    """

    paper: str
    claim: str
    published: str
    measured: str
    ratio: float | None = None
    spread: str = ""
    loses: str = ""


def show_claims(claims: Sequence[Claim]) -> Outcome:
    """The claims of a paper as the first part of its study's outcome, "claim" in the JSON."""
    return outcome_of(claims, "What the paper claims, and what was measured", part="claim")


def outcome_of(
    rows: Sequence[Any],
    heading: str = "",
    columns: str = "",
    *,
    headings: Mapping[str, str] | None = None,
    part: str | None = None,
    findings: Iterable[str] = (),
) -> Outcome:
    """The outcome of dataclass rows of one kind: all their fields as JSON, some of them in a table.

    Args:
        heading: of the table.  columns, headings: see `tabulate`.
        part: the value of the key "part" in each row's JSON; None for no such key.
        findings: see `Outcome`.
    """
    return Outcome(
        tables=[(heading, tabulate(rows, columns, **(headings or {})))],
        rows=[({} if part is None else {"part": part}) | flatten(row) for row in rows],
        findings=list(findings),
    )


def run_parts(chosen: Sequence[str], parts: Mapping[str, Callable[[], Outcome]]) -> Outcome:
    """Run the parts of a study that are chosen, one after the other.

    Args:
        chosen: the value of `--parts`.
        parts: all, by name.

    Raises:
        SpecError: there is no such part.
    """
    for name in chosen:
        check_choice("--parts", name, list(parts))
    outcomes = (run() for name, run in parts.items() if name in chosen)
    return sum(outcomes, Outcome(tables=[], rows=[]))


def group_by(rows: Iterable[RowT], key: Callable[[RowT], KeyT]) -> dict[KeyT, list[RowT]]:
    """The rows of each key, keys in the order of their first rows."""
    groups: dict[KeyT, list[RowT]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def median_row(rows: Sequence[RowT]) -> RowT:
    """One dataclass row of several of one configuration: the median of each number; `runs` counts them.

    That of integers is one of them.
    """
    first: Any = rows[0]
    values = {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(first)}
    medians = {
        name: (statistics.median if kind is float else statistics.median_low)(column)
        for name, column in values.items()
        for kind in (float, int)
        if all(type(value) is kind for value in column)
    }
    result: RowT = dataclasses.replace(first, **(medians | {"runs": len(rows)}))
    return result


def format_bytes(size: int) -> str:
    """A size for people: "4 KiB"; 0 is "none"."""
    if size == 0:
        return "none"
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


# --- means over seeds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean over `n` values and its 95 % confidence interval, `half` to either side; None for a single value."""

    mean: float
    half: float | None
    n: int

    @property
    def ends(self) -> tuple[float, float | None, float | None]:
        """The mean, the lower and the upper end."""
        half = self.half
        return (self.mean, None, None) if half is None else (self.mean, self.mean - half, self.mean + half)

    @property
    def sign(self) -> int:
        """Of paired differences: 1 or -1 where the interval is above or below 0; 0 where none is seen."""
        _, low, high = self.ends
        return 0 if low is None or high is None else (low > 0) - (high < 0)

    def describe(self) -> str:
        """In words, where it is the mean of paired differences in percentage points."""
        mean, low, high = self.ends
        if low is None or high is None:
            return f"{mean:+.2f} points with one seed, which says nothing; take more --seeds"
        seen = "a difference is seen" if self.sign else "no difference is seen"
        return f"{mean:+.2f} points, 95 % interval {low:+.2f} to {high:+.2f} over {self.n} seeds: {seen}"

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.half is None else f"{self.mean:.2f} ± {self.half:.2f}"


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values, one of each seed, with Student's t interval: mean ± t(n - 1) · s / √n."""
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Interval(mean, None, 1)
    from scipy.stats import t  # type: ignore[import-untyped]

    return Interval(mean, float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n), n)


def paired_interval(values: Sequence[float | None], others: Sequence[float | None]) -> Interval | None:
    """The mean difference `values - others`, value i and other i of the same seed, with its interval.

    Pairs of which a value is missing are left out; None where no pair is left.
    """
    pairs = zip(values, others, strict=False)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return interval(differences) if differences else None


@dataclass(frozen=True)
class Spread:
    """The median of a figure, and the least and the most."""

    median: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float, float]:
        """The median, the least and the most."""
        return self.median, self.low, self.high

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def slowest_quartiles(by_rank: Iterable[Sequence[float]]) -> tuple[float, float, float]:
    """The median and both quartiles of the rank whose median is the largest."""
    import numpy as np

    low, middle, high = np.quantile(max(by_rank, key=statistics.median), (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


# --- rows for files and for people --------------------------------------------------------------


def flatten(row: Any) -> dict[str, Any]:
    """A dataclass row for JSON, intervals and spreads as `name_ends` has them."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        is_interval = str(field.type).startswith(("Interval", "Spread"))  # or None, of which there are no ends
        result |= name_ends(field.name, value) if is_interval else {field.name: value}
    return result


def name_ends(name: str, value: Interval | Spread | None) -> dict[str, float | None]:
    """The middle as NAME, the ends as NAME_low and NAME_high."""
    ends = (None, None, None) if value is None else value.ends
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def tabulate(rows: Sequence[Any], names: str = "", **headings: str) -> Rows:
    """The table of dataclass rows, intervals and spreads as text.

    Args:
        names: of the fields, with spaces between them; "" for all.
        headings: of fields that are not headed by their names.
    """

    def cell(value: Any) -> Any:
        return str(value) if isinstance(value, Interval | Spread) else value

    return [
        {headings.get(name, name): cell(getattr(row, name)) for name in names.split() or vars(row)} for row in rows
    ]
