"""A session that measures members: a few real steps of each shape, on the real device, before they are packed.

The members' own code runs, a Recipe in the built-in loop or a train function, on a `TrainContext` without effects:
no checkpoint, no predictions, no events but what was measured. The epoch ends after a few steps, the loop goes on
to its evaluation, which gets one batch, and where the next epoch would begin it is left, after a checkpoint that
is written nowhere. Batches lie ready: the samples are real, their preparation is no part of a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemble.comm import Communicator
from ensemble.meter import peak_memory_gb, release_memory, reset_peak_memory
from ensemble.spec import Ensemble, Identity, Recipe
from ensemble.spec.sample_weights import make_weight_function
from ensemble.store import rehearse_checkpoint
from ensemble.train import checkpoint
from ensemble.train import recipe as built_in
from ensemble.train.data import Data
from ensemble.train.gather import gather_json
from ensemble.train.job import PROFILE, Command, Diverged, Inbox, Job, LabelError, Outcome
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.member import TrainContext
from ensemble.train.model_signature import shape_of
from ensemble.train.optimization import Optimization, Stepped
from ensemble.train.reporter import Reporter
from ensemble.train.seeding import process_settings, seed_everything
from ensemble.train.stopwatch import Gpu, Stopwatch
from ensemble.train.worker import connect

if TYPE_CHECKING:
    from pipelines import Batch, Loader, Pipeline

READY = 2  # batches
HEARTBEAT_S = 1.0

Emit = Callable[[dict[str, Any]], None]


class _Done(BaseException):
    """Leaves a training loop when everything has been measured; no Exception, as `Ended`."""


def run(job: Job, ensemble: Ensemble, emit: Emit, inbox: Inbox, startup_cpu_s: float = 0.0) -> Outcome:
    """One rank of a session: measure what `job.profile` names, one shape after the other, small ones first.

    Rank 0 emits `profiling` (of: the member that comes now, and every second in between) and `profiled` (of: those
    of one shape; measured: the figures of a `Profile` for this number of workers, None where it was known). An
    error ends the session with a `failed` event. CPU time goes to the role "profile", that of the start included.
    """
    try:
        with contextlib.ExitStack() as leaving:
            leaving.callback(_usage, job, emit)
            device = torch.device(job.device)
            gpu = Gpu(device) if device.type == "cuda" else None
            leaving.enter_context(process_settings(job.identity.threads, device))
            communicator = connect(job, device)
            leaving.callback(communicator.close)
            _Session(job, ensemble, communicator, gpu, emit).measure()
        return "finished"
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        said = next(iter(str(error).splitlines()), "") or "no message"
        of_data = isinstance(error, LabelError)
        said = said if of_data else f"{type(error).__name__}: {said}"
        emit(_event(job, "failed", error=said, reason="spec" if of_data else "error"))
        return "failed"


def _event(job: Job, type: str, **fields: Any) -> dict[str, Any]:
    return {"type": type, "member": PROFILE, "attempt": job.attempt, **fields}


def _usage(job: Job, emit: Emit) -> None:
    who = {"node": job.node, "role": "profile", "member": None, "rank": job.rank, "pid": os.getpid()}
    emit({"type": "usage", **who, "cpu_s": time.process_time(), "origin": "measured"})


class _Session:
    """One rank of a session."""

    def __init__(self, job: Job, ensemble: Ensemble, comm: Communicator, gpu: Gpu | None, emit: Emit) -> None:
        assert job.profile is not None
        self._job, self._asked, self._ensemble, self._comm, self._emit = job, job.profile, ensemble, comm, emit
        self._gpu, self._ready = gpu, _Ready(ensemble, comm)
        self._said = 0.0

    def measure(self) -> None:
        """See `run`."""
        gc.freeze()  # collecting what was there before would write to pages that all forked workers share
        shapes: dict[str, list[Identity]] = {}
        sizes: dict[str, int] = {}
        for identity in self._asked.members:
            self._say(identity)
            shape, sizes[shape] = shape_of(self._ensemble, identity)
            shapes.setdefault(shape, []).append(identity)
        # What one leaves behind of its memory the next one seems to hold: small ones first.
        for shape in sorted(shapes, key=sizes.__getitem__):
            measured = None if shape in self._asked.known else self._measured(shapes[shape][0])
            of = [identity.member for identity in shapes[shape]]
            if self._job.rank == 0:
                self._emit(_event(self._job, "profiled", of=of, shape=shape, measured=measured))

    def _say(self, identity: Identity, every_s: float = 0.0) -> None:
        now = time.monotonic()
        if self._job.rank == 0 and now >= self._said + every_s:
            self._said = now
            self._emit(_event(self._job, "profiling", of=identity.member))

    def _measured(self, identity: Identity) -> dict[str, Any]:
        """What a few steps of a member show; of memory and of shares, the most of all ranks."""
        self._say(identity)
        device = torch.device(self._job.device)
        self._ready.load(identity)  # before its memory is looked at
        gc.collect()  # of the one before
        release_memory()
        reset_peak_memory()
        if self._gpu is not None:
            self._gpu.begin()
        watch = Stopwatch(self._comm, device, self._asked.steps_s, self._gpu)
        own = dataclasses.replace(identity, workers=self._comm.world)
        job = dataclasses.replace(self._job, identity=own, profile=None)
        with process_settings(identity.threads, device):
            seed_everything(identity.seed, device)
            alive = functools.partial(self._say, identity, HEARTBEAT_S)
            member = _Trial(job, self._ensemble, self._comm, self._ready, watch, alive)
            try:
                if isinstance(self._ensemble.recipe, Recipe):
                    built_in.train(self._ensemble.recipe, member)
                else:
                    self._ensemble.recipe(member)
            except _Done:
                pass
            finally:
                member.close()
        figures: dict[str, Any] = watch.figures() | {"prepare_s": self._ready.prepare_s}
        # The batches that lie ready are ours; the one in use is the member's.
        figures["memory_gb"] = max(0.0, peak_memory_gb() - self._ready.bytes / 2**30)
        figures |= self._gpu.figures() if self._gpu is not None else {}
        shares = gather_json(self._comm, figures)
        told = set(figures).intersection(*shares)  # a GPU's load may be told of some only
        most = {name: max(share[name] for share in shares) for name in told}
        return most | {"samples_per_s": watch.samples / most["step_s"]}


class _Ready:
    """Batches of this rank that were prepared before they are needed, the same for members that read the same."""

    def __init__(self, ensemble: Ensemble, comm: Communicator) -> None:
        self._ensemble, self._comm = ensemble, comm
        self._pipelines: tuple[str, Pipeline] | None = None
        self._kept: dict[str, tuple[Pipeline, str, list[Batch]]] = {}
        self.prepare_s = 0.0

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        batches = (batch for _, _, batches in self._kept.values() for batch in batches)
        return sum(tensor.nbytes for batch in batches for tensor in batch.values())

    def load(self, identity: Identity) -> None:
        """Prepare what a member reads."""
        self.batches("train", identity)
        if self._ensemble.valid is not None:
            self.batches("valid", identity)

    def train(self, identity: Identity) -> Pipeline:
        """A member's training pipeline."""
        params = json.dumps(identity.params, sort_keys=True) if callable(self._ensemble.train) else ""
        if self._pipelines is None or self._pipelines[0] != params:
            self._pipelines = params, self._ensemble.pipeline(identity.params)
        return self._pipelines[1]

    def batches(self, split: str, identity: Identity) -> list[Batch]:
        """A few training batches of whole size, or one of another split; of the latter each rank has its own."""
        training = split == "train"
        pipeline = self.train(identity) if training else getattr(self._ensemble, split)
        weights = identity.weights if training else None
        read = json.dumps([identity.batch_size, weights])
        known = self._kept.get(split)
        if known is None or known[0] is not pipeline or known[1] != read:
            rank, world = self._comm.rank, self._comm.world
            size = identity.batch_size * (1 if training else world)
            loader = pipeline.loader(size, 1, rank, world, weights=make_weight_function(weights, len(pipeline)))
            made = list(itertools.islice(self._timed(loader), READY) if training else itertools.islice(loader, 1))
            loader.close()
            whole = [batch for batch in made if batch.global_size == made[0].global_size]
            known = self._kept[split] = pipeline, read, whole
        return known[2]

    def _timed(self, loader: Loader) -> Iterator[Batch]:
        """The batches of a loader; CPU-seconds that a sample of the last one took, the first ones warm up."""
        cpu_s, samples = 0.0, 0
        for batch in loader:
            stats = loader.stats()
            new = max(1, stats["samples"] - samples)
            self.prepare_s = (stats["prepare_cpu_s"] - cpu_s) / new
            cpu_s, samples = stats["prepare_cpu_s"], stats["samples"]
            yield batch


class _Data(Data):
    """The same few batches again and again, as many as the stopwatch wants."""

    def __init__(
        self,
        ensemble: Ensemble,
        identity: Identity,
        device: torch.device,
        comm: Communicator,
        ready: _Ready,
        watch: Stopwatch,
    ) -> None:
        super().__init__(ensemble, identity, None, device, comm)
        self._ready, self._watch = ready, watch

    def epoch(self, own_epoch: int) -> Iterator[Batch]:
        """The only epoch there is."""
        return self._on_device(self._timed())

    def _timed(self) -> Iterator[Batch]:
        ready = itertools.cycle(self._ready.batches("train", self._identity))
        while self._watch.more():
            batch = next(ready).clone()  # members may write into it
            self._watch.start(batch)
            yield batch
            self._watch.stop()

    def split(self, name: str) -> Iterator[Batch]:
        """One batch is enough to see what memory it takes."""
        self.pipeline(name)
        return self._on_device(batch.clone() for batch in self._ready.batches(name, self._identity))

    @functools.cached_property
    def _train(self) -> Pipeline:
        return self._ready.train(self._identity)


class _Life(Lifecycle):
    """Goes nowhere: tells nothing, is asked nothing, saves nothing."""

    heartbeat: Callable[[], None]

    def resume(self, optimization: Optimization) -> None:
        """There is no checkpoint."""
        optimization.start(None)

    def begin(self) -> None:
        """Nobody hears of it."""

    def asked(self) -> Command | None:
        """Nothing."""
        return None

    def rehearse_save(self, optimization: Optimization) -> None:
        """A checkpoint takes memory: copies of all that it holds."""
        parts = optimization.state_dict()
        if self._comm.rank == 0:
            rehearse_checkpoint(checkpoint.pack(self._identity, {}, 0, self.at, parts))

    def stepped(self, step: Stepped, samples: int, optimization: Optimization) -> None:
        """Count it."""
        self.at.step += 1
        self.alive()

    def alive(self) -> None:
        """Say that the session lives."""
        self.heartbeat()

    def close(self) -> None:
        """Nothing is to be told."""
        self._data.close()


class _Trial(TrainContext):
    """A member on trial: one epoch of a few steps, and no effects."""

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        ready: _Ready,
        watch: Stopwatch,
        alive: Callable[[], None],
    ) -> None:
        nobody = dataclasses.replace(job, identity=dataclasses.replace(job.identity, member=PROFILE))
        reporter, inbox = Reporter(nobody, lambda event: None), Inbox()
        super().__init__(job, ensemble, comm, reporter, inbox)
        self._data = _Data(ensemble, job.identity, self.device, comm, ready, watch)
        self._life: _Life = _Life(job, ensemble, comm, self._data, reporter, inbox, self.steps_per_epoch)
        self._life.heartbeat = alive

    def epochs(self) -> Iterator[int]:
        """The first; where the second would begin, all is measured but what a checkpoint takes."""
        optimization = self._prepared()
        yield 0
        self._life.rehearse_save(optimization)
        raise _Done

    def step(self) -> None:
        """See `TrainContext`; a loss that is not finite takes as long as any other."""
        try:
            super().step()
        except Diverged:
            self._life.at.step += 1

    def predictions(
        self, split: str, probabilities: Tensor | None, index: Tensor | None, target: Tensor | None = None
    ) -> None:
        """Nothing is saved."""
