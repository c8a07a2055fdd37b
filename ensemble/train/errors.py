"""How the training of a member ends before its time."""

from __future__ import annotations

from ensemble.train.job import Outcome


class TrainingError(RuntimeError):
    """Training cannot go on as declared; the message is one line made for the user. Trying again is of no use."""


class LabelError(TrainingError):
    """A sample's label is no class of the model."""


class Diverged(TrainingError):
    """The loss is NaN or infinite."""


class Ended(BaseException):
    """Leaves a training loop because it was asked to end.

    It passes through the user's own loop, hence no Exception: an `except Exception` there must not hold it up.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome
