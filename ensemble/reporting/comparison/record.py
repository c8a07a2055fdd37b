"""The form of what a run keeps beside its log (`summary.json`), by which it is checked when it is read.

Whoever may write into the directory of a run may have put another file there: what is of another form, nested more
deeply or longer than what is written is no summary, and the log is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from ensemble.events.base import Origin
from ensemble.spec.task import Kind

#: Points of a curve; members that are told of; different values of members that a summary keeps.
MOST_POINTS, MOST_BEST, MOST_VALUES = 200, 3, 20
LEVELS = 6  # of lists and objects within each other, in what a user has declared

if TYPE_CHECKING:
    Value = Any
else:
    Value = None | bool | int | float | str
    for _ in range(LEVELS):
        Value = None | bool | int | float | str | list[Value] | dict[str, Value]

Word = Annotated[str, Meta(max_length=1000)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Splits = Literal["valid", "test", "shifted"]
Curve = Annotated[list[tuple[Count, float]], Meta(max_length=MOST_POINTS + 2)]
Bands = Annotated[list[tuple[Count, float, float, float]], Meta(max_length=MOST_POINTS + 2)]
Few = Meta(max_length=1000)


class StateForm(TypedDict):
    """How a run stands."""

    word: Word
    tone: Word


class BestForm(TypedDict):
    """The best member."""

    member: Word
    value: float | None


class UsedForm(TypedDict):
    """What a run has used."""

    cpu_s: float | None
    energy_j: float | None
    energy_origin: Origin


class RowForm(TypedDict):
    """How a run stands in a list of runs (`describe_head`)."""

    name: Word
    state: StateForm
    started: float | None
    updated: float | None
    counts: Annotated[dict[Word, Count], Few]
    done: float
    best: BestForm | None
    objective: Word
    combined_value: float | None
    combined_split: Splits | None
    wall_s: float | None
    used: UsedForm | None


class StandingForm(TypedDict):
    """The row of a run in a comparison."""

    state: Word
    members: Count
    finished: Count
    objective: Word
    direction: Literal["min", "max"]
    best_member: Word | None
    best: float | None
    combined: float | None
    split: Splits | None
    cpu_s: float | None
    energy_j: float | None
    energy_origin: Origin
    wall_s: float | None


class CurvesForm(TypedDict):
    """The objective after each epoch."""

    best: Curve
    quartiles: Bands


class SideForm(TypedDict):
    """A sample of the records of a split."""

    by: Word
    limit: int
    hashes: str


class DataForm(TypedDict, total=False):
    """What identifies data (`ensemble.train.data_identity`)."""

    scheme: Value
    python: Value
    samples: Value
    drop_last: Value
    fingerprint: Word | None
    fingerprints: dict[str, Word | None]
    numbering: dict[str, Value] | None
    splits: Annotated[dict[str, tuple[Count, Word | None]], Few] | None
    sides: Annotated[dict[str, SideForm], Few] | None


class TaskForm(TypedDict):
    """What members predict."""

    kind: Kind
    levels: NotRequired[list[float]]


class CombinedForm(TypedDict):
    """Of the event `combined`, what is compared."""

    method: Word | None
    members: list[str]
    split: Splits | None
    declared: Word | None
    weights: dict[str, float]
    candidates: list[str] | None
    task: TaskForm | None
    calibration: dict[str, Value] | None
    metrics: Annotated[dict[str, Annotated[dict[str, float | None], Few]], Few] | None
    intervals: Annotated[dict[str, dict[str, tuple[float, float] | None]], Few] | None
    noise: list[str] | None
    best_member: Word | None
    code: Word | None
    reason: str | None


class RecordForm(TypedDict):
    """See `ensemble.reporting.comparison.declarations.make_record`."""

    v: int
    standing: StandingForm
    reached: list[tuple[float, float]]
    best: Annotated[list[tuple[Word, float | None, dict[str, Value]]], Meta(max_length=MOST_BEST)]
    curves: CurvesForm
    declaration: Annotated[dict[str, Value], Few]
    data: DataForm
    combined: CombinedForm | None
    members: dict[str, tuple[Count | None, dict[str, str] | None, dict[str, Value] | None]]


class SummaryForm(TypedDict):
    """What `summary.json` holds."""

    v: int
    log_bytes: int
    row: RowForm
    record: NotRequired[RecordForm]
