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
| multilabel     | thr        | that of two classes, yes and no, with a threshold of its own for each label       |
| regression     | absolute   | abs(y - point)                                                                    |
| gaussian       | normalised | abs(y - mean) / standard deviation (Lei et al. 2018, section 5.2)                 |
| quantiles      | cqr        | max(lower - y, y - upper) (Romano, Patterson and Candes 2019, eq. 6)              |

**aps is deterministic** unless `randomised`: S(x) is the smallest set of the most probable classes whose sum
exceeds the threshold. It always holds the most probable class, hence covers more than `level` where the accuracy
is higher. Randomised, a uniform u of the sample adds u * p_y to the score: coverage comes down to `level`, and
sets may be empty, as those of thr may be: that is how they come down to it. u is a function of `seed` and the
sample's index.

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

from ensemble.combine.metrics import Array, CombineError, find_known
from ensemble.spec.task import Task
from pipelines.order.epoch_order import derive_bytes, mix

LEVEL = 0.9
"""The coverage that is asked for unless another one is."""

SetMethod = Literal["thr", "aps"]
IntervalMethod = Literal["absolute", "normalised", "cqr"]

_CHUNK = 2**20
"""Elements of values that are worked on at once."""

_OF_RANDOMISED = ("randomised", "seed")

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
        randomised: of aps: whether the score has a random part.
        seed: of the random part.
    """

    method: SetMethod
    level: float
    thresholds: tuple[float, ...]
    multilabel: bool = False
    randomised: bool = False
    seed: int = 0

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
        for at in _chunks(values):
            scores = score_classes(self.method, values[at], None if draws is None else draws[at])
            inside[at] = scores <= (thresholds[:, None] if self.multilabel else thresholds[0])
        return inside

    def as_record(self) -> dict[str, Any]:
        """The parameters as JSON, an infinite threshold as None; see `load_conformal`."""
        record = {"kind": "sets", **asdict(self), "thresholds": list(map(_as_json, self.thresholds))}
        return record if self.randomised else {name: record[name] for name in record if name not in _OF_RANDOMISED}


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
    """Every way that the task has, calibrated: of classification thr and (deterministic) aps, else one.

    Args:
        values: combined and calibrated predictions of samples that took no part in training, as the task lays
            them out.
        target: as the task lays it out; positions that take no part are left out.
        level: the probability with which the truth is to be covered.
        index: int [n], of the samples; used by randomised sets only.

    Raises:
        CombineError: for a free task.
    """
    if task.kind == "classification":
        return [
            calibrate_sets(task, values, target, method=method, level=level, index=index)
            for method in ("thr", "aps")
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
        CombineError: the task has no classes, or something else than aps is to be randomised.
    """
    if task.kind not in ("classification", "multilabel"):
        raise CombineError(f"sets are of classes; {task.kind} has none")
    if randomised and method != "aps":
        raise CombineError(f"only aps can be randomised, not {method}")
    _check_level(level)
    multilabel = task.kind == "multilabel"
    target, part = np.asarray(target), find_known(np.asarray(target))
    sets = ConformalSets(method, level, (math.inf,), multilabel, randomised, seed)
    values = _as_classes(values) if multilabel else np.asarray(values)
    draws = _draw(sets, values, index, "calibrate")
    scores = np.empty(target.shape)
    named = np.where(part, target, 0).astype(np.int64)[..., None]
    for at in _chunks(values):
        every = score_classes(method, values[at], None if draws is None else draws[at])
        scores[at] = np.take_along_axis(every, named[at], axis=-1)[..., 0]
    if multilabel:
        labels = range(target.shape[1])
        thresholds = tuple(find_threshold(scores[:, label], part[:, label], level) for label in labels)
    else:
        thresholds = (find_threshold(scores, part, level),)
    return replace(sets, thresholds=thresholds)


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
    weight = _weigh_positions(part)
    if not len(weight):
        raise CombineError("no position of the target takes part")
    samples = float(weight.sum())
    return {name: float((one[part] * weight).sum() / samples) for name, one in figures.items()}


def find_threshold(scores: Array, part: Array, level: float) -> float:
    """The threshold of split conformal prediction, every sample counting once.

    The smallest t for which the sum over samples of the fraction of their scores that are not above t is at least
    (n + 1) * level; with one position a sample it is the ceil((n + 1) * level)-th smallest score.

    Args:
        scores: float64 [n, ...].
        part: bool [n, ...], which take part; a sample without any is not counted.
        level: between 0 and 1.

    Returns:
        The threshold; inf where n samples are too few for the level.
    """
    weight = _weigh_positions(part)
    known = scores[part]
    order = np.argsort(known, kind="stable")
    samples = round(float(weight.sum()))
    wanted = (samples + 1) * level * (1 - _ROUNDING)
    at = int(np.searchsorted(np.cumsum(weight[order]), wanted))
    # The last sum is `samples` but for rounding, which is to hide no sample and to invent none.
    if wanted > samples or not len(known):
        return math.inf
    return float(known[order[min(at, len(known) - 1)]])


def score_classes(method: SetMethod, values: Array, draws: Array | None = None) -> Array:
    """The score of every class: probabilities [n, ..., C] -> float64 of that shape.

    Args:
        draws: float64 [n], between 0 and 1: of randomised aps.
    """
    p = np.asarray(values, dtype=np.float64)
    if method == "thr":
        return 1 - p
    order = np.argsort(-p, axis=-1, kind="stable")
    before = np.zeros(p.shape)
    np.cumsum(np.take_along_axis(p, order, axis=-1)[..., :-1], axis=-1, out=before[..., 1:])
    scores = np.empty(p.shape)
    np.put_along_axis(scores, order, before, axis=-1)
    return scores if draws is None else scores + draws.reshape(-1, *[1] * (p.ndim - 1)) * p


def draw_uniform(seed: int, index: Array, purpose: str) -> Array:
    """A number between 0 and 1 for each sample, a function of the arguments alone: float64 [n].

    Args:
        index: int [n].
        purpose: numbers of two purposes are independent.
    """
    key = np.frombuffer(derive_bytes("conformal", purpose, seed, size=8), np.uint64)
    words = mix(mix(np.asarray(index, dtype=np.int64).astype(np.uint64) ^ key) + key)
    numbers: Array = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _draw(sets: ConformalSets, values: Array, index: Array | None, purpose: str) -> Array | None:
    if not sets.randomised:
        return None
    return draw_uniform(sets.seed, np.arange(len(values)) if index is None else index, purpose)


def _weigh_positions(part: Array) -> Array:
    """The weight of each position that takes part, in order: 1 / (their number in its sample): float64."""
    flat = part.reshape(len(part), -1) if part.size else part.reshape(len(part), 0)
    count = flat.sum(axis=1)
    weight: Array = 1.0 / np.repeat(count, count)
    return weight


def _as_classes(values: Array) -> Array:
    """The probability of each label [n, L] as that of two classes, no and yes: float64 [n, L, 2]."""
    p = np.asarray(values, dtype=np.float64)
    return np.stack([1 - p, p], axis=-1)


def _choose_quantiles(levels: Sequence[float], level: float) -> tuple[int, int]:
    low, high = (1 - level) / 2, (1 + level) / 2
    lower = min(range(len(levels)), key=lambda at: abs(levels[at] - low))
    return lower, min(range(len(levels)), key=lambda at: abs(levels[at] - high))


def _chunks(values: Array) -> list[slice]:
    step = max(1, _CHUNK * len(values) // max(1, values.size))
    return [slice(start, start + step) for start in range(0, len(values), step)]


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise CombineError(f"the level must be between 0 and 1, got {level}")


def _as_json(threshold: float) -> float | None:
    return None if math.isinf(threshold) else threshold
