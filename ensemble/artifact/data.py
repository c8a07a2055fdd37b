"""Opens the data that a model is to predict for, and prepares them as the model takes them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.artifact.layout import ArtifactError
from pipelines import Pipeline, sources, stages
from pipelines.sources import Source
from pipelines.stages.records import from_record

if TYPE_CHECKING:
    from pipelines.stage import Stage

FORMATS = ".parquet, .tar, .npz, .npy, .csv, a folder of one of the first two, or a folder of images"
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff")
_DECODERS = tuple(type(make("image")) for make in (stages.decode_jpeg, stages.decode_image))


def open_source(data: str | os.PathLike[str], field: str | None = None) -> Source:
    """A source of the records in a file or folder.

    Args:
        data: a path; the ending of the file, or what is in the folder, says the format. In .npz each array is a
            field, and in .csv each column.
        field: what the array of a .npy file, or the image of a folder or of an archive, is called.

    Raises:
        ArtifactError: there is no such file, or it is of no known format.
        PipelineError: it cannot be read.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_folder(path, field)
    if not path.exists() and not any(char in str(path) for char in "*?["):
        raise ArtifactError(f"there is no file or folder {str(path)!r} with data to predict for")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return sources.parquet(str(path))
    if suffix == ".tar":
        return sources.tar(str(path), rename=dict.fromkeys(_IMAGES, field) if field else None)
    if suffix in (".npy", ".npz"):
        return _open_arrays(path, field)
    if suffix == ".csv":
        return _open_table(path)
    raise ArtifactError(f"{path} is of no known format; data are {FORMATS}")


def _open_folder(path: Path, field: str | None) -> Source:
    for suffix in ("parquet", "tar"):
        if any(path.glob(f"*.{suffix}")):
            return open_source(path / f"*.{suffix}", field)
    return sources.image_folder(path)


def _open_arrays(path: Path, field: str | None) -> Source:
    try:
        found = np.load(path, mmap_mode="r" if path.suffix.lower() == ".npy" else None, allow_pickle=False)
        columns = {field or "x": found} if isinstance(found, np.ndarray) else dict(found)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None
    return sources.arrays(**columns)


def _open_table(path: Path) -> Source:
    import pyarrow
    import pyarrow.csv

    try:
        table = pyarrow.csv.read_csv(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ArtifactError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    return sources.arrays(**{name: table.column(name).to_numpy() for name in table.column_names})


def prepare_for_program(record: Mapping[str, Any], source: Source, *, prepared: bool = False) -> Pipeline:
    """The records of a source as an artifact's program takes them, in the source's order.

    Args:
        record: of the artifact (`layout.read_record`).
        source: of raw records, as the run's data were; images may be decoded.
        prepared: the records are what the program takes: no stage is to be run.

    Raises:
        ArtifactError: a stage is the user's own function, or the records lack a field or have others than the
            program takes.
    """
    fields = record["fields"]
    sample, pipeline = source[0], Pipeline(source, shuffle=False)
    if source.kind == "image_folder" and "image" not in fields and len(fields) == 1:
        pipeline = pipeline.map(stages.rename(image=next(iter(fields))))
    if not prepared:
        for stage in record["stages"]["of_caller"]:
            if stage["record"] is None:
                raise ArtifactError(
                    f"the stage {stage['name']} of the run's pipeline is a function of its spec, which is not in "
                    "the artifact: predict from the run, or prepare the data with it and give --prepared"
                )
            made = from_record(stage["record"])
            if not is_needless(made, sample, ()):
                pipeline = pipeline.map(made)
    for name, found in fields.items():
        if found.get("least"):  # images of several sizes, of which the program would cut this part
            pipeline = pipeline.map(stages.center_crop(name, tuple(found["least"])))
    return _fit_types(pipeline.map(stages.select(*fields)), fields)


def _fit_types(pipeline: Pipeline, fields: Mapping[str, Mapping[str, Any]]) -> Pipeline:
    """The pipeline with casts to what the program takes, where these lose no more than precision."""
    for name, found in pipeline.fields.items():
        wanted = fields[name]
        axes = wanted["shape"][1:]
        fits = len(axes) == len(found.shape) and all(
            isinstance(size, str) or size == own for size, own in zip(axes, found.shape, strict=True)
        )
        if not fits or not np.can_cast(found.dtype, wanted["dtype"], "same_kind"):
            raise ArtifactError(
                f"the field {name!r} of the data is {found.dtype} {list(found.shape)}, but the program takes "
                f"{wanted['dtype']} {axes} for each sample"
            )
        if found.dtype != wanted["dtype"]:
            pipeline = pipeline.map(stages.cast(name, wanted["dtype"]))
    return pipeline


def prepare_for_run(pipeline: Pipeline, source: Source, target: str) -> Pipeline:
    """The records of a source through the stages of a run's pipeline, in the source's order.

    Args:
        pipeline: of the run, without random stages.
        source: of raw records, as the run's data were; images may be decoded, the target may be missing.
        target: the field of the target.
    """
    sample = source[0]
    made = Pipeline(source, shuffle=False, on_error=pipeline.on_error)
    for stage in pipeline.stages:
        if not is_needless(stage.call, sample, (target,)):
            made = _append(made, stage)
    return made.map(stages.select(*(name for name in pipeline.fields if name != target)))


def find_image_field(source: Source) -> str | None:
    """The field of a source's records that holds bytes, such as an image; None where there is not just one."""
    found = [name for name, value in source[0].items() if isinstance(value, bytes)]
    return found[0] if len(found) == 1 else None


def _append(pipeline: Pipeline, stage: Stage) -> Pipeline:
    return pipeline.map(stage.call, field=stage.field, random=stage.random or False, id=stage.id)


def is_needless(stage: Any, sample: Mapping[str, Any], absent: Sequence[str]) -> bool:
    """Whether a stage has nothing to do for records like this one: it decodes what is decoded, or works on a field
    that may be absent and is.
    """
    field = getattr(stage, "field", None)
    if isinstance(stage, _DECODERS) and isinstance(sample.get(str(field)), np.ndarray):
        return True
    return field in absent and field not in sample
