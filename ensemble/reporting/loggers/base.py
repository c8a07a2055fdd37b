"""The interface of a logger, and what loggers share."""

from __future__ import annotations

import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ensemble.events import Epoch, Event
from ensemble.reporting.loggers.points import Point, PointReader, RunEnd, describe_end
from ensemble.reporting.run_projection import RunProjection
from ensemble.store import RunDir, RunState, RunStatus, apply_event, read_events
from ensemble.store.event_log import identify_log
from ensemble.store.files import make_directory, write_json
from ensemble.store.follower import LogFollower

IMPORT_S = 60.0  # how long an import of another thread is waited for
_importing = threading.Lock()


class LostRecordsError(RuntimeError):
    """What a logger had written is gone: it is written again from the log's first event on."""


class Logger(ABC):
    """Writes a run to one library, which is imported by `open`.

    Args:
        run_dir: of the run.
        options: the fields of the logger's options (`ensemble.spec.loggers`), or what the user gave it.
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


VERSION = 1


class RunObserver:
    """Follows a run: reads its files, and changes nothing of it. One thread calls it.

    Attributes:
        follow_s: seconds between two calls of `catch_up`.
        may_wait: whether it waits for others rather than works: then it needs no rest between two calls.
        missing: what is missing when `end` has failed, in words.
    """

    follow_s = 1.0
    may_wait = False
    missing = "the end is missing"

    def catch_up(self) -> None:
        """Write what is new. After an error it is called again, and goes on from what was written."""
        raise NotImplementedError

    def end(self, last: Event | None) -> None:
        """Write what is new, and the end of the run.

        Args:
            last: the event that will be logged next and last; None if it is in the log already.
        """
        raise NotImplementedError

    def lose(self) -> None:
        """Do what is to be done when the run's controller is gone."""


class Follower(RunObserver):
    """Writes one logger. After an error it opens the library again, and goes on from the logger's file.

    Args:
        name: of the logger, and of its file.
        kind: its class.
        options: of the logger.
    """

    def __init__(self, run_dir: RunDir, name: str, kind: type[Logger], options: Mapping[str, Any]) -> None:
        self._run_dir, self._kind, self._options = run_dir, kind, options
        self._path = run_dir.logger_state(name)
        self._written, self._ids = 0, dict[str, Any]()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # without a file: from the first event
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            if all(saved[name] == value for name, value in self._describe_log().items()):
                self._written, self._ids = int(saved["events"]), dict(saved["ids"])
        self._begin()

    def _describe_log(self) -> dict[str, Any]:
        """What the logger's file must have, else it is of another log or of other options."""
        log, options = identify_log(self._run_dir.events), self._kind.identify(self._options)
        return {"v": VERSION, "log": log, "options": options}

    @property
    def missing(self) -> str:  # type: ignore[override]
        """What of the log is not written, in words."""
        if self._kind.missing is not None:
            return self._kind.missing
        events = enumerate(read_events(self._run_dir.events))
        is_missing = [number >= self._written for number, event in events if isinstance(event, Epoch)]
        return f"{sum(is_missing)} of {len(is_missing)} epochs and the final figures are missing"

    def catch_up(self) -> None:
        """Write what is new in the log, and save how far it has come.

        Raises:
            Exception: whatever the library raises.
        """
        self._try(self._catch_up)

    def end(self, last: Event | None) -> None:
        """Write what is new, and how the run and its members stand at the end; then close the logger.

        Raises:
            Exception: whatever the library raises.
        """
        self._try(lambda: self._end(last))
        self._logger.close()

    def lose(self) -> None:
        """Write that nobody drives the run any more, where the logger has a place for that."""
        if self._kind.tells_loss:
            self._catch_up()
            self._save(self._logger.lose(self._reader.state))

    def _begin(self) -> None:
        self._logger = self._kind(self._run_dir, self._options)
        self._log, self._reader = LogFollower(self._run_dir), PointReader()
        self._events = 0  # read so far
        self._is_open = False

    def _save(self, ids: Mapping[str, Any]) -> None:
        make_directory(self._path.parent)
        write_json(self._path, {**self._describe_log(), "events": self._events, "ids": dict(ids)})
        self._written, self._ids = self._events, dict(ids)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            if self._is_open:
                with contextlib.suppress(Exception):
                    self._logger.close()
            if isinstance(error, LostRecordsError):
                self._written, self._ids = 0, {}
            self._begin()
            if not isinstance(error, LostRecordsError):
                raise
            step()  # once more, from the first event on

    def _catch_up(self) -> None:
        points: list[Point] = []
        for events, _ in self._log.read():
            for event in events:
                new = self._reader.read(event)
                self._events += 1
                if self._events > self._written:
                    points += new
        if not self._is_open:
            self._is_open = True
            if self._written > self._events:
                raise LostRecordsError("the log is shorter than the part that was written before")
            self._logger.open(self._reader.state, self._ids)
        if points:
            self._save(self._logger.write(points))

    def _end(self, last: Event | None) -> None:
        self._catch_up()
        status, state = RunStatus.load(self._run_dir), self._reader.state
        if last is not None:
            status.used.apply(last)
            apply_event(state, last)
        end = describe_end(RunProjection(state, status.used.read()))
        self._save(self._logger.end(end, state))
