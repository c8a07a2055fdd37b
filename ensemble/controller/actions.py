"""What a session decides, as data; `ensemble.controller.performer` is the one place that does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Checkpoint, Event
from ensemble.spec import Identity, Member
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.schedule.needs import Placement
    from pipelines import Peers


@dataclass(frozen=True, slots=True)
class Log:
    """Write an event to the log: as it was folded into the run's state, and as a line without its newline."""

    event: Event
    line: bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """Start all ranks of an attempt, or of a profiling session, a job and a GPU (None: CPU) each; else
    `launch_failed`.
    """

    jobs: Sequence[Job]
    devices: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to every rank of a member, as `Executor.send` does."""

    member: str
    command: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill all ranks of a member."""

    member: str


@dataclass(frozen=True, slots=True)
class StartFeeder:
    """Start the feeder of a cohort on a node, as `Executor.start_feeder` does.

    `feeder_ready` has its address, and the number of this start: a feeder may be stopped and started anew before
    the answer to its first start has come.
    """

    node: str
    cohort: int
    expected: int
    capacity: int
    peers: Peers | None = None
    late: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class ExpectReaders:
    """Lower the number of members that a feeder's start gate waits for."""

    node: str
    cohort: int
    members: int


@dataclass(frozen=True, slots=True)
class StopFeeder:
    """Stop the feeder of a cohort on a node."""

    node: str
    cohort: int


@dataclass(frozen=True, slots=True)
class ClearRendezvous:
    """Remove the directory in which the feeders of a cohort on several nodes find each other."""

    cohort: int


@dataclass(frozen=True, slots=True)
class Demand:
    """Say which members found no place, and where the others are, as `Executor.request` does."""

    waiting: Sequence[Identity]
    placed: Sequence[Placement]


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask for the next member: `proposed`, or `impossible`."""


@dataclass(frozen=True, slots=True)
class Add:
    """Ask for a member that a user declared, in addition to the others: `added`, or `add_refused`.

    Attributes:
        lineage: of a clone, as in `Identity`.
        checkpoint, logged: with whose weights a warm clone starts, and the event that names it.
    """

    request: Mapping[str, Any]
    declared: Member
    lineage: dict[str, Any] | None = None
    checkpoint: Path | None = None
    logged: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class EndTrial:
    """Report how a member ended: "finished", "pruned", "failed" or "cancelled"."""

    number: int
    state: str
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MeasureCost:
    """Read from the account what a member has used so far: `cost`."""

    member: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RemoveCheckpoints:
    """Remove a member's checkpoints but those of these names.

    Attributes:
        attempt: that runs; what it has written after them stays, too. None: none runs.
        removes_start: whether the checkpoint from which it went on is removed, too.
    """

    member: str
    kept: Sequence[str]
    attempt: int | None = None
    removes_start: bool = False


@dataclass(frozen=True, slots=True)
class ReduceCheckpoint:
    """Take out of the checkpoint of a member that has ended what is not to be kept: `checkpoint_reduced`."""

    member: str
    name: str
    digest: str | None
    keeps_weights: bool


@dataclass(frozen=True, slots=True)
class RemoveAttemptFiles:
    """Remove what the ranks of an attempt that has ended leave: rendezvous, failure note, notes of samples."""

    member: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """Remove the folder of what was rehearsed."""

    member: str


@dataclass(frozen=True, slots=True)
class AppendMemberLog:
    """Add a line to a member's own log, which no worker is left to write."""

    member: str
    line: str


Action = (
    Log
    | Launch
    | Send
    | Kill
    | StartFeeder
    | ExpectReaders
    | StopFeeder
    | ClearRendezvous
    | Demand
    | Propose
    | Add
    | EndTrial
    | MeasureCost
    | RemoveCheckpoints
    | ReduceCheckpoint
    | RemoveAttemptFiles
    | RemoveFolder
    | AppendMemberLog
)
