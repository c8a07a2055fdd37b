"""Reads resident sets: validation and test data, prepared once and kept in memory, outside the stream."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines import ipc
from pipelines.checks import check_address, check_function, check_integer, check_pipeline
from pipelines.errors import DataOutOfReach, PipelineError, SampleError
from pipelines.loader.attachment import AttachmentRefused, request_resident
from pipelines.loader.batch import Batch
from pipelines.loader.collate import Collate, make_collator
from pipelines.loader.ragged import assemble
from pipelines.order import rank_bounds
from pipelines.prepare.deadly_records import has_deadly
from pipelines.prepare.fields import GOOD, INDEX, OK, UNREACHED
from pipelines.prepare.preparer import Preparer, warn_skipped
from pipelines.shm import ring
from pipelines.verification.reader import MakeVerification, Stream, Verification, verify_here
from pipelines.verification.served import ServedSample

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline


class Resident:
    """All samples of a pipeline, in its source's order, in shared memory.

    Attributes:
        prepare_cpu_s: CPU-seconds that this process spent on preparing it; 0 where a feeder did.
    """

    def __init__(self, view: ring.RingView, pipeline: Pipeline, prepare_cpu_s: float = 0.0) -> None:
        self.prepare_cpu_s = prepare_cpu_s
        self._pipeline, self._structure = pipeline, pipeline.structure
        self._verification: Verification | None = None
        self._passes = 0
        self._view = view
        if has_deadly(ok := view.columns[OK].tobytes()):
            pipeline.hazards.learn(ok, view.columns[INDEX])
        if UNREACHED in ok:
            raise DataOutOfReach("records were out of reach where it was prepared")
        self._ok = view.columns[OK] & GOOD != 0
        failed = np.flatnonzero(~self._ok).tolist()
        if pipeline.on_error == "skip":
            pipeline.check_skipped(len(failed), len(pipeline), failed)
        elif failed:
            # Prepare it here again, to raise the original error.
            bad = failed[0]
            columns = {name: column[bad : bad + 1].copy() for name, column in view.columns.items() if name != OK}
            Preparer(pipeline).fill(columns, 0, 0, bad, bad + 1)
            raise SampleError(bad, pipeline.source.where(bad), "could not be prepared, but can be now: try again")

    @classmethod
    def prepare(cls, pipeline: Pipeline) -> Resident:
        """Prepare the set in this process.

        Raises:
            SampleError: a record cannot be prepared, and `on_error` is "raise".
            TooManySkipped: more cannot be than may be left out.
            DataOutOfReach: an outage lasts (`pipelines.prepare.transient`).
        """
        import torch  # noqa: F401 - before the stages do, so that they run on one thread from the start

        layout = ring.Layout(pipeline.fields, len(pipeline))
        fd = ring.create(layout, "resident")
        try:
            preparer = Preparer(pipeline, warn_skipped if pipeline.on_error == "skip" else None)
            preparer.fill(ring.map_writable(fd, layout), 0, 0, 0, len(pipeline))
            return cls(ring.RingView(fd, layout), pipeline, preparer.cpu_s)
        finally:
            os.close(fd)

    def verify(self, make: MakeVerification, stream: Stream) -> bool:
        """Compare the first samples of a set that a feeder has prepared; returns whether it may be read.

        Args:
            make: makes what compares them.
            stream: what the feeder says of the set.
        """
        self._verification = make(stream)
        n = len(self._pipeline)
        return self._verification is None or self._verification.admit_first(self._read_served, 0, 0, n)

    def begin_pass(self) -> None:
        """Compare the sample that is due in the next pass over a set that a feeder has prepared, if one is.

        Raises:
            SamplesDiffer: it differs.
        """
        if self._verification is not None:
            self._verification.check_batch(self._read_served, self._passes, 0, len(self._pipeline))
            self._passes += 1

    def _read_served(self, place: int) -> ServedSample:
        record = None if self._structure is None else self._structure.as_record()
        stages = len(self._pipeline.stages)
        return ServedSample.read(self._view.columns, place, stages=stages, epoch=0, place=place, structure=record)

    def __len__(self) -> int:
        """Samples in the set, without the ones that were skipped."""
        return int(np.count_nonzero(self._ok))

    def loader(
        self, batch_size: int, rank: int = 0, world: int = 1, collate: Collate | None = None
    ) -> ResidentLoader:
        """Batches of this rank's rows [n*rank//world, n*(rank+1)//world), in the source's order, at each pass.

        Args:
            collate: `f(batch)` or `f(batch, rng)`, applied to each batch; `rng` is None.
        """
        return ResidentLoader(self, batch_size, rank, world, collate)


class ResidentLoader:
    """Iterates a rank's rows of a resident set, as often as wanted: the same batches at each pass.

    `len(loader)` is the number of batches in a pass. A batch is valid until the next one is asked for.
    """

    def __init__(
        self, resident: Resident, batch_size: int, rank: int = 0, world: int = 1, collate: Collate | None = None
    ) -> None:
        self._resident = resident
        self._batch_size = check_integer("batch_size", batch_size, 1)
        world = check_integer("world", world, 1)
        rank = check_integer("rank", rank, 0, world - 1, f" of world {world}")
        self._rows = rank_bounds(0, resident._view.layout.capacity, rank, world)
        self._collate = make_collator(collate)
        self._counts = {"samples": 0, "batches": 0, "skipped": 0}

    def __len__(self) -> int:
        first, last = self._rows
        return -(-(last - first) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        self._resident.begin_pass()
        view, (first, last), structure = self._resident._view, self._rows, self._resident._structure
        for step, start in enumerate(range(first, last, self._batch_size)):
            stop = min(last, start + self._batch_size)
            ok = self._resident._ok[start:stop]
            tensors, views = view.read_batch(start, stop)
            if not ok.all():
                tensors = {name: tensor[np.flatnonzero(ok)] for name, tensor in tensors.items()}
            size = len(tensors[INDEX])
            self._counts["batches"] += 1
            self._counts["samples"] += size
            self._counts["skipped"] += stop - start - size
            fields = tensors if structure is None else assemble(structure, tensors)
            try:
                batch = Batch(fields, epoch=0, step=step, global_size=size)
                yield self._collate(batch, is_training=False)
            finally:
                view.restore(start, stop, views)

    def stats(self) -> dict[str, Any]:
        """What has been read so far, over all passes: `samples` and `batches` of this rank, `skipped` samples.

        `prepare_cpu_s`: CPU-seconds that this process spent on preparing the set; 0 where a feeder did.
        """
        return {**self._counts, "prepare_cpu_s": self._resident.prepare_cpu_s}


def resident(
    address: str | None,
    key: str,
    pipeline: Pipeline,
    on_wait: Callable[[], None] | None = None,
    verify: bool | MakeVerification = True,
) -> Resident:
    """The feeder's resident set `key`, or one prepared here where there is no feeder.

    Args:
        address: of the feeder; None where there is none.
        key: the name under which the feeder was given the pipeline, such as "valid".
        pipeline: the same pipeline, built again; fingerprints are compared.
        on_wait: called every second while the feeder still prepares the set.
        verify: whether samples are prepared here, too, and compared (`attach`): two before the set is read; then
            one for each 2,000 that are read. If one of the first differs, the set is prepared here.

    Raises:
        PipelineError: the feeder has no such set, or another pipeline under that name.
    """
    check_pipeline("the pipeline of resident()", pipeline)
    check_function("on_wait", on_wait)
    if address is not None:
        address = check_address(address)
    still = pipeline.without_randomness()
    if address is not None:
        try:
            view, stream = request_resident(address, key, still, on_wait)
            make = verify_here(still, key, f"the resident set {key!r}") if verify is True else verify or None
            found = Resident(view, still)
            if make is None or found.verify(make, stream):
                return found
        except ipc.ConnectionLost:
            warnings.warn(f"no feeder answers at {address}: {key!r} is prepared here", stacklevel=2)
        except DataOutOfReach as error:
            warnings.warn(f"{key!r} is prepared here: {error}", stacklevel=2)
        except AttachmentRefused as refused:
            if not refused.unsure:
                raise PipelineError(str(refused)) from None
            warnings.warn(f"{key!r} is prepared here: {refused}", stacklevel=2)
    return Resident.prepare(still)
