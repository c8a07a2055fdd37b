"""Records at which preparation workers have died or hung: each is tried alone, and found deadly or not.

One death says little: anybody may kill a process. At the second at the same record it is tried in a process of its
own; one that hangs has cost a long time already, and is tried at once.
"""

from __future__ import annotations

import selectors
from collections import Counter
from collections.abc import Callable

from pipelines.feeder.record_trial import Trial

_STRIKES = 2

Record = tuple[int, int, int]  # (number of its pipeline, index, epoch)


class Suspects:
    """The records that are under suspicion in a feeder.

    Args:
        payload: a memory file of the pipelines by number.
        selector: where trials are registered, each with a function that takes what is there.
        verdict: called with a record and what its trial has found (`Trial.verdict`).
        timeout_s: how long a record may take.
    """

    def __init__(
        self,
        payload: int,
        selector: selectors.BaseSelector,
        verdict: Callable[[Record, int | None], None],
        timeout_s: float,
    ) -> None:
        self._payload, self._selector, self._verdict = payload, selector, verdict
        self._timeout_s = timeout_s
        self._strikes: Counter[Record] = Counter()
        self._trials: dict[Record, Trial] = {}

    def accuse(self, record: Record, *, hung: bool) -> bool:
        """A worker died at a record, or hung; whether it is being tried now, so that `verdict` will be called."""
        self._strikes[record] += 1
        if record not in self._trials and (hung or self._strikes[record] >= _STRIKES):
            trial = self._trials[record] = Trial(self._payload, *record, self._timeout_s)
            self._selector.register(trial.stdout, selectors.EVENT_READ, lambda _: self._take(record))
        return record in self._trials

    def _take(self, record: Record) -> None:
        trial = self._trials[record]
        descriptor = trial.stdout
        if trial.says_more():
            return
        self._selector.unregister(descriptor)
        trial.close()
        del self._trials[record], self._strikes[record]
        self._verdict(record, trial.verdict)

    def tick(self) -> float | None:
        """End trials whose time is over; in how many seconds to look again."""
        return min((trial.tick() for trial in self._trials.values()), default=None)

    def close(self) -> None:
        """End all trials."""
        for trial in self._trials.values():
            trial.end()
        self._trials.clear()
