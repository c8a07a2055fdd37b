"""Finds the names of classes: given by the user, or kept by the source of the data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.artifact.layout import ArtifactError
from ensemble.spec import Recipe
from ensemble.spec.task import Task
from pipelines import Pipeline, stages
from pipelines.errors import PipelineError
from pipelines.stages.records import as_record

if TYPE_CHECKING:
    from ensemble.spec import Ensemble

#: Of which it is seen whether stages change labels.
SAMPLES = 64
_RENAME = type(stages.rename(a="b"))
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
    """The names that the sources of a run's data have for its classes or labels; empty where they have none, or
    where a stage of the user's gives the first samples other labels.
    """
    if task.kind not in NAMED:
        return ()
    target = ensemble.recipe.target if isinstance(ensemble.recipe, Recipe) else "label"
    for pipeline in (ensemble.valid, ensemble.test, ensemble.train):
        if not isinstance(pipeline, Pipeline):
            continue
        source = pipeline.source
        raw = _find_raw_name(pipeline, target)
        names = _read_names(getattr(source, "source", source), raw)
        if names and _keeps_labels(pipeline, raw, target):
            return names
    return ()


def _find_raw_name(pipeline: Pipeline, target: str) -> str:
    """What the target is called in the source."""
    for stage in reversed(pipeline.stages):
        if isinstance(stage.call, _RENAME):
            target = next((old for old, new in stage.call.names if new == target), target)
    return target


def _keeps_labels(pipeline: Pipeline, raw: str, target: str) -> bool:
    """Whether the labels of the first samples are those of the source."""
    if all(stage.field is None and as_record(stage.call) is not None for stage in pipeline.stages):
        return True
    try:
        first = pipeline if pipeline.sampling is not None else pipeline.take(min(SAMPLES, len(pipeline)))
        for batch in itertools.islice(first.loader(SAMPLES, epochs=1), 1):
            for index, label in zip(batch["index"].tolist(), batch[target].numpy(), strict=True):
                if not np.array_equal(np.asarray(pipeline.source[index][raw]), label):
                    return False
    except (PipelineError, KeyError):
        return False
    return True


def _read_names(source: Any, target: str) -> tuple[str, ...]:
    """The names that a source knows: of folders, of a data set's `classes`, of a Hugging Face `ClassLabel`."""
    if getattr(source, "kind", None) == "parquet":
        return _read_parquet_names(source.files[0].path, target)
    known = getattr(source, "classes", None) or getattr(getattr(source, "items", None), "classes", None)
    return tuple(map(str, known)) if isinstance(known, list | tuple) else ()


def _read_parquet_names(path: str, target: str) -> tuple[str, ...]:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_schema(path).metadata or {}
    try:
        feature = json.loads(metadata[b"huggingface"])["info"]["features"][target]
        return tuple(map(str, feature["names"]))
    except (KeyError, TypeError, ValueError):
        return ()
