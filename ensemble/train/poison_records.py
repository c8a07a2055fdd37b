"""Finds records that kill or hang a member which prepares its own batches.

Without a feeder a member prepares samples in its own process, and a record that kills the process ends the member.
So the member notes the sample in preparation in a file of its directory. The next attempt finds the note and tries
that record in a separate process (`pipelines.workers.record_trial`). Where that process dies or hangs as well, the
record
cannot be prepared: the controller is informed, and informs the other members, as for a record that a feeder found.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.comm import Communicator
from ensemble.spec import PREDICTED_SPLITS, Ensemble
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.train.job import Inbox, Job

if TYPE_CHECKING:
    from pipelines import Pipeline

log = logging.getLogger(__name__)

SPLITS = ("train", *PREDICTED_SPLITS)


def note_file(run_dir: RunDir, member: str, rank: int, attempt: int) -> Path:
    """The file in which a rank notes the sample in preparation; each attempt has its own."""
    return run_dir.member(member) / f"preparing-{rank}-{attempt}"


def read_interrupted(path: Path) -> dict[str, tuple[int, int]]:
    """Read which samples were in preparation when a process died: split -> (index, epoch).

    Empty where nothing was noted or the file cannot be read: a note explains a failure, and must not cause one.
    """
    from pipelines.samples.poison_records import parse_note

    try:
        file = path.read_bytes()
    except OSError:
        return {}
    noted = {split: parse_note(file, place) for place, split in enumerate(SPLITS)}
    return {split: at for split, at in noted.items() if at is not None}


class PoisonRecords:
    """The poison records that one rank knows, and its notes.

    Args:
        pipelines: the member's own, by split; they skip the known records.
        emit: sends an event to the controller, from rank 0.
    """

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        pipelines: dict[str, Pipeline],
        emit: Callable[..., None],
    ) -> None:
        self._job, self._comm, self._pipelines, self._emit = job, comm, pipelines, emit
        self._timeout_s = ensemble.prepare_timeout_s
        self.add(job.bad)

    def add(self, records: Iterable[Any]) -> None:
        """Add records that must not be prepared: (split, index, code)."""
        for split, index, code in records:
            if split in self._pipelines:
                self._pipelines[split].poison_records.codes[index] = code

    def start(self, inbox: Inbox) -> None:
        """Try the records at which earlier attempts died, then start noting; call it before preparing samples."""
        records, tried = list[list[Any]](), list[Path]()
        for attempt in range(self._job.attempt):  # the last attempt may have died before it could try them
            if (earlier := self._file(attempt)).exists():
                records += [record for record in self._try_records(earlier) if record not in records]
                tried.append(earlier)
        self._start_noting()
        inbox.on_record(lambda split, index, code: self.add([(split, index, code)]))
        if self._job.attempt > 0:
            from ensemble.train.gather import gather_json

            for ranks in gather_json(self._comm, records):
                self.add(ranks)
                for split, index, code in ranks:
                    self._report(split, index, code)
        for earlier in tried:
            with contextlib.suppress(OSError):  # then it is tried again
                earlier.unlink()

    def _file(self, attempt: int) -> Path:
        return note_file(RunDir(self._job.run_dir), self._job.identity.member, self._job.rank, attempt)

    def _start_noting(self) -> None:
        """Note each sample in preparation from here on, where the file system allows it."""
        from pipelines.samples.poison_records import PreparationNote

        path = self._file(self._job.attempt)
        make_directory(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                notes = {split: PreparationNote(descriptor, place) for place, split in enumerate(SPLITS)}
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: a record that kills this member cannot be identified: %s", path, error)
            notes = {}
        for split, pipeline in self._pipelines.items():
            pipeline.poison_records.note = notes.get(split)

    def _try_records(self, path: Path) -> list[list[Any]]:
        from pipelines.workers.record_trial import try_record

        records = []
        for split, (index, epoch) in read_interrupted(path).items():
            if split not in self._pipelines:
                continue
            pipeline = self._pipelines[split]
            code = pipeline.poison_records.codes.get(index) or try_record(pipeline, index, epoch, self._timeout_s)
            if code is not None:
                records.append([split, index, code])
        return records

    def _report(self, split: str, index: int, code: int) -> None:
        pipeline = self._pipelines[split]
        error = pipeline.poison_records.error(index, pipeline.source.where(index))
        self._emit("bad_record", split=split, index=index, where=error.where, reason=error.reason, code=code)
