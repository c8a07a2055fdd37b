"""`TrainState`: what one rank of a member trains now. Its evaluator, its life cycle and its steps share it."""

from __future__ import annotations

from typing import Any

import torch

from ensemble.comm import Communicator
from ensemble.spec import Ensemble, Recipe
from ensemble.spec.recipe import has_own_loop
from ensemble.train.accumulation import MicroBatches
from ensemble.train.checkpoint import Position
from ensemble.train.effects import Effects
from ensemble.train.gpu_busy import open_gpu_busy
from ensemble.train.job import Command, Inbox, Job, TrainingError
from ensemble.train.observer import Observer
from ensemble.train.optimization import Optimization
from ensemble.train.own_states import OwnStates
from ensemble.train.precision import MixedPrecision
from ensemble.train.selection import Selection
from ensemble.train.throughput import Throughput


class TrainState:
    """What one rank of a member trains now.

    Attributes:
        identity: of the member; `job` and `ensemble` say the rest.
        reporter, data: of its `effects`.
        device, precision: of its model and batches.
        recipe: the declared one; of a train function one that declares nothing else.
        observer: what is known of its model.
        target: the field of the target.
        is_own_loop: whether its training loop is the user's.
        collate: `f(batch)` or `f(batch, rng)`, applied to each batch; None: nothing is.
        prepared: model and optimizer; None before `TrainContext.prepare`.
        at: the position.
        selection: which evaluation was the best, and whether the member has stopped early.
        throughput: how fast it trains.
        micro_batches: of the training step in progress; None between steps.
        own: what else its checkpoints hold.
        steps_elsewhere: whether a loop that is not ours computes the steps, so that their losses are not known.
        reports_later: whether its loop evaluates in some epochs only, and at the end if in none.
        saved_at: epoch and step of the checkpoint that has the weights that count; None where none has.
        gpu_busy: measures how long its GPU is busy; None on the CPU.
        is_looked_at: whether `ensemble.train.first_look` has seen a batch.
        remarked: the remarks so far.
    """

    def __init__(self, job: Job, ensemble: Ensemble, comm: Communicator, effects: Effects, inbox: Inbox) -> None:
        self.job, self.identity, self.ensemble, self.comm, self.inbox = job, job.identity, ensemble, comm, inbox
        self.effects, self.reporter, self.data = effects, effects.reporter, effects.data
        self.steps_per_epoch = effects.steps_per_epoch
        declared: Any = ensemble.recipe
        recipe = declared if isinstance(declared, Recipe) else Recipe(model=declared, train=declared)
        self.recipe, self.remarked = recipe, set[str]()
        self.device = torch.device(job.device)
        self.precision = MixedPrecision(job.identity.precision, self.device, job.identity.loss_scale)
        self.observer = Observer(recipe, comm)
        self.target: str = recipe.target
        self.is_own_loop = has_own_loop(recipe)
        self.collate: Any = recipe.collate
        self.prepared: Optimization | None = None
        self.own, self.steps_elsewhere, self.reports_later = OwnStates(), False, False
        self.at, self.selection, self.throughput = Position(), Selection(), Throughput()
        self.micro_batches: MicroBatches | None = None
        self.saved_at: tuple[int, int] | None = None
        self.gpu_busy = open_gpu_busy(self.device)
        self.is_looked_at = False

    @property
    def optimization(self) -> Optimization:
        """Model and optimizer.

        Raises:
            TrainingError: they are not prepared yet.
        """
        if self.prepared is None:
            raise TrainingError("call member.prepare(model, optimizer) before anything else")
        return self.prepared

    @property
    def ends_early(self) -> bool:
        """Whether the member has stopped early: by its objective, or by its train function."""
        return self.selection.is_stopped or self.at.stop_reason is not None

    @property
    def is_over(self) -> bool:
        """Whether all epochs are done, or the member has stopped early."""
        return self.at.epoch >= self.identity.epochs or self.ends_early

    @property
    def position(self) -> dict[str, int]:
        """Own epoch and step in it, as fields of events."""
        return {"epoch": self.at.epoch, "step": self.at.step}

    @property
    def global_step(self) -> int:
        """Steps done since the member's first."""
        return self.at.epoch * self.steps_per_epoch + self.at.step

    def describe_progress(self) -> dict[str, Any]:
        """The fields of a `progress` event."""
        rate = self.throughput.samples_per_s()
        return {**self.position, "steps": self.steps_per_epoch, "samples_per_s": rate}

    def report_progress(self) -> None:
        """Emit a progress event, at most once a second. A silent member would be taken to hang."""
        self.reporter.progress(self.describe_progress)

    def remark(self, text: str) -> None:
        """Let the run's status and page show a line about the member, once."""
        if text not in self.remarked:
            self.remarked.add(text)
            self.reporter.log(text)
            self.reporter.event("remark", text=text)

    def poll_command(self) -> Command | None:
        """The next command to this rank, if any; only rank 0 gets commands."""
        return self.inbox.poll() if self.comm.rank == 0 else None
