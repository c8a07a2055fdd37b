"""Events of a run as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ensemble.events.base import Event, Json


class CodeSaved(Event):
    """Before the declaration and the code are written.

    Attributes:
        files: digests by path.
        info: what `run.json` says.
        arrays: the files in `data/` with which this declaration is read.
    """

    files: dict[str, str] = {}
    info: Json | None = None
    arrays: list[str] | None = None


class MoreEpochs(Struct, kw_only=True):
    """More epochs for members that have ended: the new number, the members with their number before, and notes.

    `keeps_results`: whether what a member had finished with is its result until it has finished them; early logs
    lack it.
    """

    epochs: int
    members: dict[str, int] = {}
    notes: list[str] = []
    keeps_results: bool = False


#: Objectives that are no metrics: fields of the `cost` events of trials.
COSTS = ("energy_j", "cpu_s")


class Objective(Struct, frozen=True):
    """An objective of a search, a metric or a cost of trials, and whether it is to be "max" or "min"."""

    name: str
    mode: str

    @property
    def is_cost(self) -> bool:
        """Whether its value is the account's, and no metric."""
        return self.name in COSTS

    def read(self, cost: object, metrics: Mapping[str, float | None]) -> float | None:
        """The value of a trial with this `cost` event and these metrics; None where it has no finite one."""
        value: float | None = getattr(cost, self.name, None) if self.is_cost else metrics.get(self.name)
        return value if value is not None and math.isfinite(value) else None


class RunStarted(Event):
    """A run, or a resume of it, begins.

    Attributes:
        versions: `python` and the libraries: version, or null where absent.
        settings: global settings of libraries that differ from their defaults, such as
            `torch.set_default_dtype`.
        data: `fingerprint`, `fingerprints` (where members have pipelines of their own), `scheme` of the
            fingerprint, `python` that compiled the functions in it, `samples`, `drop_last`, `splits`,
            `numbering`: of splits whose classes are mapped to the numbers of the training data, a digest
            of how, `records`: of splits whose records can change alone, numbers that tell which did.
        overlap: objects of `split`, `with`, `shared`, `samples`: samples of a split that another one has,
            too.
        tables: what became of the columns of each table that a stage was fitted to, as text.
        energy: `intensity_g_per_kwh`, `pue`, `price_per_kwh`, `currency`.
        more_epochs: `epochs`, `members`: *member*: epochs before, `notes`.
        changed_splits: *split*: how it has changed; members that had finished are evaluated on it again.
        evaluated_again: members that had finished, and are evaluated again from their checkpoints.
        accepts_data: whether members go on with other training data than before, in this start or an earlier one.
        further_objectives: of a search, beside `objective`: `name`, `mode` of each.
        second_objective: the only one of these, minimized, in logs of earlier versions.
        search: what a search was declared with, by which a later start is known to be the same; null of a list.
        constraints: *member*: by how much a trial that had finished violates the constraints of the search,
            computed in this start.
        budget: of a search: `trials`, `hours`, `cpu_hours`, `energy_kj`, those that are limited.
        limits: `gpus`, `cpus`, those that are limited.
        keep_predictions_gb: see `Ensemble`.
    """

    name: str = ""
    run_id: str = ""
    executor: str = ""
    members: int | None = None
    epochs: int | None = None
    objective: str | None = None
    mode: str | None = None
    direction: str | None = None
    further_objectives: list[Objective] = []
    second_objective: str | None = None
    versions: Json = {}
    settings: Json = {}
    revision: str | None = None
    code: str | None = None
    files: dict[str, str] = {}
    data: Json = {}
    overlap: list[Json] = []
    tables: list[str] = []
    energy: Json = {}
    host: str | None = None
    pid: int | None = None
    resumed: bool = False
    more_epochs: MoreEpochs | None = None
    changed_splits: dict[str, str] = {}
    evaluated_again: list[str] = []
    accepts_data: bool = False
    limits: Json = {}
    keep_predictions_gb: float = 1.0
    budget: Json | None = None
    search: Json | None = None
    constraints: dict[str, dict[str, float]] = {}


class BaseMade(Event):
    """The frozen network that members share (`Recipe.base`) was made.

    Attributes:
        digest: SHA-256 of its weights, buffers and other tensors.
        file: digest of its file, `base/<digest>.pt`.
        bytes: of its tensors.
        source: the function, or the folder, that it came from.
        code: fingerprint of the declaration's code.
    """

    digest: str
    file: str
    bytes: int
    source: str
    code: str
    node: str | None = None
    wall_s: float | None = None


class CodeChanged(Event):
    """The code is not what earlier members trained with."""

    before: str | None = None
    code: str | None = None
    changed: list[str] = []
    trained: list[str] = []


class RequestAnswered(Event, tag="request"):
    """A request from a shell or a handle was answered.

    Attributes:
        request: its id.
        members: those that it names, where it is about several.
        message: the answer, for people.
        by: who says to have asked: a user on a host, or a browser of a user's page.
    """

    request: str
    verb: str = ""
    member: str | None = None
    members: list[str] = []
    done: bool = False
    message: str = ""
    by: str | None = None


class Combining(Event):
    """Members are about to be combined.

    Attributes:
        members: how many have finished.
    """

    members: int = 0


class Combined(Event):
    """The members were combined.

    Attributes:
        weights: *member*: weight.
        task: `kind`; for quantiles `levels`.
        calibration: `method`, `value`, `reason` where there is none.
        metrics: `ensemble`, `best`, `mean`: *metric*: value.
        intervals: `ensemble`, `best`, `difference`: *metric*: `[low, high]`.
        best_calibrated: *metric*: value, of the best member with a calibration of its own.
        reliability: `ensemble`, `best`: a list of `[mean confidence, accuracy, samples]`, one for each
            bin.
        decision: `by`, `thresholds` of the classes or labels, `metrics` of what is predicted by `thresholds` and
            as `usual`, or the `reason` why there are none.
        uncertainty: `total`, `aleatoric`, `epistemic`, `disagreement`.
        conformal: *method*: `kind`, `method`, `level`, measured `coverage` and mean `size`; of `sets` also
            `thresholds`, `multilabel`, `empty`; of an `interval` `threshold`, `columns`.
        left_out: *member*: why.
        failed: whether an error, which `reason` names, prevented it.
        unloadable: why `ensemble.load` cannot predict with them, and what to declare; None where it can.
        folds: of each configuration of a cross-validation: `members`, the `metric` that ranks members, its
            `mean` and `std` over so many `folds`, as each member reported it of its own.
        out_of_fold: whether `valid` are the training samples, predicted by members that have not learnt from
            them.
    """

    method: str | None
    members: list[str]
    split: str | None
    declared: str | None = None
    weights: dict[str, float] = {}
    candidates: list[str] | None = None
    task: Json | None = None
    calibration: Json | None = None
    temperature: float | None = None
    metrics: Json | None = None
    intervals: Json | None = None
    noise: list[str] | None = None
    best_member: str | None = None
    best_calibrated: Json | None = None
    reliability: Json | None = None
    decision: Json | None = None
    uncertainty: Json | None = None
    conformal: Json | None = None
    classes: list[Any] | None = None
    code: str | None = None
    left_out: dict[str, str] = {}
    failed: bool = False
    unloadable: str | None = None
    out_of_fold: bool = False
    folds: list[Json] = []
    note: str | None = None
    reason: str | None = None

    @property
    def measured_on(self) -> str:
        """The samples that the figures are of, in words."""
        is_own = self.out_of_fold and self.split == "valid"
        return "training samples, out of fold" if is_own else f"{self.split} split"


#: Stands for the event of a run that has not combined its members.
NOT_COMBINED = Combined(method=None, members=[], split=None)


class LoggerChanged(Event, tag="logger"):
    """A logger of the run fails, works again or has ended.

    Attributes:
        logger: its name.
        state: "failing", "works" or "ended".
    """

    logger: str
    state: str
    detail: str = ""


class RunFinished(Event):
    """All members have ended.

    Attributes:
        states: *state*: how many members.
    """

    wall_s: float | None = None
    states: dict[str, int] = {}
    notes: list[str] = []
    report_cpu_s: float | None = None
    loggers_cpu_s: float | None = None


class RunStopped(Event):
    """The run was stopped.

    Attributes:
        failed: whether by an error; else by its user, or because it has used its budget.
    """

    reason: str | None = None
    failed: bool = False
    report_cpu_s: float | None = None
    loggers_cpu_s: float | None = None
