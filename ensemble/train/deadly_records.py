"""Records that end or hang a member which prepares its own batches: known, or found by its next attempt.

Alone a member prepares samples in its own process, and a record that ends that ends the member. So it notes which
sample it is at in a file of its directory. The next attempt finds the note, tries that record in a process of its
own (`pipelines.feeder.record_trial`), and where that does not come back either the record counts as one that
cannot be prepared,
for all members: the controller hears of it and tells the others, as it tells what a feeder has found.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.comm import Communicator
from ensemble.spec import Ensemble
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.train.job import Inbox, Job

if TYPE_CHECKING:
    from pipelines import Pipeline

log = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")


def note_file(run_dir: RunDir, member: str, rank: int, attempt: int) -> Path:
    """Where a rank notes which sample it is preparing; an attempt that has not ended yet has a file of its own."""
    return run_dir.member(member) / f"preparing-{rank}-{attempt}"


def interrupted(path: Path) -> dict[str, tuple[int, int]]:
    """split -> (index, epoch) of the samples that were being prepared when the process that noted them ended.

    None where nothing was noted, or that cannot be read: it explains a failure, and is not to be another.
    """
    from pipelines.prepare.deadly_records import parse_note

    try:
        file = path.read_bytes()
    except OSError:
        return {}
    noted = {split: parse_note(file, place) for place, split in enumerate(SPLITS)}
    return {split: at for split, at in noted.items() if at is not None}


class Records:
    """What one rank knows of deadly records, and its notes.

    Args:
        pipelines: the member's own, by split.
        tell: tells the controller an event, from rank 0.
    """

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        pipelines: dict[str, Pipeline],
        tell: Callable[..., None],
    ) -> None:
        self._job, self._comm, self._pipelines, self._tell = job, comm, pipelines, tell
        self._timeout_s = ensemble.prepare_timeout_s
        self.learn(job.bad)

    def learn(self, records: Iterable[Any]) -> None:
        """Take (split, index, code) of records that nobody is to prepare."""
        for split, index, code in records:
            if split in self._pipelines:
                self._pipelines[split].hazards.deadly[index] = code

    def settle(self, inbox: Inbox) -> None:
        """Before anything is prepared: judge what earlier attempts ended at, and note from here on."""
        found, judged = list[list[Any]](), list[Path]()
        for attempt in range(self._job.attempt):  # the last may have ended before it could judge
            if (earlier := self._file(attempt)).exists():
                found += [record for record in self._judged(earlier) if record not in found]
                judged.append(earlier)
        self._note()
        inbox.on_record(lambda split, index, code: self.learn([(split, index, code)]))
        if self._job.attempt > 0:
            from ensemble.train.gather import gather_json

            for ranks in gather_json(self._comm, found):
                self.learn(ranks)
                for split, index, code in ranks:
                    self._say(split, index, code)
        for earlier in judged:
            with contextlib.suppress(OSError):  # it is judged again, then
                earlier.unlink()

    def _file(self, attempt: int) -> Path:
        return note_file(RunDir(self._job.run_dir), self._job.identity.member, self._job.rank, attempt)

    def _note(self) -> None:
        """Note from here on, where the file system allows it."""
        from pipelines.prepare.deadly_records import Note

        path = self._file(self._job.attempt)
        make_directory(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                notes = {split: Note(descriptor, place) for place, split in enumerate(SPLITS)}
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: a record that ends this member cannot be named: %s", path, error)
            notes = {}
        for split, pipeline in self._pipelines.items():
            pipeline.hazards.note = notes.get(split)

    def _judged(self, path: Path) -> list[list[Any]]:
        from pipelines.feeder.record_trial import outcome

        found = []
        for split, (index, epoch) in interrupted(path).items():
            if split not in self._pipelines:
                continue
            pipeline = self._pipelines[split]
            code = pipeline.hazards.deadly.get(index) or outcome(pipeline, index, epoch, self._timeout_s)
            if code is not None:
                found.append([split, index, code])
        return found

    def _say(self, split: str, index: int, code: int) -> None:
        pipeline = self._pipelines[split]
        error = pipeline.hazards.error(index, pipeline.source.where(index))
        self._tell("bad_record", split=split, index=index, where=error.where, reason=error.reason, code=code)
