"""The splits of a run beside each other: classes have one numbering, and samples that two splits share are known.

Sources number classes by what they hold: in a folder with `b` and `c`, `b` is 0, whatever it is in another. The
training data decide: in `valid` and `test` each class has the number that it has there, by its name. A source
whose classes have these numbers already stays as it is; another is wrapped (`Source.number_classes`), which is
part of its fingerprint. Labels that are texts are numbered in sorted order, in all splits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ensemble.spec.sample_weights import make_weight_function
from ensemble.spec.validation import SpecError

if TYPE_CHECKING:
    from ensemble.spec.identity import Identity
    from pipelines import Pipeline
    from pipelines.stage import Stage

#: Splits whose labels are compared with predictions.
LABELLED = ("valid", "test")
#: Samples, spread over a split, by which it is seen what the user's stages make of labels.
SAMPLES = 64

Trace = Literal["kept", "changed", "gone", "unknown"]


def _has_names(pipeline: Any) -> bool:
    """Whether what a pipeline reads may know names: a source of a class of the user's own need not."""
    from pipelines.sources import Source

    return isinstance(getattr(pipeline, "source", None), Source)


def find_raw_name(pipeline: Pipeline, target: str) -> str:
    """What a field of the samples is called in the records."""
    from pipelines import stages

    rename = type(stages.rename(a="b"))
    for stage in reversed(pipeline.stages):
        if isinstance(stage.call, rename):
            target = next((old for old, new in stage.call.names if new == target), target)
    return target


def trace_labels(pipeline: Pipeline, target: str) -> Trace:
    """What the stages make of the labels: whether samples have those of the records, others, or none.

    With functions of the user's among the stages, some samples are prepared; unknown where none can be.
    """
    from pipelines.stage import find_slots
    from pipelines.stages.records import as_record

    if target in find_slots(pipeline.stages):  # a text, or a list, is to stand in batches
        return "changed"
    if all(stage.field is None and as_record(stage.call) is not None for stage in pipeline.stages):
        return _trace_known_stages(pipeline, target)
    traces = {_compare_label(pipeline, index, target) for index in _spread(len(pipeline.source))}
    return next((trace for trace in ("changed", "gone", "kept") if trace in traces), "unknown")


def _trace_known_stages(pipeline: Pipeline, target: str) -> Trace:
    from pipelines import stages

    rename, select, drop = type(stages.rename(a="b")), type(stages.select("a")), type(stages.drop("a"))
    name = find_raw_name(pipeline, target)
    is_text = pipeline.source.is_text(name)
    for stage in pipeline.stages:
        call: Any = stage.call
        if isinstance(call, rename):
            name = dict(call.names).get(name, name)
        elif isinstance(call, select | drop):
            if (name in call.fields) == isinstance(call, drop):
                return "gone"
        elif is_text and getattr(call, "field", None) == name:
            return "changed"
    return "kept" if name == target else "gone"


def _spread(count: int) -> Sequence[int]:
    return sorted({number * (count - 1) // (SAMPLES - 1) for number in range(SAMPLES)})


def _compare_label(pipeline: Pipeline, index: int, target: str) -> Trace:
    import numpy as np

    from pipelines.errors import PipelineError
    from pipelines.prepare.checked import prepare_checked
    from pipelines.prepare.sample_maker import SampleMaker

    try:
        before = pipeline.source[index].get(find_raw_name(pipeline, target))
        sample = prepare_checked(SampleMaker(pipeline), index)
    except PipelineError:
        return "unknown"
    if target not in sample:
        return "gone"
    return "kept" if np.array_equal(np.asarray(before), np.asarray(sample[target])) else "changed"


def list_classes(pipeline: Pipeline, target: str) -> tuple[str, ...]:
    """Names of the classes of the target, in the order of their numbers; empty where the source knows none."""
    from pipelines.sources._classes import list_classes

    if not _has_names(pipeline):
        return ()
    raw = find_raw_name(pipeline, target)
    is_text = pipeline.source.is_text(raw)
    return () if is_text and trace_labels(pipeline, target) != "kept" else list_classes(pipeline.source, raw)


def number_classes(split: str, pipeline: Pipeline, train: Pipeline, target: str, names: Sequence[str]) -> Pipeline:
    """Returns the pipeline of a split with the classes numbered as in the training data.

    Args:
        split: its name.
        train: the pipeline of the training data.
        names: of its classes, in the order of their numbers.

    Raises:
        SpecError: a class is not in the training data, or stages change labels otherwise than those of `train` do.
    """
    from pipelines.errors import PipelineError
    from pipelines.sources._classes import find_foreign_class

    if not _has_names(pipeline):
        return pipeline
    raw, source = find_raw_name(pipeline, target), pipeline.source
    classes = source.find_class_names(raw)
    if (classes is None and not source.is_text(raw)) or (classes is not None and classes.are_numbered_by(names)):
        return pipeline
    trace = trace_labels(pipeline, target)
    if trace == "gone" or (classes is None and trace == "changed"):  # a text that a stage makes numbers of
        return pipeline
    if trace == "changed" and not _are_stages_of(pipeline, train):
        raise SpecError(
            f"Ensemble.{split}: {source!r} numbers the classes of {raw!r} differently from the training data "
            f"({_format(classes.union if classes else ())} instead of {_format(names)}), and its stages change "
            "them differently from those of train=: leave these stages out; classes are numbered by their names"
        )
    foreign = find_foreign_class(source, raw, names)
    if foreign is not None:
        index, name = foreign
        raise SpecError(
            f"Ensemble.{split}: the class {name!r} ({source.where(index)}) is not in the training data, whose "
            f"classes are {_format(names)} ({train.source.where(0)} ...): add it there, or leave its records out "
            f"of {split}="
        )
    has_arrays = False
    with contextlib.suppress(PipelineError):  # whoever reads the record says so
        has_arrays = bool(getattr(source[0].get(raw), "ndim", 0))
    if classes is not None and has_arrays:
        raise SpecError(
            f"Ensemble.{split}: {source!r} names its classes {_format(classes.union)}, the training data "
            f"{_format(names)}, and {raw!r} is an array, whose numbers are not mapped: give both the same names"
        )
    return pipeline.number_classes(raw, names)


def _are_stages_of(pipeline: Pipeline, train: Pipeline) -> bool:
    """Whether all functions of the user's among the stages are stages of the training data, too."""

    def describe(stage: Stage) -> Any:
        return id(stage.call) if stage.description.gaps else stage.description.value

    theirs = list(map(describe, train.stages))
    return all(describe(stage) in theirs for stage in pipeline.stages)


def _format(names: Sequence[str]) -> str:
    from pipelines.sources._labels import format_classes

    return format_classes(list(names))


def describe_numbering(splits: Mapping[str, Pipeline | None], target: str, names: Sequence[str]) -> dict[str, Any]:
    """Split -> a digest of how its classes are numbered, of splits whose sources by themselves number them
    otherwise than the training data do.
    """
    from pipelines import fingerprint

    digests: dict[str, Any] = {}
    for split, pipeline in splits.items():
        source: Any = getattr(pipeline, "source", None)
        whole: Any = source.source if getattr(source, "kind", "") == "subset" else source
        if hasattr(whole, "describe_numbering"):
            digests[split] = fingerprint.digest(whole.describe_numbering())
        elif pipeline is not None and names and hasattr(whole, "find_class_names"):
            classes = whole.find_class_names(find_raw_name(pipeline, target))
            if classes is not None and not classes.are_numbered_by(names):
                digests[split] = fingerprint.digest(classes.lists)
    return digests


def count_overlaps(splits: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, int]]:
    """Split -> another one before it -> how many of the split's records it has as well, where that is known.

    Args:
        splits: the pipelines of each, in order; of several the largest number counts.
    """
    from pipelines.sources._origin import find_shared_records

    counts: dict[str, dict[str, int]] = {}
    names = list(splits)
    for number, split in enumerate(names):
        for before in names[:number]:
            pairs = ((one.source, other.source) for one in splits[before] for other in splits[split])
            most = int(max((find_shared_records(*pair).sum() for pair in pairs), default=0))
            if most:
                counts.setdefault(split, {})[before] = most
    return counts


def find_leak(split: str, pipeline: Pipeline, train: Sequence[Pipeline]) -> str | None:
    """How training would know samples of a split: by windows with steps in common, or by a stage that was fitted
    to them; None where nothing is known of that.
    """
    import numpy as np

    from pipelines.sources._origin import find_shared_records, share_steps

    if any(one.source is not pipeline.source and share_steps(one.source, pipeline.source) for one in train):
        return (
            f"{split} has windows that share steps with those of train: split the table by time first, as by "
            "table.split(0.8, by='hour'), and make windows (or packed rows) of each part"
        )
    is_trained = np.any([find_shared_records(one.source, pipeline.source) for one in train], axis=0)
    for stage in (stage for one in (*train, pipeline) for stage in one.stages):
        if (fitted_to := getattr(stage.call, "fitted_to", None)) is not None:
            is_seen = find_shared_records(fitted_to, pipeline.source) & ~is_trained
            if is_seen.any():
                return (
                    f"{split}: the stage {stage.name} was fitted to {int(is_seen.sum()):,} of its {len(is_seen)} "
                    "samples, too: split first, and fit it to the training records: stages.fit(train, ...)"
                )
    return None


def check_weights(identities: Sequence[Identity], train: Sequence[Pipeline], *, may_overlap: bool) -> None:
    """Raise SpecError where the weights or folds of some member cannot be made of the training records.

    Args:
        identities: of members; equal weights are tried once.
        train: pipelines of the training records.
        may_overlap: whether windows that have steps in common may be in two folds.
    """
    from pipelines.errors import PipelineError
    from pipelines.sources._origin import find_windows

    records = [one.weights for one in identities if one.weights is not None]
    distinct = {json.dumps(record | {"held_out": 0}, sort_keys=True): record for record in records}
    for record, pipeline in itertools.product(distinct.values(), train):
        if not hasattr(pipeline, "source"):
            continue
        fields = {name: record[name] for name in ("by", "stratify", "group", "assigned") if name in record}
        named = ", ".join(f"Folds.{name}={field!r}" for name, field in fields.items())
        name = {"fold": named or "Folds", "classes": "ClassWeights"}.get(record["kind"], "weights")
        try:
            make_weight_function(record, pipeline.source)
            is_random = record["kind"] == "fold" and not fields
            if is_random and not may_overlap and find_windows(pipeline.source):
                pipeline.source.number_folds(record["k"], record["seed"])
        except PipelineError as error:
            raise SpecError(f"{name}: {error}") from error


#: What is wrong with samples that two splits share.
_SEEN = {
    ("valid", "train"): "members are selected, and the combined model is calibrated, on samples that they were "
    "trained on",
    ("test", "train"): "the test figures are of samples that members were trained on",
    ("test", "valid"): "the test figures are of samples on which members were selected and calibrated",
}


def describe_overlap(row: Mapping[str, Any]) -> str:
    """A row of `Ensemble.list_overlaps` as a sentence."""
    split, before = row["split"], row["with"]
    return (
        f"{split} shares {row['shared']:,} of its {row['samples']:,} samples with {before}: {_SEEN[split, before]}"
    )
