"""Figures of each class: precision, recall, F1, support, and which classes are taken for which.

They are scikit-learn's with `zero_division=0`. Of several labels a sample, a label is predicted from a probability
of 0.5 on. Targets that are ignored take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.combine.metrics import Array, CombineError, find_known, flatten
from ensemble.combine.tasks import find_math
from ensemble.events import NOT_COMBINED, Combined
from ensemble.spec.task import LABELS, Task

if TYPE_CHECKING:
    import pandas

    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.store import RunDir, RunState

MOST_DENSE = 10_000
"""Classes of a matrix that is made: of as many it takes 800 MB."""
MOST_SHOWN = 30
"""Classes of a matrix that is shown."""
TRUE_PREDICTED = "true \\ predicted"
"""Head of the names of true classes, beside those of predicted ones."""
FIGURES = ("precision", "recall", "f1")


@dataclass(frozen=True)
class PerClass:
    """Figures of each class or label of one model.

    Attributes:
        task: "classification" or "multilabel".
        split: of the samples, "test" or "valid".
        classes: names of the classes or labels; None where they are not known.
        precision, recall, f1: float64 [C].
        support: int64 [C], how many samples (or positions) are of the class.
        predicted: int64 [C], how many are predicted as it.
        cells: int64 [k, 3]: true class, predicted class, count, where that is not 0; of labels [L, 3]: true
            positives, false positives, false negatives.
        positions: how many samples or positions take part, of labels for each label int64 [L].
    """

    task: str
    split: str
    classes: tuple[str, ...] | None
    precision: Array
    recall: Array
    f1: Array
    support: Array
    predicted: Array
    cells: Array
    positions: Array

    @property
    def confusion(self) -> Array:
        """Counts int64 [C, C], rows are true and columns predicted classes; of labels [L, 2, 2], each
        [[tn, fp], [fn, tp]], as in scikit-learn.

        Raises:
            CombineError: there are too many classes for a matrix; `cells` has what is not 0.
        """
        count = len(self.support)
        if self.task == "multilabel":
            hit, extra, missed = self.cells.T
            none = self.positions - hit - extra - missed
            return np.stack([np.stack([none, extra], axis=-1), np.stack([missed, hit], axis=-1)], axis=1)
        if count > MOST_DENSE:
            raise CombineError(f"a matrix of {count} classes does not fit into memory: take .cells")
        matrix = np.zeros((count, count), dtype=np.int64)
        matrix[self.cells[:, 0], self.cells[:, 1]] = self.cells[:, 2]
        return matrix

    def name(self, number: int) -> str:
        """The name of a class, or its number."""
        return str(number) if self.classes is None else self.classes[number]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each class: class, name, precision, recall, f1, support."""
        columns = [getattr(self, name).tolist() for name in (*FIGURES, "support")]
        return [
            {"class": number, "name": self.name(number), **dict(zip((*FIGURES, "support"), figures, strict=True))}
            for number, figures in enumerate(zip(*columns, strict=True))
        ]

    def list_confusions(self, most: int | None = None) -> list[dict[str, Any]]:
        """Which classes are taken for which, the most frequent first: true, predicted, count, share (of the true
        class). Empty for labels.

        Args:
            most: how many are listed at most.
        """
        if self.task == "multilabel":
            return []
        wrong = self.cells[self.cells[:, 0] != self.cells[:, 1]]
        order = np.argsort(-wrong[:, 2], kind="stable")[:most]
        return [
            {"true": self.name(t), "predicted": self.name(p), "count": n, "share": n / int(self.support[t])}
            for t, p, n in wrong[order].tolist()
        ]

    def __str__(self) -> str:
        """The rows as a table, and of at most `MOST_SHOWN` classes the confusion matrix, names on both axes."""
        rows = [[row["name"], *(f"{row[n]:.3f}" for n in FIGURES), str(row["support"])] for row in self.rows()]
        text = _format_table([["class", *FIGURES, "support"], *rows])
        if self.task == "multilabel" or len(rows) > MOST_SHOWN:
            return text
        names = [row[0] for row in rows]
        counts = [[name, *map(str, row)] for name, row in zip(names, self.confusion.tolist(), strict=True)]
        return f"{text}\n\n{_format_table([[TRUE_PREDICTED, *names], *counts])}"

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        from ensemble.spec.frames import make_frame

        return make_frame(self.rows())

    def as_record(self) -> dict[str, Any]:
        """The figures as JSON values, of classes in their order; `cells` as above."""
        return {name: getattr(self, name).tolist() for name in (*FIGURES, "support", "cells")}


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of one width each: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
        for first, *cells in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def compute_per_class(
    task: Task, values: Array, target: Array, classes: Sequence[str] | None = None, split: str = "test"
) -> PerClass:
    """The figures of each class.

    Args:
        values: [n, ..., C] probabilities of classes, or [n, L] of labels.
        target: [n, ...] classes, or [n, L] labels.
        classes: their names; other than there are classes: none.

    Raises:
        CombineError: the task has no classes, or the targets do not fit.
    """
    if task.kind not in LABELS:
        raise CombineError(f"predictions of the task {task.kind} have no classes")
    values, target = np.asarray(values), np.asarray(target)
    find_math(task).check_target(values, target)
    count = values.shape[-1]
    names = tuple(map(str, classes)) if classes is not None and len(classes) == count else None
    if task.kind == "classification":
        rows = flatten(values, target)
        pairs, counts = np.unique(rows.target * count + rows.values.argmax(axis=1), return_counts=True)
        cells = np.stack([pairs // count, pairs % count, counts], axis=1).astype(np.int64)
        true, chosen, counts = cells.T
        support, predicted, hit = (np.zeros(count, dtype=np.int64) for _ in range(3))
        np.add.at(support, true, counts)
        np.add.at(predicted, chosen, counts)
        np.add.at(hit, true[true == chosen], counts[true == chosen])
        positions = np.asarray(len(rows.target))
    else:
        takes_part, present, chosen = find_known(target), target != 0, values >= 0.5
        hit = (takes_part & present & chosen).sum(axis=0)
        support, predicted = (takes_part & present).sum(axis=0), (takes_part & chosen).sum(axis=0)
        cells = np.stack([hit, predicted - hit, support - hit], axis=1)
        positions = takes_part.sum(axis=0)

    def divide(part: Array, whole: Array) -> Array:
        return np.asarray(np.where(whole > 0, part / np.maximum(whole, 1), 0.0))

    precision, recall, f1 = divide(hit, predicted), divide(hit, support), divide(2 * hit, predicted + support)
    return PerClass(task.kind, split, names, precision, recall, f1, support, predicted, cells, positions)


def read_per_class(run_dir: RunDir, state: RunState | None = None) -> dict[str, PerClass]:
    """The figures of the "ensemble" and of the "best" member, on the samples that the combined metrics are of.

    Raises:
        CombineError: nothing was combined, the task has no classes, or the predictions have no targets.
    """
    from ensemble.combine.prediction_matrix import PredictionMatrix, read_prediction_matrix
    from ensemble.combine.recorded import read_combined
    from ensemble.store import read_state

    state = (read_state(run_dir.events) if state is None else state).as_finished()
    combined = state.combined or NOT_COMBINED
    split = combined.split or "test"
    ensemble = read_combined(run_dir, state, split)
    if ensemble.target is None:
        raise CombineError(f"{run_dir.path}: the {split} split has no targets")
    own = PredictionMatrix(["ensemble"], [ensemble.values], ensemble.index, ensemble.target, {}, ensemble.task)
    models = {"ensemble": own}
    if combined.best_member:
        models["best"] = read_prediction_matrix(run_dir, state, [combined.best_member], split)
    figures: dict[str, PerClass] = {}
    for of, model in models.items():
        if model.members and model.target is not None:
            part = take_part(model, combined)
            assert part.target is not None
            figures[of] = compute_per_class(part.task, part.values[0], part.target, combined.classes, split)
    return figures


def take_part(model: PredictionMatrix, combined: Combined) -> PredictionMatrix:
    """The part of the positions of which the run's figures of classes are."""
    return model if combined.method == "function" else model.thin(len(combined.candidates or ()))
