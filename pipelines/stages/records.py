"""Stages as JSON values, so that what is prepared can be told without pickles."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.stages._decode import DecodeImage, DecodeJpeg
from pipelines.stages._fields import Drop, Rename, Select
from pipelines.stages._geometry import CenterCrop, Resize
from pipelines.stages._sample import Transform
from pipelines.stages._table import Table
from pipelines.stages._text import Tokenize
from pipelines.stages._values import Cast, Pad, Scale

_CLASSES: dict[str, type[Transform]] = {
    "cast": Cast,
    "center_crop": CenterCrop,
    "decode_image": DecodeImage,
    "decode_jpeg": DecodeJpeg,
    "drop": Drop,
    "fit": Table,
    "pad": Pad,
    "rename": Rename,
    "resize": Resize,
    "scale": Scale,
    "select": Select,
    "tokenize": Tokenize,
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}


def as_record(stage: Any) -> dict[str, Any] | None:
    """A stage of `pipelines.stages` as JSON: its name and its values; None for any other, and for random ones."""
    name = _NAMES.get(type(stage))
    if name is None:
        return None
    return {
        "stage": name,
        "values": {f.name: _to_plain(getattr(stage, f.name)) for f in dataclasses.fields(stage)},
    }


def from_record(record: dict[str, Any]) -> Any:
    """The stage that `as_record` described."""
    try:
        cls = _CLASSES[record["stage"]]
        return cls(**{name: _to_tuple(value) for name, value in record["values"].items()})
    except (KeyError, TypeError):
        raise PipelineError(
            f"the stage {str(record)[:80]} is not known here; it was written by another version"
        ) from None


def _to_plain(value: Any) -> Any:
    """A number of numpy as Python's, which JSON knows."""
    if isinstance(value, tuple | list):
        return tuple(map(_to_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _to_tuple(value: Any) -> Any:
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value
