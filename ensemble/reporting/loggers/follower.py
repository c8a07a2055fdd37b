"""Follows the log of a run and writes it to a logger, from where the logger's file says that it has come to."""

from __future__ import annotations

import itertools

from ensemble.events import Event
from ensemble.reporting.loggers.base import Kept, Logger, LostRecordsError
from ensemble.reporting.loggers.points import EpochEnded, Point, PointReader, describe_end
from ensemble.reporting.run_projection import RunProjection
from ensemble.store import RunDir, RunStatus, apply_event, read_events
from ensemble.store.follower import LogFollower


class Follower:
    """Writes one logger. After an error of its library another follower goes on, from the file.

    Args:
        logger: not open yet.
        kept: the logger's file.
    """

    def __init__(self, run_dir: RunDir, logger: Logger, kept: Kept) -> None:
        self._run_dir, self._logger, self._kept = run_dir, logger, kept
        self._log, self._reader = LogFollower(run_dir), logger.make_reader()
        self._events = 0  # read so far
        self._is_open = False

    def catch_up(self) -> None:
        """Write what is new in the log, and save how far it has come.

        Raises:
            Exception: whatever the library raises.
        """
        points: list[Point] = []
        for events, _ in self._log.read():
            for event in events:
                new = self._reader.read(event)
                self._events += 1
                if self._events > self._kept.events:
                    points += new
        self._open()
        if points or self._logger.is_due():
            self._kept.save(self._events, self._logger.write(points))

    def end(self, last: Event | None) -> None:
        """Write what is new, and how the run and its members stand at the end.

        Args:
            last: the event that will be logged next and last; None if it is in the log already.

        Raises:
            Exception: whatever the library raises.
        """
        self.catch_up()
        status, state = RunStatus.load(self._run_dir), self._reader.state
        if last is not None:
            status.used.apply(last)
            apply_event(state, last)
        end = describe_end(RunProjection(state, status.used.read()))
        self._kept.save(self._events, self._logger.end(end, state))

    def lose(self) -> None:
        """Write what is new, and that nobody drives the run any more, of a logger that says so."""
        self.catch_up()
        if (ids := self._logger.lose()) is not None:
            self._kept.save(self._events, ids)

    def close(self) -> None:
        """Close the logger."""
        if self._is_open:
            self._logger.close()

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


def describe_missing(run_dir: RunDir, kept: Kept) -> str:
    """What of a log a logger has not written, in words, beside how the run ended."""
    reader = PointReader()
    points = [reader.read(event) for event in read_events(run_dir.events)]
    missing = itertools.chain.from_iterable(points[kept.events :])
    count = sum(isinstance(point, EpochEnded) for point in missing)
    total = sum(isinstance(point, EpochEnded) for point in itertools.chain.from_iterable(points))
    return f"{count} of {total} epochs and the final figures are missing"
