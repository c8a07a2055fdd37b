"""Profiles members before they are packed: a few real steps of each signature, on the real device.

The members' own code runs, a Recipe in the built-in loop or a train function, on a `TrainContext` without effects:
no checkpoint, no predictions, no events but the measurements. The epoch ends after a few steps. The loop continues
with its evaluation, which gets one batch; where the next epoch would begin, a checkpoint is assembled but not
written, and the loop is left. The batches are real and prepared beforehand, so that preparation is not part of a
step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ensemble.comm import Communicator
from ensemble.meter import CpuClock, make_usage, peak_memory_gb, release_memory, reset_peak_memory
from ensemble.spec import Ensemble, Identity
from ensemble.spec.recipe import has_own_loop
from ensemble.store import RunDir, rehearse_checkpoint
from ensemble.train.checkpoint import Checkpointer, Position, pack
from ensemble.train.effects import Effects
from ensemble.train.forward_errors import describe_error
from ensemble.train.gather import gather_json
from ensemble.train.gpu_busy import describe_gpu_busy
from ensemble.train.job import PROFILE, Diverged, Inbox, Job, LabelError, Outcome, TrainingError
from ensemble.train.member import TrainContext
from ensemble.train.model_signature import signature_of
from ensemble.train.optimization import Optimization
from ensemble.train.own_parameters import note_process
from ensemble.train.profile_data import PreparedBatches, PreparedData
from ensemble.train.recipe import run_training_loop
from ensemble.train.reporter import Reporter, append_log
from ensemble.train.seeding import process_settings, seed_everything
from ensemble.train.stopwatch import GpuTimer, Stopwatch
from ensemble.train.worker import check_gpu, connect
from pipelines.loader.ragged import find_tensors

HEARTBEAT_S = 1.0

Emit = Callable[[dict[str, Any]], None]


class _AllRefused(TrainingError):
    """Every member of the run fails with this message."""


class _Done(BaseException):
    """Leaves a training loop when everything is measured; no Exception, for the reason of `StopTraining`."""


def run(job: Job, ensemble: Ensemble, emit: Emit, inbox: Inbox, clock: CpuClock | None = None) -> Outcome:
    """Run one rank of a session: measure the members of `job.profile`, small ones first.

    Rank 0 emits `profiling` (of: the member being measured), also every second as a heartbeat, and `profiled` (of:
    the members of one signature; measured: the figures of a `Profile` for this number of workers, None where they
    were known). An error ends the session with a `failed` event. All CPU time has the role "profile".
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
            TrialSession(job, ensemble, communicator, gpu, emit).measure()
        return "finished"
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = "spec" if isinstance(error, LabelError | _AllRefused) else "error"
        emit(_event(job, "failed", error=describe_error(error), reason=reason))
        return "failed"


def _event(job: Job, type: str, **fields: Any) -> dict[str, Any]:
    return {"type": type, "member": PROFILE, "attempt": job.attempt, **fields}


def _emit_usage(job: Job, emit: Emit) -> None:
    used = make_usage(job.node, "profile", os.getpid(), time.process_time(), rank=job.rank)
    emit({**used, **describe_gpu_busy(job.gpu)})


class TrialSession:
    """One rank of a session."""

    def __init__(self, job: Job, ensemble: Ensemble, comm: Communicator, gpu: GpuTimer | None, emit: Emit) -> None:
        assert job.profile is not None
        self._job, self._request, self._ensemble, self._comm, self._emit = job, job.profile, ensemble, comm, emit
        self._gpu, self._ready = gpu, PreparedBatches(ensemble, comm)
        self.shown: dict[str, tuple[Any, ...]] = {}  # member -> the last fields of a `MeasuredSteps`
        self._reported_at = 0.0
        self._steps = 0  # that were timed last, if these were all

    def measure(self) -> None:
        """See `run`."""
        note_process()
        gc.freeze()  # a collection would write to pages that all forked workers share
        shapes: dict[str, list[Identity]] = {}
        sizes: dict[str, int] = {}
        for identity in self._request.members:
            self._report_member(identity)
            shape, sizes[shape] = signature_of(self._ensemble, identity)
            shapes.setdefault(shape, []).append(identity)
        refused: list[TrainingError] = []
        # Memory that one leaves allocated is counted for the next: small ones first.
        for shape in sorted(shapes, key=sizes.__getitem__):
            try:
                measured = None if shape in self._request.known else self._measure_member(shapes[shape][0])
            except TrainingError as error:
                refused.append(error)
                if not self._request.is_all or self._comm.world > 1 or len(set(map(str, refused))) > 1:
                    raise
                continue
            if refused:
                raise refused[0]
            of = [identity.member for identity in shapes[shape]]
            if self._job.rank == 0:
                self._emit(_event(self._job, "profiled", of=of, shape=shape, measured=measured))
        if refused:  # every member is: none needs to be started
            raise _AllRefused(str(refused[0])) from refused[0]

    def _report_member(self, identity: Identity, every_s: float = 0.0) -> None:
        now = time.monotonic()
        if self._job.rank == 0 and now >= self._reported_at + every_s:
            self._reported_at = now
            self._emit(_event(self._job, "profiling", of=identity.member))

    def _measure_member(self, identity: Identity) -> dict[str, Any]:
        """Measure a few steps of a member; each figure is the maximum over the ranks.

        A framework's loop that counts `steps_per_epoch` batches does not reach its validation after a few steps,
        and fails for want of its metrics. It is tried again as a member with an epoch of so many steps.
        """
        try:
            return self._measure_epoch(identity)
        except Exception:
            if self._comm.world > 1 or not self._steps:
                raise
            return self._measure_epoch(identity, self._steps)

    def _measure_epoch(self, identity: Identity, steps: int | None = None) -> dict[str, Any]:
        """Measure a member.

        Args:
            steps: of the epoch; None: as many as are worth to be timed, of the many that the member has.
        """
        self._report_member(identity)
        device = torch.device(self._job.device)
        self._ready.load(identity)  # before its memory is measured
        gc.collect()  # garbage of the member before
        release_memory()
        reset_peak_memory()
        if self._gpu is not None:
            self._gpu.begin()
        watch = Stopwatch(self._comm, device, self._request.steps_s, self._gpu, self._request.evaluations, steps)
        self._steps = 0
        # Evaluations within the epoch would come on top of what a step takes.
        own = dataclasses.replace(identity, workers=self._comm.world, validate_every=0)
        job = dataclasses.replace(self._job, identity=own, profile=None)
        with process_settings(identity.threads, device):
            seed_everything(identity.seed, device)
            heartbeat = functools.partial(self._report_member, identity, HEARTBEAT_S)
            effects = _TrialEffects(job, self._ensemble, self._comm, self._ready, watch, heartbeat, steps)
            member = TrainContext(job, self._ensemble, self._comm, effects, Inbox())
            if has_own_loop(self._ensemble.recipe):  # its evaluation is not ours to cut to one batch
                effects.data.on_evaluated = lambda: effects.end_training(member._state.optimization)
            try:
                run_training_loop(self._ensemble.recipe, member)
            except _Done:
                pass
            finally:
                self._steps = watch.steps if watch.is_complete else 0
                sizes = *effects.sizes, effects.predictions_bytes
                self.shown[identity.member] = *sizes, watch.evaluation(), effects.remarks
                member.close()
        figures: dict[str, Any] = watch.figures() | {"prepare_s": self._ready.prepare_s}
        # The prepared batches are the session's; the one in use is the member's.
        figures["memory_gb"] = max(0.0, peak_memory_gb() - self._ready.bytes / 2**30)
        figures |= self._gpu.figures() if self._gpu is not None else {}
        shares = gather_json(self._comm, figures)
        known = set(figures).intersection(*shares)  # the load of a GPU may be known on some ranks only
        highest = {name: max(share[name] for share in shares) for name in known}
        # Of the stream: a batch may have fewer samples, those of weight above 0.
        of_stream = watch.samples if identity.weights is None else min(identity.batch_size, self._ensemble.samples)
        return highest | {"samples_per_s": of_stream / highest["step_s"]}


class _ProfileReporter(Reporter):
    """Keeps remarks; progress only signals that the session is alive; lines go to the session's log."""

    def __init__(self, job: Job, heartbeat: Callable[[], None], remarks: list[str]) -> None:
        self._log = RunDir(job.run_dir).log(PROFILE)
        self._job, self._heartbeat, self._remarks = job, heartbeat, remarks

    def event(self, type: str, **fields: Any) -> None:
        """Keep the text of a remark."""
        self._remarks += [fields["text"]] if type == "remark" else []

    def progress(self, fields: Callable[[], Mapping[str, Any]]) -> None:
        """Signal that the session is alive."""
        self._heartbeat()

    def log(self, text: str, *, any_rank: bool = False) -> None:
        """Append lines to the session's log; only rank 0 does."""
        if self._job.rank == 0:
            append_log(self._log, f"attempt {self._job.attempt} rank 0: {text.rstrip()}")


class _ProfileCheckpointer(Checkpointer):
    """Saving allocates the memory that a checkpoint takes."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.bytes = 0

    def save(self, first_epoch: int, position: Position, parts: Mapping[str, Any]) -> dict[str, str]:
        """Allocate, and free, copies of all tensors of a checkpoint."""
        packed = pack(self._identity, {}, first_epoch, position, parts)
        self.bytes = sum(tensor.nbytes for tensor in find_tensors(packed))
        rehearse_checkpoint(packed)
        return super().save(first_epoch, position, parts)


class _TrialEffects(Effects):
    """The effects of a member that is measured: it trains one epoch of a few steps, and leaves nothing behind.

    Args:
        steps: of its epoch; None: as many as it has.

    Attributes:
        sizes: parameters of its model, how many of them are trained, bytes of the tensors of its checkpoint; known
            after its epoch.
        remarks: of the member.
    """

    sizes = 0, 0, 0

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        ready: PreparedBatches,
        watch: Stopwatch,
        heartbeat: Callable[[], None],
        steps: int | None = None,
    ) -> None:
        self.data: PreparedData
        data = PreparedData(ensemble, job.identity, torch.device(job.device), comm, ready, watch)
        self.remarks = list[str]()
        reporter = _ProfileReporter(job, heartbeat, self.remarks)
        self._rehearsed = _ProfileCheckpointer(job.identity)
        super().__init__(job, ensemble, comm, reporter, data, self._rehearsed)
        self.steps_per_epoch = steps or self.steps_per_epoch

    def open(self, inbox: Inbox, at: Position | None) -> None:
        """Nothing: the batches are there."""

    def end_training(self, optimization: Optimization) -> None:
        """Assemble a checkpoint, and leave the loop."""
        if self._job.identity.keep == "best":
            optimization.kept.keep_best()
        parts = optimization.state_dict()
        if self._comm.rank == 0:
            self._rehearsed.save(0, Position(), parts)
        parameters = list(optimization.model.parameters())
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        self.sizes = sum(each.numel() for each in parameters), trained, self._rehearsed.bytes
        raise _Done

    def end_diverged(self, error: Diverged) -> None:
        """Nothing: a step with a loss that is not finite takes as long as any other."""

    def save_predictions(self, *predicted: Any, beside: str | None) -> str:
        """Nothing."""
        return ""
