"""Gradient accumulation: splits a rank's rows of a global batch into micro-batches that are trained in one step.

The losses of each micro-batch are divided by the size of the *global batch*, so their gradients add up to that of
the whole batch, while memory is needed for the activations of one micro-batch only. The gradients are exchanged
once, during the backward pass of the last micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ensemble.train.job import TrainingError
from pipelines import Batch, PipelineError
from pipelines.loader.ragged import take_rows


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch's rows, in order, into parts that differ by one row at most; into fewer where rows are fewer.

    A single part is the batch itself. The parts share its memory.
    """
    rows = len(batch["index"])
    count = min(parts, rows)
    if count <= 1:
        return [batch]
    about = {"epoch": batch.epoch, "step": batch.step, "global_size": batch.global_size}
    bounds = itertools.pairwise(rows * i // count for i in range(count + 1))
    try:
        return [
            Batch({name: take_rows(value, slice(*part), rows, name) for name, value in batch.items()}, **about)
            for part in bounds
        ]
    except PipelineError as error:
        raise TrainingError(
            f"accumulate= divides a batch by its samples, but {error}: let collate= keep them"
        ) from None


class MicroBatches:
    """The micro-batches of one training batch of a rank; checks that the training loop uses each exactly once."""

    def __init__(self, batch: Batch, accumulate: int) -> None:
        self.batch, self.is_complete = batch, False
        self._accumulate = accumulate
        self._has_begun, self._is_last = False, True
        # Without accumulation a loop need not call `parts`.
        self._part = batch if accumulate == 1 or not batch["index"].shape[0] else None

    def parts(self) -> Iterator[Batch]:
        """Yield the micro-batches; the loop calls `backward` once for each before it continues."""
        if self._has_begun or self.is_complete:
            raise TrainingError("member.parts(batch) is called once for each batch of member.batches()")
        self._has_begun = True
        parts = split_batch(self.batch, self._accumulate)
        for number, part in enumerate(parts, start=1):
            self._part, self._is_last = part, number == len(parts)
            yield part
            if self._part is not None:
                raise TrainingError("member.backward() is called once for each part of member.parts(batch)")

    def pop(self) -> tuple[Batch, bool]:
        """Return the micro-batch in training, and whether it is the last; called once for each."""
        part, self._part = self._part, None
        if part is None:
            raise TrainingError(
                "member.backward() is called once for each batch of member.batches(): add up losses"
                if self._accumulate == 1
                else f"with accumulate={self._accumulate} member.backward() is called once for each part of "
                "member.parts(batch)"
            )
        self.is_complete = self._is_last
        return part, self._is_last
