"""Follows the log of a run and writes it to a logger, from where the logger's file says that it has come to."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from ensemble.events import Event
from ensemble.reporting.loggers.base import Kept, Logger, LostRecordsError
from ensemble.reporting.loggers.points import EpochEnded, Point, PointReader, describe_end
from ensemble.reporting.run_projection import RunProjection
from ensemble.store import RunDir, RunStatus, apply_event, read_events
from ensemble.store.follower import LogFollower


class Follower:
    """Writes one logger. After an error it opens the library again, and goes on from the logger's file.

    Args:
        name: of the logger: that of its module, with a number behind it where there are several.
        options: of the logger.
    """

    follow_s, may_wait = 1.0, False

    def __init__(self, run_dir: RunDir, name: str, options: Mapping[str, Any]) -> None:
        self._run_dir, self._options = run_dir, options
        self._kind: type[Logger]
        self._kind = importlib.import_module(f"ensemble.reporting.loggers.{name.partition('-')[0]}").LOGGER
        self._kept = Kept(run_dir, name, self._kind.identify(options))
        self._begin()

    @property
    def missing(self) -> str:
        """What of the log is not written, in words."""
        if self._kind.missing is not None:
            return self._kind.missing
        reader = PointReader()
        points = [reader.read(event) for event in read_events(self._run_dir.events)]
        missing = itertools.chain.from_iterable(points[self._kept.events :])
        count = sum(isinstance(point, EpochEnded) for point in missing)
        total = sum(isinstance(point, EpochEnded) for point in itertools.chain.from_iterable(points))
        return f"{count} of {total} epochs and the final figures are missing"

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
            self._kept.save(self._events, self._logger.lose(self._reader.state))

    def _begin(self) -> None:
        self._logger = self._kind(self._run_dir, self._options)
        self._log, self._reader = LogFollower(self._run_dir), PointReader()
        self._events = 0  # read so far
        self._is_open = False

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            if self._is_open:
                with contextlib.suppress(Exception):
                    self._logger.close()
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
                if self._events > self._kept.events:
                    points += new
        self._open()
        if points:
            self._kept.save(self._events, self._logger.write(points))

    def _end(self, last: Event | None) -> None:
        self._catch_up()
        status, state = RunStatus.load(self._run_dir), self._reader.state
        if last is not None:
            status.used.apply(last)
            apply_event(state, last)
        end = describe_end(RunProjection(state, status.used.read()))
        self._kept.save(self._events, self._logger.end(end, state))

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        try:
            if self._kept.events > self._events:
                raise LostRecordsError("the log is shorter than what was written of it")
            self._logger.open(self._reader.state, self._kept.ids)
        except LostRecordsError:
            self._kept.reset()
            raise
