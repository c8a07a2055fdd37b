"""Batches of rows of arrays that no stage changes: the rows of several batches are copied at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.description import PipelineDescription
from pipelines.loader.batch import empty_batch
from pipelines.prepare.preparer import Preparer
from pipelines.samples.fields import INDEX, Columns

if TYPE_CHECKING:
    import torch

_BYTES = 2**18  # that are copied at once, at least one batch
_ALIGNMENT = 64


class CopiedRows:
    """Reads batches of an epoch of n samples in their order; copies one at first, then twice as many each time."""

    def __init__(self, pipeline: PipelineDescription, n: int) -> None:
        self._pipeline, self._n = pipeline, n
        self._epoch, self._places, self._batches = -1, range(0), 0
        self._tensors: dict[str, torch.Tensor] = {}

    def read(self, preparer: Preparer, epoch: int, start: int, stop: int) -> dict[str, torch.Tensor] | None:
        """The batch at these places of an epoch, in memory of its own; None where it has to be prepared."""
        if not preparer.copies_rows:
            return None
        if epoch != self._epoch or start not in self._places:
            sizes = [(stop - start) * row.nbytes for row in empty_batch(self._pipeline.fields, 1).values()]
            most = max(1, _BYTES // sum(sizes))
            # A batch begins where torch aligns memory: what is computed with it must not depend on its place.
            self._batches = 1 if any(size % _ALIGNMENT for size in sizes) else min(max(1, 2 * self._batches), most)
            places = range(start, min(self._n, start + self._batches * (stop - start)))
            tensors = empty_batch(self._pipeline.fields, len(places))
            columns: Columns = {name: tensor.numpy() for name, tensor in tensors.items()}
            if not preparer.copy(columns, 0, preparer.indices(epoch, places.start, places.stop)):
                return None
            self._epoch, self._places, self._tensors = epoch, places, tensors
        after = self._places.stop - stop
        self._places = range(stop, self._places.stop)  # none is given twice: its reader may write into it
        rows = slice(len(self._tensors[INDEX]) - after - (stop - start), len(self._tensors[INDEX]) - after)
        return {name: tensor[rows] for name, tensor in self._tensors.items()}
