"""Conformal prediction: sets of classes and intervals that hold the truth with a probability that is chosen.

From n samples that took no part in training, **split conformal** prediction computes how large a *score* s(x, y)
of disagreement between a prediction and the truth usually is, and then predicts every y whose score is not
larger than the threshold, the ceil((n + 1) * level)-th smallest of the n scores (Vovk, Gammerman and Shafer
2005; Lei et al. 2018). If these samples and a new one are exchangeable, the set holds the new truth with a
probability of `level` at least and, without ties, of level + 1 / (n + 1) at most, however bad the model is; a
bad model has large sets. With fewer than level / (1 - level) samples nothing can be promised, and everything is
predicted.

The promise is on average over calibrations and new samples, not for each class or each region of x. Members,
weights and temperature were chosen on the validation split, too, which makes its scores a little too good:
therefore the coverage on the test split is measured beside it.

| task           | method     | score                                                                             |
| classification | thr        | 1 - p_y: least ambiguous sets, also called LAC (Sadinle, Lei and Wasserman 2019)  |
| classification | aps        | the sum of what is more probable than y (Romano, Sesia and Candes 2020)           |
| classification | raps       | that of aps + lam * max(0, rank of y - k_reg) (Angelopoulos et al. 2021, eq. 4)   |
| multilabel     | thr        | that of two classes, yes and no, with a threshold of its own for each label       |
| regression     | absolute   | abs(y - point)                                                                    |
| gaussian       | normalised | abs(y - mean) / standard deviation (Lei et al. 2018, section 5.2)                 |
| quantiles      | cqr        | max(lower - y, y - upper) (Romano, Patterson and Candes 2019, eq. 6)              |

**aps is deterministic** unless `randomised`: S(x) is the smallest set of the most probable classes whose sum
exceeds the threshold. It always holds the most probable class, hence covers more than `level` where the accuracy
is higher. Randomised, a uniform u of the sample adds u * p_y to the score: coverage comes down to `level`, and
sets may be empty, as those of thr may be: that is how they come down to it. u is a function of `seed` and the
sample's index. All of this holds for raps, too.

**raps** makes sets smaller where many improbable classes are hard to tell apart: each rank beyond `k_reg` costs
`lam`. Both are chosen on a fifth of the samples, which a hash of their index picks, and the threshold is of the
others alone (`conformal_scores`). Given that fifth, the score is a fixed function and the others are exchangeable
with a new sample: the promise holds as it stands, with n the number of the others.

**Positions** (steps, pixels, several targets) of one sample are not exchangeable with each other, but samples
are. Every sample therefore counts once: its positions share its weight in the threshold, and n is the number of
samples (HCP: Lee, Barber and Willett 2023, "Distribution-free inference with hierarchical data"). What is
covered with probability `level` is a position drawn from a new sample, not all its positions at once; and one
threshold serves all, so scale targets of different units alike, or predict their variances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from ensemble.combine.conformal_scores import (
    SetMethod,
    choose_penalty,
    choose_tuning,
    draw_uniform,
    find_threshold,
    list_chunks,
    score_classes,
    score_true,
    weigh_positions,
)
from ensemble.combine.metrics import Array, CombineError, find_known
from ensemble.spec.task import Task

LEVEL = 0.9
"""The coverage that is asked for unless another one is."""

IntervalMethod = Literal["absolute", "normalised", "cqr"]

_OF_RANDOMISED = ("randomised", "seed")

_OF_RAPS = ("lam", "k_reg")


@dataclass(frozen=True)
class ConformalSets:
    """Predicts sets of classes.

    Attributes:
        method: "thr", "aps" or "raps".
        level: the probability with which a set holds the truth.
        thresholds: the largest score of a class in the set, inf for every class: one, or one for each label.
        multilabel: whether values are [n, L], of L labels.
        randomised: of aps and raps: whether the score has a random part.
        seed: of the random part.
        lam: of raps: what the score adds for each rank of a class beyond `k_reg`, not negative.
        k_reg: of raps: the last rank that costs nothing, from 1.
    """

    method: SetMethod
    level: float
    thresholds: tuple[float, ...]
    multilabel: bool = False
    randomised: bool = False
    seed: int = 0
    lam: float = 0.0
    k_reg: int = 0

    def predict(self, values: Array, index: Array | None = None) -> Array:
        """The set of each position.

        Args:
            values: combined and calibrated, of classification [n, ..., C] or of multilabel [n, L].
            index: int [n] of the samples, by which randomised sets are drawn; None: 0, 1, ...

        Returns:
            bool [n, ..., C], whether the class is in the set; of multilabel [n, L, 2], whether "no" and "yes" are.
        """
        values = _as_classes(values) if self.multilabel else np.asarray(values)
        thresholds = np.asarray(self.thresholds)
        draws = _draw(self, values, index, "predict")
        inside = np.empty(values.shape, dtype=bool)
        for at in list_chunks(values):
            own = None if draws is None else draws[at]
            scores = score_classes(self.method, values[at], own, lam=self.lam, k_reg=self.k_reg)
            inside[at] = scores <= (thresholds[:, None] if self.multilabel else thresholds[0])
        return inside

    def as_record(self) -> dict[str, Any]:
        """The parameters as JSON, an infinite threshold as None; see `load_conformal`."""
        record = {"kind": "sets", **asdict(self), "thresholds": list(map(_as_json, self.thresholds))}
        without = {*(() if self.randomised else _OF_RANDOMISED), *(() if self.method == "raps" else _OF_RAPS)}
        return {name: value for name, value in record.items() if name not in without}


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
    """The sets or intervals that `as_record` describes."""
    kind: type[Conformal] = ConformalSets if record["kind"] == "sets" else ConformalInterval
    given: dict[str, Any] = {each.name: record[each.name] for each in fields(kind) if each.name in record}
    for name in set(given) & {"thresholds", "columns"}:
        given[name] = tuple(math.inf if each is None else each for each in given[name])
    if given.get("threshold", 0) is None:
        given["threshold"] = math.inf
    return kind(**given)


def calibrate(
    task: Task, values: Array, target: Array, *, level: float = LEVEL, index: Array | None = None
) -> list[Conformal]:
    """Every way that the task has, calibrated: of classification thr and (deterministic) aps and raps, else one.

    Args:
        values: combined and calibrated predictions of samples that took no part in training, as the task lays
            them out.
        target: as the task lays it out; positions that take no part are left out.
        level: the probability with which the truth is to be covered.
        index: int [n], of the samples; used by randomised sets and by raps; None: 0, 1, ...

    Raises:
        CombineError: for a free task.
    """
    if task.kind == "classification":
        return [
            calibrate_sets(task, values, target, method=method, level=level, index=index)
            for method in ("thr", "aps", "raps")
        ]
    if task.kind == "multilabel":
        return [calibrate_sets(task, values, target, level=level)]
    return [calibrate_interval(task, values, target, level=level)]


def calibrate_sets(
    task: Task,
    values: Array,
    target: Array,
    *,
    method: SetMethod = "thr",
    level: float = LEVEL,
    randomised: bool = False,
    seed: int = 0,
    index: Array | None = None,
) -> ConformalSets:
    """Sets of classes for classification or multilabel; arguments as `calibrate` and `ConformalSets` have them.

    Raises:
        CombineError: the task has no classes, thr is to be randomised, or raps is to be of labels, which have two
            classes each.
    """
    if task.kind not in ("classification", "multilabel"):
        raise CombineError(f"sets are of classes; {task.kind} has none")
    if randomised and method == "thr":
        raise CombineError("only aps and raps can be randomised, not thr")
    _check_level(level)
    multilabel = task.kind == "multilabel"
    if multilabel and method == "raps":
        raise CombineError("raps ranks the classes of a classification; take thr for labels, of yes and no")
    target = np.asarray(target)
    sets = ConformalSets(method, level, (math.inf,), multilabel, randomised, seed)
    values = _as_classes(values) if multilabel else np.asarray(values)
    draws = _draw(sets, values, index, "calibrate")
    penalty: dict[str, Any] = {}
    if method == "raps":
        tuning = choose_tuning(np.arange(len(values)) if index is None else index)
        penalty = choose_penalty(values[tuning], target[tuning], level, None if draws is None else draws[tuning])
        values, target = values[~tuning], target[~tuning]
        draws = None if draws is None else draws[~tuning]
    scores, part = score_true(method, values, target, draws, **penalty), find_known(target)
    if multilabel:
        labels = range(target.shape[1])
        thresholds = tuple(find_threshold(scores[:, label], part[:, label], level) for label in labels)
    else:
        thresholds = (find_threshold(scores, part, level),)
    return replace(sets, thresholds=thresholds, **penalty)


def calibrate_interval(task: Task, values: Array, target: Array, *, level: float = LEVEL) -> ConformalInterval:
    """Intervals for regression, gaussian or quantiles; arguments as `calibrate` has them.

    Of quantiles, those nearest to (1 - level) / 2 and (1 + level) / 2 are corrected; of a single one, both ends
    start from it.

    Raises:
        CombineError: the task has no intervals.
    """
    _check_level(level)
    values, target = np.asarray(values, dtype=np.float64), np.asarray(target, dtype=np.float64)
    part = find_known(target)
    if task.kind == "regression":
        scores, interval = np.abs(target - values), ConformalInterval("absolute", level, math.inf)
    elif task.kind == "gaussian":
        scores = np.abs(target - values[..., 0]) / np.sqrt(values[..., 1])
        interval = ConformalInterval("normalised", level, math.inf)
    elif task.kind == "quantiles":
        columns = _choose_quantiles(task.levels, level)
        scores = np.maximum(values[..., columns[0]] - target, target - values[..., columns[1]])
        interval = ConformalInterval("cqr", level, math.inf, columns)
    else:
        raise CombineError(f"intervals are of numbers; {task.kind} predicts none")
    return replace(interval, threshold=find_threshold(scores, part, level))


def measure(conformal: Conformal, values: Array, target: Array, index: Array | None = None) -> dict[str, float]:
    """How sets or intervals do on samples that calibration has not seen; arguments as `calibrate` has them.

    Returns:
        Means over samples, of each the mean over its positions (or labels) that take part: `coverage`, the
        fraction whose truth is inside; `size`, the number of classes in a set (of multilabel 0 to 2 of each label)
        or the width of an interval in the unit of the target; of sets also `empty`, the fraction without a class.

    Raises:
        CombineError: no position takes part.
    """
    target = np.asarray(target)
    part = find_known(target)
    figures: dict[str, Array]
    if isinstance(conformal, ConformalSets):
        inside = conformal.predict(values, index)
        named = np.where(part, target, 0).astype(np.int64)[..., None]
        size = inside.sum(axis=-1)
        covered = np.take_along_axis(inside, named, axis=-1)[..., 0]
        figures = {"coverage": covered, "size": size, "empty": size == 0}
    else:
        low, high = conformal.predict(values)
        figures = {"coverage": (low <= target) & (target <= high), "size": high - low}
    weight = weigh_positions(part)
    if not len(weight):
        raise CombineError("no position of the target takes part")
    samples = float(weight.sum())
    return {name: float((one[part] * weight).sum() / samples) for name, one in figures.items()}


def _draw(sets: ConformalSets, values: Array, index: Array | None, purpose: str) -> Array | None:
    if not sets.randomised:
        return None
    return draw_uniform(sets.seed, np.arange(len(values)) if index is None else index, purpose)


def _as_classes(values: Array) -> Array:
    """The probability of each label [n, L] as that of two classes, no and yes: float64 [n, L, 2]."""
    p = np.asarray(values, dtype=np.float64)
    return np.stack([1 - p, p], axis=-1)


def _choose_quantiles(levels: Sequence[float], level: float) -> tuple[int, int]:
    low, high = (1 - level) / 2, (1 + level) / 2
    lower = min(range(len(levels)), key=lambda at: abs(levels[at] - low))
    return lower, min(range(len(levels)), key=lambda at: abs(levels[at] - high))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise CombineError(f"the level must be between 0 and 1, got {level}")


def _as_json(threshold: float) -> float | None:
    return None if math.isinf(threshold) else threshold
