"""Measures members before they are packed, or in a dry run: a few steps of the real loop on the real device.

The loop reads prepared batches, so that preparation is not part of a step, and one batch of each split. It is left
where its first epoch ends; a checkpoint is then assembled, for its memory, and not written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ensemble.comm import Communicator, SingleRank
from ensemble.meter import CpuClock, make_usage, peak_memory_gb, release_memory, reset_peak_memory
from ensemble.schedule.needs import uses_gpus
from ensemble.spec import Ensemble, Identity
from ensemble.spec.recipe import has_own_loop
from ensemble.store import RunDir, rehearse_checkpoint
from ensemble.train.checkpoint import Checkpointer, Position, pack
from ensemble.train.data import Data, steps_per_epoch
from ensemble.train.forward_errors import describe_error
from ensemble.train.gather import gather_json
from ensemble.train.gpu_busy import describe_gpu_busy
from ensemble.train.job import (
    PROFILE,
    Inbox,
    Job,
    LabelError,
    Outcome,
    ProfileRequest,
    StopTraining,
    TrainingError,
)
from ensemble.train.member import TrainContext
from ensemble.train.model_signature import signature_of
from ensemble.train.own_tensors import note_process, use_base
from ensemble.train.recipe import run_training_loop
from ensemble.train.reporter import EventReporter, append_log
from ensemble.train.seeding import process_settings, seed_everything
from ensemble.train.state import TrainState
from ensemble.train.stopwatch import GpuTimer, Stopwatch
from ensemble.train.worker import check_gpu, connect
from pipelines.loader.ragged import find_tensors
from pipelines.loader.resident import StreamedSet

if TYPE_CHECKING:
    from pipelines import Batch
    from pipelines.loader.collate import Collate

HEARTBEAT_S, READY, EVALUATIONS = 1.0, 2, 4  # training batches that are repeated; of a batch, in a dry run

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class MeasuredSteps:
    """What a few steps of a member have shown.

    Attributes:
        parameters: of the model; trainable: how many of them are trained; checkpoint_bytes: of its tensors;
            predictions_bytes: of all splits, None if not known.
        evaluation: `evaluate_s` and `evaluate_cpu_s` of a batch of a split; None: none was evaluated.
    """

    figures: dict[str, Any]
    parameters: int
    trainable: int
    checkpoint_bytes: int
    predictions_bytes: int | None
    evaluation: dict[str, float] | None
    remarks: list[str]


class _AllRefused(TrainingError):
    """Every member of the run fails with this message."""


class _Done(StopTraining):
    """Leaves a training loop when everything is measured."""

    def __init__(self) -> None:
        super().__init__("finished")


def run(job: Job, ensemble: Ensemble, emit: Emit, inbox: Inbox, clock: CpuClock | None = None) -> Outcome:
    """Run one rank of a session: measure the members of `job.profile`, small ones first.

    Rank 0 emits `profiling` (of: the member), as a heartbeat too, and `profiled` (of: members of one signature;
    measured: the figures of a `Profile` for this number of workers, None if they were known). An error ends it by
    a `failed` event. All CPU time has the role "profile".
    """
    try:
        with contextlib.ExitStack() as leaving:
            leaving.callback(_emit_usage, job, emit)
            device = torch.device(job.device)
            gpu = GpuTimer(device) if device.type == "cuda" else None
            leaving.enter_context(process_settings(job.identity.threads, device))
            check_gpu(job.gpu, device)
            communicator = connect(job, device)
            leaving.callback(communicator.close)
            leaving.enter_context(use_base(job.run_dir, ensemble.recipe, device))
            _Session(job, ensemble, communicator, gpu, emit).measure()
        return "finished"
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = "spec" if isinstance(error, LabelError | _AllRefused) else "error"
        emit(_event(job, "failed", error=describe_error(error), reason=reason))
        return "failed"


def measure_here(ensemble: Ensemble, member: Identity, directory: str, steps_s: float) -> MeasuredSteps:
    """Measure a member in this process, as one worker, for a dry run: for about `steps_s` seconds of steps.

    Nothing is left behind but a log in `directory`; seeds and the number of threads are restored.
    """
    alone = dataclasses.replace(member, workers=1)
    request = ProfileRequest(members=[alone], known=[], steps_s=steps_s, evaluations=EVALUATIONS)
    job = make_job_here(ensemble, alone, directory, profile=request)
    device = torch.device(job.device)
    gpu = GpuTimer(device) if device.type == "cuda" else None
    settings, base = process_settings(alone.threads, device), use_base(directory, ensemble.recipe, device)
    with settings, base, contextlib.closing(SingleRank()) as communicator:
        note_process()
        release_memory()
        reset_peak_memory()
        before_gb = peak_memory_gb()  # what processes of a run have from their fork server
        measured = _Session(job, ensemble, communicator, gpu, lambda event: None).measure_member(alone)
        least_gb = measured.checkpoint_bytes / 2**30  # it may fit where others were
        measured.figures["memory_gb"] = max(least_gb, measured.figures["memory_gb"] - before_gb)
        return measured


def make_job_here(ensemble: Ensemble, member: Identity, directory: str, **request: Any) -> Job:
    """Return a job of one worker for this process, on a GPU where there is one and members would be on it."""
    on_gpu = uses_gpus(member, ensemble.devices) and torch.cuda.is_available()
    alone = dataclasses.replace(member, workers=1)
    where: dict[str, Any] = {"rendezvous": None, "interface": None, "feeder": None}
    where["device"] = "cuda:0" if on_gpu else "cpu"
    return Job(run_dir=directory, identity=alone, attempt=0, rank=0, **where, **request)


def _event(job: Job, type: str, **fields: Any) -> dict[str, Any]:
    return {"type": type, "member": PROFILE, "attempt": job.attempt, **fields}


def _emit_usage(job: Job, emit: Emit) -> None:
    used = make_usage(job.node, "profile", os.getpid(), time.process_time(), rank=job.rank)
    emit({**used, **describe_gpu_busy(job.gpu)})


class _Session:
    def __init__(self, job: Job, ensemble: Ensemble, comm: Communicator, gpu: GpuTimer | None, emit: Emit) -> None:
        assert job.profile is not None
        self._job, self._request, self._ensemble, self._comm, self._emit = job, job.profile, ensemble, comm, emit
        self._gpu, self._ready = gpu, _Ready()
        self._reported_at = 0.0

    def measure(self) -> None:
        """Measure one member of each signature."""
        note_process()
        gc.freeze()  # a collection would write to pages that all forked workers share
        by_signature: dict[str, list[Identity]] = {}
        sizes: dict[str, int] = {}
        for identity in self._request.members:
            self._report_member(identity)
            signature, sizes[signature] = signature_of(self._ensemble, identity)
            by_signature.setdefault(signature, []).append(identity)
        refused: list[TrainingError] = []
        # Memory that one leaves allocated is counted for the next: small ones first.
        for signature in sorted(by_signature, key=sizes.__getitem__):
            members = by_signature[signature]
            try:
                is_known = signature in self._request.known
                measured = None if is_known else self.measure_member(members[0]).figures
            except TrainingError as error:
                refused.append(error)
                if not self._request.is_all or self._comm.world > 1 or len(set(map(str, refused))) > 1:
                    raise
                continue
            if refused:
                raise refused[0]
            if self._job.rank == 0:
                names = [identity.member for identity in members]
                self._emit(_event(self._job, "profiled", of=names, shape=signature, measured=measured))
        if refused:  # every member is: none needs to be started
            raise _AllRefused(str(refused[0])) from refused[0]

    def _report_member(self, identity: Identity, every_s: float = 0.0) -> None:
        if self._job.rank == 0 and time.monotonic() >= self._reported_at + every_s:
            self._reported_at = time.monotonic()
            self._emit(_event(self._job, "profiling", of=identity.member))

    def measure_member(self, identity: Identity) -> MeasuredSteps:
        """Measure a few steps of a member; each figure is the maximum over the ranks.

        A framework's loop that counts `steps_per_epoch` batches does not reach its validation after a few steps,
        and fails for want of its metrics. It is tried again as a member with an epoch of so many steps.
        """
        watch = self._make_watch(identity)
        try:
            return self._measure_epoch(identity, watch)
        except Exception:
            if self._comm.world > 1 or not watch.is_complete:
                raise
        return self._measure_epoch(
            identity, self._make_watch(identity, watch.steps)
        )  # once the failed one's memory is free

    def _make_watch(self, identity: Identity, steps: int | None = None) -> Stopwatch:
        device, request = torch.device(self._job.device), self._request
        most = identity.epochs * steps_per_epoch(self._ensemble, identity)
        return Stopwatch(self._comm, device, request.steps_s, self._gpu, request.evaluations, steps, most)

    def _measure_epoch(self, identity: Identity, watch: Stopwatch) -> MeasuredSteps:
        self._report_member(identity)
        device = torch.device(self._job.device)
        # Evaluations within the epoch would come on top of what a step takes.
        own = dataclasses.replace(identity, workers=self._comm.world, validate_every=0)
        job = dataclasses.replace(self._job, identity=own, profile=None)
        data = _MeasuredData(self._ensemble, own, None, device, self._comm)
        data.prepare(self._ready, watch)  # before its memory is measured
        release_memory()  # of the member before
        reset_peak_memory()
        if self._gpu is not None:
            self._gpu.begin()
        reporter = _Reporter(job, lambda: self._report_member(identity, HEARTBEAT_S))
        sizes = (0, 0, 0)
        with process_settings(identity.threads, device):
            seed_everything(identity.seed, device)
            checkpointer = _NoCheckpoints(job, self._ensemble)
            state = TrainState(job, self._ensemble, self._comm, reporter, Inbox(), data, checkpointer)
            member = TrainContext(state)
            state.steps_per_epoch = member.steps_per_epoch = watch.fixed_steps or state.steps_per_epoch

            def leave() -> None:
                nonlocal sizes
                sizes = _assemble_checkpoint(member)
                raise _Done

            state.on_trained, state.ends_at_nan = leave, False  # such a step takes as long as any other
            if has_own_loop(self._ensemble.recipe):  # its evaluation is not ours to cut to one batch
                data.on_evaluated = leave
            try:
                with contextlib.suppress(_Done):
                    run_training_loop(self._ensemble.recipe, member)
                predictions_bytes = state.predictions_bytes
            finally:
                member.close()
        figures: dict[str, Any] = watch.figures() | {"prepare_s": self._ready.prepare_s}
        # The prepared batches are the session's; the one in use is the member's.
        figures["memory_gb"] = max(0.0, peak_memory_gb() - self._ready.nbytes / 2**30)
        figures |= self._gpu.figures() if self._gpu is not None else {}
        shares = gather_json(self._comm, figures)
        common = set(figures).intersection(*shares)  # the load of a GPU may be known on some ranks only
        highest = {name: max(share[name] for share in shares) for name in common}
        # Of the stream: a batch may have fewer samples, those of weight above 0.
        of_stream = watch.samples if identity.weights is None else min(identity.batch_size, self._ensemble.samples)
        figures = highest | {"samples_per_s": of_stream / highest["step_s"]}
        return MeasuredSteps(figures, *sizes, predictions_bytes, watch.evaluation(), reporter.remarks)


def _assemble_checkpoint(member: TrainContext) -> tuple[int, int, int]:
    """Allocate, and free, what a checkpoint takes: the model's parameters, those that are trained, its bytes."""
    optimization, packed_bytes = member._state.optimization, 0
    if member.identity.keep == "best":
        optimization.kept.keep_best()
    parts = optimization.state_dict()
    if member.rank == 0:
        packed = pack(member.identity, {}, 0, Position(), parts)
        packed_bytes = sum(tensor.nbytes for tensor in find_tensors(packed))
        rehearse_checkpoint(packed)
    sizes = {name: parameter.numel() for name, parameter in optimization.model.named_parameters()}
    is_trained = optimization.structure["requires_grad"]  # as it was built: an evaluation may freeze all of it
    return sum(sizes.values()), sum(size for name, size in sizes.items() if is_trained.get(name)), packed_bytes


class _Reporter(EventReporter):
    """Keeps remarks; progress only signals that the session is alive; lines go to the session's log."""

    def __init__(self, job: Job, heartbeat: Callable[[], None]) -> None:
        super().__init__(job, lambda event: None, CpuClock())
        self._log = RunDir(job.run_dir).log(PROFILE)
        self._heartbeat, self.remarks = heartbeat, list[str]()

    def event(self, type: str, **fields: Any) -> None:
        self.remarks += [fields["text"]] if type == "remark" else []

    def progress(self, fields: Callable[[], Mapping[str, Any]]) -> bool:
        self._heartbeat()
        return False

    def log(self, text: str, *, any_rank: bool = False) -> None:
        if self._job.rank == 0:
            append_log(self._log, f"attempt {self._job.attempt} rank 0: {text.rstrip()}")


class _NoCheckpoints(Checkpointer):
    """A member that is measured begins anew, with weights of its own."""

    def load_initial_weights(self) -> None: ...

    def load_inherited(self) -> None: ...

    def save(self, first_epoch: int, position: Position, parts: Mapping[str, Any]) -> dict[str, str]:
        """See `Checkpointer`; `checkpoint_minutes=` may be short."""
        return {"path": "", "digest": "", "weights_sha256": ""}


class _Ready:
    """What is prepared for members that read the same: batches, with CPU-seconds for a sample, and splits."""

    batches: tuple[Batch, ...] = ()
    prepare_s = 0.0
    key = ""

    def __init__(self) -> None:
        self.sets: dict[str, tuple[Any, StreamedSet]] = {}  # with its pipeline

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for batch in self.batches for tensor in find_tensors(batch))


class _MeasuredData(Data):
    """Repeats a few prepared batches, as many as the stopwatch wants.

    Attributes:
        on_evaluated: called when the steps are measured, and a batch of a split is, where there is one.
    """

    on_evaluated: Callable[[], None] = staticmethod(lambda: None)

    def prepare(self, ready: _Ready, watch: Stopwatch) -> None:
        """Prepare training batches, unless they are there."""
        own, comm, declared = self._identity, self._comm, self._ensemble.train
        self._ready, self._watch = ready, watch
        key = json.dumps([own.params if callable(declared) else None, own.batch_size, own.weights])
        if ready.key == key:
            return
        loader = self.pipeline("train").loader(own.batch_size, 1, comm.rank, comm.world, weights=self._weights)
        batches, cpu_s, samples = list[Any](), 0.0, 0
        with contextlib.closing(loader):
            for batch in itertools.islice(loader, READY):
                stats = loader.stats()
                ready.prepare_s = (stats["prepare_cpu_s"] - cpu_s) / max(1, stats["samples"] - samples)
                cpu_s, samples = stats["prepare_cpu_s"], stats["samples"]
                batches.append(batch.clone())
        most = max(batch.global_size for batch in batches)
        ready.key, ready.batches = key, tuple(batch for batch in batches if batch.global_size == most)

    def start(self, *args: Any) -> None: ...  # the batches are there

    def open(self, epoch: int, step: int) -> None: ...

    def epoch(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield the batches of the only epoch; what `collate` takes is part of a step."""
        return self._on_device(self._apply_collate(self._time_steps(), collate))

    def _time_steps(self) -> Iterator[Batch]:
        batches = itertools.cycle(self._ready.batches)
        while self._watch.has_next():
            batch = next(batches).clone()  # members may write into it
            self._watch.start(batch)
            yield batch
            self._watch.stop()
        if self._ensemble.valid is None:
            self.on_evaluated()

    def count_batches(self, own_epoch: int, steps: int) -> int:
        """All: none of them is empty."""
        return steps

    def reread(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield a few batches of the epoch."""
        batches = (batch.clone() for batch in self._ready.batches)
        return self._on_device(self._apply_collate(batches, collate))

    def split(self, name: str, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield one batch, as often as the stopwatch wants; once suffices to measure memory."""
        for batch in itertools.islice(super().split(name, collate), 1):
            for _ in self._watch.time_evaluations():
                yield batch.clone()  # members may write into it
        if self._watch.is_complete:
            self.on_evaluated()

    def _resident(self, split: str) -> StreamedSet:
        pipeline, sets = self.pipeline(split), self._ready.sets
        if sets.get(split, (None,))[0] is not pipeline:
            sets[split] = pipeline, StreamedSet(pipeline.without_randomness())
        return sets[split][1]
