"""Prepares a sample that was served once more, twice, by the pipeline of its reader, and compares all three.

A stage that makes two different samples of one record here is no function of (sample, rng): nothing can be said of
what was served. Records that crash or hang whoever prepares them, and those of a spooled iterable, are left out.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.description import PipelineDescription
from pipelines.environment.torch_threads import limit_torch_threads
from pipelines.errors import DataOutOfReach, ForeignRandomness, SampleError
from pipelines.prepare.checked import prepare_checked
from pipelines.prepare.preparer import as_array
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.samples.fields import FAILED, GOOD, INDEX, ODD, OK, Columns, Field
from pipelines.samples.structure import LENGTH, Structure, StructureMismatch
from pipelines.verification.compare import EQUAL, CheckResult, compare_arrays

#: In what torch, CuPy and numba say where there is no GPU, no driver, or no CUDA in them.
_NEEDS_GPU = re.compile(
    "No CUDA GPUs|with CUDA enabled|on a CUDA device|NVIDIA driver|CUDA driver|CUDA-capable|cudaErrorNoDevice"
)
_HEAD = struct.Struct("<q")
_MOST_KEPT = 4  # samples

Values = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class ServedSample:
    """A sample in the columns of a ring or of a resident set, copied.

    Attributes:
        stages: how many of the pipeline's stages were applied to it.
        epoch: of the stream.
        place: its position in the epoch.
        index: its number in the source.
        status: how it was prepared (`pipelines.samples.fields`).
        structure: how its columns make up a sample (`Structure.as_record`); None: they are its fields.
        columns: name -> value, with the unused ends of slots.
    """

    stages: int
    epoch: int
    place: int
    index: int
    status: int
    structure: Any
    columns: Columns = dataclasses.field(repr=False)

    @classmethod
    def read(cls, columns: Columns, slot: int, **what: Any) -> ServedSample:
        """Copy the sample in a slot of columns [capacity, ...]."""
        values = {name: column[slot].copy() for name, column in columns.items() if name not in (INDEX, OK)}
        return cls(index=int(columns[INDEX][slot]), status=int(columns[OK][slot]), columns=values, **what)

    @property
    def fields(self) -> dict[str, Field]:
        """Shape and dtype of each column."""
        return {name: Field(value.shape, str(value.dtype)) for name, value in self.columns.items()}

    def pack(self, about: Mapping[str, Any]) -> bytes:
        """The sample as bytes, with a few JSON values; see `unpack`."""
        names = ("stages", "epoch", "place", "index", "status", "structure")
        head = {name: getattr(self, name) for name in names} | {"about": dict(about)}
        head["columns"] = [[name, *shape_and_dtype] for name, shape_and_dtype in self.fields.items()]
        text = json.dumps(head).encode()
        return b"".join([_HEAD.pack(len(text)), text, *(value.tobytes() for value in self.columns.values())])

    @classmethod
    def unpack(cls, packed: bytes) -> tuple[ServedSample, dict[str, Any]]:
        """The sample and the values that `pack` was given.

        Raises:
            ValueError: these bytes are not what `pack` makes.
        """
        (size,) = _HEAD.unpack_from(packed)
        head = json.loads(packed[_HEAD.size : _HEAD.size + size])
        at, columns = _HEAD.size + size, {}
        for name, shape, dtype in head.pop("columns"):
            count = int(np.prod(shape, dtype=np.int64))
            columns[name] = np.frombuffer(packed, dtype, count, at).reshape(shape)
            at += columns[name].nbytes
        about: dict[str, Any] = head.pop("about")
        return cls(columns=columns, **head), about


class SampleChecker:
    """Compares samples that were served with those of one pipeline.

    The states of all generators, of torch, numpy and Python and of those that a stage holds, are as before after
    each call.

    Args:
        pipeline: of the reader.
        is_exact: whether bytes must be equal (`pipelines.verification.compare`).
    """

    def __init__(self, pipeline: PipelineDescription, *, is_exact: bool = True) -> None:
        self._pipeline, self._is_exact = pipeline, is_exact
        self._makers: dict[int, SampleMaker] = {}  # by the number of stages that were applied
        self._prepared: OrderedDict[tuple[int, int, int], dict[str, Any]] = OrderedDict()

    def check(self, served: ServedSample) -> CheckResult:
        """Compare one sample.

        Returns:
            "left_out" for a sample that was not served: its reader prepares it in full, or nobody may.
        """
        if (why := self._explain_left_out(served)) is not None:
            return CheckResult(kind="left_out", detail=why)
        if served.stages not in self._makers:
            self._makers[served.stages] = SampleMaker(self._pipeline.take_stages(served.stages))
        maker = self._makers[served.stages]
        index = int(maker.pipeline.order()(served.epoch, served.place, served.place + 1)[0])
        if index != served.index:
            size = float(abs(index - served.index))
            detail = f"this position has sample {served.index} where it was prepared, {index} here"
            return CheckResult(kind="different", field="index", size=size, detail=detail)
        if index in maker.pipeline.poison_records.codes:
            return CheckResult(kind="left_out", detail="it ends or hangs every process that prepares it")
        try:
            own = _select_used(served, _store(served, self._prepare(maker, served)))
        except ForeignRandomness as error:
            return CheckResult(kind="unstable", detail=str(error))
        except DataOutOfReach as error:
            return CheckResult(kind="left_out", detail=str(error))
        except (SampleError, StructureMismatch) as error:
            why = error.reason if isinstance(error, SampleError) else str(error)
            if _NEEDS_GPU.search(why):
                detail = f"a stage needs a GPU, which no process that compares has: {why}"
                return CheckResult(kind="left_out", detail=detail)
            if served.status == FAILED:
                return EQUAL  # skipped there and here
            return CheckResult(kind="different", detail=f"sample {index} could not be prepared here ({why})")
        if served.status == FAILED:
            return CheckResult(kind="different", detail=f"sample {index} was left out where it was prepared")
        return compare_arrays(_select_used(served, served.columns), own, is_exact=self._is_exact)

    def _prepare(self, maker: SampleMaker, served: ServedSample) -> dict[str, Any]:
        """The sample as the pipeline makes it; of batch stages some are kept: all readers compare the same."""
        key = served.stages, served.epoch, served.place
        if (kept := self._prepared.get(key)) is not None:
            return kept
        with limit_torch_threads():
            sample = prepare_checked(maker, served.index, served.epoch, place=served.place, is_repeated=True)
        if self._pipeline.batched:
            self._prepared[key] = sample
            if len(self._prepared) > _MOST_KEPT:
                self._prepared.popitem(last=False)
        return sample

    def _explain_left_out(self, served: ServedSample) -> str | None:
        source: Any = self._pipeline.source
        while source is not None:
            if getattr(source, "kind", None) == "iterable":
                return "a spooled iterable is read from one file by all"
            source = getattr(source, "source", None)
        if served.status not in (FAILED, GOOD, ODD):
            return "it ends or hangs every process that prepares it, or does not fit"
        if served.status == ODD and served.stages < len(self._pipeline.stages):
            return "its reader prepares it in full"
        if served.status == FAILED and self._pipeline.on_error == "raise":
            return "its reader prepares it again, for the error"
        return None


def _store(served: ServedSample, sample: dict[str, Any]) -> Values:
    fields = served.fields
    if served.structure is not None:
        columns: Values = {name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in fields.items()}
        Structure.from_record(served.structure).store(sample, fields, columns, 0, None, as_array)
        return {name: column[0] for name, column in columns.items()}
    values = {name: as_array(value) for name, value in sample.items()}
    for name in {**fields, **values}:
        value, declared = values.get(name), fields.get(name)
        own = None if value is None else Field(value.shape, str(value.dtype))
        if own is None or own != declared:
            raise StructureMismatch(f"the field {name!r} is {own or 'missing'}, not {declared or 'missing'}")
    return values  # type: ignore[return-value]


def _select_used(served: ServedSample, columns: Values) -> Values:
    """The columns without the unused ends of slots."""
    if served.structure is None:
        return columns
    lengths = {name: int(columns[name + LENGTH]) for name in columns if name + LENGTH in columns}
    return {name: value[: lengths[name]] if name in lengths else value for name, value in columns.items()}
