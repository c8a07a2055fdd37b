"""One attempt of a member: one start of all its ranks, until the last process of them is gone."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.controller.failure_policy import Decision
from ensemble.schedule import Start
from ensemble.spec import Identity
from ensemble.store import MemberState, RunDir
from ensemble.train.job import Job

#: Events that are news of one attempt, in the worker's own words.
NEWS = frozenset(
    ("plan", "started", "progress", "epoch", "checkpoint", "moved", "finished", "pruned", "stopped", "cancelled")
) | {"failed", "waiting"}

# How an attempt has ended that was told to end: a worker knows of two ways only.
ENDED_AS = {"stop": "stopped", "pause": "paused", "cancel": "cancelled"}


@dataclass
class Attempt:
    """One attempt whose processes are not all gone.

    Attributes:
        ranks: whose exit has not been seen.
        began: (epoch, step) of the checkpoint that it went on from.
        heard: when it was last heard of (monotonic clock).
        outcome: how it ended, None while it has not.
        told: "stop", "pause" or "cancel" once it was asked to end.
        kill_at: when its processes are ended by force, None for never.
        reason: why it was killed, None when it was not.
        decision: what the policy made of its failure, None where it has not failed.
        cancelled: whether it is not to be tried again after all.
        held: whether it is to wait, once it has ended, until it is asked to go on.
        cohort: whose stream it reads now; None: it prepares its own batches.
        moving: whether it was asked to read another one from its next epoch on: that of `to`.
        waiting: whether it has no place from the cluster yet.
        saved: whether it has written a checkpoint.
        wider: with how many workers it is to go on once it has stopped; None where it is not asked to.
    """

    start: Start
    identity: Identity
    number: int
    ranks: set[int]
    heard: float
    began: tuple[int, int] = (0, 0)
    outcome: str | None = None
    told: str | None = None
    kill_at: float | None = None
    reason: str | None = None
    decision: Decision | None = None
    cancelled: bool = False
    held: bool = False
    cohort: int | None = None
    moving: bool = False
    to: int | None = None
    wider: int | None = None
    saved: bool = False
    waiting: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended and was not asked to."""
        return self.outcome is None and self.told is None

    def jobs(self, **common: Any) -> list[Job]:
        """One for each rank, alike in the fields that are given."""
        return [
            Job(
                identity=self.identity,
                attempt=self.number,
                rank=rank,
                interface="lo",
                device="cpu" if device is None else "cuda:0",
                node=self.start.placement.node,
                **common,
            )
            for rank, device in enumerate(self.start.placement.devices)
        ]

    @property
    def reads(self) -> list[tuple[str, int]]:
        """(node, cohort) of the feeders that it reads, or will after this epoch."""
        cohorts = dict.fromkeys((self.cohort, self.to if self.moving else self.cohort))
        return [(self.start.placement.node, cohort) for cohort in cohorts if cohort is not None]

    def is_to_move(self, to: int | None) -> bool:
        """Note that it is to be asked to read another stream; False where it does, was asked to, or ends."""
        if not self.goes_on or to == (self.to if self.moving else self.cohort):
            return False
        self.moving, self.to = True, to
        return True

    def moved(self, cohort: int | None) -> None:
        """It has; it may have been asked to move on since."""
        self.cohort = cohort
        self.moving = self.moving and self.to != cohort

    def is_to_widen(self, workers: int) -> bool:
        """Note that it is to be asked to end, and to return wider; False where it is as wide, or ends."""
        if not self.goes_on or workers <= max(self.identity.workers, self.wider or 1):
            return False
        self.wider = workers
        return True

    def widened(self) -> Identity:
        """The member as it goes on with more workers."""
        first = self.identity.widened_from or self.identity.workers
        workers = self.wider or self.identity.workers
        return dataclasses.replace(self.identity, workers=workers, widened_from=first)


def reached(member: MemberState) -> tuple[int, int]:
    """(epoch, step) of a member's last checkpoint."""
    saved = member.checkpoint or {"epoch": 0, "step": 0}
    return saved["epoch"], saved["step"]


def what_happened(live: Attempt, event: dict[str, Any], log_file: Path, hang_timeout_s: float) -> str:
    """In words, why an attempt failed that did not say so itself, from the exit of one of its ranks."""
    if live.reason == "hang":
        return f"nothing was heard of it for {hang_timeout_s:g} s; see {log_file}"
    detail = event.get("detail") or f"ended as {event['outcome']} without a word"
    return f"rank {event['rank']} {detail}"


def publish(run_dir: RunDir, member: str, attempt: int) -> None:
    """Let what an attempt that has finished predicted be the member's predictions."""
    for split in ("valid", "test"):
        written = run_dir.predictions(member, split, attempt)
        if written.exists():
            os.replace(written, run_dir.predictions(member, split))


def remove_earlier(run_dir: RunDir, member: str, attempt: int) -> None:
    """Remove the checkpoints of a member's earlier attempts, now that the log names one of this attempt."""
    valid = run_dir.checkpoint(member, attempt)
    for each in run_dir.member(member).glob("checkpoint*.safetensors"):
        if each != valid:
            each.unlink(missing_ok=True)
