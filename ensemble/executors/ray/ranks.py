"""Ranks of members as actors: what each holds in Ray, and that none starts before all of its member have a place.

Ray gives an actor its place when it has one: on a cluster that others use, too, that may take hours. Meanwhile the
member waits, which is told again and again, so that nobody takes it to hang.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ensemble.executors.ray.idle_actors import Share
from ensemble.schedule import Node
from ensemble.train.job import Job

WAITS_S = 5.0  # what an actor may take to start before its member is said to wait, and between two times


@dataclass(eq=False)
class Rank:
    """One rank of one attempt, and its actor.

    Attributes:
        share: by which the actor may be kept for another rank; None where it holds a GPU.
        gang: all ranks of the attempt.
        placed: whether Ray has given it its place.
        killed: whether its actor was killed: it may have said its last before that, and is of no more use.
        untold: commands that came before it started.
        told: when it was last said to wait, or asked for (monotonic clock).
    """

    job: Job
    device: int | None
    actor: Any
    share: Share | None
    gang: list[Rank]
    placed: bool = False
    killed: bool = False
    untold: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    told: float = field(default_factory=time.monotonic)

    @property
    def started(self) -> bool:
        """Whether the whole gang has its places, and trains."""
        return all(rank.placed for rank in self.gang)

    def tell(self, command: str, fields: dict[str, Any]) -> None:
        """Put a command into its inbox, now or when it has one."""
        if self.started:
            self.actor.tell.remote(self.job.identity.member, self.job.attempt, command, fields)
        else:
            self.untold.append((command, fields))

    def start(self, forks: str) -> Any:
        """Let it train; the stream of what it says."""
        run = self.actor.run.options(num_returns="streaming")
        return run.remote(self.job.as_json(), self.device, forks, self.untold)


def waiting(ranks: Iterable[Rank], now: float) -> list[dict[str, Any]]:
    """A `waiting` event for each rank that has no place yet, every few seconds."""
    news = []
    for rank in ranks:
        if not rank.placed and now - rank.told >= WAITS_S:
            rank.told = now
            job, gpu = rank.job, rank.device is not None and rank.job.identity.gpus_per_worker
            wants = f"{job.identity.cpus_per_worker:g} cpus" + (f" and {gpu:g} GPU" if gpu else "")
            detail = f"Ray has no place for rank {job.rank} ({wants}) on node {job.node} yet"
            who = {"member": job.identity.member, "attempt": job.attempt, "rank": job.rank}
            news.append({"type": "waiting", **who, "node": job.node, "detail": detail})
    return news


def share_of(job: Job, node: Node) -> Share:
    """What the actor of a rank holds beside a GPU."""
    wanted = job.identity
    # a guess of cores may be more than there are (`ensemble.schedule.needs`)
    cpus = min(wanted.cpus_per_worker, node.cpus / wanted.workers)
    memory = None if wanted.memory_gb is None else int(wanted.memory_gb * 2**30)
    return node.name, cpus, memory


def exited(job: Job, detail: str) -> dict[str, Any]:
    """The event of the end of a rank that could not tell it."""
    who = {"member": job.identity.member, "attempt": job.attempt, "rank": job.rank}
    return {"type": "exited", **who, "outcome": None, "detail": detail}
