"""Tries records at which preparation workers have ended or hung, to find out which of them are deadly.

A worker may be killed by anybody, so a record is tried, in a process of its own, after the second worker has ended
at it. A record that hangs is tried at once.
"""

from __future__ import annotations

import selectors
from collections import Counter
from collections.abc import Callable

from pipelines.feeder.record_trial import RecordTrial

_MIN_FAILURES = 2

RecordKey = tuple[int, int, int]  # (number of its pipeline, index, epoch)


class Suspects:
    """The suspected records of a feeder.

    Args:
        payload: a memory file of the pipelines by number.
        selector: where trials are registered, each with its handler.
        on_verdict: called with a record and its trial's `verdict`.
        timeout_s: the longest time for one record.
    """

    def __init__(
        self,
        payload: int,
        selector: selectors.BaseSelector,
        on_verdict: Callable[[RecordKey, int | None], None],
        timeout_s: float,
    ) -> None:
        self._payload, self._selector, self._on_verdict = payload, selector, on_verdict
        self._timeout_s = timeout_s
        self._failures: Counter[RecordKey] = Counter()
        self._trials: dict[RecordKey, RecordTrial] = {}

    def report(self, record: RecordKey, *, hung: bool) -> bool:
        """Report that a worker ended or hung at a record.

        Returns:
            Whether the record is being tried now, so that `on_verdict` will be called.
        """
        self._failures[record] += 1
        if record not in self._trials and (hung or self._failures[record] >= _MIN_FAILURES):
            trial = self._trials[record] = RecordTrial(self._payload, *record, self._timeout_s)
            self._selector.register(trial.stdout, selectors.EVENT_READ, lambda _: self._handle_output(record))
        return record in self._trials

    def _handle_output(self, record: RecordKey) -> None:
        trial = self._trials[record]
        descriptor = trial.stdout
        if trial.read_output():
            return
        self._selector.unregister(descriptor)
        trial.close()
        del self._trials[record], self._failures[record]
        self._on_verdict(record, trial.verdict)

    def tick(self) -> float | None:
        """End trials that take too long; returns the seconds until the next check, None without trials."""
        return min((trial.tick() for trial in self._trials.values()), default=None)

    def close(self) -> None:
        """End all trials."""
        for trial in self._trials.values():
            trial.terminate()
        self._trials.clear()
