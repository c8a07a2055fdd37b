"""Trains one member: the loop, mixed precision, data parallelism, checkpoints.

`work` runs one rank of a member to its end. Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ensemble.train.job import COMMANDS, Command, Inbox, Job, Outcome

if TYPE_CHECKING:
    from ensemble.meter import CpuClock
    from ensemble.spec import Ensemble

__all__ = ["COMMANDS", "Command", "Inbox", "Job", "Outcome", "load_work", "work"]


def work(
    job: Job,
    ensemble: Ensemble,
    emit: Callable[[dict[str, Any]], None],
    inbox: Inbox,
    clock: CpuClock | None = None,
) -> Outcome:
    """Train one rank of a member to its end, from its last checkpoint where there is one; or measure, or rehearse.

    Callable in a thread: no signal handlers, no exits. Errors of training do not leave it; they become a
    `failed` event and a traceback in the member's log.

    Args:
        job: which member, which rank, on which device.
        ensemble: the declaration: its recipe and its pipelines.
        emit: takes the member's events, without `v` and `t`. Rank 0 emits the member's, every rank its `usage`.
        inbox: commands for this rank; only rank 0 reads its inbox.
        clock: CPU time of this process, in the role "startup"; None: a new one, from now on.

    Returns:
        How it ended.
    """
    return load_work(job)(job, ensemble, emit, inbox, clock)


def load_work(job: Job) -> Callable[..., Outcome]:
    """Import what a job needs, and return the function that does it, which takes the arguments of `work`."""
    if job.profile is not None:
        from ensemble.train.profile import run
    elif job.rehearsal is not None:
        from ensemble.train.rehearsal import run
    else:
        from ensemble.train.worker import run
    return run
