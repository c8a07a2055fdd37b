"""What every logger can do, and the file that holds what it has written.

loggers/NAME.json   {"v": 1, "events": how many of the log it has written, "log": digest of the log's first
                     line, "options": ..., "ids": of the library's runs or files}
"""

from __future__ import annotations

import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from ensemble.events import Event
from ensemble.reporting.loggers.points import Point, RunEnd
from ensemble.store import RunDir, RunState
from ensemble.store.files import make_directory, write_json
from ensemble.store.log_lines import identify_log

VERSION = 1
IMPORT_S = 60.0  # how long an import of another thread is waited for
_importing = threading.Lock()


class RunObserver(Protocol):
    """Follows a run: reads its files, and changes nothing of it. One thread calls it."""

    @property
    def follow_s(self) -> float:
        """Seconds between two calls of `catch_up`."""

    @property
    def may_wait(self) -> bool:
        """Whether it waits for others rather than works: then it needs no rest between two calls."""

    @property
    def missing(self) -> str:
        """What is missing when `end` has failed, in words."""

    def catch_up(self) -> None:
        """Write what is new. After an error it is called again, and goes on from what was written."""

    def end(self, last: Event | None) -> None:
        """Write what is new, and the end of the run.

        Args:
            last: the event that will be logged next and last; None if it is in the log already.
        """

    def lose(self) -> None:
        """Do what is to be done when the run's controller is gone."""


class LostRecordsError(RuntimeError):
    """What a logger had written is gone: it is written again from the log's first event on."""


class Logger(ABC):
    """Writes a run to one library, which is imported by `open`.

    Args:
        run_dir: of the run.
        options: the fields of the logger's options (`ensemble.spec.loggers`).
    """

    #: What is missing where it could not write its end; None: how many epochs are.
    missing: ClassVar[str | None] = None
    #: Whether `lose` is to be called.
    tells_loss: ClassVar[bool] = False

    def __init__(self, run_dir: RunDir, options: Mapping[str, Any]) -> None:
        self.run_dir, self.options = run_dir, dict(options)

    @classmethod
    def identify(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with which it goes on from its file; with others it writes the log from its first event."""
        return dict(options)

    @abstractmethod
    def open(self, state: RunState, ids: dict[str, Any]) -> None:
        """Open the library.

        Args:
            state: of the run, which has started.
            ids: as `write` or `end` returned them last; empty at the first start.

        Raises:
            LostRecordsError: what `ids` names is gone.
        """

    @abstractmethod
    def write(self, points: Sequence[Point]) -> dict[str, Any]:
        """Write points in their order, to the operating system or the server.

        Args:
            points: with those that were written before, those of the whole log. If the process was killed before
                its file was written, some have been written already, and must not be there twice.

        Returns:
            The ids with which a later `open` goes on from here.
        """

    @abstractmethod
    def end(self, end: RunEnd, state: RunState) -> dict[str, Any]:
        """Write how the run and its members stand, after all points; returns the ids, as `write` does.

        The run may be resumed. Then `open` is called again, and later `end`, whose figures replace these.
        """

    def lose(self, state: RunState) -> dict[str, Any]:
        """Write that the run's controller is gone; returns the ids, as `write` does."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the library; what was not written is left."""
        return


class Kept:
    """The file of a logger; it is replaced after what it counts has been written.

    Attributes:
        events: of the log that were written.
        ids: of the library's runs or files.
    """

    def __init__(self, run_dir: RunDir, name: str, options: Mapping[str, Any]) -> None:
        self._log, self._path = run_dir.events, run_dir.loggers / f"{name}.json"
        self._options = dict(options)
        self.events, self.ids = 0, dict[str, Any]()
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if (kept["v"], kept["log"], kept["options"]) == (VERSION, identify_log(self._log), self._options):
                self.events, self.ids = int(kept["events"]), dict(kept["ids"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # there is none, or it is of another log: from the first event on

    def save(self, events: int, ids: Mapping[str, Any]) -> None:
        """Replace the file.

        Raises:
            WriteError: it could not be written.
        """
        make_directory(self._path.parent)
        head = {"v": VERSION, "log": identify_log(self._log), "options": self._options, "events": events}
        write_json(self._path, {**head, "ids": dict(ids)})
        self.events, self.ids = events, dict(ids)

    def reset(self) -> None:
        """Start from the first event."""
        self.events, self.ids = 0, {}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Let one thread at a time import a library: two that import the same one may get half of a module."""
    is_held = _importing.acquire(timeout=IMPORT_S)  # an import that hangs does not hold the others back
    try:
        yield
    finally:
        if is_held:
            _importing.release()


def as_text(value: Any) -> str:
    """A hyperparameter as text: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
