"""Takes batches of any epoch from a ring that holds all samples, each once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.description import PipelineDescription
from pipelines.loader.stream_client import StreamClient
from pipelines.prepare.batches import Begun
from pipelines.prepare.preparer import Preparer, warn_skipped
from pipelines.samples.fields import GOOD, INDEX, OK, UNREACHED, Columns
from pipelines.samples.poison_records import has_poison

Indices = npt.NDArray[np.int64]


class KeptRows(Preparer):
    """Copies samples out of a ring in place of preparing them; prepares those that the feeder could not prepare.

    Args:
        ring: holds all samples of the pipeline, after its first `ring.stages` stages.
    """

    def __init__(self, pipeline: PipelineDescription, ring: StreamClient) -> None:
        super().__init__(pipeline, warn_skipped if pipeline.on_error == "skip" else None)
        self.copies_rows = True
        self._ring, self._columns, n = ring, ring.columns, len(pipeline)
        if has_poison(ok := self._columns[OK][:n].tobytes()):
            pipeline.poison_records.learn(ok, self._columns[INDEX][:n])
        self._slots: Indices = np.empty(n, np.int64)
        self._slots[self._columns[INDEX][:n]] = np.arange(n)

    def prepare(self, columns: Columns, slot: int, epoch: int, places: Any, indices: Indices) -> None:
        if self.copy(columns, slot, indices):
            return
        samples: Iterator[Begun] = zip(places, indices.tolist(), itertools.repeat(None))
        if self._ring.stages < len(self.pipeline.stages):
            slots = self._slots[indices].tolist()
            samples = ((place, *self._ring.read_shared_part(at)) for place, at in zip(places, slots, strict=True))
        self._fill(columns, slot, epoch, samples, self._ring.stages)

    def copy(self, columns: Columns, slot: int, indices: Indices) -> bool:
        if self._ring.stages < len(self.pipeline.stages):
            return False
        slots = self._slots[indices]
        ok = self._columns[OK][slots]
        if UNREACHED in ok or (self.pipeline.on_error == "raise" and not (ok & GOOD).all()):
            return False
        for name, column in columns.items():
            np.take(self._columns[name], slots, axis=0, out=column[slot : slot + len(slots)], mode="clip")
        return True
