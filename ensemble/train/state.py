"""`TrainState`: what one rank of a member trains now. Its evaluator, its life cycle and its steps share it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ensemble.comm import Communicator
from ensemble.spec import PREDICTED_SPLITS, Ensemble, Recipe
from ensemble.spec.recipe import has_own_loop
from ensemble.store.member import LEARNS_NOTHING
from ensemble.train.accumulation import MicroBatches
from ensemble.train.call import Call, Observation
from ensemble.train.callbacks import Callbacks
from ensemble.train.checkpoint import Checkpointer, Position, Selection
from ensemble.train.data import Data, steps_per_epoch
from ensemble.train.gather import find_first
from ensemble.train.gpu_busy import open_gpu_busy
from ensemble.train.job import Command, Inbox, Job, TrainingError
from ensemble.train.optimization import Optimization
from ensemble.train.own_states import OwnStates
from ensemble.train.precision import MixedPrecision
from ensemble.train.reporter import EventReporter
from ensemble.train.throughput import Throughput


def _refuse_unprepared() -> Optimization:
    raise TrainingError("call member.prepare(model, optimizer) before anything else")


class TrainState:
    """What one rank of a member trains now.

    Attributes:
        splits: on which members are evaluated, those that the ensemble has.
        recipe: the declared one; of a train function one that declares nothing else.
        collate: `f(batch)` or `f(batch, rng)`, applied to each batch; None: nothing is.
        prepared: model and optimizer; None before `TrainContext.prepare`.
        micro_batches: of the training step in progress; None between steps.
        steps_elsewhere: whether a loop that is not ours computes the steps, so that their losses are not known.
        reports_later: whether its loop evaluates in some epochs only, and at the end if in none.
        saved_at: epoch and step of the checkpoint that has the weights that count; None where none has.
        gpu_busy: measures how long its GPU is busy; None on the CPU.
        catches_up: whether a loop makes a pass that was trained before a resume, and others follow: of a split it
            gets the first batch only.
        call: how a framework's model is called; None: as the Recipe says.
        seen: what the first batch that was evaluated or predicted shows; None before it.
        prepare_nothing: called where a model is needed before `TrainContext.prepare`.
        predictions_bytes: what its predictions of all splits would take as a whole; None: not known.
        forward: calls the model on a training batch, as far as that is known; for averaged batch normalization.
        on_trained: called where the steps of an epoch are done, before it is evaluated for good.
        ends_at_nan: whether a loss that is not finite ends it; False while it is measured.
        not_finite: which samples made the last validation loss NaN; "" where it was not, or none did.
    """

    callbacks: Callbacks

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        reporter: EventReporter,
        inbox: Inbox,
        data: Data | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.job, self.identity, self.ensemble, self.comm, self.inbox = job, job.identity, ensemble, comm, inbox
        self.device = torch.device(job.device)
        self.reporter = reporter
        self.data = data or Data(ensemble, job.identity, job.feeder, self.device, comm, job.local_world)
        self.data.on_finding = functools.partial(reporter.event, "sample_difference")
        self.checkpointer = checkpointer or Checkpointer(job, ensemble)
        self.steps_per_epoch = steps_per_epoch(ensemble, job.identity)
        self.splits = [name for name in PREDICTED_SPLITS if getattr(ensemble, name) is not None]
        declared: Any = ensemble.recipe
        recipe = declared if isinstance(declared, Recipe) else Recipe(model=declared, train=declared)
        self.recipe, self.remarked = recipe, set[str]()
        self.precision = MixedPrecision(job.identity.precision, self.device, job.identity.loss_scale)
        self.call: Call | None = None
        self.seen: Observation | None = None
        self.target: str = recipe.target
        self.is_own_loop = has_own_loop(recipe)
        self.collate: Any = recipe.collate
        self.prepared: Optimization | None = None
        self.own, self.steps_elsewhere = OwnStates(self.name_parts), ensemble.train is None
        self.at, self.selection, self.throughput = Position(), Selection(), Throughput()
        self.micro_batches: MicroBatches | None = None
        self.saved_at: tuple[int, int] | None = None
        self.gpu_busy = open_gpu_busy(self.device)
        self.reports_later = self.catches_up = False
        self.predictions_bytes: int | None = None
        self.forward: Callable[[Any, Any], Any] | None = None
        self.on_trained: Callable[[], None] = lambda: None
        self.prepare_nothing: Callable[[], Optimization] = _refuse_unprepared
        self.ends_at_nan, self.not_finite = True, ""
        self._chance: str | None = None  # what its evaluations were no better than; "" once one that counts was

    def open(self) -> None:
        """Prepare the other splits, then read the stream, unless no epoch is left to be trained."""
        self.data.start(self.job, self.inbox, self.reporter.event)
        if not self.is_over:
            self.data.open(self.at.epoch, self.at.step)

    @property
    def can_predict(self) -> bool:
        """Whether it is declared how the model predicts."""
        return bool(self.recipe.predict or self.recipe.loss or self.call)

    def agree(self) -> None:
        """Let all ranks have the observation of the first one that has made one; all call it together."""
        record = find_first(self.comm, None if self.seen is None else self.seen.as_record())
        self.seen = None if record is None else Observation.from_checkpoint(record)

    @property
    def optimization(self) -> Optimization:
        return self.prepared or self.prepare_nothing()

    def name_parts(self) -> dict[str, Any]:
        """Return what objects in a state may hold of the member: optimizer, modules and parameters, by name."""
        if (own := self.prepared) is None:
            return {}
        parts: dict[str, Any] = {f"parameter {name}": weight for name, weight in own.model.named_parameters()}
        parts |= {f"module {path}": module for path, module in own.model.named_modules()}
        return {**parts, "optimizer": own.optimizer}

    @property
    def ends_early(self) -> bool:
        """Whether the member has stopped early: by a callback, or by its train function."""
        return self.at.stop_reason is not None

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
        rate = self.throughput.samples_per_s()
        return {**self.position, "steps": self.steps_per_epoch, "samples_per_s": rate}

    def explain_not_finite(self) -> str:
        """What made the validation loss NaN, or may have, to be put behind a message."""
        return self.not_finite or self.precision.suspect(self.optimization.lr)

    def report_progress(self) -> None:
        """Emit a progress event, at most once a second, and usage. A silent member would be taken to hang."""
        if self.reporter.progress(self.describe_progress):
            self.reporter.usage(self.data.stats()["prepare_cpu_s"])

    def remark(self, text: str) -> None:
        """Let the run's status and page show a line about the member, once."""
        if text not in self.remarked:
            self.remarked.add(text)
            self.reporter.log(text)
            self.reporter.event("remark", text=text)

    def note_chance(self, chance: str, *, is_warm: bool) -> None:
        """Note the guess that an evaluation was no better than. The last one counts; with keep="best" any.

        Args:
            chance: the guess; empty: the evaluation was better.
            is_warm: whether the learning rate has risen by then.
        """
        has_learnt = self.identity.keep == "best" and self._chance == ""
        if not chance or (is_warm and not has_learnt):
            self._chance = chance

    def remark_chance(self) -> None:
        """Remark at the member's end that it has learnt nothing."""
        if self._chance:
            self.remark(f"{LEARNS_NOTHING}: the loss on 'valid' is no better than that of {self._chance}")

    def poll_command(self) -> Command | None:
        """The next command to this rank, if any; only rank 0 gets commands."""
        return self.inbox.poll() if self.comm.rank == 0 else None
