"""Finds the names of classes: given by the user, or kept by the source of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble.artifact.layout import ArtifactError
from ensemble.spec.splits import list_classes, trace_labels
from ensemble.spec.task import Task
from pipelines import Pipeline

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

NAMED = ("classification", "multilabel")


def find_classes(
    ensemble: Ensemble, task: Task, count: int, given: Sequence[str] | None
) -> tuple[str, ...] | None:
    """The names of the classes or labels, in order; None where they are not known, or the task has none.

    Args:
        count: how many there are.
        given: by the user.

    Raises:
        ArtifactError: other names are given than there are classes, or one is there twice.
    """
    if given is not None:
        if task.kind not in NAMED:
            raise ArtifactError(f"classes are given, but the task is {task.kind}, which has none")
        if len(given) != count or len(set(given)) != count:
            names = ", ".join(map(str, given))
            raise ArtifactError(f"classes must be {count} different names, got {len(given)}: {names}")
        return tuple(map(str, given))
    known = find_known_classes(ensemble, task)
    return known if len(known) == count else None


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
