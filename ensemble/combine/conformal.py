"""Conformal prediction: sets of classes and intervals that hold the truth with a probability that is chosen.

**Split conformal** prediction computes a *score* s(x, y) of disagreement on n samples that took no part in
training, and predicts every y whose score is at most the ceil((n + 1) * level)-th smallest of them (Vovk,
Gammerman and Shafer 2005; Lei et al. 2018). If these samples and a new one are exchangeable, the set holds the new
truth with a probability of `level` at least, however bad the model is; below level / (1 - level) samples it holds
everything. Members were chosen on the same samples: therefore the coverage on the test split is measured, too.

| task           | method     | score                                                                             |
| classification | thr        | 1 - p_y: least ambiguous sets, also called LAC (Sadinle, Lei and Wasserman 2019)  |
| classification | aps        | the sum of what is more probable than y (Romano, Sesia and Candes 2020)           |
| multilabel     | thr        | that of two classes, yes and no, with a threshold of its own for each label       |
| regression     | absolute   | abs(y - point)                                                                    |
| gaussian       | normalised | abs(y - mean) / standard deviation (Lei et al. 2018, section 5.2)                 |
| quantiles      | cqr        | max(lower - y, y - upper) (Romano, Patterson and Candes 2019, eq. 6)              |

Positions (steps, pixels, several targets) of one sample are not exchangeable, samples are: each sample counts
once, and its positions share its weight (HCP: Lee, Barber and Willett 2023). What is covered is a position drawn
from a new sample, not all its positions at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from ensemble.combine.formulas import list_chunks
from ensemble.combine.metrics import Array, CombineError, find_known
from ensemble.spec.task import LABELS, Task

LEVEL = 0.9
"""The coverage that is asked for unless another one is."""

SetMethod = Literal["thr", "aps"]
IntervalMethod = Literal["absolute", "normalised", "cqr"]

_ROUNDING = 1e-9
"""Relative rounding of (n + 1) * level: 10 * 0.9 is to be 9, and not a hair more."""


@dataclass(frozen=True)
class ConformalSets:
    """Predicts sets of classes.

    Attributes:
        method: "thr" or "aps".
        level: the probability with which a set holds the truth.
        thresholds: the largest score of a class in the set, inf for every class: one, or one for each label.
        multilabel: whether values are [n, L], of L labels.
    """

    method: SetMethod
    level: float
    thresholds: tuple[float, ...]
    multilabel: bool = False

    def predict(self, values: Array) -> Array:
        """The set of each position.

        Args:
            values: combined and calibrated, of classification [n, ..., C] or of multilabel [n, L].

        Returns:
            bool [n, ..., C], whether the class is in the set; of multilabel [n, L, 2], whether "no" and "yes" are.
        """
        values = _as_classes(values) if self.multilabel else np.asarray(values)
        thresholds = np.array(self.thresholds)[:, None] if self.multilabel else self.thresholds[0]
        inside = np.empty(values.shape, dtype=bool)
        for at in list_chunks(values):
            inside[at] = score_classes(self.method, values[at]) <= thresholds
        return inside

    def as_record(self) -> dict[str, Any]:
        """The parameters as JSON, an infinite threshold as None; see `load_conformal`."""
        return {"kind": "sets", **asdict(self), "thresholds": list(map(_as_json, self.thresholds))}


@dataclass(frozen=True)
class ConformalInterval:
    """Predicts intervals.

    Attributes:
        method: "absolute", "normalised" or "cqr".
        level: the probability with which an interval holds the truth.
        threshold: the largest score of a value in the interval; inf for every value.
        columns: of cqr: which two of the quantiles the interval starts from.
    """

    method: IntervalMethod
    level: float
    threshold: float
    columns: tuple[int, int] | None = None

    def predict(self, values: Array) -> tuple[Array, Array]:
        """The interval of each position, in the unit of the target.

        Args:
            values: combined and calibrated: [n, ...], of gaussian [n, ..., 2], of quantiles [n, ..., Q].

        Returns:
            low, high: float64 [n, ...]. One that would be empty (of cqr) is its middle.
        """
        values = np.asarray(values, dtype=np.float64)
        if self.method == "cqr":
            assert self.columns is not None
            lower, upper = (values[..., column] for column in self.columns)
            middle = (lower + upper) / 2
            return np.minimum(lower - self.threshold, middle), np.maximum(upper + self.threshold, middle)
        if self.method == "normalised":
            values, margin = values[..., 0], self.threshold * np.sqrt(values[..., 1])
            return values - margin, values + margin
        return values - self.threshold, values + self.threshold

    def as_record(self) -> dict[str, Any]:
        """The parameters as JSON, an infinite threshold as None; see `load_conformal`."""
        record = {"kind": "interval", **asdict(self), "threshold": _as_json(self.threshold)}
        columns = record.pop("columns")
        return record if columns is None else {**record, "columns": list(columns)}


Conformal = ConformalSets | ConformalInterval


def load_conformal(record: Mapping[str, Any]) -> Conformal:
    """The sets or intervals that `as_record` describes.

    Raises:
        CombineError: a former version recorded a method that there is no more.
    """
    if record["method"] == "raps" or record.get("randomised"):
        raise CombineError(f"an earlier version made these sets by {record['method']!r}, which is gone")
    kind: type[Conformal] = ConformalSets if record["kind"] == "sets" else ConformalInterval
    parts: dict[str, Any] = {field.name: record[field.name] for field in fields(kind) if field.name in record}
    for name in set(parts) & {"thresholds", "columns"}:
        parts[name] = tuple(math.inf if part is None else part for part in parts[name])
    if parts.get("threshold", 0) is None:
        parts["threshold"] = math.inf
    return kind(**parts)


def calibrate(task: Task, values: Array, target: Array, *, level: float = LEVEL) -> list[Conformal]:
    """Every way that the task has, calibrated: of classification thr and aps, else one.

    Args:
        values: combined and calibrated predictions of samples that took no part in training, as the task lays
            them out.
        target: as the task lays it out; positions that take no part are left out.
        level: the probability with which the truth is to be covered.

    Raises:
        CombineError: for a free task.
    """
    if task.kind == "classification":
        return [calibrate_sets(task, values, target, method=method, level=level) for method in ("thr", "aps")]
    if task.kind == "multilabel":
        return [calibrate_sets(task, values, target, level=level)]
    return [calibrate_interval(task, values, target, level=level)]


def calibrate_sets(
    task: Task, values: Array, target: Array, *, method: SetMethod = "thr", level: float = LEVEL
) -> ConformalSets:
    """Sets of classes for classification or multilabel; arguments as `calibrate` and `ConformalSets` have them.

    Raises:
        CombineError: the task has no classes.
    """
    if task.kind not in LABELS:
        raise CombineError(f"sets are of classes; {task.kind} has none")
    is_multilabel, target = task.kind == "multilabel", np.asarray(target)
    values, takes_part = _as_classes(values) if is_multilabel else np.asarray(values), find_known(target)
    true = np.where(takes_part, target, 0).astype(np.int64)[..., None]
    scores = np.empty(target.shape)
    for at in list_chunks(values):
        scores[at] = np.take_along_axis(score_classes(method, values[at]), true[at], axis=-1)[..., 0]
    columns = zip(scores.T, takes_part.T, strict=True) if is_multilabel else [(scores, takes_part)]
    thresholds = tuple(find_threshold(own, part, level) for own, part in columns)
    return ConformalSets(method, level, thresholds, is_multilabel)


def calibrate_interval(task: Task, values: Array, target: Array, *, level: float = LEVEL) -> ConformalInterval:
    """Intervals for regression, gaussian or quantiles; arguments as `calibrate` has them.

    Of quantiles, those nearest to (1 - level) / 2 and (1 + level) / 2 are corrected; of a single one, both ends
    start from it.

    Raises:
        CombineError: the task has no intervals.
    """
    values, target = np.asarray(values, dtype=np.float64), np.asarray(target, dtype=np.float64)
    columns: tuple[int, int] | None = None
    method: IntervalMethod
    if task.kind == "regression":
        method, scores = "absolute", np.abs(target - values)
    elif task.kind == "gaussian":
        method, scores = "normalised", np.abs(target - values[..., 0]) / np.sqrt(values[..., 1])
    elif task.kind == "quantiles":
        ends = (1 - level) / 2, (1 + level) / 2
        low, high = (int(np.abs(np.array(task.levels) - end).argmin()) for end in ends)
        method, columns = "cqr", (low, high)
        scores = np.maximum(values[..., low] - target, target - values[..., high])
    else:
        raise CombineError(f"intervals are of numbers; {task.kind} predicts none")
    return ConformalInterval(method, level, find_threshold(scores, find_known(target), level), columns)


def measure(conformal: Conformal, values: Array, target: Array) -> dict[str, float]:
    """How sets or intervals do on samples that calibration has not seen; arguments as `calibrate` has them.

    Returns:
        Means over samples, of each the mean over its positions (or labels) that take part: `coverage`, the
        fraction whose truth is inside; `size`, the number of classes in a set (of multilabel 0 to 2 of each label)
        or the width of an interval in the unit of the target; of sets also `empty`, the fraction without a class.

    Raises:
        CombineError: no position takes part.
    """
    target = np.asarray(target)
    takes_part = find_known(target)
    figures: dict[str, Array]
    if isinstance(conformal, ConformalSets):
        inside = conformal.predict(values)
        true = np.where(takes_part, target, 0).astype(np.int64)[..., None]
        size = inside.sum(axis=-1)
        covered = np.take_along_axis(inside, true, axis=-1)[..., 0]
        figures = {"coverage": covered, "size": size, "empty": size == 0}
    else:
        low, high = conformal.predict(values)
        figures = {"coverage": (low <= target) & (target <= high), "size": high - low}
    weight = weigh_positions(takes_part)
    if not len(weight):
        raise CombineError("all positions of the target are ignored")
    samples = float(weight.sum())
    return {name: float((one[takes_part] * weight).sum() / samples) for name, one in figures.items()}


def find_threshold(scores: Array, takes_part: Array, level: float) -> float:
    """The threshold of split conformal prediction, every sample counting once.

    The smallest t for which the sum over samples of the fraction of their scores that are not above t is at least
    (n + 1) * level; with one position a sample it is the ceil((n + 1) * level)-th smallest score.
    It is inf where n samples are too few for the level.

    Args:
        scores: float64 [n, ...].
        takes_part: bool [n, ...]; a sample of which nothing does is not counted.
    """
    if not 0 < level < 1:
        raise CombineError(f"the level must be between 0 and 1, got {level}")
    weight, own = weigh_positions(takes_part), scores[takes_part]
    order = np.argsort(own, kind="stable")
    samples = round(float(weight.sum()))
    wanted = (samples + 1) * level * (1 - _ROUNDING)
    at = int(np.searchsorted(np.cumsum(weight[order]), wanted))
    # The last sum is `samples` but for rounding, which is to hide no sample and to invent none.
    if wanted > samples or not len(own):
        return math.inf
    return float(own[order[min(at, len(own) - 1)]])


def score_classes(method: SetMethod, values: Array) -> Array:
    """The score of every class: probabilities [n, ..., C] -> float64 of that shape."""
    p = np.asarray(values, dtype=np.float64)
    if method == "thr":
        return 1 - p
    order = np.argsort(-p, axis=-1, kind="stable")
    before, scores = np.zeros(p.shape), np.empty(p.shape)
    np.cumsum(np.take_along_axis(p, order, axis=-1)[..., :-1], axis=-1, out=before[..., 1:])
    np.put_along_axis(scores, order, before, axis=-1)
    return scores


def weigh_positions(takes_part: Array) -> Array:
    """The weight of each position that takes part, in order: 1 / (their number in its sample): float64."""
    flat = takes_part.reshape(len(takes_part), -1) if takes_part.size else takes_part.reshape(len(takes_part), 0)
    count = flat.sum(axis=1)
    weight: Array = 1.0 / np.repeat(count, count)
    return weight


def _as_classes(values: Array) -> Array:
    """The probability of each label [n, L] as that of two classes, no and yes: float64 [n, L, 2]."""
    p = np.asarray(values, dtype=np.float64)
    return np.stack([1 - p, p], axis=-1)


def _as_json(threshold: float) -> float | None:
    return None if math.isinf(threshold) else threshold


def describe(
    task: Task, valid: tuple[Array, Array], report: tuple[Array, Array], *, level: float, is_same: bool
) -> dict[str, Any] | None:
    """The field `conformal` of the `combined` event: method -> its parameters (`load_conformal`) and figures.

    Args:
        valid: values and target that it is calibrated on: what the model predicts without having been fitted on
            them. From the own fit of a stack sets would be too small.
        report: values and target that it is measured on; with `is_same` those of `valid`, of which there is no
            coverage. Infinite sizes are left out. None for a free task.
    """
    records: dict[str, Any] = {}
    for method in calibrate(task, *valid, level=level) if task.kind != "free" else ():
        figures = {name: value for name, value in measure(method, *report).items() if math.isfinite(value)}
        if is_same:
            del figures["coverage"]
        records[method.method] = {**method.as_record(), **figures}
    return records or None
