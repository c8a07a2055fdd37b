"""Writes the lines of a model card that make a batch of one raw record.

Where each stage can be written in a few lines of numpy and OpenCV, they need no more; else they call the stages
of this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ensemble.artifact.layout import PROGRAM, RECORD
from ensemble.artifact.preparation import DECODERS, RENAME, Preparation, make_preparation
from pipelines import stages
from pipelines.stages._table import Table
from pipelines.stages.records import as_record

_FILES: tuple[Any, ...] = (*DECODERS, type(stages.shrink_jpeg("a", 1)))
_TOKENIZE = type(stages.tokenize("a", ["a"]))
_IMPORTS = {"cv2": "import cv2  # pip install opencv-python-headless", "json": "import json"}
_DECODE = (
    "sample[{field!r}] = cv2.imdecode(np.frombuffer(sample[{field!r}], np.uint8), cv2.IMREAD_COLOR | "
    "cv2.IMREAD_IGNORE_ORIENTATION)[:, :, ::-1].transpose(2, 0, 1)"
)
_RESIZE = (
    "sample[{field!r}] = cv2.resize(np.ascontiguousarray(sample[{field!r}].transpose(1, 2, 0)), "
    "({width}, {height}), interpolation=cv2.INTER_{method}).reshape({height}, {width}, -1).transpose(2, 0, 1)"
)
_TABLE = """\
with open({file!r}, encoding="utf-8") as file:
    blocks = json.load(file)["stages"]["of_caller"][{place}]["record"]["values"]["blocks"]
def as_category(value):  # of numbers and booleans
    if value is None or value != value or not str(value).strip():
        return None
    try:
        number = float(str(value))
    except ValueError:
        return str(value).lower() if str(value).lower() in ("true", "false") else str(value)
    return str(int(number)) if number.is_integer() else repr(number)
made = []
for columns, kinds, steps in blocks:
    values = [as_category(sample[name]) if kind == "value" else sample[name] for name, kind in zip(columns, kinds)]
    for step, first, second in steps:
        if step == "impute":
            absent = [value is None or value == "" or value != value for value in values]
            values = [fill if gone else value for value, gone, fill in zip(values, absent, first)]
            values += [float(absent[column]) for column in second]
        elif step == "scale":
            values = [(value - low) / by for value, low, by in zip(values, first, second)]
        else:
            values = [float(value == category) for value, known in zip(values, first) for category in known]
    made += values
sample[{field!r}] = np.array(made, np.float32)"""


def write_example(record: Mapping[str, Any]) -> str:
    """The lines, for the record of an artifact (`layout.read_record`); empty where raw records need no stage.

    Raises:
        ArtifactError: a stage is the user's own function.
    """
    preparation = make_preparation(record)
    if not preparation.plan.stages:
        return ""
    places = {json.dumps(stage["record"]): place for place, stage in enumerate(record["stages"]["of_caller"])}
    lines = [_write_stage(stage.call, places) for stage in preparation.plan.stages]
    imports = ["import numpy as np", "import torch"]
    if None in lines:
        imports += ["from ensemble.artifact import read_record  # pip install ray-ensemble"]
        imports += ["from ensemble.artifact.preparation import make_preparation"]
        lines = ['sample = make_preparation(read_record("."))(sample)']
    else:
        imports = [line for name, line in _IMPORTS.items() if f"{name}." in "".join(map(str, lines))] + imports
    raw = ", ".join(f"{name!r}: {_write_value(name, preparation, record)}" for name in preparation.reads)
    batch = ", ".join(
        f"{name!r}: torch.tensor(np.ascontiguousarray(sample[{name!r}]), dtype=torch.{field['dtype']})[None]"
        for name, field in record["fields"].items()
    )
    model = f'model = torch.export.load("{PROGRAM}").module()'
    return "\n".join(
        [*imports, "", f"sample = {{{raw}}}", *map(str, lines), model, f"values = model({{{batch}}})"]
    )


def _write_stage(stage: Any, places: Mapping[str, int]) -> str | None:
    """What does the same as a stage with numpy and OpenCV; None where that is more than a few lines."""
    if isinstance(stage, RENAME):
        return f"sample = {{{dict(stage.names)}.get(name, name): value for name, value in sample.items()}}"
    if isinstance(stage, DECODERS):
        is_usual = stage.mode == "RGB" and not (stage.orient or getattr(stage, "dtype", None))
        return _DECODE.format(field=stage.field) if is_usual and not getattr(stage, "min_size", None) else None
    if isinstance(stage, type(stages.resize("a", 1))) and stage.size is not None:
        height, width = stage.size
        return _RESIZE.format(field=stage.field, width=width, height=height, method=stage.interpolation.upper())
    if isinstance(stage, Table):
        steps = [step for _, _, steps in stage.blocks for step in steps]
        if all(step[0] in ("impute", "scale") or step[::2] == ("one_hot", "ignore") for step in steps):
            return _TABLE.format(field=stage.field, place=places[json.dumps(as_record(stage))], file=RECORD)
    return None


def _write_value(raw: str, preparation: Preparation, record: Mapping[str, Any]) -> str:
    """A value that a field of raw records may have; none is of the data."""
    name = raw
    for stage in preparation.plan.stages:
        call: Any = stage.call
        if isinstance(call, RENAME):
            name = dict(call.names).get(name, name)
        elif isinstance(call, Table) and name in call.reads:
            return repr(_find_value(name, call))
        elif isinstance(call, _FILES) and call.field == name:
            return 'open("photo.jpg", "rb").read()'
        elif isinstance(call, _TOKENIZE) and call.field == name:
            return repr(" ".join(call.vocabulary[:3]))
    field = record["fields"].get(name, {"shape": ["batch"], "dtype": "float32"})
    return f"np.zeros({tuple(list_sizes(field))}, {field['dtype']!r})"


def list_sizes(field: Mapping[str, Any]) -> list[int]:
    """The sizes of one sample of a field of an artifact, the smallest where they may vary."""
    least = iter(field.get("least", ()))
    return [size if isinstance(size, int) else next(least) for size in field["shape"][1:]]


def _find_value(name: str, table: Table) -> Any:
    """A category of a column, or a number about in the middle of it."""
    columns, kinds, steps = next(block for block in table.blocks if name in block[0])
    place = columns.index(name)
    if kinds[place] == "number":
        return next((step[1][place] for step in steps if step[0] in ("impute", "scale")), 0.0)
    known = next((step[1][place] for step in steps if step[0] in ("one_hot", "ordinal")), ())
    return next((category for category in known if category is not None), "")
