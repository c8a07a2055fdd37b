"""Errors about a run on disk; each message is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import os


class StoreError(RuntimeError):
    """A run on disk cannot be used."""


class OtherPythonError(StoreError):
    """A declaration holds functions that another minor version of Python compiled."""


class WriteError(StoreError):
    """A file could not be written; the run itself is intact and can be resumed.

    Attributes:
        is_for_room: whether the disk or quota is full: with more room it can be.
    """

    is_for_room = False


class UnlikeRows(StoreError):
    """Predictions of a batch do not have the shape of those before, and not only more or fewer positions."""


class DamagedError(StoreError):
    """A file is not what the log says that was written, or is gone."""


def explain_format(path: str | os.PathLike[str], found: object, known: int, remedy: str = "train it again") -> str:
    """Returns the sentence that refuses a file of another format.

    Args:
        found: the number of the format that the file has.
        known: the number of the one that this version reads.
        remedy: how such a file is made again.
    """
    return (
        f"{os.fspath(path)} was written by another version of ray-ensemble (format {found}, this one reads "
        f"{known}); {remedy}, or use that version"
    )
