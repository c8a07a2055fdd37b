"""Runs one rank of a member: connects to the other ranks, trains, and reports the outcome."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import resource
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ensemble.comm import Communicator, CommunicatorError, SingleRank
from ensemble.meter.cpu import CpuClock
from ensemble.meter.memory import describe_memory
from ensemble.spec import Ensemble, Identity, SpecError
from ensemble.spec.options import BACKENDS
from ensemble.store import RunDir, StoreError, WriteError
from ensemble.store.files import is_disk_full
from ensemble.train.forward_errors import describe_error, find_own_mistake, is_repeatable
from ensemble.train.job import (
    Diverged,
    Inbox,
    Job,
    Outcome,
    ShapeMismatchError,
    SharingDiffers,
    StopTraining,
    TrainingError,
    UnusableData,
)
from ensemble.train.member import TrainContext
from ensemble.train.outputs import OutputError
from ensemble.train.own_tensors import note_process, use_base
from ensemble.train.recipe import run_training_loop
from ensemble.train.reporter import EventReporter, FailureNote
from ensemble.train.seeding import process_settings, seed_everything
from ensemble.train.state import TrainState

#: Parts of the messages of PyTorch, C++, OpenCV, numpy and Python when an allocation fails, in a stage as well: a
#: record that could not be prepared for want of memory is not at fault.
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "Insufficient memory", "Unable to allocate", "MemoryError")


def run(
    job: Job,
    ensemble: Ensemble,
    emit: Callable[[dict[str, Any]], None],
    inbox: Inbox,
    clock: CpuClock | None = None,
) -> Outcome:
    """See `ensemble.train.work`."""
    reporter = EventReporter(job, emit, clock or CpuClock())
    reporter.usage()
    member: TrainContext | None = None
    with contextlib.ExitStack() as leaving:  # after the outcome was reported: peers notice that this rank leaves
        try:
            device = torch.device(job.device)
            leaving.enter_context(process_settings(job.identity.threads, device))
            check_gpu(job.gpu, device)
            _cap_memory(job, device)
            communicator = connect(job, device)
            leaving.callback(communicator.close)
            member = TrainContext(TrainState(job, ensemble, communicator, reporter, inbox))
            leaving.callback(member.close)
            note_process()
            leaving.enter_context(use_base(job.run_dir, ensemble.recipe, device))
            seed_everything(job.identity.seed, device)
            run_training_loop(ensemble.recipe, member)
            member.finish()
            return "finished"
        except StopTraining as ended:
            assert member is not None
            try:
                if ended.is_unsaved:
                    member.save()
            except Exception as error:
                _report_failure(reporter, job, error, member.position)
                return "failed"
            _report_end(reporter, member, ended)
            return ended.outcome
        except BaseException as error:
            if not isinstance(error, Exception | SystemExit) and not _is_panic(error):
                raise
            _report_failure(reporter, job, error, {} if member is None else member.position)
            return "failed"


def connect(job: Job, device: torch.device) -> Communicator:
    """Connect to the other ranks of this attempt."""
    if job.identity.workers == 1:
        return SingleRank()
    from ensemble.comm.peer_failure_detector import GRACE_S

    if job.rendezvous is None:
        raise TrainingError(f"{job.identity.member} has {job.identity.workers} workers and no rendezvous for them")
    return _load_backend(job.identity)(
        job.rendezvous,
        rank=job.rank,
        world=job.identity.workers,
        device=device,
        interface=job.interface,
        timeout_s=job.timeout_s,
        grace_s=min(GRACE_S, job.timeout_s / 8),
    )


def _load_backend(identity: Identity) -> Callable[..., Communicator]:
    """The `connect` function of the declared backend: the communicator's name, or its option "backend"."""
    chosen = identity.communicator or {}
    name = chosen.get("backend") or chosen.get("name") or "torch"
    if name == "horovod" and importlib.util.find_spec("horovod") is None:
        raise TrainingError(f"{identity.member} is to train over Horovod, which is not installed (make horovod)")
    connect: Callable[..., Communicator] = BACKENDS.load(name)
    return connect


def check_gpu(planned: str | None, device: torch.device) -> None:
    """Write to the log which GPU a rank has, and refuse another than the planned one.

    Args:
        planned: its id (`Node.gpu_ids`); None: not known. Instances in MIG mode are not compared: CUDA does not
            give their names.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        own = "GPU-" + str(getattr(properties, "uuid", "")).removeprefix("GPU-")
        print(f"on {properties.name} ({own})", flush=True)
        if not is_same_gpu(planned, own):  # something on the way has changed CUDA_VISIBLE_DEVICES
            raise RuntimeError(f"this rank was placed on {planned} and has {own}")


def is_same_gpu(planned: str | None, own: str) -> bool:
    """Whether two names may be of one GPU: both are UUIDs and equal, or one says nothing."""
    return planned is None or not planned.startswith("GPU-") or own in ("GPU-", planned)


def _cap_memory(job: Job, device: torch.device) -> None:
    """Limit a member to its share of a GPU's memory, so that a shortage hits the member that caused it."""
    if device.type == "cuda":
        share = job.identity.gpus_per_worker
        torch.cuda.set_per_process_memory_fraction(share if 0 < share < 1 else 1.0, device)


def _report_end(reporter: EventReporter, member: TrainContext, ended: StopTraining) -> None:
    outcome = ended.outcome
    if isinstance(ended, SharingDiffers):
        reporter.event("failed", error=ended.error, reason="sharing", retry=ended.begins_anew, **member.position)
    elif outcome == "stopped":
        reporter.event("stopped", **member.position)
    elif outcome == "pruned":
        reporter.event("pruned", epoch=max(0, member.position["epoch"] - 1))
    else:
        reporter.event("cancelled")


def _report_failure(reporter: EventReporter, job: Job, error: BaseException, position: Mapping[str, int]) -> None:
    """Report a failure: rank 0 to the controller, another rank in a note, before its connections close.

    Rank 0 also reports the loss of a peer. If rank 0 itself is lost, the controller finds the note.
    """
    reason, retry = classify(error)
    line = describe_error(error)
    if reason == "oom" and not isinstance(error, torch.OutOfMemoryError):
        line = f"{line} ({describe_memory()})"
    if retry and reason == "error" and _is_first_step(job, position) and is_repeatable(error):
        line, retry = f"{line} (in the first step, where another attempt would fail in the same way)", False
    reporter.log("".join(traceback.format_exception(error)), any_rank=True)
    note = FailureNote(RunDir(job.run_dir), job.identity.member, job.attempt)
    if job.rank == 0:
        cause = note.pop() if reason == "lost" else None
        reporter.event("failed", **(cause or {"error": line, "reason": reason, "retry": retry, **position}))
    elif reason != "lost" or (isinstance(error, CommunicatorError) and 0 in error.lost_ranks):
        note.write(line, reason, retry, job.rank)


def _is_first_step(job: Job, position: Mapping[str, int]) -> bool:
    """Whether the member has done no step yet, in this attempt or in one that left a checkpoint."""
    return not job.checkpoints and not position.get("epoch") and not position.get("step")


def _is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has panicked: safetensors does where an allocation fails. It is no Exception."""
    return type(error).__name__ == "PanicException"


def classify(error: BaseException) -> tuple[str, bool]:
    """The `reason` of a failure, and whether a retry may help."""
    from pipelines.errors import DataOutOfReach, PipelineError
    from pipelines.prepare.transient import find_errno

    if isinstance(error, Diverged | ShapeMismatchError | UnusableData):
        names = {Diverged: "nan", ShapeMismatchError: "impossible", UnusableData: "data"}
        return names[type(error)], False
    if isinstance(error, CommunicatorError | DataOutOfReach):
        return "lost" if isinstance(error, CommunicatorError) else "unreachable", True
    if isinstance(error, WriteError) or is_disk_full(error):
        return "disk", isinstance(error, WriteError) and error.is_for_room  # ours: there is a line that says so
    is_enomem = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if (
        is_enomem
        or (_is_panic(error) and resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY)
        or isinstance(error, MemoryError | torch.OutOfMemoryError)
        or any(w in str(error) for w in _NO_MEMORY)
    ):
        return "oom", True
    deterministic = isinstance(error, TrainingError | SpecError | OutputError | PipelineError | StoreError)
    is_ours = find_own_mistake(error) is not None
    return "error", not (deterministic or is_ours) or find_errno(error) is not None
