"""Errors about a run on disk; each message is one line that says what is wrong, where, and what to do."""

from __future__ import annotations


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


class DamagedError(StoreError):
    """A file is not what the log says that was written, or is gone."""
