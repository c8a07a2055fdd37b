"""Targets as digests, by which a record is known to be that of a prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble.spec.task import IGNORED, LABELS, NUMBERS


@dataclass(frozen=True)
class Wanted:
    """A sample whose record is wanted.

    Attributes:
        index: in the source of the split.
        digest: of the target that was saved with its predictions (`digest_values`); None: there is none.
        target: the field of targets, or the path of one, such as "target.label".
        task: the kind of the task.
    """

    index: int
    digest: str | None
    target: str
    task: str


def digest_values(values: Any, task: str) -> str | None:
    """Digests a target: "size:digest", equal before and after it was in a batch and in a file of predictions.

    There floats of a label are integers, what takes no part is NaN or `IGNORED`, and floats may have been rounded
    to 32 bits.

    Returns:
        None for what is no array of numbers.
    """
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError):
        return None
    if array.dtype.kind not in "biuf":
        return None
    if task in LABELS and array.dtype.kind == "f":
        array = np.where(np.isnan(array), IGNORED, array)
        array = array.astype(np.int64) if (array == array.round()).all() else array
    if task in NUMBERS or array.dtype.kind == "f":
        array = array.astype(np.float32)
        array = np.where(np.isnan(array), np.float32(np.nan), array)
    else:
        array = array.astype(np.int64)
    return f"{array.size}:{hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()}"


def digest_target(sample: Mapping[str, Any], name: str, task: str) -> str | None:
    """The same of the target of a prepared sample; None where it has none."""
    value: Any = sample.get(name)
    if value is None and "." in name:
        value = sample
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else digest_values(value, task)
