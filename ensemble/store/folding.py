"""Folds the events of a log into the state of its run.

state = read_state(run_dir.events)
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator

from ensemble.events import Event
from ensemble.store.errors import DamagedError
from ensemble.store.event_handlers import apply_event
from ensemble.store.event_log import read_batches
from ensemble.store.state import RunState

#: What `apply_event` may raise for an event that does not fit to those before it.
EVENT_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def fold(log: Iterable[Event]) -> RunState:
    """Returns the state after these events, the first of which is the log's first.

    Raises:
        DamagedError: one of them does not fit to those before it.
    """
    state = RunState()
    with without_garbage_collection():
        _apply_all(state, log)
    return state


def read_state(path: str | os.PathLike[str]) -> RunState:
    """Returns the state after all complete events of a log.

    Raises:
        StoreError: there is no log, or it is unreadable.
    """
    return FoldedLog(path).update()


class FoldedLog:
    """The state of a run, brought up to date while its log grows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._offset, self._state = path, 0, RunState()

    def update(self) -> RunState:
        """Applies what is new in the log; returns the state, the same object each time.

        Raises:
            StoreError: there is no log, or it is unreadable.
        """
        try:
            with without_garbage_collection():
                for events, offset in read_batches(self._path, self._offset):
                    _apply_all(self._state, events)
                    self._offset = offset
        except BaseException:  # part of a batch may have been applied
            self._offset, self._state = 0, RunState()
            raise
        return self._state


def _apply_all(state: RunState, log: Iterable[Event]) -> None:
    for event in log:
        try:
            apply_event(state, event)
        except EVENT_ERRORS as error:
            raise make_event_error(event, error) from error


def make_event_error(event: Event, error: Exception) -> DamagedError:
    """The error for an event of a log that raised one of `EVENT_ERRORS`."""
    return DamagedError(
        f"the event {event.type!r} of {event.t:.6f} does not fit to those before it in events.jsonl "
        f"({type(error).__name__}: {error}): lines are missing before it"
    )


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector within the context: it would scan a million new objects in vain."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
