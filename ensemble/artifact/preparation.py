"""Prepares raw records as a model takes them, by those stages of a run's pipeline that the model's fields need.

What a pipeline does to labels, names and other fields is left out, so that records need no more than the model
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ensemble.artifact.layout import ArtifactError
from ensemble.artifact.preprocessing import NUMBERS, RENAME, As
from ensemble.spec.splits import find_raw_name
from pipelines import Pipeline, stages
from pipelines.errors import PipelineError, as_utf8
from pipelines.samples.structure import advise_image_size
from pipelines.sources import Source, Subset
from pipelines.sources._classes import find_foreign_class
from pipelines.stage import Stage, make_stage
from pipelines.stages._table import Table
from pipelines.stages.records import as_record, from_record

DECODERS = tuple(type(make("image")) for make in (stages.decode_jpeg, stages.decode_image))
_SELECT, _DROP = type(stages.select("a")), type(stages.drop("a"))


class Open(Protocol):
    """Opens data."""

    def __call__(
        self, image: str | None, fields: Sequence[str] | None, *, keeps_missing: bool, texts: frozenset[str]
    ) -> Source:
        """Open them.

        Args:
            image: what their images are called.
            fields: those that are read; None: all.
            keeps_missing: whether a number that is missing is NaN.
            texts: fields that are texts, whatever they look like.
        """


@dataclass(frozen=True)
class Plan:
    """Which stages make some fields of raw records.

    Attributes:
        stages: in order.
        raw: the fields of raw records that they read; None where that is not known: a stage is the user's own.
    """

    stages: tuple[Stage, ...]
    raw: tuple[str, ...] | None

    @property
    def imputed(self) -> frozenset[str]:
        """The fields of raw records of which values may be missing."""
        return self._find_raw(lambda table: table.reads)

    @property
    def texts(self) -> frozenset[str]:
        """The fields of raw records that are texts, whatever they look like."""
        return self._find_raw(lambda table: table.texts)

    def _find_raw(self, choose: Callable[[Table], frozenset[str]]) -> frozenset[str]:
        """Fields that tables read, as they are called in raw records."""
        names: dict[str, str] = {}  # as they are now -> as they were
        fields: set[str] = set()
        for stage in self.stages:
            if isinstance(stage.call, RENAME):
                names |= {new: names.get(old, old) for old, new in stage.call.names}
            elif isinstance(stage.call, Table):
                fields |= {names.get(name, name) for name in choose(stage.call)}
        return frozenset(fields)

    @property
    def image(self) -> str | None:
        """The raw field that is decoded, or else the only one; None where that is not clear."""
        if self.raw is None:
            return None
        names = {name: name for name in self.raw}  # as they are now -> as they were
        decoded = []
        for stage in self.stages:
            if isinstance(stage.call, RENAME):
                renamed = dict(stage.call.names)
                names = {renamed.get(name, name): raw for name, raw in names.items()}
            elif isinstance(stage.call, DECODERS):
                decoded.append(names[stage.call.field])
        chosen = decoded or list(self.raw)
        return chosen[0] if len(chosen) == 1 else None


def make_plan(pipeline_stages: Sequence[Stage], fields: Sequence[str]) -> Plan:
    """The stages of a pipeline that `fields` of its samples need."""
    needed: set[str] | None = set(fields)
    kept: list[Stage] = []
    for stage in reversed(pipeline_stages):
        call = stage.call
        if needed is None or not _is_ours(stage):
            needed = None
            kept.append(stage)
        elif isinstance(call, RENAME):
            pairs = {old: new for old, new in call.names if new in needed}
            if pairs:
                kept.append(make_stage(stages.rename(**pairs), None, None, None))
            olds = {new: old for old, new in pairs.items()}
            needed = {olds.get(name, name) for name in needed}
        elif not isinstance(call, _SELECT | _DROP):  # what is not needed is dropped at the start
            made = {name for part in ("field", "lengths", "mask") if (name := getattr(call, part, None))}
            if isinstance(call, Table):
                if made & needed:
                    kept.append(stage)
                    needed = needed - made | call.reads
            elif made & needed:
                kept.append(stage)
                needed = needed - made | {call.field}  # type: ignore[attr-defined]
    order = {name: number for number, name in enumerate(fields)}
    raw = None if needed is None else tuple(sorted(needed, key=lambda name: (order.get(name, len(order)), name)))
    return Plan(tuple(reversed(kept)), raw)


def _is_ours(stage: Stage) -> bool:
    return stage.field is None and not stage.random and as_record(stage.call) is not None


@dataclass(frozen=True)
class Preparation:
    """What makes one raw record what an artifact's program takes: `preparation(record) -> sample`.

    Attributes:
        plan: the stages of the run's pipeline that the program's fields need.
        fields: of the program.
    """

    plan: Plan
    fields: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of a raw record that it needs."""
        return self.plan.raw or ()

    def __call__(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The program's fields of a record, without the batch axis.

        Raises:
            PipelineError: the record cannot be prepared.
        """
        sample: dict[str, Any] = {name: raw[name] for name in self.reads if name in raw}
        for stage in self.plan.stages:
            sample = stage.call(sample)
        return {name: sample[name] for name in self.fields}


def make_preparation(record: Mapping[str, Any]) -> Preparation:
    """The preparation of raw records for an artifact's program.

    Args:
        record: of the artifact (`layout.read_record`).

    Raises:
        ArtifactError: a stage is the user's own function.
    """
    fields = tuple(record["fields"])
    return Preparation(make_plan(_read_stages(record), fields), fields)


def _read_stages(record: Mapping[str, Any]) -> list[Stage]:
    """The stages before an artifact's program."""
    for stage in record["stages"]["of_caller"]:
        if stage["record"] is None:
            raise ArtifactError(
                f"the stage {stage['name']} of the run's pipeline is a function of its spec, which is not in "
                "the artifact: predict from the run, or prepare the data with it and give --prepared"
            )
    return [make_stage(from_record(one["record"]), None, None, None) for one in record["stages"]["of_caller"]]


def prepare_for_program(record: Mapping[str, Any], open_data: Open, *, prepared: bool = False) -> Pipeline:
    """The records of a source as an artifact's program takes them, in the source's order.

    Args:
        record: of the artifact (`layout.read_record`).
        open_data: of raw records, as the run's data were; images may be decoded.
        prepared: the records are what the program takes: no stage is to be run.

    Raises:
        ArtifactError: a stage is the user's own function, or the records lack a field or have others than the
            program takes.
    """
    fields = record["fields"]
    plan = make_plan([] if prepared else _read_stages(record), list(fields))
    pipeline = _apply(plan.stages, _start(open_data, plan, plan.image))
    for name, field in fields.items():
        if field.get("least"):  # images of several sizes, of which the program would cut this part
            pipeline = pipeline.map(stages.center_crop(name, tuple(field["least"])))
    return _fit_fields(pipeline.map(stages.select(*fields)), fields)


def prepare_for_run(
    pipeline: Pipeline,
    open_data: Open,
    fields: Sequence[str] | None,
    target: str,
    classes: Sequence[str] = (),
) -> Pipeline:
    """The records of a source through the stages of a run's pipeline, in the source's order.

    Args:
        pipeline: of the run, without random stages.
        open_data: of raw records, as the run's data were; images may be decoded, the target may be missing.
        fields: that the model reads; None: all that the pipeline gives, but the target.
        target: the field of the target.
        classes: names of the run's classes, by which labels that stages of the user's read are numbered.

    Raises:
        ArtifactError: the records lack a field.
    """
    wanted = [name for name in pipeline.top_fields if name != target] if fields is None else list(fields)
    plan = make_plan(pipeline.stages, wanted)
    sample = pipeline.source[0]
    image = plan.image
    if plan.raw is None:
        bytes_fields = [name for name, value in sample.items() if isinstance(value, bytes)]
        arrays = [name for name, value in sample.items() if isinstance(value, np.ndarray)]
        image = next((names[0] for names in (bytes_fields, arrays) if len(names) == 1), None)
    start = _start(open_data, plan, image, keeps_missing=_keeps_missing(pipeline.source))
    imputed = plan.imputed
    for name, value in sample.items():
        number = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMBERS
        if number and name in (plan.raw or ()) and name not in imputed:
            start = start.map(As(name, value.dtype.name))
    applied: Sequence[Stage] = plan.stages
    if plan.raw is None:
        start, first = _number_labels(start, find_raw_name(pipeline, target), classes)
        applied = _leave_out_target(applied, target, first)
    made = _apply(applied, start).map(stages.select(*wanted))
    structure = pipeline.structure
    for name, field in pipeline.fields.items():
        # A function of the user's makes of other numbers other types.
        if name in wanted and (structure is None or structure.is_array(name)):
            made = made.map(As(name, field.dtype))
    _check_first_sample(made, list(sample), list(start.source[0]))
    return made


def _keeps_missing(source: Any) -> bool:
    """Whether the records of a run have NaN where a number is missing."""
    while isinstance(source, Subset):
        source = source.source
    return bool(getattr(source, "keeps_missing", False))


def _start(open_data: Open, plan: Plan, image: str | None, *, keeps_missing: bool = False) -> Pipeline:
    """The raw records, with what is read of them.

    Raises:
        ArtifactError: they lack a field.
    """
    raw = plan.raw
    options: Any = {"keeps_missing": keeps_missing or bool(plan.imputed), "texts": plan.texts}
    source = open_data(image, raw, **options)
    pipeline = Pipeline(source, shuffle=False)
    if source.kind == "image_folder" and image not in (None, "image"):
        pipeline = pipeline.map(stages.rename(image=image))
    if raw is None:
        return pipeline
    renamed = {"image": image} if pipeline.stages else {}
    has = [renamed.get(name, name) for name in source[0]]
    if any(name.partition(".")[0] not in has for name in raw):
        raise ArtifactError(_explain_missing(raw, list(open_data(image, None, **options)[0])))
    return pipeline.map(stages.select(*raw))


def _explain_missing(needed: Sequence[str], has: Sequence[str]) -> str:
    missing = [name for name in needed if name.partition(".")[0] not in has]
    return (
        f"the model needs the {'fields' if len(needed) > 1 else 'field'} {', '.join(needed)}; the data have "
        f"{', '.join(has)}: {', '.join(missing or needed)} {'are' if len(missing) > 1 else 'is'} missing"
    )


def _check_first_sample(pipeline: Pipeline, needed: Sequence[str], has: Sequence[str]) -> None:
    """Raises for a record that a stage cannot prepare for the lack of a field that the run's records have.

    Raises:
        ArtifactError: see above.
    """
    missing = set(needed) - set(has)
    if not missing:
        return
    try:
        _ = pipeline.fields
    except PipelineError as error:
        if not any(repr(name) in str(error) for name in missing):
            return  # whoever reads the record says so
        why = f"{_explain_missing(needed, has)}, and a stage of the run's pipeline reads it ({error})"
        raise ArtifactError(
            f"{why}; add it to the data, or move what only training needs (such as the label) into a stage of "
            "its own: .map(function, field='label')"
        ) from error


def _number_labels(pipeline: Pipeline, raw: str, classes: Sequence[str]) -> tuple[Pipeline, dict[str, Any]]:
    """The records with labels as the run numbers them, and the first one; without labels, where one is of another
    class.
    """
    source = pipeline.source
    sample = dict(source[0])
    if classes and (source.find_class_names(raw) is not None or source.is_text(raw)):
        if find_foreign_class(source, raw, classes) is None:
            return pipeline.number_classes(raw, classes), sample
        sample.pop(raw, None)
        pipeline = pipeline.map(stages.drop(raw))
    return pipeline, sample


def _apply(applied: Sequence[Stage], pipeline: Pipeline) -> Pipeline:
    """The pipeline with these stages, without those that would decode what is decoded."""
    decoded = {name for name, value in pipeline.source[0].items() if isinstance(value, np.ndarray)}
    for stage in applied:
        if isinstance(stage.call, DECODERS) and stage.call.field in decoded:
            continue
        if isinstance(stage.call, RENAME):
            names = dict(stage.call.names)
            decoded = {names.get(name, name) for name in decoded}
        pipeline = append(pipeline, stage)
    return pipeline


def append(pipeline: Pipeline, stage: Stage) -> Pipeline:
    """The pipeline with one more stage, of another one."""
    return pipeline.map(stage.call, field=stage.field, random=stage.random or False, id=stage.id)


def _leave_out_target(applied: Sequence[Stage], target: str, sample: Mapping[str, Any]) -> list[Stage]:
    """The stages without what they do to a target that the records lack."""
    raw = target
    for stage in reversed(applied):
        if isinstance(stage.call, RENAME):
            raw = next((old for old, new in stage.call.names if new == raw), raw)
    if raw in sample:
        return list(applied)
    missing, kept = raw, []
    for stage in applied:
        call = stage.call
        if isinstance(call, RENAME):
            names = dict(call.names)
            renamed = {old: new for old, new in names.items() if old != missing}
            missing = names.get(missing, missing)
            if renamed:
                kept.append(make_stage(stages.rename(**renamed), None, None, None))
        elif isinstance(call, _SELECT | _DROP):
            fields = [name for name in call.fields if name != missing]
            if fields:
                make = stages.select if isinstance(call, _SELECT) else stages.drop
                kept.append(make_stage(make(*fields), None, None, None))
        elif missing not in (stage.field, getattr(call, "field", None)):
            kept.append(stage)
    return kept


def _fit_fields(pipeline: Pipeline, fields: Mapping[str, Mapping[str, Any]]) -> Pipeline:
    """The pipeline with casts to what the program takes, where these lose no more than precision."""
    for name, field in pipeline.fields.items():
        wanted = fields[name]
        axes = wanted["shape"][1:]
        fits = len(axes) == len(field.shape) and all(
            isinstance(size, str) or size == own for size, own in zip(axes, field.shape, strict=True)
        )
        numbers = all(np.dtype(dtype).kind in NUMBERS for dtype in (field.dtype, wanted["dtype"]))
        if not fits or not (numbers or field.dtype == wanted["dtype"]):
            place = as_utf8(pipeline.source.where(0))
            raise ArtifactError(
                f"{place}: the field {name!r} is {field.dtype} {list(field.shape)}, but "
                f"the program takes {wanted['dtype']} {axes} for each sample: "
                + (advise_image_size(name, field.shape, axes) or "prepare it as the training data were")
            )
        if field.dtype != wanted["dtype"]:
            pipeline = pipeline.map(As(name, wanted["dtype"]))
    return pipeline
