"""What goes wrong in a pipeline: `PipelineError`, and `SampleError` where one sample is to blame."""

from __future__ import annotations

from typing import Any


class PipelineError(Exception):
    """A pipeline that cannot be made or used as asked; the message is one line made for the user."""


class ForeignRandomness(PipelineError):
    """A source or a stage draws random numbers that are no function of pipeline, epoch and index."""


class SampleError(PipelineError):
    """One sample that cannot be read or prepared.

    Attributes:
        index: of the sample in its source.
        where: the file and the row or member that holds it.
        reason: what is wrong with it.
    """

    def __init__(self, index: int, where: str, reason: str) -> None:
        super().__init__(f"sample {index} ({where}): {reason}")
        self.index = index
        self.where = where
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own pickling would call the class with the finished message as its only argument.
        return type(self), (self.index, self.where, self.reason)
