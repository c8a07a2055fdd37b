"""Figures of each class for the page: which classes are taken for which, and how well each one is found.

A confusion matrix of up to `MOST_SHOWN` classes can be read as one; of more classes the page lists the most
frequent confusions, and the classes that are found worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting.sections import Cell, Table, scored

if TYPE_CHECKING:
    from ensemble.combine.metrics import Array
    from ensemble.combine.per_class import PerClass
    from ensemble.spec.task import Task

MOST_CONFUSIONS = 30
MOST_CLASSES = 30  # rows of the table of classes
NAMES = {"combined": "combined model", "best": "best member"}


def describe_classes(
    task: Task, models: Mapping[str, Array], target: Array, names: Sequence[str] | None
) -> dict[str, Any] | None:
    """The part `classes` of the document `quality`; None where the task has no classes.

    Args:
        models: values [n, ...] of "best" and "combined".
        names: of the classes; None: their numbers.

    Returns:
        - `count`: how many classes there are.
        - `matrices`: of each model `of` ("combined" first), the `names` of classes and `cells` [true, predicted,
          count, share of the true class] that are not 0; empty of labels, and of more than `MOST_SHOWN` classes.
        - `tables`: the classes by F1, the worst first, and the most frequent confusions.
    """
    from ensemble.combine.per_class import MOST_SHOWN, compute_per_class
    from ensemble.spec.task import LABELS

    if task.kind not in LABELS:
        return None
    found = {of: compute_per_class(task, models[of], target, names) for of in ("combined", "best") if of in models}
    if not found:
        return None
    first = next(iter(found.values()))
    count = len(first.support)
    has_matrix = task.kind == "classification" and count <= MOST_SHOWN
    tables = [_tabulate_classes(found)]
    if task.kind == "classification" and not has_matrix:
        tables += [_tabulate_confusions(of, each) for of, each in found.items()][:1]
    return {
        "count": count,
        "matrices": [_make_matrix(of, each) for of, each in found.items()] if has_matrix else [],
        "tables": [table.as_dict() for table in tables],
    }


def _make_matrix(of: str, figures: PerClass) -> dict[str, Any]:
    cells = [[t, p, n, round(n / int(figures.support[t]), 5)] for t, p, n in figures.cells.tolist()]
    return {"of": of, "names": [figures.name(i) for i in range(len(figures.support))], "cells": cells}


def _tabulate_classes(found: Mapping[str, PerClass]) -> Table:
    of, first = next(iter(found.items()))
    other = found.get("best") if of != "best" else None
    what = "label" if first.task == "multilabel" else "class"
    order = sorted(range(len(first.support)), key=lambda i: (first.support[i] == 0, first.f1[i], i))
    shown = order[:MOST_CLASSES]
    head = [(what, "text"), ("precision", ""), ("recall", ""), ("F1", ""), ("support", "")]
    head += [("F1 of the best member", "")] if other is not None else []
    rows: list[list[Cell]] = []
    for i in shown:
        figures = [scored(float(column[i])) for column in (first.precision, first.recall, first.f1)]
        row: list[Cell] = [first.name(i), *figures, float(first.support[i])]
        rows.append([*row, scored(float(other.f1[i]))] if other is not None else row)
    more = len(order) - len(shown)
    left = f" The {len(shown)} worst of {len(order)}; results.json has all." if more else ""
    reading = f"Of the {NAMES[of]}, the lowest F1 first; support is how many samples are of the {what}.{left}"
    return Table("per-class", f"Figures of each {what}", reading, head, rows)


def _tabulate_confusions(of: str, figures: PerClass) -> Table:
    found = figures.list_confusions(MOST_CONFUSIONS)
    total = int((figures.cells[:, 0] != figures.cells[:, 1]).sum())
    reading = f"Of the {NAMES[of]}, the most frequent first; the share is that of the true class."
    reading += f" {len(found)} of {total} pairs that occur." if total > len(found) else ""
    head = [("true class", "text"), ("predicted as", "text"), ("samples", ""), ("share", "")]
    rows: list[list[Cell]] = [
        [each["true"], each["predicted"], each["count"], (f"{100 * each['share']:.1f} %", each["share"])]
        for each in found
    ]
    return Table("confusions", "Classes taken for others", reading, head, rows)
