"""What every logger can do, and the file that holds what it has written.

    loggers/NAME.json   {"v": 1, "events": how many of the log it has written, "log": digest of the log's first
                         line, "options": ..., "ids": of the library's runs or files}

The file is replaced after what it counts has been written. What a process that was killed had written beyond it is
written again by the next one, and each logger sees to it that nothing is there twice.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ensemble.reporting.loggers.points import Point, PointReader, RunEnd
from ensemble.store import RunDir, RunState
from ensemble.store.files import make_directory, write_json
from ensemble.store.log_lines import identify_log

VERSION = 1


class LostRecordsError(RuntimeError):
    """What a logger had written is gone: it is written again from the log's first event on."""


class Logger(ABC):
    """Writes a run to one library, which is imported by `open`.

    Args:
        run_dir: of the run.
        options: the fields of the logger's options (`ensemble.spec.loggers`).
    """

    #: Whether it waits for others rather than works: it may do so at any time.
    may_wait: ClassVar[bool] = False
    #: Between two looks at the log, and the longest time until another attempt after failures, in seconds.
    follow_s: ClassVar[float] = 1.0
    longest_retry_s: ClassVar[float] = 300.0
    #: What is said where it could not write its end; None: how many epochs are missing.
    missing: ClassVar[str | None] = None

    def __init__(self, run_dir: RunDir, options: Mapping[str, Any]) -> None:
        self.run_dir, self.options = run_dir, dict(options)

    @classmethod
    def identify(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with which it goes on from its file; with others it writes the log from its first event."""
        return dict(options)

    def make_reader(self) -> Any:
        """Finds what is to be written in the events: `read(event)`, and the run's `state` after it."""
        return PointReader()

    def is_due(self) -> bool:
        """Whether `write` is to be called although there are no points."""
        return False

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
                its file was written, some have been written already.

        Returns:
            The ids with which a later `open` goes on from here.
        """

    @abstractmethod
    def end(self, end: RunEnd, state: RunState) -> dict[str, Any]:
        """Write how the run and its members stand, after all points; returns the ids, as `write` does.

        The run may be resumed. Then `open` is called again, and later `end`, whose figures replace these.
        """

    def lose(self) -> dict[str, Any] | None:
        """Write that the run's controller is gone; returns the ids, or None: nothing was written."""
        return None

    def close(self) -> None:
        """Close the library; what was not written is left."""
        return


class Kept:
    """The file of a logger.

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


def as_text(value: Any) -> str:
    """A hyperparameter as text: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
