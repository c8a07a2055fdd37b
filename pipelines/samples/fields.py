"""The fields of prepared samples: shapes and dtypes, and two columns that every memory of samples has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError

#: Field name to array `[samples, *shape]`.
Columns = dict[str, npt.NDArray[Any]]

#: The column of the samples' numbers in their source, and the column that says how each was prepared.
INDEX, OK = "index", "_ok"

# Values of the column OK. Two kinds of readers ask: one that reads the pipeline as it is takes samples that are
# GOOD or ODD and leaves out the rest; one that continues from it takes GOOD samples, leaves out FAILED ones, and
# prepares in full those that do not fit the memory's fields (UNFIT) or would come back in another memory order
# (ODD = both bits). `pipelines.samples.poison_records` has further values, of records that must not be prepared.
FAILED, GOOD, UNFIT, ODD = range(4)

#: The data were out of reach where it was to be prepared: nobody leaves it out, each reader prepares it itself.
UNREACHED = 16


class Field(NamedTuple):
    """Shape and dtype that every sample's value of a field has.

    Attributes:
        shape: of one sample, without the batch axis; `()` for a scalar.
        dtype: numpy's name of it, such as `"uint8"`.
    """

    shape: tuple[int, ...]
    dtype: str


def declare_fields(fields: Mapping[str, Any], *, has_slots: bool) -> dict[str, Field]:
    """The fields of `Pipeline.map(fields=...)`.

    Args:
        fields: name -> (shape, dtype).
        has_slots: whether stages have declared texts or ragged arrays.
    """
    if has_slots or any(isinstance(field, Mapping) for field in fields.values()):
        raise PipelineError("fields= declares flat fields: leave it out, and a sample is prepared to find out")
    return {name: Field(tuple(shape), str(np.dtype(dtype))) for name, (shape, dtype) in fields.items()}


def describe_fields(fields: dict[str, Field]) -> list[Any]:
    """Fields as a JSON value that is equal for equal fields, in whichever order."""
    return [[name, list(shape), dtype] for name, (shape, dtype) in sorted(fields.items())]
