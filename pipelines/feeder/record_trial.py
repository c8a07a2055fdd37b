"""Prepares one record in a process of its own, to see whether that process survives it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from pipelines import memory_pickle
from pipelines.child_processes import child_environment
from pipelines.pipeline import Pipeline
from pipelines.prepare.deadly_records import HUNG, KILLED

START_S = 300.0
_AGAIN_S = 1.0
_END_S = 5.0


class Trial:
    """A process that tries one record.

    Args:
        payload: a memory file (`pipelines.memory_pickle`) of pipelines by number.
        number, index, epoch: which record of which, with the randomness of which epoch.
        timeout_s: how long it may take.

    Attributes:
        stdout: a descriptor to wait on; `says_more` takes what is there.
        verdict: KILLED or HUNG; None where the record did nothing to its process, or where that is not known.
    """

    def __init__(self, payload: int, number: int, index: int, epoch: int, timeout_s: float) -> None:
        self.index = index
        self.verdict: int | None = None
        self._timeout_s = timeout_s
        self._begun = self._killed = False
        self._until = time.monotonic() + START_S
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "pipelines.feeder.record_trial_main",
                *map(str, (payload, number, index, epoch)),
            ],
            pass_fds=[payload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        assert self._process.stdout is not None
        self.stdout = self._process.stdout.fileno()

    def says_more(self) -> bool:
        """Take what it says; False when it has said its last: to be closed."""
        if not os.read(self.stdout, 1):
            return False
        self._begun, self._until = True, time.monotonic() + self._timeout_s
        return True

    def tick(self) -> float:
        """End it if its time is over; in how many seconds to look again."""
        left_s = self._until - time.monotonic()
        if left_s > 0:
            return left_s
        if not self._killed:
            self._killed = True
            self.verdict = HUNG if self._begun else None
            self._process.kill()  # its end is taken as any
        return _AGAIN_S

    def close(self) -> None:
        """Wait for its end, and find the verdict."""
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:  # it lives on without a voice, which no record has it do
            self._killed = True
        self.end()
        if self._begun and not self._killed and self._process.returncode:
            self.verdict = KILLED

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def outcome(pipeline: Pipeline, index: int, epoch: int, timeout_s: float) -> int | None:
    """Try a record of a pipeline, and wait for what becomes of it: `Trial.verdict`."""
    payload = memory_pickle.dump({0: pipeline})
    try:
        trial = Trial(payload, 0, index, epoch, timeout_s)
    finally:
        os.close(payload)
    said = select.poll()
    said.register(trial.stdout, select.POLLIN)
    while True:
        if said.poll(1000 * trial.tick()) and not trial.says_more():
            trial.close()
            return trial.verdict
