"""One attempt of a member: one start of all its ranks, until the last of their processes has ended.

`TRANSITIONS` has the phase that follows each event. In the last phase, EXITING, the outcome is known, but
processes still hold the place: the member can be launched again when the last of them has exited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ensemble.controller.failures import Decision
from ensemble.schedule.needs import Node
from ensemble.schedule.placement import Start
from ensemble.spec import Identity
from ensemble.store import MemberState, RunDir
from ensemble.train.job import Job


class AttemptPhase(StrEnum):
    """The phase of an attempt."""

    STARTING = "starting"  # launched; no rank has begun to train
    RUNNING = "running"
    STOPPING = "stopping"  # asked to stop, to pause or to be cancelled
    EXITING = "exiting"  # the outcome is known; processes still hold the place


class Intent(StrEnum):
    """What an attempt was asked to do before its regular end."""

    WIDEN = "widen"  # stop after this epoch; the member goes on with more workers
    STOP = "stop"  # the run ends
    PAUSE = "pause"  # stop; the member waits until a user resumes it
    RESUME = "resume"  # a pause was withdrawn: stop, and the member is placed again at once
    LEAVE = "leave"  # its node is drained: stop, and it waits for a place at once
    CANCEL = "cancel"


_S, _R, _T, _E = AttemptPhase
# The phase after an event, by the phase before it (starting, running, stopping, exiting); None: refused.
_BY_EVENT: dict[str, tuple[AttemptPhase | None, ...]] = {
    # what workers report
    "damaged": (_S, _R, _T, None),
    "plan": (_S, _R, _T, None),
    "started": (_R, _R, _T, None),
    "progress": (_R, _R, _T, None),
    "epoch": (_R, _R, _T, None),
    "checkpoint": (_S, _R, _T, None),
    "moved": (_S, _R, _T, None),
    "finished": (_E, _E, _E, None),
    "pruned": (_E, _E, _E, None),
    "stopped": (_E, _E, _E, None),
    "cancelled": (_E, _E, _E, None),
    "failed": (_E, _E, _E, None),
    # what the executor reports
    "launch_failed": (_E, None, _E, None),  # a stop may have been requested before its feeder had an address
    "rank_exited": (_S, _R, _T, _E),  # one of its processes exited; others may run on
    "died": (_E, _E, _E, None),  # without a report of how it ended
    # what the controller asks
    "move": (_S, _R, None, None),
    "widen": (_S, _R, None, None),
    "stop": (_T, _T, None, None),
    "pause": (_T, _T, _T, _E),
    "resume": (None, None, _T, _E),
    "cancel": (_T, _T, _T, _E),
}
#: (phase, event) -> the phase after it. A pair that is missing is refused.
TRANSITIONS: Mapping[tuple[AttemptPhase, str], AttemptPhase] = {
    (before, event): after
    for event, row in _BY_EVENT.items()
    for before, after in zip(AttemptPhase, row, strict=True)
    if after is not None
}

#: Events in which a worker, or the executor for it, reports on its attempt.
ATTEMPT_EVENTS = frozenset(
    (
        "damaged",
        "plan",
        "started",
        "progress",
        "epoch",
        "checkpoint",
        "moved",
        "finished",
        "pruned",
        "stopped",
        "cancelled",
    )
) | {"failed"}

# A worker reports "stopped" or "cancelled"; the log says what became of the member.
_LOGGED_AS = {
    Intent.STOP: "stopped",
    Intent.PAUSE: "paused",
    Intent.RESUME: "paused",
    Intent.LEAVE: "paused",
    Intent.CANCEL: "cancelled",
}


_GIVE_UP = Decision(retry=False)

#: Bytes a second at which a checkpoint is written at least, as far as a limit of time needs to know it.
SLOWEST_WRITE = 50e6


@dataclass(slots=True)
class Attempt:
    """One attempt that still has processes, or a reserved place.

    Attributes:
        number: of this attempt of the member, from 0.
        device: as `Placement.describe_device` names it.
        ranks: the ranks whose exit has not been reported.
        last_event_at: the time of the last event of a rank, in seconds of a monotonic clock.
        progress_at: when its steps were logged last, in seconds of a monotonic clock.
        cohort: the cohort whose stream it reads; None: it prepares its own batches.
        phase: see `AttemptPhase`.
        intent: what it was asked to do; in EXITING, what becomes of the member unless it has ended.
        outcome: how it ended; None before EXITING.
        decision: whether the member is placed again after this attempt, and when.
        deadline: the time at which its processes are killed; None: never.
        grace_s: how long after a sign of life an attempt that was asked to stop is killed; 0: the deadline stands.
        latest_deadline: to which it can be moved.
        saves_until: by when a checkpoint that it writes may take; until then it gives no sign of life.
        kill_reason: why they were or will be killed; None: they were not.
        target_cohort: the cohort whose stream it was asked to read next; equal to `cohort` otherwise.
        target_workers: the number of workers of the next attempt, if the intent is WIDEN.
        is_launched: whether its processes were requested.
        awaits: (node, cohort) of the feeders whose addresses it needs before it is launched or moves there.
        feeders: the addresses known before its launch, by node; None: ranks there prepare their own batches.
        lost_report: the report of a rank that lost another one; why that was lost decides what follows.
        is_being_pruned: whether it was told to end by the pruner.
    """

    start: Start
    identity: Identity
    number: int
    device: str
    ranks: set[int]
    last_event_at: float
    progress_at: float = float("-inf")
    cohort: int | None = None
    phase: AttemptPhase = AttemptPhase.STARTING
    intent: Intent | None = None
    outcome: str | None = None
    decision: Decision = _GIVE_UP
    deadline: float | None = None
    grace_s: float = 0.0
    latest_deadline: float = 0.0
    saves_until: float = 0.0
    kill_reason: str | None = None
    target_cohort: int | None = None
    target_workers: int | None = None
    is_launched: bool = False
    awaits: set[tuple[str, int]] = field(default_factory=set)
    feeders: dict[str, str | None] = field(default_factory=dict)
    lost_report: Mapping[str, Any] | None = None
    is_being_pruned: bool = False

    @property
    def member(self) -> str:
        return self.identity.member

    @property
    def is_active(self) -> bool:
        """Whether it trains, or will, and was not asked to stop at once."""
        return self.phase in (AttemptPhase.STARTING, AttemptPhase.RUNNING)

    @property
    def is_exiting(self) -> bool:
        """Whether its outcome is known, so that later reports are ignored."""
        return self.phase is AttemptPhase.EXITING

    @property
    def is_moving(self) -> bool:
        """Whether it was asked to read the stream of another cohort and does not yet."""
        return self.target_cohort != self.cohort

    def advance(self, event: str) -> bool:
        """Enter the phase that follows an event, as `TRANSITIONS` says; False where it is refused."""
        after = TRANSITIONS.get((self.phase, event))
        if after is None:
            return False
        self.phase = after
        return True

    def end(self, event: str, outcome: str, decision: Decision, deadline: float | None = None) -> None:
        """Enter EXITING; `event` is what ended it (`TRANSITIONS`), `outcome` its name in the log, `deadline` when
        it is killed.
        """
        if not self.advance(event) or not self.is_exiting:
            raise RuntimeError(f"attempt {self.number} of {self.member} is {self.phase}: it cannot end by {event}")
        self.outcome, self.decision = outcome, decision
        if deadline is not None:
            self.deadline = deadline

    def limit_stop(self, now_s: float, until: float, write_s: float, most_s: float) -> None:
        """Set the time by which an attempt that was asked to stop must have ended.

        It has until `until`, or as long since its last sign of life (it evaluates, say), and twice as long as its
        last checkpoint took, `write_s`; at most `most_s` seconds.
        """
        self.grace_s = until - now_s + 2 * write_s if until > now_s else 0.0
        limit = max(now_s + self.grace_s, self.saves_until) if self.grace_s else now_s
        self.deadline = limit if self.deadline is None else min(self.deadline, limit)
        self.latest_deadline = max(limit, now_s + most_s)

    def note_life(self, now_s: float, saved_bytes: float = 0.0) -> None:
        """Move the deadline of an attempt that was asked to stop and reports that it works, or begins to write so
        many bytes.
        """
        if saved_bytes:
            self.saves_until = now_s + saved_bytes / SLOWEST_WRITE
        if self.phase is AttemptPhase.STOPPING and self.grace_s and self.deadline is not None:
            limit = max(min(now_s + self.grace_s, self.latest_deadline), self.saves_until)
            self.deadline = max(self.deadline, limit)

    def event_type(self, reported: str) -> str:
        """The type under which an end is logged that its worker reported."""
        if reported in ("stopped", "cancelled") and self.intent is not None:
            return _LOGGED_AS.get(self.intent, reported)
        return reported

    def make_jobs(self, nodes: Sequence[Node], **common: Any) -> list[Job]:
        """One job for each rank; `common` has the fields that are the same for all."""
        placement = self.start.placement
        interfaces = {node.name: node.interface if placement.nodes else "lo" for node in nodes}
        return [
            Job(
                identity=self.identity,
                attempt=self.number,
                rank=rank,
                interface=interfaces.get(placement.find_node(rank)),
                local_world=placement.count_ranks(placement.find_node(rank)),
                feeder=self.feeders.get(placement.find_node(rank)),
                device="cpu" if device is None else "cuda:0",
                gpu=device,
                node=placement.find_node(rank),
                **common,
            )
            for rank, device in enumerate(placement.devices)
        ]

    @property
    def feeder_keys(self) -> list[tuple[str, int]]:
        """(node, cohort) of the feeders that it reads, or will read after this epoch."""
        cohorts = dict.fromkeys((self.cohort, self.target_cohort))
        return [
            (n, cohort) for n in self.start.placement.ranks_by_node for cohort in cohorts if cohort is not None
        ]

    def request_move(self, cohort: int | None) -> bool:
        """Record that it is to read the stream of another cohort; False where it cannot, or does already."""
        if cohort == self.target_cohort or not self.advance("move"):
            return False
        self.target_cohort = cohort
        return True

    def record_move(self, cohort: int | None) -> None:
        """Record that it reads the stream of another cohort; meanwhile it may have been asked to move again."""
        if self.target_cohort in (self.cohort, cohort):
            self.target_cohort = cohort
        self.cohort = cohort

    def request_widening(self, workers: int) -> bool:
        """Record that it is to stop for more workers; False where it cannot, or has as many already."""
        if workers <= max(self.identity.workers, self.target_workers or 1) or not self.advance("widen"):
            return False
        self.intent, self.target_workers = Intent.WIDEN, workers
        return True

    def widened_identity(self) -> Identity:
        """The member with its new number of workers."""
        first = self.identity.widened_from or self.identity.workers
        workers = self.target_workers or self.identity.workers
        return dataclasses.replace(self.identity, workers=workers, widened_from=first)

    def describe_failure(self, event: dict[str, Any], log_file: Path, hang_timeout_s: float) -> str:
        """Describe a failure that no worker reported, by the `exited` event of one of its ranks."""
        if self.kill_reason == "hang":
            return f"it sent no event for {hang_timeout_s:g} s; see {log_file}"
        detail = event.get("detail") or f"ended without a report (outcome {event['outcome']!r})"
        return f"rank {event['rank']} {detail}"


def checkpoint_position(member: MemberState) -> tuple[int, int]:
    """(epoch, step) of a member's last checkpoint."""
    saved = member.checkpoint
    return (0, 0) if saved is None else (saved.epoch, saved.step)


def rendezvous_file(run_dir: RunDir, member: str, attempt: int) -> Path:
    """The file by which the ranks of an attempt find each other."""
    return run_dir.member(member) / f"rendezvous-{attempt}"
