"""Gradient accumulation: a rank's rows of a global batch are trained a part at a time, in one step.

Each part's losses are divided by the size of the *global batch*, so the parts' gradients add up to what the whole
would have given, and memory is needed for the activations of one part only. The gradients are exchanged once,
while the backward pass of the last part goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ensemble.train.job import TrainingError
from pipelines import Batch


def split(batch: Batch, parts: int) -> list[Batch]:
    """The batch's rows in order, in so many parts that differ by one row at most; in fewer where rows are fewer.

    One part is the batch itself. The parts share its memory.
    """
    rows = len(batch["index"])
    count = min(parts, rows)
    if count <= 1:
        return [batch]
    return [
        Batch(
            {name: value[start:stop] for name, value in batch.items()},
            epoch=batch.epoch,
            step=batch.step,
            global_size=batch.global_size,
        )
        for start, stop in itertools.pairwise(rows * i // count for i in range(count + 1))
    ]


class MicroBatches:
    """One training batch of a rank, from when the loop gets it to its step.

    Args:
        batch: the rank's rows, maybe none.
        accumulate: in how many parts they are trained.

    Attributes:
        batch: as given.
        sent: whether the losses of all rows have been taken.
    """

    def __init__(self, batch: Batch, accumulate: int) -> None:
        self.batch, self.sent = batch, False
        self._accumulate = accumulate
        self._begun, self._last = False, True
        # In one part, a loop need not ask for parts.
        self._part = batch if accumulate == 1 or not len(batch["index"]) else None

    def parts(self) -> Iterator[Batch]:
        """The parts, each to be taken before the next is asked for."""
        if self._begun or self.sent:
            raise TrainingError("member.parts(batch) is called once for each batch of member.batches()")
        self._begun = True
        parts = split(self.batch, self._accumulate)
        for number, part in enumerate(parts, start=1):
            self._part, self._last = part, number == len(parts)
            yield part
            if self._part is not None:
                raise TrainingError("member.backward() is called once for each part of member.parts(batch)")

    def take(self) -> tuple[Batch, bool]:
        """The part whose losses are there, and whether it is the last.

        Raises:
            TrainingError: none is due.
        """
        part, self._part = self._part, None
        if part is None:
            raise TrainingError(
                "member.backward() is called once for each batch of member.batches(): add up losses"
                if self._accumulate == 1
                else f"with accumulate={self._accumulate} member.backward() is called once for each part of "
                "member.parts(batch)"
            )
        self.sent = self._last
        return part, self._last
