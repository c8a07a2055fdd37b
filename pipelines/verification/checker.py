"""Prepares a sample that was served once more, twice, by the pipeline of its reader, and compares all three.

A stage that makes two different samples of one record here is no function of (sample, rng): nothing can be said of
what was served, and no reader can be given the same samples again. Records that crash or hang whoever prepares
them, and those of a spooled iterable, which are read from one file by all, are left out.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.description import PipelineDescription
from pipelines.errors import DataOutOfReach, PipelineError, SampleError
from pipelines.prepare.checked import prepare_checked
from pipelines.prepare.draw_watch import find_own_generators
from pipelines.prepare.global_generators import preserve_states
from pipelines.prepare.preparer import as_array
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.prepare.torch_threads import limit_torch_threads
from pipelines.samples.fields import FAILED, GOOD, ODD
from pipelines.samples.structure import LENGTH, Structure, StructureMismatch
from pipelines.verification.compare import CheckResult, compare_arrays
from pipelines.verification.served import ServedSample

#: In what torch, CuPy and numba say where there is no GPU, no driver, or no CUDA in them.
_NEEDS_GPU = re.compile(
    "No CUDA GPUs|with CUDA enabled|on a CUDA device|NVIDIA driver|CUDA driver|CUDA-capable|cudaErrorNoDevice"
)

Values = dict[str, npt.NDArray[Any]]


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
        self._is_compared = not _is_spooled(pipeline)
        self._cut: tuple[int, PipelineDescription, SampleMaker] | None = None

    def check(self, served: ServedSample) -> CheckResult:
        """Compares one sample.

        Returns:
            "left_out" for a sample that was not served: its reader prepares it in full, or nobody may.
        """
        if not self._is_compared:
            return CheckResult(kind="left_out", detail="a spooled iterable is read from one file by all")
        if served.status not in (FAILED, GOOD, ODD):
            return CheckResult(kind="left_out", detail="it ends or hangs whoever prepares it, or does not fit")
        if served.status == ODD and served.stages < len(self._pipeline.stages):
            return CheckResult(kind="left_out", detail="its reader prepares it in full")
        if served.status == FAILED and self._pipeline.on_error == "raise":
            return CheckResult(kind="left_out", detail="its reader prepares it again, for the error")
        if self._cut is None or self._cut[0] != served.stages:
            cut = self._pipeline.take_stages(served.stages)
            self._cut = served.stages, cut, SampleMaker(cut)
        _, cut, maker = self._cut
        index = int(cut.order()(served.epoch, served.place, served.place + 1)[0])
        if index != served.index:
            detail = f"the sample there is {served.index} where it was prepared, {index} here"
            return CheckResult(
                kind="different", field="index", size=float(abs(index - served.index)), detail=detail
            )
        if index in cut.poison_records.codes:
            return CheckResult(kind="left_out", detail="it ends or hangs whoever prepares it")
        with limit_torch_threads(), preserve_states(own=find_own_generators(cut)):
            try:
                first, why = self._prepare(maker, served)
                second, _ = self._prepare(maker, served)
            except DataOutOfReach as error:
                return CheckResult(kind="left_out", detail=str(error))
        if (first is None) != (second is None):
            return CheckResult(kind="left_out", detail=f"it can be prepared here now and then: {why}")
        if (unstable := self._compare_own(maker, served, first, second)) is not None:
            return unstable
        if first is None and _NEEDS_GPU.search(why):
            return CheckResult(
                kind="left_out", detail=f"a stage needs a GPU, which no process that compares has: {why}"
            )
        if first is None or served.status == FAILED:
            if first is None and served.status == FAILED:
                return CheckResult(kind="equal")  # skipped there and here
            where = (
                f"could not be prepared here ({why})" if first is None else "was left out where it was prepared"
            )
            return CheckResult(kind="different", detail=f"sample {index} {where}")
        return compare_arrays(self._select_used(served, served.columns), first, is_exact=self._is_exact)

    def _prepare(self, maker: SampleMaker, served: ServedSample) -> tuple[Values | None, str]:
        """The sample in columns as the served one has, without unused ends; None and why if it has none."""
        try:
            sample = maker.make(served.index, served.epoch, place=served.place)
            return self._select_used(served, self._store(served, sample)), ""
        except SampleError as error:
            return None, error.reason
        except StructureMismatch as shape_mismatch:
            return None, str(shape_mismatch)

    def _store(self, served: ServedSample, sample: dict[str, Any]) -> Values:
        fields = served.fields
        if served.structure is None:
            values = {name: as_array(value) for name, value in sample.items()}
            for name, field in fields.items():
                value = values.get(name)
                if value is None or (value.shape, str(value.dtype)) != (field.shape, field.dtype):
                    got = "missing" if value is None else f"{value.dtype}{list(value.shape)}"
                    raise StructureMismatch(f"the field {name!r} is {got}, not {field.dtype}{list(field.shape)}")
            if len(values) != len(fields):
                surplus = next(name for name in values if name not in fields)
                raise StructureMismatch(f"the field {surplus!r} is not one of {', '.join(fields)}")
            return {name: values[name] for name in fields}  # type: ignore[misc]
        columns: Values = {name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in fields.items()}
        Structure.from_record(served.structure).store(sample, fields, columns, 0, None, as_array)
        return {name: column[0] for name, column in columns.items()}

    def _select_used(self, served: ServedSample, columns: Values) -> Values:
        """The columns without the unused ends of slots."""
        made = {}
        for name, value in columns.items():
            length = columns.get(name + LENGTH) if served.structure is not None else None
            made[name] = value if length is None else value[: int(length)]
        return made

    def _compare_own(
        self, maker: SampleMaker, served: ServedSample, first: Values | None, second: Values | None
    ) -> CheckResult | None:
        """The result "unstable", with the stage, if the samples that were prepared here differ; None if not."""
        if first is None or second is None:
            return None
        found = compare_arrays(first, second, is_exact=True)
        if found.kind == "equal":
            return None
        try:
            prepare_checked(maker, served.index, served.epoch, place=served.place, is_repeated=True)
            reason = f"two different samples were made of it, called twice: {found.detail}"
        except PipelineError as error:
            reason = str(error)
        return CheckResult(
            kind="unstable", field=found.field, position=found.position, size=found.size, detail=reason
        )


def _is_spooled(pipeline: PipelineDescription) -> bool:
    """Whether the records are those of an iterable, which was read once, into a file."""
    source = pipeline.source
    while source is not None:
        if getattr(source, "kind", None) == "iterable":
            return True
        source = getattr(source, "source", None)
    return False
