"""Batches of rows of arrays that no stage changes: the rows of several batches are copied at once."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pipelines.description import PipelineDescription
from pipelines.loader.batch import empty_batch
from pipelines.prepare.preparer import Preparer
from pipelines.samples.fields import Columns

if TYPE_CHECKING:
    import torch

_BYTES = 2**18  # that are copied at once, at least one batch


class CopiedRows:
    """Reads batches of an epoch of n samples in their order; copies one at first, then twice as many each time."""

    def __init__(self, pipeline: PipelineDescription, n: int) -> None:
        self._pipeline, self._n = pipeline, n
        self._batches, self._next = 0, (-1, 0)  # the epoch, and the place in it, of the first that is copied ahead
        self._ahead = deque[dict[str, "torch.Tensor"]]()

    def read(self, preparer: Preparer, epoch: int, start: int, stop: int) -> dict[str, torch.Tensor] | None:
        """The batch at these places of an epoch, in memory of its own; None where it has to be prepared."""
        if not preparer.copies_rows:
            return None
        if not self._ahead or self._next != (epoch, start):
            size, fields = stop - start, self._pipeline.fields
            sizes = [size * row.nbytes for row in empty_batch(fields, 1).values()]
            # Each begins at a multiple of 64 bytes, as torch aligns memory: no result depends on how it is copied.
            most = 1 if any(nbytes % 64 for nbytes in sizes) else _BYTES // sum(sizes)
            self._batches = max(1, min(2 * self._batches, most))
            end = min(self._n, start + self._batches * size)
            tensors = empty_batch(fields, end - start)
            columns: Columns = {name: tensor.numpy() for name, tensor in tensors.items()}
            if not preparer.copy(columns, 0, preparer.indices(epoch, start, end)):
                return None
            pieces = (tensor.split(size) for tensor in tensors.values())  # type: ignore[no-untyped-call]
            parts = zip(*pieces, strict=True)
            self._ahead = deque(dict(zip(tensors, part, strict=True)) for part in parts)
        self._next = epoch, stop
        return self._ahead.popleft()  # none is given twice: its reader may write into it
