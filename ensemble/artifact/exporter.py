"""Exports the combined members of a run as an artifact."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.artifact import layout
from ensemble.artifact.card import make_card
from ensemble.artifact.preparation import append
from ensemble.artifact.preprocessing import Division, Input, divide
from ensemble.combine import find_math, load
from ensemble.events import NOT_COMBINED
from ensemble.meter.ledger_view import ledger
from ensemble.spec import Recipe
from ensemble.spec.class_names import NAMED, find_known_classes
from ensemble.spec.task import Task
from ensemble.store import read_events, read_state
from pipelines import Pipeline
from pipelines.environment.library_settings import keeps_settings
from pipelines.errors import SampleError
from pipelines.sources import Source, Subset

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ensemble.combine.model import EnsembleModel
    from ensemble.spec import Ensemble
    from ensemble.store import RunDir, RunState

#: Samples with which a program is traced and checked.
SAMPLES = 8


@dataclass(frozen=True)
class _Sources:
    """What an artifact is made of."""

    run: RunDir
    state: RunState
    ensemble: Ensemble
    model: EnsembleModel
    division: Division
    raw: dict[str, Tensor]  # of the program
    prepared: dict[str, Tensor]  # of the model: the same samples


@keeps_settings
def export(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    preprocessing: bool = True,
    uncertainty: bool = True,
    classes: Sequence[str] | None = None,
) -> Path:
    """Write the combined, calibrated model of a run to a folder that predicts with torch alone.

    The programs in it are held against `load(run_dir)` on samples of the run's validation data: on the CPU they
    must be bitwise equal to it. `ensemble.artifact.layout` has the files.

    Examples:
        ensemble.export("runs/digits", "digits")
        # elsewhere: torch.export.load("digits/model.pt2").module()({"image": images})

    Args:
        run_dir: the directory of a run with finished members.
        out: the folder, a new one.
        preprocessing: let the program begin with the last stages of the validation pipeline, as far as they have
            twins in torch; else it takes what the pipeline gives.
        uncertainty: write uncertainty.pt2, too, where the task has uncertainties.
        classes: names of the classes or labels, in order; None takes those of the data's source, where it has
            any.

    Returns:
        The folder.

    Raises:
        ArtifactError: `out` is there already, the model cannot be exported (with what to write
            instead), the exported one computes something else, or `classes` does not fit.
        CombineError: as `load` does.
        WriteError: it could not be written.
    """
    path = Path(out).expanduser().absolute()
    layout.check_target(path)
    sources = _collect(run_dir, preprocessing)
    layout.write_folder(path, lambda folder: _write(folder, sources, uncertainty, classes))
    return path


def _collect(run_dir: str | os.PathLike[str], preprocessing: bool) -> _Sources:
    from ensemble.artifact.program import find_fields
    from ensemble.store import RunDir

    run = RunDir(run_dir)
    model = load(run_dir)
    state = read_state(run.events).as_finished()
    ensemble = run.load_ensemble(state.header.code, takes_settings=True)
    assert isinstance(ensemble.recipe, Recipe)
    if ensemble.recipe.collate is not None:
        raise layout.ArtifactError(
            "an exported program cannot contain Recipe.collate, which makes the models' batches: predict from the "
            "run (ensemble predict RUN DATA), or do its work in stages of the pipeline or in the model"
        )
    pipeline = ensemble.valid if ensemble.valid is not None else ensemble.pipeline(_params(state, model))
    pipeline = _find_samples(pipeline)
    whole = _take(pipeline)
    whole.pop(ensemble.recipe.target, None)
    fields = model.fields or find_fields(model, whole)
    if (other := next((name for name in fields if name not in whole), None)) is not None:
        raise layout.ArtifactError(
            f"the models are called with {other!r}, which is nested, ragged or a text: a program takes tensors of "
            "one shape, so pad it, or take it out of the nested field, in a stage of the pipeline"
        )
    division = divide(pipeline, fields, fold=preprocessing)
    try:
        raw = _take(division.prepared)
    except SampleError:  # the first samples differ in size, which the program's stages make one
        raw, whole = _take(division.prepared.take(1)), _take(pipeline.take(1))
    return _Sources(run, state, ensemble, model, division, raw, {name: whole[name] for name in fields})


def _params(state: RunState, model: EnsembleModel) -> Mapping[str, Any]:
    return state.members[model.member_ids[0]].params


def _find_samples(pipeline: Pipeline) -> Pipeline:
    """The pipeline of its first samples, of those that can be prepared where it leaves out the others.

    Raises:
        ArtifactError: it leaves out all.
    """
    indices: list[int] = list(range(min(SAMPLES, len(pipeline.source))))
    if pipeline.on_error == "skip":
        indices = []
        for batch in _read_again(pipeline, pipeline.source).loader(SAMPLES, epochs=1):
            indices += batch["index"].tolist()
            if len(indices) >= SAMPLES:
                break
    if not indices:
        raise layout.ArtifactError("no sample of the run's data can be prepared; a model is exported with some")
    return _read_again(pipeline, Subset(pipeline.source, np.array(indices[:SAMPLES])))


def _read_again(pipeline: Pipeline, source: Source) -> Pipeline:
    """The stages of a pipeline on another source, in its order."""
    made = Pipeline(source, seed=pipeline.seed, shuffle=False, on_error=pipeline.on_error, max_skipped=1.0)
    for stage in pipeline.stages:
        made = append(made, stage)
    return made


def _take(pipeline: Pipeline) -> dict[str, Tensor]:
    """The tensors of all samples of a pipeline as a batch; a single one twice."""
    from torch import Tensor

    batch = next(iter(pipeline.loader(len(pipeline), epochs=1)))
    count = len(batch["index"])
    return {
        name: value.clone() if count > 1 else value.repeat(2, *[1] * (value.dim() - 1))
        for name, value in batch.items()
        if name != "index" and isinstance(value, Tensor)
    }


def _write(folder: Path, sources: _Sources, uncertainty: bool, classes: Sequence[str] | None) -> None:
    import torch

    from ensemble.artifact import program as programs

    model, division = sources.model, sources.division
    with torch.no_grad():
        values = programs.as_outputs(model(sources.prepared))
    names = _find_classes(sources.ensemble, model.task, values["values"].shape[-1], classes)
    batches = _cut_batches(sources.raw, sources.prepared)
    _save_checked(folder / layout.PROGRAM, model, division, batches)
    uncertain = None
    if uncertainty and model.task.kind != "free":
        with _with_uncertainty(model):
            _save_checked(folder / layout.UNCERTAINTY, model, division, batches)
            with torch.no_grad():
                uncertain = programs.as_outputs(model(sources.prepared))
    programs.save_weights(folder / layout.WEIGHTS, model)
    record = _describe(sources, values, uncertain, names)
    used = ledger(read_events(sources.run.events)).as_dict()
    _write_json(folder / layout.LEDGER, used)
    card = make_card(record, sources.ensemble, sources.state, used)
    (folder / layout.CARD).write_text(card, encoding="utf-8")
    layout.write_record(folder, record)


def _cut_batches(
    raw: Mapping[str, Tensor], prepared: Mapping[str, Tensor]
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Batches of the same samples in several sizes, for the program and for the model."""
    count = len(next(iter(raw.values())))
    return [
        ({k: v[:size] for k, v in raw.items()}, {k: v[:size] for k, v in prepared.items()})
        for size in sorted({1, 2, count})
    ]


def _save_checked(path: Path, model: nn.Module, division: Division, batches: Sequence[Any]) -> None:
    from ensemble.artifact import program as programs

    traced = programs.trace(programs.Program(division.make_modules(), model), batches[-1][0], division.inputs)
    programs.save_program(path, traced)
    programs.check_equal(path, model, batches)


@contextlib.contextmanager
def _with_uncertainty(model: EnsembleModel) -> Iterator[None]:
    """Let the model give uncertainties, too."""
    model.uncertainty = True
    try:
        yield
    finally:
        model.uncertainty = False


def _describe(
    sources: _Sources,
    values: Mapping[str, Tensor],
    uncertain: Mapping[str, Tensor] | None,
    classes: Sequence[str] | None,
) -> dict[str, Any]:
    """The record of the artifact; see `layout.read_record`."""
    from ensemble.store import versions

    run, state, model = sources.run, sources.state, sources.model
    task = model.task
    combined = state.combined or NOT_COMBINED
    weights = dict(zip(model.member_ids, model.weights.tolist(), strict=True))
    return {
        "v": layout.VERSION,
        "kind": layout.KIND,
        "name": sources.ensemble.name,
        "run_id": run.info["run_id"],
        "created": time.time(),
        "versions": versions(),
        "task": task.as_record(),
        "fields": {name: _describe_input(name, one) for name, one in sources.division.inputs.items()},
        "outputs": _describe_outputs(values),
        "uncertainty": None if uncertain is None else _describe_outputs(uncertain),
        "classes": None if classes is None else list(classes),
        "members": model.member_ids,
        "weights": weights,
        "method": model.method,
        "calibration": combined.calibration or _describe_calibration(model),
        "conformal": combined.conformal,
        "thresholds": None if model.thresholds is None else model.thresholds.tolist(),
        "stages": sources.division.describe(),
    }


def _describe_calibration(model: EnsembleModel) -> dict[str, Any] | None:
    """The calibration of a run that was not combined, whose members `load` combines."""
    method = find_math(model.task).calibrator
    return None if method is None or model.calibration == 1.0 else {"method": method, "value": model.calibration}


def _describe_input(name: str, tensor: Input) -> dict[str, Any]:
    axes = iter((f"{name}_height", f"{name}_width"))
    shape: list[int | str] = ["batch", *(next(axes) if size is None else size for size in tensor.shape)]
    least = {"least": list(tensor.least)} if tensor.least else {}
    return {"shape": shape, "dtype": tensor.dtype, **least}


def _describe_outputs(values: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: {"shape": ["batch", *value.shape[1:]], "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in values.items()
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _find_classes(
    ensemble: Ensemble, task: Task, count: int, classes: Sequence[str] | None
) -> tuple[str, ...] | None:
    """The names of the classes or labels, in order; None where they are not known, or the task has none.

    Raises:
        ArtifactError: the user gives other names than there are classes, or one is there twice.
    """
    if classes is None:
        kept_names = find_known_classes(ensemble, task)
        return kept_names if len(kept_names) == count else None
    if task.kind not in NAMED:
        raise layout.ArtifactError(f"classes are given, but the task is {task.kind}, which has none")
    if len(classes) != count or len(set(classes)) != count:
        names = ", ".join(map(str, classes))
        raise layout.ArtifactError(f"classes must be {count} different names, got {len(classes)}: {names}")
    return tuple(map(str, classes))
