"""A loader's own preparation workers: started with the first batch, ended with the loader."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

import numpy as np

from pipelines.checks import check_integer
from pipelines.description import PipelineDescription
from pipelines.errors import PipelineError
from pipelines.loader.batch import Good, ReadRange, find_good
from pipelines.loader.private_feeder import PrivateFeeder
from pipelines.order.rank_rows import RankRows
from pipelines.samples.fields import GOOD, UNREACHED
from pipelines.workers.processes import CannotStart

if TYPE_CHECKING:
    import torch


class LoaderWorkers:
    """The workers of one loader.

    Args:
        count: how many workers; 0 for none.
        prefetch: see `PrivateFeeder`.
        copy: whether batches are copies.

    Raises:
        PipelineError: an option is invalid, or makes no sense without workers.

    Attributes:
        count: how many there are; 0 as well where none can be started.
    """

    def __init__(self, pipeline: PipelineDescription, count: int, prefetch: int | None, *, copy: bool) -> None:
        self.count = check_integer("workers", count, 0)
        if self.count == 0 and prefetch is not None:
            raise PipelineError(
                "prefetch= needs workers=1 or more: without workers each batch is prepared by the process that "
                "asks for it, when it asks"
            )
        self._prefetch = None if prefetch is None else check_integer("prefetch", prefetch, 1)
        self._pipeline, self._copy = pipeline, copy
        self._feeder: PrivateFeeder | None = None
        self._ended_cpu_s = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU-seconds that they have used."""
        return self._ended_cpu_s + (self._feeder.cpu_s if self._feeder is not None else 0.0)

    @property
    def pids(self) -> list[int]:
        """Process ids of those that run."""
        return self._feeder.pids if self._feeder is not None else []

    def read_batch(
        self, reading: ReadRange, stop_epoch: int | None, epoch: int, step: int
    ) -> tuple[dict[str, torch.Tensor], Good] | None:
        """The rows of this rank of a batch, and which samples of the global batch are prepared.

        Args:
            stop_epoch: the epoch before which it ends; None: there is no last one.

        Returns:
            None if the loader has to prepare the batch itself.

        Raises:
            PipelineError: the pipeline cannot be given to workers, or they end before they have prepared anything.
        """
        feeder = self._get_feeder(reading, stop_epoch)
        if feeder is None:
            return None
        try:
            ok, tensors = feeder.read(epoch, step, copy=self._copy)
        except (CannotStart, MemoryError) as error:  # one that has died cannot be replaced
            self._give_up(error)
            return None
        if UNREACHED in ok:
            return None
        good = ok.count(GOOD)
        start, stop = reading.places(step)
        if self._pipeline.on_error == "raise":
            # Prepare it in the loader again, to raise the original error; a transient fault may not occur again.
            return None if good < len(ok) else (tensors, None)
        first, last = (place - start for place in reading.own(start, stop))
        if good < len(ok) or last - first < len(ok):
            kept = np.flatnonzero(np.frombuffer(ok[first:last], np.uint8) == GOOD) + first
            tensors = {name: tensor[kept] for name, tensor in tensors.items()}
        return tensors, find_good(ok)

    def _get_feeder(self, reading: ReadRange, stop_epoch: int | None) -> PrivateFeeder | None:
        """The workers, started if they do not run; None where there can be none."""
        if self._feeder is not None and self._feeder.is_inherited:
            self._feeder = None  # this process is a copy of the one that has them
        if self._feeder is None and self.count:
            # To count its samples, a batch of which some may be left out is prepared as a whole.
            rank, world = (0, 1) if self._pipeline.on_error == "skip" else (reading.rank, reading.world)
            rows = RankRows(reading.n, reading.batch_size, rank, world, reading.drop_last)
            if rows.per_epoch == 0:
                return None
            try:
                self._feeder = PrivateFeeder(self._pipeline, rows, self.count, self._prefetch, stop_epoch)
            except (OSError, MemoryError) as error:
                self._give_up(error)
        return self._feeder

    def _give_up(self, error: Exception) -> None:
        """Let the loader prepare its batches itself from now on."""
        self.close()
        self.count = 0
        warnings.warn(f"this process prepares its batches itself, without workers: {error}", stacklevel=7)

    def keep_batch(self) -> None:
        """Let the batch that was read last stay valid."""
        if self._feeder is not None and not sys.is_finalizing():  # numpy and our modules may be gone by then
            self._feeder.keep_batch()

    def end_epoch(self, epoch: int) -> None:
        """Release all of an epoch; the next one is prepared meanwhile."""
        if self._feeder is not None:
            self._feeder.end_epoch(epoch)

    def close(self) -> None:
        """End them; the batch that was read last stays valid."""
        if self._feeder is not None:
            feeder, self._feeder = self._feeder, None
            feeder.close()
            self._ended_cpu_s += feeder.cpu_s
