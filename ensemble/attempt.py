"""One attempt of a member: one start of all its ranks, until the last process of them is gone."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble.schedule import Decision, Start
from ensemble.spec import Identity


@dataclass
class Attempt:
    """One attempt whose processes are not all gone.

    Attributes:
        ranks: whose exit has not been seen.
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
        wider: with how many workers it is to go on once it has stopped; None where it is not asked to.
    """

    start: Start
    identity: Identity
    number: int
    ranks: set[int]
    heard: float
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

    @property
    def reads(self) -> list[tuple[str, int]]:
        """(node, cohort) of the feeders that it reads, or will after this epoch."""
        cohorts = dict.fromkeys((self.cohort, self.to if self.moving else self.cohort))
        return [(self.start.placement.node, cohort) for cohort in cohorts if cohort is not None]
