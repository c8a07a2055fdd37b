"""Finds the names of classes that the source of the data keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble.spec.splits import list_classes, trace_labels
from ensemble.spec.task import Task
from pipelines import Pipeline

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

NAMED = ("classification", "multilabel")


def find_known_classes(ensemble: Ensemble, task: Task) -> tuple[str, ...]:
    """The names that a run's data have for its classes or labels: the training data, else a split with names.

    Empty where there are none, or where a stage of the user's gives samples other labels.
    """
    if task.kind not in NAMED:
        return ()
    for pipeline in (ensemble.first_pipeline(), ensemble.valid, ensemble.test):
        if not isinstance(pipeline, Pipeline):
            continue
        names = list_classes(pipeline, ensemble.target)
        if names and trace_labels(pipeline, ensemble.target) == "kept":
            return names
    return ()
