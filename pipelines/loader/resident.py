"""Reads resident sets: validation and test data, prepared once and kept in memory, outside the stream.

Where memory does not hold a set (`machine_limits.fits_in_memory`), each pass prepares it anew, batch by batch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_address, check_function, check_integer, check_pipeline
from pipelines.description import PipelineDescription
from pipelines.environment.machine_limits import fits_in_memory
from pipelines.errors import MOST_RECORDS, BadRecords, DataOutOfReach, PipelineError, SampleError, TooManySkipped
from pipelines.ipc import messages
from pipelines.loader.batch import Batch
from pipelines.loader.ragged import assemble
from pipelines.order.epoch_order import rank_bounds
from pipelines.prepare.preparer import Preparer, warn_skipped
from pipelines.samples.fields import GOOD, INDEX, OK, UNREACHED, Columns
from pipelines.samples.poison_records import has_poison
from pipelines.shm import ring

if TYPE_CHECKING:
    from pipelines.loader.collate import Collate, Collator
    from pipelines.verification.checker import ServedSample
    from pipelines.verification.reader import MakeVerification, StreamOrigin, Verification

#: Reads rows of a set: a view, the slot of the first of them in it, and which rows hold a sample.
ReadRows = Callable[[int, int], tuple[ring.RingView, int, npt.NDArray[Any]]]
Chosen = npt.NDArray[np.bool_]  # of each row of a set whether it is read, [n]
TRIED, TRIED_BYTES = 64, 2**28  # records that are tried at a time, at most, and their bytes
_CHECKS, LEAST_CHECKED = 64, 2**20  # while a set is prepared, at most so many, each for at least so many bytes


class _WholeSet:
    """What a set in memory and one that is prepared again at each pass have in common."""

    pipeline: PipelineDescription

    def loader(
        self,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        collate: Collate | None = None,
        chosen: Chosen | None = None,
    ) -> ResidentLoader:
        """Batches of this rank's rows [n*rank//world, n*(rank+1)//world), in the source's order, at each pass.

        Args:
            collate: `f(batch)` or `f(batch, rng)`, applied to each batch; `rng` is None.
            chosen: whether batches have each row, bool [n]; None: they have all.
        """
        assert isinstance(self, Resident | StreamedSet)
        return ResidentLoader(self, batch_size, rank, world, collate, chosen)


class Resident(_WholeSet):
    """All samples of a pipeline, in its source's order, in shared memory.

    Attributes:
        prepare_cpu_s: CPU-seconds that this process spent on preparing it; 0 where a feeder did.
    """

    def __init__(self, view: ring.RingView, pipeline: PipelineDescription, prepare_cpu_s: float = 0.0) -> None:
        self.prepare_cpu_s = prepare_cpu_s
        self.pipeline, self._structure = pipeline, pipeline.structure
        self._verification: Verification | None = None
        self._passes = 0
        self._view = view
        if has_poison(ok := view.columns[OK].tobytes()):
            pipeline.poison_records.learn(ok, view.columns[INDEX])
        _check_reached(ok)
        self._ok = view.columns[OK] & GOOD != 0
        failed = np.flatnonzero(~self._ok).tolist()
        if pipeline.on_error == "skip":
            pipeline.check_skipped(len(failed), len(pipeline), failed)
        elif failed:
            _raise_failures(pipeline, view.columns, failed)

    @classmethod
    def prepare(cls, pipeline: PipelineDescription, check: Callable[[int], None] = lambda size: None) -> Resident:
        """Prepare the set in this process.

        Args:
            check: called now and then with the bytes that are still to be filled; what it raises ends it.

        Raises:
            SampleError: a record cannot be prepared, and `on_error` is "raise".
            TooManySkipped: more cannot be than may be left out.
            DataOutOfReach: an outage lasts (`pipelines.prepare.transient`).
        """
        import torch  # noqa: F401 - before the stages do, so that they run on one thread from the start

        n = len(pipeline)
        layout = ring.Layout(pipeline.fields, n)
        check(layout.nbytes)
        fd = ring.create(layout, "resident")
        try:
            preparer = Preparer(pipeline, warn_skipped if pipeline.on_error == "skip" else None)
            columns = ring.map_writable(fd, layout)
            parts = min(_CHECKS, 1 + max(layout.nbytes // LEAST_CHECKED, n // TRIED))
            for first in range(0, n, step := -(-n // parts)):
                check(layout.nbytes * (n - first) // n)
                preparer.fill(columns, first, 0, first, min(first + step, n))
            return cls(ring.RingView(fd, layout), pipeline, preparer.cpu_s)
        finally:
            os.close(fd)

    def verify(self, make: MakeVerification, stream: StreamOrigin) -> bool:
        """Compare the first samples of a set that a feeder has prepared; returns whether it may be read.

        Args:
            make: makes what compares them.
            stream: what the feeder says of the set.
        """
        self._verification = make(stream)
        n = len(self.pipeline)
        return self._verification is None or self._verification.admit_first(self._read_served, 0, 0, n)

    def begin_pass(self, batch_size: int, first: int, last: int) -> ReadRows:
        """Compare a sample of a set that a feeder has prepared, before passes 0, 1, 2, 4, 8 ...

        Returns:
            What reads the rows [start, stop) within [first, last), at most `batch_size`.

        Raises:
            SamplesDiffer: it differs.
        """
        if self._verification is not None and self._passes & (self._passes - 1) == 0:
            self._verification.check_batch(self._read_served, self._passes, 0, len(self.pipeline))
        self._passes += 1
        return lambda start, stop: (self._view, start, self._ok[start:stop])

    def _read_served(self, place: int) -> ServedSample:
        from pipelines.verification.checker import ServedSample

        record = None if self._structure is None else self._structure.as_record()
        stages = len(self.pipeline.stages)
        return ServedSample.read(self._view.columns, place, stages=stages, epoch=0, place=place, structure=record)

    def __len__(self) -> int:
        """Samples in the set, without the ones that were skipped."""
        return int(np.count_nonzero(self._ok))

    @property
    def columns(self) -> Columns:
        """The fields of all samples, by row, and `_ok`: which rows hold one."""
        return self._view.columns


class StreamedSet(_WholeSet):
    """All samples of a pipeline, in its source's order, of which one batch at a time is in memory.

    Its batches are those of a `Resident`, bit by bit.

    Args:
        pipeline: without randomness.
    """

    def __init__(self, pipeline: PipelineDescription) -> None:
        import torch  # noqa: F401 - before the stages do, so that they run on one thread from the start

        self.pipeline = pipeline
        self._preparer = Preparer(pipeline, warn_skipped if pipeline.on_error == "skip" else None)

    @property
    def prepare_cpu_s(self) -> float:
        """CPU-seconds that this process spent on preparing it, in all passes."""
        return self._preparer.cpu_s

    def __len__(self) -> int:
        """Samples in the set, without the ones that are skipped; prepares them all to find out."""
        return sum(len(batch[INDEX]) for batch in self.loader(1))

    def begin_pass(self, batch_size: int, first: int, last: int) -> ReadRows:
        """See `Resident.begin_pass`.

        Raises:
            MemoryError: there is none for a batch.
        """
        columns, view = self._make_columns(min(batch_size, max(1, last - first)))
        failed: list[int] = []

        def read(start: int, stop: int) -> tuple[ring.RingView, int, npt.NDArray[Any]]:
            self._preparer.fill(columns, 0, 0, start, stop)
            _check_reached(columns[OK][: stop - start].tobytes())
            ok = columns[OK][: stop - start] & GOOD != 0
            failed.extend((start + np.flatnonzero(~ok)).tolist())
            if failed and self.pipeline.on_error != "skip":
                _raise_failures(self.pipeline, columns, failed)
            if stop == last:
                self.pipeline.check_skipped(len(failed), last - first, failed)
                self._preparer.on_skip = None  # each was named once
            return view, 0, ok

        return read

    def try_records(self, errors: list[SampleError]) -> Iterator[tuple[int, Columns]]:
        """Prepare all samples, a few at a time.

        Args:
            errors: gets those of records that cannot be prepared.

        Yields:
            How many were tried so far, and the columns of the last few; the next ones take their place.
        """
        n, self._preparer.on_skip = len(self.pipeline), errors.append
        rows = max(1, min(TRIED, TRIED_BYTES // max(1, ring.sample_bytes(self.pipeline.fields))))
        columns, _ = self._make_columns(rows)
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            self._preparer.fill(columns, 0, 0, start, stop)
            yield stop, {name: column[: stop - start] for name, column in columns.items()}

    def _make_columns(self, rows: int) -> tuple[Columns, ring.RingView]:
        layout = ring.Layout(self.pipeline.fields, rows)
        fd = ring.create(layout, "a batch of a set")
        try:
            return ring.map_writable(fd, layout), ring.RingView(fd, layout)
        finally:
            os.close(fd)


def explain_failures(pipeline: PipelineDescription, errors: Sequence[SampleError]) -> str | None:
    """Why a pipeline cannot be used with these errors of its records; None where it can."""
    places = [error.index for error in errors]
    try:
        if pipeline.on_error == "skip":
            pipeline.check_skipped(len(errors), len(pipeline), places)
        elif errors:
            return str(BadRecords(errors[:MOST_RECORDS], len(errors)) if len(errors) > 1 else errors[0])
    except TooManySkipped as error:
        return str(error)
    return None


def _check_reached(ok: bytes) -> None:
    if UNREACHED in ok:
        raise DataOutOfReach("the process that prepares the set could not reach the records")


def _raise_failures(pipeline: PipelineDescription, columns: Columns, failed: Sequence[int]) -> None:
    """Prepare the first records that have failed here again, for the original errors, and raise all in one."""
    alone = {name: column[:1].copy() for name, column in columns.items() if name != OK}
    where, errors = pipeline.source.where, []
    for bad in failed[:MOST_RECORDS]:
        try:
            Preparer(pipeline).fill(alone, 0, 0, bad, bad + 1)
        except SampleError as error:
            errors.append(error)
        else:
            errors.append(SampleError(bad, where(bad), "could not be prepared, but can be now: try again"))
    if len(failed) == 1:
        raise errors[0]
    raise BadRecords(errors, len(failed))


class ResidentLoader:
    """Iterates the `spans` of a rank's rows of a resident set; a batch is valid until the next one is."""

    def __init__(
        self,
        resident: Resident | StreamedSet,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        collate: Collate | None = None,
        chosen: Chosen | None = None,
    ) -> None:
        self._resident, self._chosen = resident, chosen
        batch_size = check_integer("batch_size", batch_size, 1)
        world = check_integer("world", world, 1)
        rank = check_integer("rank", rank, 0, world - 1, f" of world {world}")
        rows = rank_bounds(0, len(resident.pipeline), rank, world)
        self.spans = list(pairwise(cut_rows(*rows, batch_size, chosen)))
        self._collate: Collator | None = None
        if collate is not None:
            from pipelines.loader.collate import Collator

            self._collate = Collator(collate, 0)
        self._counts = {"samples": 0, "batches": 0, "skipped": 0}

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[Batch]:
        spans, structure = self.spans or [(0, 1)], self._resident.pipeline.structure
        read = self._resident.begin_pass(max(b - a for a, b in spans), spans[0][0], spans[-1][1])
        for step, (start, stop) in enumerate(self.spans):
            view, slot, ok = read(start, stop)
            wanted = ok.size if self._chosen is None else int(self._chosen[start:stop].sum())
            if self._chosen is not None:
                ok = ok & self._chosen[start:stop]
            tensors, views = view.read_batch(slot, slot + stop - start)
            if not ok.all():
                tensors = {name: tensor[np.flatnonzero(ok)] for name, tensor in tensors.items()}
            size = len(tensors[INDEX])
            self._counts["batches"] += 1
            self._counts["samples"] += size
            self._counts["skipped"] += wanted - size
            fields = tensors if structure is None else assemble(structure, tensors)
            try:
                batch = Batch(fields, epoch=0, step=step, global_size=size)
                yield batch if self._collate is None else self._collate(batch, is_training=False)
            finally:
                view.restore(slot, slot + stop - start, views)

    def stats(self) -> dict[str, Any]:
        """What has been read in all passes: this rank's `samples`, `batches` and `skipped`; `prepare_cpu_s`."""
        return {**self._counts, "prepare_cpu_s": self._resident.prepare_cpu_s}


def cut_rows(first: int, last: int, batch_size: int, chosen: Chosen | None) -> list[int]:
    """Where the batches of the rows [first, last) begin, and where the last of them ends.

    Args:
        chosen: see `Resident.loader`; each batch but the last then has `batch_size` of these rows.
    """
    if chosen is None:
        return [*range(first, last, batch_size), last]
    rows = (first + np.flatnonzero(chosen[first:last])).tolist()
    ends = [row + 1 for row in rows[batch_size - 1 :: batch_size]]
    return [*rows[:1], *ends, *([rows[-1] + 1] if len(rows) % batch_size else [])] or [first]


def resident(
    address: str | None,
    key: str,
    pipeline: PipelineDescription,
    on_wait: Callable[[], None] | None = None,
    verify: bool | MakeVerification = True,
) -> Resident | StreamedSet:
    """The feeder's resident set `key`; without one it is prepared here, or streamed if memory does not hold it.

    Args:
        address: the address of the feeder; None where there is none.
        key: the name under which the feeder was given the pipeline, such as "valid".
        pipeline: the same pipeline, built again; fingerprints are compared.
        on_wait: called every second while the feeder still prepares the set; now and then while this process does.
        verify: whether samples are prepared here, too, and compared (`attach`): two before the set is read; then
            one for each 2,000 that are read. If one of the first differs, the set is prepared here.

    Raises:
        PipelineError: the feeder has no such set, or another pipeline under that name.
    """
    check_pipeline("the pipeline of resident()", pipeline)
    check_function("on_wait", on_wait)
    still = pipeline.without_randomness()
    if address is not None:
        served = _find_served(check_address(address), key, still, on_wait, verify)
        if served is not None:
            return served

    def check(size: int) -> None:  # again and again: others may prepare theirs
        if not fits_in_memory(size):
            raise MemoryError(f"{size / 2**30:.3g} GiB are more than half of the memory that is free")
        if on_wait is not None:
            on_wait()

    try:
        return Resident.prepare(still, check)
    except MemoryError as error:
        warnings.warn(f"{key!r} is prepared again at each pass: {error}", stacklevel=2)
        return StreamedSet(still)


def _find_served(
    address: str,
    key: str,
    still: PipelineDescription,
    on_wait: Callable[[], None] | None,
    verify: bool | MakeVerification,
) -> Resident | None:
    """The resident set of a feeder; None, with a warning, where it is to be prepared here."""
    from pipelines.loader.stream_client import StreamRefused, request_resident
    from pipelines.verification.reader import verify_here

    try:
        view, stream = request_resident(address, key, still, on_wait)
        make = verify_here(still, key, f"the resident set {key!r}") if verify is True else verify or None
        served = Resident(view, still)
        return served if make is None or served.verify(make, stream) else None
    except messages.ConnectionLost:
        why = f"no feeder answers at {address}: {key!r} is prepared here"
    except DataOutOfReach as error:
        why = f"{key!r} is prepared here: {error}"
    except StreamRefused as refused:
        if not refused.unsure:
            raise PipelineError(str(refused)) from None
        why = f"{key!r} is prepared here: {refused}"
    warnings.warn(why, stacklevel=3)
    return None
