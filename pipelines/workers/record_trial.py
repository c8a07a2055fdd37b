"""Tries records at which preparation workers have ended or hung, to find out which of them are poison.

Anybody may kill a worker, so a record is tried only after the second worker has ended at it; a record that hangs
is tried at once. The process of a trial is `pipelines.workers.record_trial_main`.
"""

from __future__ import annotations

import os
import select
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

from pipelines.description import PipelineDescription
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import START_S, child_environment
from pipelines.samples.poison_records import HUNG, KILLED

_RETRY_S = 1.0
_EXIT_S = 5.0
_MIN_FAILURES = 2

RecordKey = tuple[int, int, int]  # (number of its pipeline, index, epoch)


class RecordTrial:
    """A process that tries one record.

    Args:
        payload: a memory file (`pipelines.ipc.memory_pickle`) of pipelines by number.
        number: the pipeline's number.
        index: the record's index.
        epoch: the epoch whose randomness is used.
        timeout_s: the longest time for the record.

    Attributes:
        stdout: a descriptor to wait on before `read_output`.
        outcome: KILLED or HUNG; None if the record is harmless, or that is unknown.
    """

    def __init__(self, payload: int, number: int, index: int, epoch: int, timeout_s: float) -> None:
        self.outcome: int | None = None
        self._timeout_s = timeout_s
        self._has_begun = self._was_killed = False
        self._until = time.monotonic() + START_S
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.workers.record_trial_main"]
            + [str(argument) for argument in (payload, number, index, epoch)],
            pass_fds=[payload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        assert self._process.stdout is not None
        self.stdout = self._process.stdout.fileno()

    def read_output(self) -> bool:
        """Read its output; returns False at the end, after which it has to be closed."""
        if not os.read(self.stdout, 1):
            return False
        self._has_begun, self._until = True, time.monotonic() + self._timeout_s
        return True

    def tick(self) -> float:
        """Kill the process if its time is over; returns the seconds until the next check."""
        left_s = self._until - time.monotonic()
        if left_s > 0:
            return left_s
        if not self._was_killed:
            self._was_killed = True
            self.outcome = HUNG if self._has_begun else None
            self._process.kill()
        return _RETRY_S

    def close(self) -> None:
        """Wait for the process to end, and set the outcome."""
        try:
            self._process.wait(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:  # it closed its output and runs on
            self._was_killed = True
        self.terminate()
        if self._has_begun and not self._was_killed and self._process.returncode:
            self.outcome = KILLED

    def terminate(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Suspects:
    """The suspected records of a feeder.

    Args:
        payload: returns a memory file of the pipelines by number.
        selector: where trials are registered, each with its handler.
        on_outcome: called with a record and its trial's `outcome`.
        timeout_s: the longest time for one record.
    """

    def __init__(
        self,
        payload: Callable[[], int],
        selector: selectors.BaseSelector,
        on_outcome: Callable[[RecordKey, int | None], None],
        timeout_s: float,
    ) -> None:
        self._payload, self._selector, self._on_outcome = payload, selector, on_outcome
        self._timeout_s = timeout_s
        self._failures: Counter[RecordKey] = Counter()
        self._trials: dict[RecordKey, RecordTrial] = {}

    def report(self, record: RecordKey, *, hung: bool) -> bool:
        """Report that a worker ended or hung at a record.

        Returns:
            Whether the record is being tried now, so that `on_outcome` will be called.
        """
        self._failures[record] += 1
        if record not in self._trials and (hung or self._failures[record] >= _MIN_FAILURES):
            trial = self._trials[record] = RecordTrial(self._payload(), *record, self._timeout_s)
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
        self._on_outcome(record, trial.outcome)

    def tick(self) -> float | None:
        """End trials that take too long; returns the seconds until the next check, None without trials."""
        return min((trial.tick() for trial in self._trials.values()), default=None)

    def close(self) -> None:
        """End all trials."""
        for trial in self._trials.values():
            trial.terminate()
        self._trials.clear()


def try_record(pipeline: PipelineDescription, index: int, epoch: int, timeout_s: float) -> int | None:
    """Try a record of a pipeline and wait; returns `RecordTrial.outcome`."""
    payload = memory_pickle.dump({0: pipeline})
    try:
        trial = RecordTrial(payload, 0, index, epoch, timeout_s)
    finally:
        os.close(payload)
    output = select.poll()
    output.register(trial.stdout, select.POLLIN)
    while True:
        if output.poll(1000 * trial.tick()) and not trial.read_output():
            trial.close()
            return trial.outcome
