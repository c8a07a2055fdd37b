"""Predicts for whole data sets: batch by batch, from an artifact or a run, to a file."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ensemble.artifact import layout
from ensemble.artifact.data import open_source
from ensemble.artifact.layout import ArtifactError
from ensemble.artifact.preparation import prepare_for_program, prepare_for_run
from ensemble.artifact.preprocessing import RENAME
from ensemble.artifact.table_writers import MARK, OTHER_FORMATS, open_writer
from ensemble.combine.conformal import Conformal, load_conformal
from ensemble.combine.metrics import CombineError
from ensemble.events import NOT_COMBINED
from ensemble.spec.positions import TAILS
from ensemble.spec.task import Task
from pipelines.environment.library_settings import keeps_settings
from pipelines.errors import PipelineError, as_utf8
from pipelines.stages._sample import Transform
from pipelines.stages._table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines import Pipeline

SPLITS = ("valid", "test")
#: Bytes of predictions that are written together.
GROUP_BYTES = 16 << 20
Batch = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Predictor:
    """A model, what it predicts, and how records become its batches.

    Attributes:
        compute: maps a batch on `device` to values and uncertainties, by name.
        task: what is predicted.
        classes: their names, as far as they are known.
        pipeline: the samples to predict for, in order.
        device: where the model is.
        conformal: what predicts sets and intervals from the values.
        collate: `Recipe.collate`, applied to each batch before `compute`.
        kept: columns of the data, by name, that are written with the predictions, each [records].
    """

    compute: Callable[[Batch], Mapping[str, Tensor]]
    task: Task
    classes: Sequence[str]
    pipeline: Pipeline
    device: str
    conformal: Sequence[Conformal] = ()
    collate: Callable[..., Any] | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Any:
        """Where the records come from, where these have names of their own: files in a folder or in an archive."""
        source = self.pipeline.source
        return source if source.kind in ("image_folder", "tar") else None


@keeps_settings
def predict(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "predictions.parquet",
    *,
    split: str | None = None,
    keep: Sequence[str] = (),
    uncertainty: bool = False,
    prepared: bool = False,
    batch_size: int = 256,
    device: str | None = None,
) -> int:
    """Predict for all records of a data set, and write the predictions to a file, whole or not at all.

    Batches are prepared, computed and written one after the other, so that the memory in use does not grow with
    the data (.npz and .csv are read whole). Rows are in the order of the records, which `index` numbers: those of
    `data` all have one. Records that the run leaves out (`on_error="skip"`) are left out of its splits.
    `ensemble.artifact.columns` has the columns, beside `file` of records that are files; CSV and JSON lines have
    probabilities by class name, Parquet the names of the classes in its metadata (`classes`, JSON), where they are
    known. Predictions that are NaN are warned of.

    Args:
        model: an artifact, or the directory of a run.
        data: a file or folder of records like those that the run read (`ensemble.artifact.data.FORMATS`); they are
            prepared by the stages of the run's validation pipeline.
        out: the file, by its ending Parquet, CSV (.csv) or JSON lines (.jsonl): a new one, or one without content
            or a Parquet file of predictions, which is replaced.
        split: instead of data, the run's own valid or test split.
        keep: fields of the records that are written, too, such as an id; from CSV as the texts that they are.
        uncertainty: add the columns of the uncertainties, and of conformal predictions.
        prepared: with an artifact: the data are what its program takes, no stage is to be run.
        batch_size: samples that are computed at once.
        device: a device of torch; None takes a GPU if there is one.

    Returns:
        The number of rows.

    Raises:
        ArtifactError: the model, the split or the data are not there, or the data do not fit the model.
        CombineError: as `load` does.
        PipelineError: a record cannot be read or prepared.
        WriteError: the file cannot be written.
    """
    from ensemble.store.files import write_atomically

    if (data is None) == (split is None):
        raise ArtifactError("give data to predict for, or --split with a run, and not both")
    if not isinstance(data, str | os.PathLike | None):
        raise ArtifactError(f"predict() reads data from a file or a folder, got {type(data).__name__}")
    target = Path(out).expanduser().absolute()
    _check_out(target, data)
    predictor = open_predictor(model, data, split, uncertainty=uncertainty, prepared=prepared, device=device)
    predictor = replace(predictor, kept=_read_kept(predictor, data, keep))
    if unseen := _describe_unseen(predictor.pipeline):
        warnings.warn(unseen, stacklevel=3)
    rows: list[int] = []

    def write(path: Path) -> None:
        with path.open("wb") as file:
            rows.append(_write(file, target.suffix.lower(), predictor, batch_size))

    write_atomically(target, write)
    return rows[0]


def _check_out(target: Path, data: str | os.PathLike[str] | None) -> None:
    """Raises for a file that would replace another one, or be read as data."""
    if target.suffix.lower() in OTHER_FORMATS:
        raise ArtifactError(
            f"predictions are written as Parquet, CSV or JSON lines: name the file {target.stem}.parquet, .csv or "
            ".jsonl"
        )
    if target.is_dir() or not target.parent.is_dir():
        raise ArtifactError(f"cannot write {target}: it is a folder, or its folder does not exist")
    if data is not None and _is_among(target.parent.resolve() / target.name, Path(data).expanduser().absolute()):
        raise ArtifactError(f"{target} would be read as one of the files with data: choose another folder")
    if os.path.lexists(target) and not _is_ours(target):
        is_unmarked = target.is_file() and target.suffix.lower() in (".csv", ".jsonl")
        what = "may hold anything, because such files are not marked" if is_unmarked else "holds no predictions"
        raise ArtifactError(f"{target} exists and {what}: choose another file, or remove it")


def _is_among(target: Path, data: Path) -> bool:
    """Whether a file would be read as one of the data: a file, a folder or a pattern."""
    if data.exists():  # its name may look like a pattern
        return data.resolve() in (target, target.parent) or data.parent.resolve() / data.name == target
    fixed = next((n for n, part in enumerate(data.parts) if glob.has_magic(part)), len(data.parts))
    folder = glob.escape(str(Path(*data.parts[:fixed]).resolve()))
    pattern = os.path.join(folder, *data.parts[fixed:])
    return any(map(target.match, (pattern, pattern.replace("**/", ""))))  # two stars may be no folder at all


def _is_ours(target: Path) -> bool:
    """Whether a file may be replaced: it is empty, or a Parquet file of predictions."""
    import pyarrow.parquet

    try:
        if not target.is_file():
            return False
        with target.open("rb") as file:  # Arrow takes no path that is not UTF-8
            return not target.stat().st_size or MARK in (pyarrow.parquet.read_schema(file).metadata or {})
    except (OSError, pyarrow.ArrowException):
        return False


def _read_kept(predictor: Predictor, data: Any, keep: Sequence[str]) -> dict[str, Any]:
    """The columns of the data that go with the predictions, by name."""
    if not keep:
        return {}
    source = predictor.pipeline.source if data is None else open_source(data, None, keep, texts=keep)
    return {name: source.column(name) for name in keep}


def _describe_unseen(pipeline: Pipeline) -> str:
    """Say which categories of the records no table of a pipeline has; empty where there are none."""
    names, found = dict[str, str](), list[str]()  # names: as they are now -> as they are in the records
    calls: list[Any] = [stage.call for stage in pipeline.stages]
    for call in calls:
        if isinstance(call, RENAME):
            names.update({new: names.get(old, old) for old, new in call.names})
        elif not isinstance(call, Transform):  # what a function of the user's makes of them is not known
            break
        elif isinstance(call, Table):
            with contextlib.suppress(PipelineError):  # of a record: said where it is prepared
                unseen = call.count_unseen(lambda name: pipeline.source.column(names.get(name, name)))
                for name, counts in unseen.items():
                    shown = ", ".join(f"{value!r:.40}" for value, _ in counts.most_common(3))
                    found += [f"{name} {counts.total():,} times ({shown})"] if counts else []
    return f"categories that the training records do not have count as none: {'; '.join(found)}" if found else ""


def open_predictor(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str] | None,
    split: str | None,
    *,
    uncertainty: bool,
    prepared: bool,
    device: str | None,
) -> Predictor:
    """Open a model and the data that it is to predict for; see `predict`."""
    import torch

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(f"the device {where!r} cannot be used here: {reason[:150]}") from None
    if layout.is_artifact(model):
        if split is not None:
            raise ArtifactError(
                f"--split {split} needs the run: {model} is an artifact, which has no data of its own"
            )
        assert data is not None
        return _open_artifact(Path(model), data, where, uncertainty=uncertainty, prepared=prepared)
    if not (Path(model) / "run.json").exists():
        if (Path(model) / layout.RECORD).exists():
            raise ArtifactError(f"{Path(model) / layout.RECORD} is damaged, or no artifact's")
        raise ArtifactError(f"{model} is neither an artifact nor a run directory")
    if prepared:
        raise ArtifactError("--prepared is for artifacts: a run prepares records itself")
    return _open_run(model, data, split, where, uncertainty=uncertainty)


def _open_artifact(path: Path, data: Any, device: str, *, uncertainty: bool, prepared: bool) -> Predictor:
    from ensemble.artifact.program import as_outputs, load_program

    record = layout.read_record(path)
    file = path / (layout.UNCERTAINTY if uncertainty else layout.PROGRAM)
    if not file.exists():
        reason = "the task has none, or it was exported without" if uncertainty else "it is incomplete"
        raise ArtifactError(f"{path} has no {file.name}: {reason}")
    layout.check_file(file, record)
    fields = list(record["fields"])
    pipeline = prepare_for_program(record, functools.partial(open_source, data), prepared=prepared)
    program = load_program(file, device)
    return Predictor(
        lambda batch: as_outputs(program({name: batch[name] for name in fields})),
        Task.from_record(record["task"]),
        record["classes"] or (),
        pipeline,
        device,
        _load_conformal(record["conformal"]) if uncertainty else (),
    )


def _load_conformal(records: Mapping[str, Any] | None) -> list[Conformal]:
    """What the run's `combined` event says of conformal prediction."""
    methods = []
    for record in (records or {}).values():
        try:
            methods.append(load_conformal(record))
        except CombineError as error:  # of a former version
            warnings.warn(str(error), stacklevel=4)
    return methods


def _open_run(model: Any, data: Any, split: str | None, device: str, *, uncertainty: bool) -> Predictor:
    from ensemble.artifact.program import as_outputs
    from ensemble.combine import load
    from ensemble.spec import Recipe
    from ensemble.spec.class_names import find_known_classes
    from ensemble.store import RunDir, read_state

    run = RunDir(model)
    loaded = load(model, uncertainty=uncertainty).to(device)
    state = read_state(run.events).as_finished()
    ensemble = run.load_ensemble(state.header.code, takes_settings=True)
    assert isinstance(ensemble.recipe, Recipe)
    target, collate = ensemble.recipe.target, ensemble.recipe.collate
    # A collate function takes what the pipeline gives, whatever the models take.
    fields = None if collate is not None else loaded.fields or None
    if split is not None:
        pipeline_of_split = getattr(ensemble, split) if split in SPLITS else None
        if pipeline_of_split is None:
            available = [name for name in SPLITS if getattr(ensemble, name) is not None]
            raise ArtifactError(f"the run has no split {split!r} (it has: {', '.join(available)})")
        pipeline = pipeline_of_split.without_randomness()
    elif ensemble.valid is None:
        raise ArtifactError("the run has no validation pipeline, whose stages would prepare the data")
    else:
        pipeline = prepare_for_run(
            ensemble.valid, functools.partial(open_source, data), fields, target, ensemble.classes
        )
    return Predictor(
        lambda batch: as_outputs(loaded({name: value for name, value in batch.items() if name != target})),
        loaded.task,
        find_known_classes(ensemble, loaded.task),
        pipeline,
        device,
        _load_conformal((state.combined or NOT_COMBINED).conformal) if uncertainty else (),
        collate=collate,
    )


def _write(file: BinaryIO, suffix: str, predictor: Predictor, batch_size: int) -> int:
    """Write the predictions, and return how many rows there are."""
    import pyarrow

    writer: Any = None
    rows, lost, waiting = 0, 0, list[Any]()
    try:
        for table, unknown in _compute(predictor, batch_size):
            rows += len(table)
            lost += unknown
            waiting.append(table)
            if writer is None:
                writer = open_writer(file, suffix, table.schema, list(predictor.classes))
            if sum(group.nbytes for group in waiting) >= GROUP_BYTES:
                writer.write_table(pyarrow.concat_tables(waiting))
                waiting.clear()
        if waiting:
            writer.write_table(pyarrow.concat_tables(waiting))
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ArtifactError("no record could be prepared, so there is nothing to predict for")
    if lost:
        warnings.warn(f"{lost:,} of {rows:,} rows have predictions that are NaN", stacklevel=4)
    return rows


def _compute(predictor: Predictor, batch_size: int) -> Iterator[tuple[Any, int]]:
    """The predictions: for each batch a table, and how many of its rows have a NaN."""
    import pyarrow
    import torch

    from ensemble.artifact.columns import find_lost, loosen, make_columns
    from ensemble.combine import CombineError
    from pipelines.loader.collate import Collator

    collate = None if predictor.collate is None else Collator(predictor.collate, 0)
    for batch in predictor.pipeline.loader(batch_size, epochs=1):
        batch = batch if collate is None else collate(batch, is_training=False)
        index = batch.pop("index").numpy().copy()
        if not len(index):  # all of its records were skipped
            continue
        with torch.inference_mode():
            try:
                outputs = predictor.compute(batch.to(predictor.device))
            except CombineError as error:
                place = predictor.pipeline.source.where(int(index[0]))
                raise ArtifactError(f"the batch that begins with {as_utf8(place)}: {error}") from error
        arrays = {name: value.cpu().numpy() for name, value in outputs.items()}
        order = index.argsort(kind="stable")  # a collate function may order samples otherwise
        index, arrays = index[order], {name: value[order] for name, value in arrays.items()}
        table = make_columns(index, arrays, predictor.task, predictor.classes, predictor.conformal)
        if predictor.collate is not None and predictor.task.kind in TAILS:
            table = loosen(table, arrays["values"].ndim - 1 - TAILS[predictor.task.kind])
        if predictor.source is not None:
            names = [as_utf8(predictor.source.where(number)) for number in index.tolist()]
            table = table.add_column(1, "file", pyarrow.array(names, pyarrow.string()))
        for place, (name, values) in enumerate(predictor.kept.items(), 1):
            if name in table.column_names:
                raise ArtifactError(f"the predictions have a column {name!r} of their own: it cannot be kept")
            table = table.add_column(place, name, pyarrow.array(values[index].tolist()))
        yield table, int(find_lost(arrays["values"]).reshape(len(index), -1).any(axis=1).sum())
