"""Reads batches out of a ring that others fill, and keeps an account of the one that the consumer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipelines.samples.fields import INDEX
from pipelines.samples.poison_records import PoisonRecords, has_poison
from pipelines.shm.ring import RingView

if TYPE_CHECKING:
    import torch


class RingReader:
    """A private view of a ring, and the batch that the consumer currently holds as views of it."""

    def __init__(self, view: RingView, poison_records: PoisonRecords) -> None:
        self.view = view
        self._poison_records = poison_records
        self._lent: tuple[int, int, list[str]] = (0, 0, [])  # slots [first, last) of these fields

    def read_status(self, first: int, last: int) -> bytes:
        """The status of the slots [first, last): 1 for a sample, 0 for one that could not be prepared.

        Poison records are remembered, so that this process does not prepare them.
        """
        ok = self.view.read_status(first, last)
        if not has_poison(ok):
            return ok
        slots = np.arange(first, last) % self.view.layout.capacity
        return self._poison_records.learn(ok, self.view.columns[INDEX][slots])

    def read_batch(self, first: int, last: int, *, copy: bool) -> dict[str, torch.Tensor]:
        """The fields of the slots [first, last): views, valid until released, or copies."""
        tensors, views = self.view.read_batch(first, last, copy=copy)
        self._lent = (first, last, views)
        return tensors

    def release(self) -> None:
        """End the lease of the batch, and undo what was written into it."""
        first, last, names = self._lent
        if names:
            self._lent = (0, 0, [])
            self.view.restore(first, last, names)

    def keep(self) -> bool:
        """Copy the batch's pages, so that it stays valid; returns whether one was held."""
        first, last, names = self._lent
        if names:
            self._lent = (0, 0, [])
            self.view.copy_pages(first, last, names)
        return bool(names)
