"""Quantifies how sure a run's combined model is: on average, by conformal prediction, and sample by sample."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine import conformal
from ensemble.combine.metrics import Array, find_known
from ensemble.combine.selective import measure_selective
from ensemble.combine.shifted import measure_shift
from ensemble.combine.tasks import find_math
from ensemble.combine.uncertainty import PARTS, average, decompose
from ensemble.spec.task import Task

if TYPE_CHECKING:
    from ensemble.combine.combination import Combination
    from ensemble.combine.prediction_matrix import PredictionMatrix

#: What each column of `uncertainty.csv` holds; empty where it has no meaning for the task.
COLUMNS = {
    "split": "valid, test or shifted",
    "index": "of the sample",
    "target": "class, number, or labels that are 1, by spaces; empty where a sample has several positions",
    "prediction": "as target, by the combined, calibrated model: of a distribution its mean or middle quantile; "
    "of a stack, in the validation split, by one that was not fitted on the sample",
    "total": "uncertainty of the prediction; see `ensemble.combine.uncertainty`",
    "aleatoric": "the part of it that is in the data",
    "epistemic": "the part of it that is between the members",
    "disagreement": "the probability that two members name different classes",
}


@dataclass(frozen=True)
class Quantified:
    """The combined model's predictions on a split, and how sure they are.

    Attributes:
        split: "valid", "test" or "shifted".
        task: what is predicted.
        index: int64 [n].
        target: [n, ...] or None.
        values: combined and calibrated, float64 [n, ...] as the task lays them out.
        parts: uncertainty of each sample by its parts, float64 [n] each.
        is_known: whether targets say which positions take part; else all do.
        best: what the best member alone predicts, uncalibrated; None where none is known to be the best.
    """

    split: str
    task: Task
    index: Array
    target: Array | None
    values: Array
    parts: dict[str, Array]
    is_known: bool = True
    best: Array | None = None


def quantify(
    split: str, aligned: PredictionMatrix, combination: Combination, best: str | None = None
) -> Quantified:
    """Predict a split's samples and decompose their uncertainty.

    Args:
        split: "valid", "test" or "shifted".
        aligned: what the members predict.
        combination: of these members.
        best: the best member, if known.

    Raises:
        CombineError: the user's function gives something else than predictions.
    """
    positions = aligned.values[0].ndim - find_math(aligned.task).tail
    known = None
    # The targets of shifted samples need not be those that the members know.
    if aligned.target is not None and aligned.target.shape == aligned.values[0].shape[:positions]:
        known = find_known(aligned.target)
    parts = decompose(aligned.task, aligned.values, combination.weights, known)
    values = combination.predict(aligned.values)
    alone = None if best is None else aligned.values[aligned.members.index(best)]
    return Quantified(split, aligned.task, aligned.index, aligned.target, values, parts, known is not None, alone)


def describe(
    valid: Quantified,
    report: Quantified,
    shifted: Quantified | None,
    *,
    level: float = conformal.LEVEL,
) -> dict[str, Any]:
    """The fields of the `combined` event that say how sure the model is, plain JSON values.

    Args:
        valid: on whose samples conformal prediction is calibrated: what the model predicts without having been
            fitted on them. From the own fit of a stack sets would be too small.
        report: of which the figures are: the test split, or `valid` itself.
        level: the probability with which conformal prediction is to cover the truth.

    Returns:
        - `uncertainty`: part -> its mean over the samples of `report`; None where the task has none.
        - `conformal`: method -> its parameters (`conformal.load_conformal` takes them), and of `report` what
          `conformal.measure` finds: without the coverage where `report` is what it was calibrated on, and without
          the size of infinite intervals. None where the task has none or there is no target.
        - `selective`: "ensemble", "best" -> what `selective.measure_selective` finds in `report`; without a model
          that has no score. None where no model has one, or there is no target.
        - `shifted`: part -> AUROC, AUPR and FPR95 of `shifted` against `report`; None without shifted samples.
    """
    return {
        "uncertainty": average(report.parts) or None,
        "conformal": _describe_conformal(valid, report, level) or None,
        "selective": _describe_selective(report) or None,
        "shifted": None if shifted is None else measure_shift(report.parts, shifted.parts) or None,
    }


def _describe_conformal(valid: Quantified, report: Quantified, level: float) -> dict[str, Any]:
    if valid.task.kind == "free" or valid.target is None or report.target is None:
        return {}
    found: dict[str, Any] = {}
    for each in conformal.calibrate(valid.task, valid.values, valid.target, level=level, index=valid.index):
        measured = conformal.measure(each, report.values, report.target, report.index)
        if report is valid:
            del measured["coverage"]
        figures = {name: value for name, value in measured.items() if math.isfinite(value)}
        found[each.method] = {**each.as_record(), **figures}
    return found


def _describe_selective(report: Quantified) -> dict[str, Any]:
    task, target = report.task, report.target
    if target is None:
        return {}
    found = {"ensemble": measure_selective(task, report.values, target, report.parts.get("epistemic"))}
    if report.best is not None:
        found["best"] = measure_selective(task, report.best, target)
    return {of: figures for of, figures in found.items() if figures is not None}


def format_samples(splits: Sequence[Quantified]) -> str:
    """The table of all samples as comma-separated values, `COLUMNS` first; numbers have all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in splits:
        n = len(one.index)
        prediction = list_cells(one.task, one.task.decide(one.values))
        target = [None] * n if one.target is None else list_cells(one.task, one.target)
        parts = [one.parts[name].tolist() if name in one.parts else [None] * n for name in PARTS]
        rows = zip([one.split] * n, one.index.tolist(), target, prediction, *parts, strict=True)
        writer.writerows([None if cell != cell else cell for cell in row] for row in rows)  # NaN is none
    return text.getvalue()


def list_cells(task: Task, points: Array) -> list[Any]:
    """A cell for each sample of targets or points [n, ...]: a number, the labels that are 1, or None.

    None stands where a sample has several positions, or its only one takes no part.
    """
    if task.kind == "multilabel":
        return [" ".join(map(str, np.flatnonzero(row == 1).tolist())) for row in points]
    if points.ndim != 1:
        return [None] * len(points)
    known = find_known(points).tolist()
    return [cell if is_known else None for cell, is_known in zip(points.tolist(), known, strict=True)]
