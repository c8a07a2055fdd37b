"""What the controller does to executors and files, as data, and the one place that does it.

Attempts and profiling sessions decide, and append actions to a list. The controller writes what was logged
meanwhile, then performs them: nothing is launched, sent or killed before the log says why. What fails comes back
as an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ensemble.controller.attempt import remove_earlier_checkpoints
from ensemble.executors import Executor
from ensemble.store import RunDir
from ensemble.store.files import make_directory
from ensemble.train.deadly_records import note_file, read_interrupted
from ensemble.train.job import Job
from ensemble.train.reporter import FailureNote, append_log


@dataclass(frozen=True, slots=True)
class Launch:
    """Start all ranks of an attempt, or of a profiling session.

    Attributes:
        jobs: one for each rank.
        devices: the GPU of each rank, None for the CPU.
    """

    jobs: Sequence[Job]
    devices: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class Send:
    """Put a command into the inbox of every rank of a member; see `Executor.tell`."""

    member: str
    command: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kill:
    """End all ranks of a member at once; their `exited` events follow."""

    member: str


@dataclass(frozen=True, slots=True)
class RemoveEarlierCheckpoints:
    """Remove the checkpoints of attempts before this one, whose first checkpoint the log names now."""

    member: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RemoveAttemptFiles:
    """Remove what an attempt leaves: where its ranks met, a failure's note, predictions if it did not finish."""

    member: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AppendMemberLog:
    """Add a line to a member's own log, which no worker is left to write."""

    member: str
    line: str


Action = Launch | Send | Kill | RemoveEarlierCheckpoints | RemoveAttemptFiles | AppendMemberLog


def perform(actions: Sequence[Action], executor: Executor, run_dir: RunDir) -> list[dict[str, Any]]:
    """Perform actions in their order; the log must have been written before.

    Returns:
        Events about those that failed: `launch_failed` (member, attempt, detail).
    """
    failed: list[dict[str, Any]] = []
    for action in actions:
        match action:
            case Launch(jobs, devices):
                try:
                    _make_ready(run_dir, jobs[0])
                    executor.launch(jobs, devices)
                except OSError as error:
                    who = {"member": jobs[0].identity.member, "attempt": jobs[0].attempt}
                    failed.append({"type": "launch_failed", **who, "detail": str(error)})
            case Send(member, command, fields):
                executor.tell(member, command, **fields)
            case Kill(member):
                executor.kill(member)
            case RemoveEarlierCheckpoints(member, attempt):
                remove_earlier_checkpoints(run_dir, member, attempt)
            case RemoveAttemptFiles(member, attempt):
                rendezvous_file(run_dir, member, attempt).unlink(missing_ok=True)
                FailureNote(run_dir, member, attempt).pop()
                run_dir.remove_unfinished_predictions(member)
            case AppendMemberLog(member, line):
                append_log(run_dir.log(member), line)
    return failed


def rendezvous_file(run_dir: RunDir, member: str, attempt: int) -> Path:
    """Where the ranks of an attempt meet."""
    return run_dir.member(member) / f"rendezvous-{attempt}"


def _make_ready(run_dir: RunDir, job: Job) -> None:
    meeting = rendezvous_file(run_dir, job.identity.member, job.attempt)
    make_directory(meeting.parent)
    meeting.unlink(missing_ok=True)


def with_exit_notes(event: dict[str, Any], run_dir: RunDir) -> dict[str, Any]:
    """An `exited` event with what the processes of the attempt left in files before they ended.

    Returns:
        The event; where a rank failed or died with `note`, the failure that a rank above 0 noted (error, reason,
        retry; None where there is none), and `preparing`, the [split, index] of samples that were being prepared.
    """
    if event["outcome"] not in (None, "failed"):
        return event
    member, attempt = event["member"], event["attempt"]
    prepared = read_interrupted(note_file(run_dir, member, event["rank"], attempt))
    return {
        **event,
        "note": FailureNote(run_dir, member, attempt).read(),
        "preparing": [[split, index] for split, (index, _) in prepared.items()],
    }
