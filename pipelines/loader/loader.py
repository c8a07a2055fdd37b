"""Iterates batches, read from a feeder's ring or prepared by this process.

Both ways give the same bits, so a loader may switch at any batch: when the feeder has ended, the loader prepares
the next batch itself, and it tries to attach again from time to time.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.checks import check_function
from pipelines.description import PipelineDescription
from pipelines.errors import PipelineError
from pipelines.ipc import messages
from pipelines.loader.batch import Batch, Good, ReadRange, Staging, find_good
from pipelines.loader.copied_rows import CopiedRows
from pipelines.loader.private_rows import complete_rows, prepare_rows
from pipelines.loader.ragged import assemble
from pipelines.loader.state import Resumable
from pipelines.prepare.preparer import Preparer, warn_skipped
from pipelines.providers import import_object
from pipelines.samples.fields import INDEX, UNREACHED
from pipelines.weights import Weights, weigh

if TYPE_CHECKING:
    import torch

    from pipelines.loader.collate import Collate
    from pipelines.loader.stream_client import StreamClient
    from pipelines.loader.workers import LoaderWorkers
    from pipelines.verification.reader import MakeVerification, Verification

_RETRY_STEPS = 32
WEIGHT = "weight"


class Loader(Resumable):
    """Iterates the batches of `epochs`; made by `Pipeline.loader` or `pipelines.attach`.

    Without `epochs` each pass over it is the next epoch of the stream; with `epochs` there is one pass.
    `len(loader)` is the number of batches in the present pass, or else in the next one. Samples of weight 0 are in
    no batch, and a global batch without a sample is passed over; `len` counts it.

    Args:
        is_endless: whether each pass is the next epoch.
        workers, prefetch: see `Pipeline.loader`.
        verify: makes what compares samples of the stream; None: nothing is compared.

    Attributes:
        reading: what is read; `reading.epochs` are stream epochs.
    """

    def __init__(
        self,
        pipeline: PipelineDescription,
        reading: ReadRange,
        *,
        address: str | None = None,
        name: str = "",
        join_next: int | None = None,
        copy: bool = False,
        on_wait: Callable[[], None] | None = None,
        weights: Weights | None = None,
        is_endless: bool = False,
        local_world: int | None = None,
        workers: int = 0,
        prefetch: int | None = None,
        collate: Collate | None = None,
        verify: MakeVerification | None = None,
    ) -> None:
        check_function("weights", weights)
        if weights is not None and WEIGHT in pipeline.top_fields:
            raise PipelineError(f"weights= fills the field {WEIGHT!r} of a batch, which the samples have already")
        super().__init__(pipeline, reading, is_endless=is_endless)
        self._address = address
        self._name = name
        self._local_world = local_world or reading.world
        self._copy = copy
        self._on_wait, self._weights = on_wait, weights
        self._collate = collate
        if collate is not None:
            make = import_object("pipelines.loader.collate:Collator")
            self._collate = make(collate, pipeline.seed, reading.rank, weighted=weights is not None)
        self._client: StreamClient | None = None
        self._make_verification = verify
        self._verification: Verification | None = None
        self._workers: LoaderWorkers | None = None  # where there are some
        if (workers, prefetch) != (0, None):
            make_workers = import_object("pipelines.loader.workers:LoaderWorkers")
            self._workers = make_workers(pipeline, workers, prefetch, copy=copy)
        self._preparer: Preparer | None = None
        self._staging = Staging()
        is_whole = reading.world == 1 and weights is None and pipeline.on_error == "raise"
        self._copied = CopiedRows(pipeline, reading.n) if is_whole else None
        self._skipped, self._skipped_indices = 0, list[int]()  # of the batch that was made last
        self._joined_epoch = 0
        self._attach_error: str | None = None
        self._counts = {"samples": 0, "batches": 0, "shared_batches": 0, "private_batches": 0}
        self._counts |= {"skipped": 0, "private_skipped": 0}
        self._waited_s = 0.0
        if address is not None:
            first = reading.epochs.start if join_next is None else None
            self._attach(first, self._position(reading.epochs.start, reading.first_step(reading.epochs.start)))
            if join_next is not None:
                self._first_epoch = self._joined_epoch
                self._read_from(replace(reading, epochs=range(self._joined_epoch, self._joined_epoch + join_next)))

    @property
    def num_workers(self) -> int:
        """Preparation workers of this loader alone; 0 if it prepares in this process, or reads a feeder."""
        return 0 if self._workers is None else self._workers.count

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in a whole epoch."""
        return self.reading.steps

    @property
    def shared(self) -> bool:
        """Whether the next batch comes from a feeder."""
        return self._client is not None

    def __len__(self) -> int:
        return len(self.reading.epochs) * self.reading.steps - self.reading.first_step(self.reading.epochs.start)

    def stats(self) -> dict[str, Any]:
        """What has been read so far.

        Returns:
            `samples` of this rank and its `batches`, of them `shared_batches` and `private_batches`; `skipped`
            samples of the global batches, and of the private ones `private_skipped`; `waited_s`, seconds waited
            for the feeder or for workers; `prepare_cpu_s`, CPU-seconds of preparation here and in workers.
        """
        prepared = sum(part.cpu_s for part in (self._preparer, self._workers) if part is not None)
        return {**self._counts, "waited_s": self._waited_s, "prepare_cpu_s": prepared}

    def _leave_stream(self) -> None:
        if self._client is not None:
            self.close()

    def _count_batches(self) -> int:
        return self._counts["batches"]

    def _end_pass(self) -> None:
        if not self._is_endless or self._client is not None:
            self.close()
        elif self._workers is not None:
            self._workers.keep_batch()  # they prepare the next pass

    def close(self) -> None:
        """Leave the stream and end the workers; others no longer wait for this loader."""
        if self._workers is not None:
            self._workers.close()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _batches(self, epoch: int) -> Iterator[Batch]:
        left_out, left_out_indices = 0, list[int]()  # of this epoch, since it was begun or resumed
        for step in range(self.reading.first_step(epoch), self.reading.steps):
            start, stop = self.reading.places(step)
            private = self._counts["private_batches"]
            try:
                batch = self._next_batch(epoch, step, start, stop)
                if skipped := self._skipped:
                    left_out += skipped
                    left_out_indices += self._skipped_indices
                    self.pipeline.check_skipped(left_out, self.reading.n, left_out_indices)
            except BaseException:
                self.close()  # the feeder's answer to an interrupted request may still arrive: attach again
                self._has_begun = self._counts["batches"] > self._batches_before  # else this was no pass
                raise
            self._counts["batches"] += 1
            self._counts["samples"] += batch[INDEX].shape[0]
            self._counts["skipped"] += skipped
            self._counts["private_skipped"] += skipped if self._counts["private_batches"] > private else 0
            self._next = (epoch, step + 1)
            yield batch
        if self._workers is not None:
            self._workers.end_epoch(epoch)
        if self._client is not None:
            try:
                self._client.release(self._position(epoch + 1, 0))
            except messages.ConnectionLost as lost:
                self._go_on_alone(epoch + 1, 0, lost)

    def _next_batch(self, epoch: int, step: int, start: int, stop: int) -> Batch:
        if self._client is None and self._address is not None:
            self._try_reattach(epoch, step)
        # Released samples may be overwritten: an epoch that is read again is prepared here.
        ring = self._client
        if ring is not None and (ring.kept or ring.position <= epoch * self.reading.n + start):
            try:
                is_kept = ring.kept and epoch > 0
                batch = (self._read_kept if is_kept else self._read_batch)(epoch, step, start, stop)
            except messages.ConnectionLost as lost:
                self._go_on_alone(epoch, step, lost)
            else:
                if batch is not None:
                    self._counts["shared_batches"] += 1
                    return batch
        self._counts["private_batches"] += 1
        if self._workers is not None and self._workers.count:
            began = time.perf_counter()
            read = self._workers.read_batch(
                self.reading, None if self._is_endless else self.reading.epochs.stop, epoch, step
            )
            self._waited_s += time.perf_counter() - began
            if read is not None:
                return self._make_batch(*read, epoch, step)
        return self._prepare_batch(epoch, step, start, stop)

    def _read_batch(self, epoch: int, step: int, start: int, stop: int) -> Batch | None:
        """The batch as views of the ring; None if a sample was not prepared there and has to be tried here."""
        ring, base = self._client, epoch * self.reading.n
        assert ring is not None
        self._wait(ring, base + start, base + stop)
        if self._is_verified(ring) and not self._is_admitted(ring, epoch, start, stop):
            return None
        ok = ring.read_status(base + start, base + stop)
        if UNREACHED in ok:
            return None
        if ring.stages < len(self.pipeline.stages):
            own = self.reading.own(start, stop)
            made = complete_rows(ring, self._get_preparer(), ok, epoch, (start, stop), own)
            return None if made is None else self._make_batch(*made, epoch, step)
        good = find_good(ok)
        if good is not None and self.pipeline.on_error == "raise":
            # Prepare it here again, to raise the original error; a transient fault may not occur again.
            return None
        first, last = self.reading.own(start, stop)
        tensors = ring.read_batch(base + first, base + last, copy=self._copy)
        if good is not None:
            mine = np.flatnonzero(good[first - start : last - start])
            tensors = {name: tensor[mine] for name, tensor in tensors.items()}
        return self._make_batch(tensors, good, epoch, step)

    def _read_kept(self, epoch: int, step: int, start: int, stop: int) -> Batch | None:
        """The batch of an epoch after the first, of samples that the ring has kept; None if they are not used."""
        from pipelines.loader.kept_rows import KeptRows

        ring, n = self._client, self.reading.n
        assert ring is not None
        is_held = isinstance(self._preparer, KeptRows)  # perhaps of a feeder that has ended since
        self._wait(ring, epoch * n + start, 0 if is_held else n)
        if not is_held:
            if self._is_verified(ring) and not self._is_admitted(ring, 0, 0, min(n, stop - start)):
                return None
            before = self._preparer
            self._preparer = KeptRows(self.pipeline, ring)
            self._preparer.cpu_s = 0.0 if before is None else before.cpu_s
        return self._prepare_batch(epoch, step, start, stop)

    def verify_start(self) -> bool:
        """Compare the first samples of the stream now, instead of at the first batch.

        Returns:
            Whether batches come from the feeder.
        """
        (epoch, step), ring = self._next, self._client
        if ring is None or epoch >= self.reading.epochs.stop or not self._is_verified(ring):
            return self.shared
        start, stop = self.reading.places(step)
        base = epoch * self.reading.n
        try:
            self._wait(ring, base + start, base + stop)
            self._is_admitted(ring, epoch, start, stop)
        except messages.ConnectionLost as lost:
            self._go_on_alone(epoch, step, lost)
        return self.shared

    def _wait(self, ring: StreamClient, released: int, want: int) -> None:
        began = time.perf_counter()
        ring.wait(released=released, want=want)
        self._waited_s += time.perf_counter() - began

    def _is_verified(self, ring: StreamClient) -> bool:
        """Whether samples of the stream are compared."""
        if self._make_verification is not None:
            self._verification, self._make_verification = self._make_verification(ring.stream), None
        return self._verification is not None

    def _is_admitted(self, ring: StreamClient, epoch: int, start: int, stop: int) -> bool:
        """Compare samples of a batch, if any are due; leave the stream for good if one differs at its start."""
        assert self._verification is not None
        where = functools.partial(ring.read_served, self.pipeline, epoch), epoch, start, stop
        if self._verification.has_begun:
            self._verification.check_batch(*where)
        elif not self._verification.admit_first(*where):
            self.close()
            self._address = None
            return False
        return True

    def _prepare_batch(self, epoch: int, step: int, start: int, stop: int) -> Batch:
        preparer = self._get_preparer()
        if self._copied is not None and (rows := self._copied.read(preparer, epoch, start, stop)) is not None:
            return self._make_batch(rows, None, epoch, step)
        own = self.reading.own(start, stop)
        return self._make_batch(*prepare_rows(preparer, epoch, (start, stop), own, self._weights), epoch, step)

    def _make_batch(self, tensors: dict[str, torch.Tensor], good: Good, epoch: int, step: int) -> Batch:
        """The batch of this rank's samples in `good` (None: all), without those of weight 0."""
        start, stop = self.reading.places(step)
        size = stop - start if good is None else int(np.count_nonzero(good))
        self._skipped = stop - start - size
        if self._skipped:
            own = self._get_preparer().indices(epoch, *self.reading.own(start, stop)).tolist()
            self._skipped_indices = sorted(set(own) - set(tensors[INDEX].tolist()))
        weight = None
        if self._weights is not None:
            weight = weigh(self._weights, tensors[INDEX].numpy())
            size = int(np.count_nonzero(weight.numpy()))
            if self.reading.world > 1:
                index = self._order(epoch, start, stop)
                size = int(np.count_nonzero(self._weights(index if good is None else index[good])))
            if len(kept := np.flatnonzero(weight.numpy())) < len(weight):
                tensors = {name: tensor[kept] for name, tensor in tensors.items()}
                weight = weight[kept]
        structure = self.pipeline.structure
        fields: dict[str, Any] = tensors if structure is None else assemble(structure, tensors)
        if weight is not None:
            fields[WEIGHT] = weight
        batch = Batch(fields, epoch=epoch, step=step, global_size=size)
        batch._staging = self._staging
        return batch if self._collate is None else self._collate(batch)

    @functools.cached_property
    def _order(self) -> Callable[[int, int, int], Any]:
        return self.pipeline.order()

    def _get_preparer(self) -> Preparer:
        if self._preparer is None:
            self._preparer = Preparer(self.pipeline, warn_skipped if self.pipeline.on_error == "skip" else None)
        return self._preparer

    def _go_on_alone(self, epoch: int, step: int, lost: messages.ConnectionLost) -> None:
        """Leave a stream that was lost, with a warning where something is left to read."""
        self.close()
        if epoch < self.reading.epochs.stop:
            warnings.warn(
                f"{self._name or 'a consumer'} goes on alone from epoch {epoch}, step {step}, with the same "
                f"batches, and looks for a feeder from time to time: {lost}",
                stacklevel=4,
            )

    def _position(self, epoch: int, step: int) -> int:
        return epoch * self.reading.n + min(self.reading.n, step * self.reading.batch_size)

    def _try_reattach(self, epoch: int, step: int) -> None:
        """Try to attach again, at each epoch's start and every 32 steps.

        All ranks of a member try at the same steps: they may wait for the feeder there, but not for each other.
        """
        if step > self.reading.first_step(epoch) and step % _RETRY_STEPS:
            return
        try:
            self._attach(epoch, self._position(epoch, step))
        except PipelineError as error:
            # The constructor raises this error; a loader that has begun continues alone.
            warnings.warn(f"working alone: {error}", stacklevel=4)
            self._address = None

    def _attach(self, first_epoch: int | None, position: int) -> None:
        """Attach to the stream at a position; the loader continues alone if that is not possible now."""
        from pipelines.loader.stream_client import StreamClient, StreamRefused

        assert self._address is not None
        reading = self.reading
        epochs = len(reading.epochs) if first_epoch is None else reading.epochs.stop - first_epoch
        place = 0 if first_epoch is None else position - first_epoch * reading.n
        try:
            self._client = StreamClient(
                self._address, self.pipeline, self._on_wait, name=self._name, rank=reading.rank,
                world=reading.world, local_world=self._local_world, batch_size=reading.batch_size,
                first_epoch=first_epoch, place=place, epochs=epochs,
            )  # fmt: skip
            self._joined_epoch = self._client.first_epoch
        except messages.ConnectionLost as lost:
            self._attach_error = str(lost)
        except StreamRefused as refused:
            self._joined_epoch = refused.first_epoch or 0
            if refused.unsure:
                warnings.warn(f"working alone: {refused}", stacklevel=4)
                self._address = None
            elif not refused.retry:
                raise PipelineError(str(refused)) from None
            else:
                self._attach_error = f"{refused}; it looks for a place from time to time"
