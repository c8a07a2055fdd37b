"""One rank of a member, from its first to its last moment: connects, trains, and says how it ended."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ensemble.comm import Communicator, CommunicatorError, SingleRank
from ensemble.spec import Ensemble, Identity, Recipe, SpecError
from ensemble.store import RunDir, StoreError, WriteError
from ensemble.store.files import is_disk_full
from ensemble.train import recipe as built_in
from ensemble.train.job import Diverged, Ended, Inbox, Job, Outcome, TrainingError
from ensemble.train.member import TrainContext
from ensemble.train.outputs import OutputError
from ensemble.train.reporter import FailureNote, Reporter
from ensemble.train.seeding import process_settings, seed_everything

#: What libraries say that were refused memory: PyTorch, C++, OpenCV.
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "Insufficient memory")


def run(
    job: Job,
    ensemble: Ensemble,
    emit: Callable[[dict[str, Any]], None],
    inbox: Inbox,
    startup_cpu_s: float = 0.0,
) -> Outcome:
    """See `ensemble.train.work`."""
    reporter = Reporter(job, emit, startup_cpu_s)
    reporter.usage()
    member: TrainContext | None = None
    with contextlib.ExitStack() as leaving:  # only after the outcome was told: peers learn of it by our leaving
        try:
            device = torch.device(job.device)
            leaving.enter_context(process_settings(job.identity.threads, device))
            _cap_memory(job, device)
            communicator = connect(job, device)
            leaving.callback(communicator.close)
            member = TrainContext(job, ensemble, communicator, reporter, inbox)
            leaving.callback(member.close)
            seed_everything(job.identity.seed, device)
            if isinstance(ensemble.recipe, Recipe):
                built_in.train(ensemble.recipe, member)
            else:
                ensemble.recipe(member)
                member.name_unread()
            member.finish()
            return "finished"
        except Ended as ended:
            assert member is not None
            _say_ended(reporter, member, ended.outcome)
            return ended.outcome
        except (Exception, SystemExit) as error:
            _say_failed(reporter, job, error, {} if member is None else member.where)
            return "failed"


def connect(job: Job, device: torch.device) -> Communicator:
    """Meet the other ranks of this attempt."""
    if job.identity.workers == 1:
        return SingleRank()
    from ensemble.comm.peer_failure_detector import GRACE_S

    if job.rendezvous is None:
        raise TrainingError(f"{job.identity.member} has {job.identity.workers} workers and no rendezvous for them")
    return _backend(job.identity)(
        job.rendezvous,
        rank=job.rank,
        world=job.identity.workers,
        device=device,
        interface=job.interface,
        timeout_s=job.timeout_s,
        grace_s=min(GRACE_S, job.timeout_s / 8),
    )


def _backend(identity: Identity) -> Callable[..., Communicator]:
    """What connects the workers of a member: a communicator's name is a backend, or it has one as an option."""
    chosen = identity.communicator or {}
    if "horovod" not in (chosen.get("name"), chosen.get("backend")):
        from ensemble.comm.torch_dist import connect

        return connect
    from pipelines.multinode.horovod_start import HOW_TO_GET_IT

    if importlib.util.find_spec("horovod") is None:
        raise TrainingError(f"{identity.member} is to train over Horovod: {HOW_TO_GET_IT}")
    from ensemble.comm import horovod

    return horovod.connect


def _cap_memory(job: Job, device: torch.device) -> None:
    """Keep a member to its share of a GPU: when memory runs out it is to hit the one that took too much."""
    if device.type == "cuda":
        share = job.identity.gpus_per_worker
        torch.cuda.set_per_process_memory_fraction(share if 0 < share < 1 else 1.0, device)


def _say_ended(reporter: Reporter, member: TrainContext, outcome: Outcome) -> None:
    if outcome == "stopped":
        reporter.event("stopped", **member.where)
    elif outcome == "pruned":
        reporter.event("pruned", epoch=max(0, member.where["epoch"] - 1))
    else:
        reporter.event("cancelled")


def _say_failed(reporter: Reporter, job: Job, error: BaseException, where: Mapping[str, int]) -> None:
    """Rank 0 tells the controller; another rank leaves it a note before its connections close.

    That a peer was lost is rank 0's to tell as well, unless it is rank 0 that was: the controller finds the note.
    """
    reason, retry = classify(error)
    line = next(iter(str(error).splitlines()), "") or "no message"
    line = line if isinstance(error, TrainingError | SpecError | StoreError) else f"{type(error).__name__}: {line}"
    reporter.log("".join(traceback.format_exception(error)), any_rank=True)
    note = FailureNote(RunDir(job.run_dir), job.identity.member, job.attempt)
    if job.rank == 0:
        cause = note.take() if reason == "lost" else None
        reporter.event("failed", **(cause or {"error": line, "reason": reason, "retry": retry, **where}))
    elif reason != "lost" or (isinstance(error, CommunicatorError) and 0 in error.lost_ranks):
        note.write(line, reason, retry)


def classify(error: BaseException) -> tuple[str, bool]:
    """The `reason` of a failure, and whether trying again may help."""
    from pipelines import PipelineError

    if isinstance(error, Diverged):
        return "nan", False
    if isinstance(error, CommunicatorError):
        return "lost", True
    if isinstance(error, WriteError) or is_disk_full(error):
        return "disk", False
    told = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if told or isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error) for w in _NO_MEMORY):
        return "oom", True
    deterministic = isinstance(error, TrainingError | SpecError | OutputError | PipelineError | StoreError)
    return "error", not deterministic
