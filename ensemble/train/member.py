"""`Training`: what a training loop asks of the member that it trains.

The built-in loop for a `Recipe` (`ensemble.train.recipe`) and a user's own `train(member)` are both written on
it. All ranks of a member run the same loop; what they must do together happens inside the calls:

    model, optimizer = member.prepare(model, optimizer)
    for epoch in member.epochs():               # a resume begins where the checkpoint was written
        for batch in member.batches():          # this rank's part of each global batch
            with member.autocast():
                losses = loss(model, batch)     # one per sample, unreduced
            member.backward(losses)
            member.step()
        member.report(**member.evaluate(measure))

Checkpoints, events, a pruner's verdict and requests to stop are dealt with between steps and between epochs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ensemble.comm import Communicator
from ensemble.spec import Ensemble
from ensemble.store import RunDir, save_checkpoint, save_predictions, weights_sha256
from ensemble.train import checkpoint
from ensemble.train.checkpoint import Position
from ensemble.train.data import Data, steps_per_epoch
from ensemble.train.determinism import seed_everything, step_seed
from ensemble.train.errors import Diverged, Ended, TrainingError
from ensemble.train.gather import Means, gather_json, gather_rows
from ensemble.train.job import Command, Inbox, Job
from ensemble.train.optimization import Optimization
from ensemble.train.pace import Pace
from ensemble.train.precision import MixedPrecision
from ensemble.train.reporter import Reporter, finite

if TYPE_CHECKING:
    from pipelines import Batch

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Measure = Callable[[nn.Module, "Batch"], Mapping[str, Any]]


class Training:
    """One member in training, as one of its ranks sees it; a train function gets it as its only argument.

    Attributes:
        identity: hyperparameters, seed, width, epochs and all else that makes it this member.
        params: its hyperparameters.
        device: where its model and batches are.
        rank, world: this worker, and how many there are.
        steps_per_epoch, steps: global batches of an epoch, and of all epochs.
        splits: the resident splits that there are, of "valid" and "test".
    """

    def __init__(self, job: Job, ensemble: Ensemble, comm: Communicator, reporter: Reporter, inbox: Inbox) -> None:
        self.identity = job.identity
        self.params: dict[str, Any] = dict(job.identity.params)
        self.device = torch.device(job.device)
        self.rank, self.world = comm.rank, comm.world
        self.steps_per_epoch = steps_per_epoch(ensemble, job.identity)
        self.steps = self.steps_per_epoch * job.identity.epochs
        self.splits = [name for name in ("valid", "test") if getattr(ensemble, name) is not None]
        self._job, self._ensemble, self._comm = job, ensemble, comm
        self._reporter, self._inbox = reporter, inbox
        self._files = RunDir(job.run_dir)
        self._data = Data(ensemble, job.identity, job.feeder, self.device, comm)
        self._precision = MixedPrecision(job.identity.precision, self.device)
        self._pace = Pace()
        self._at = Position()
        self._optimization: Optimization | None = None
        self._batch: Batch | None = None
        self._sent = self._begun = self._stop_at_epoch_end = False
        self._saved: tuple[int, int] | None = None

    def prepare(
        self, model: ModelT, optimizer: OptimizerT, schedule: Any = None, clip_norm: float | None = None
    ) -> tuple[ModelT, OptimizerT]:
        """Take charge of the model and its optimizer; they come back as the last checkpoint left them.

        Args:
            model: moved to `device`; where there are several workers, the weights of rank 0 are everybody's.
            optimizer: over parameters of the model.
            schedule: a torch LRScheduler, stepped after each step.
            clip_norm: largest L2 norm of a step's gradient, taken over the global batch.

        Returns:
            The same model and optimizer.
        """
        if self._optimization is not None:
            raise TrainingError("member.prepare() is called once, with the one model and optimizer of the member")
        self._optimization = Optimization(
            model, optimizer, schedule, clip_norm, self._precision, self._comm, self.device
        )
        path = self._files.checkpoint(self.identity.member)
        state = checkpoint.read(path, self.identity)
        if state is not None:
            self._optimization.load_state_dict(state)
            self._data.first_epoch = state["first_epoch"]
            self._at = Position(**state["position"])
            self._saved = (self._at.epoch, self._at.step)
        where = self.where()
        if any(peer != where for peer in gather_json(self._comm, where)):
            raise RuntimeError(
                f"the workers do not see the same {path}: the run directory must be shared by all nodes"
            )
        return model, optimizer

    # --- the loop ---------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """The member's own epochs, 0-based, from where it is to its last."""
        self._prepared()
        self._data.open(self._at.epoch, self._at.step)
        while self._at.epoch < self.identity.epochs:
            self._pace.begin_epoch(self._data.stats())
            yield self._at.epoch
            self._end_epoch()

    def batches(self, split: str = "train") -> Iterator[Batch]:
        """This rank's part of each batch: of the epoch in training, or of a resident split ("valid", "test").

        A training batch wants one `backward` and one `step`. Global batches of which this rank has no sample are
        dealt with here and not seen by the loop. Every batch is valid until the next one is asked for.
        """
        return self._train_batches() if split == "train" else self._data.split(split)

    def _train_batches(self) -> Iterator[Batch]:
        optimization = self._prepared()
        for batch in self._data.epoch(self._at.epoch):
            self._begin()
            step = self._at.step
            seed_everything(step_seed(self.identity.seed, self.rank, self._at.epoch * self.steps_per_epoch + step))
            with self._pace.waiting():
                optimization.share_buffers()
            self._batch = batch
            if len(batch["index"]):
                yield batch
            else:
                self._backward(None)
                self.step()
            if self._at.step != step + 1:
                raise TrainingError("member.step() must be called exactly once for each batch of member.batches()")

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """A context for forward passes, in the member's precision."""
        return self._precision.autocast()

    def backward(self, losses: Tensor) -> None:
        """Compute this rank's part of the gradient of the global batch's mean loss.

        Args:
            losses: [b], one for each sample of the batch, unreduced.
        """
        self._backward(losses)

    def _backward(self, losses: Tensor | None) -> None:
        if self._batch is None or self._sent:
            raise TrainingError(
                "member.backward() is called once for each batch of member.batches(): add up losses"
            )
        self._sent = True
        self._prepared().begin(self._inbox.poll() if self.rank == 0 else None, losses, self._batch)

    def step(self) -> None:
        """Exchange the gradients, step the optimizer and the schedule, and do what was asked meanwhile."""
        if self._batch is None or not self._sent:
            raise TrainingError("member.step() comes after member.backward(losses), once for each batch")
        batch, self._batch, self._sent = self._batch, None, False
        at = self._at
        try:
            done = self._prepared().end(batch, self._pace.waiting())
        except Diverged as error:
            raise Diverged(f"{error}, epoch {at.epoch}, step {at.step}") from None
        at.step += 1
        if done.skipped:
            at.skipped_steps += 1
        else:
            at.loss_sum += done.loss_sum
            at.samples += batch.global_size
        self._pace.add(batch.global_size)
        self._reporter.progress(self._progress)
        if done.command == "stop" and at.step == self.steps_per_epoch:
            self._stop_at_epoch_end = True  # an epoch that is trained is worth its evaluation
        elif done.command is not None:
            self._obey(done.command)

    # --- results ----------------------------------------------------------------------------------------

    def report(self, **metrics: float) -> None:
        """Say how good the member is after this epoch; the values of rank 0 are recorded."""
        self._at.metrics = {name: float(value) for name, value in metrics.items()}

    def evaluate(self, measure: Measure, split: str = "valid") -> dict[str, float]:
        """Means over all samples of a split, over all ranks; empty where the ensemble has no such split.

        Args:
            measure: `measure(model, batch) -> dict` of tensors [b] or scalars, called without gradients, in the
                member's precision, the model in evaluation mode.
        """
        if split not in self.splits:
            return {}
        means = Means()
        with self.evaluating() as model:
            for batch in self.batches(split):
                with self.autocast():
                    values = measure(model, batch)
                means.add(values, len(batch["index"]))
        return means.over_all(self._comm)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The model in evaluation mode, without gradients, its buffers alike on all ranks."""
        optimization = self._prepared()
        optimization.share_buffers()
        model = optimization.model
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                yield model
        finally:
            model.train(training)

    def predictions(
        self, split: str, probabilities: Tensor | None, index: Tensor | None, target: Tensor | None = None
    ) -> None:
        """Save what the member says about a split; all ranks call it, each with its own rows.

        Args:
            split: "valid" or "test".
            probabilities: [m, C]; None from a rank without rows.
            index: int64 [m], the samples' `index`.
            target: int64 [m]; unless given, the Recipe's target field, or "label", where it holds classes.
        """
        rows = [gather_rows(self._comm, part) for part in (probabilities, index, target)]
        if self.rank == 0 and rows[0] is not None and rows[1] is not None:
            if rows[2] is None:
                rows[2] = self._data.targets(split, getattr(self._ensemble.recipe, "target", "label"), rows[1])
            path = self._files.predictions(self.identity.member, split)
            save_predictions(path, rows[0].float(), rows[1], rows[2])

    def log(self, text: str) -> None:
        """Write a line into the member's log (rank 0 does)."""
        self._reporter.log(text)

    # --- between steps and epochs -----------------------------------------------------------------------

    def _prepared(self) -> Optimization:
        if self._optimization is None:
            raise TrainingError("call member.prepare(model, optimizer) before anything else")
        return self._optimization

    def _begin(self) -> None:
        """Before the first step: what came before was start-up."""
        if self._begun:
            return
        self._begun = True
        startup_cpu_s = self._reporter.training_begins(self._data.stats()["prepare_cpu_s"])
        self._reporter.event(
            "started",
            pid=os.getpid(),
            **self.where(),
            startup_cpu_s=startup_cpu_s,
            first_epoch=self._data.first_epoch,
        )

    def _progress(self) -> dict[str, Any]:
        at, rate = self._at, self._pace.samples_per_s()
        return {"epoch": at.epoch, "step": at.step, "steps": self.steps_per_epoch, "samples_per_s": rate}

    def _obey(self, command: Command) -> None:
        if command == "stop":
            self._save()
            raise Ended("stopped")
        if command == "prune":
            raise Ended("pruned")
        if command == "cancel":
            raise Ended("cancelled")

    def _end_epoch(self) -> None:
        at, optimization = self._at, self._prepared()
        if at.step != self.steps_per_epoch:
            raise TrainingError(
                f"epoch {at.epoch} was left after {at.step} of {self.steps_per_epoch} steps: "
                "read member.batches() to its end"
            )
        if at.metrics.get("loss") != at.metrics.get("loss"):
            raise Diverged(f"the validation loss is NaN after epoch {at.epoch}, learning rate {optimization.lr:g}")
        stats = self._data.stats()
        self._reporter.event(
            "epoch",
            **self.where(),
            metrics=finite(at.metrics),
            train_loss=at.loss_sum / at.samples if at.samples else None,
            lr=optimization.lr,
            samples=at.samples,
            skipped_steps=at.skipped_steps,
            **self._pace.end_epoch(stats),
        )
        self._reporter.usage(stats["prepare_cpu_s"])
        verdict = self._verdict()
        at.next_epoch()
        due = at.epoch == self.identity.epochs or at.epoch % self._ensemble.checkpoint_every == 0
        if due and verdict in (None, "continue"):
            self._save()
        if verdict is not None:
            self._obey(verdict)

    def _verdict(self) -> Command | None:
        """What rank 0 is told after an epoch; where a pruner decides, it waits for that."""
        verdict: Command | None = None
        if self._stop_at_epoch_end:
            verdict = "stop"
        elif self.rank == 0:
            verdict = self._inbox.wait() if self._job.gated else self._inbox.poll()
        agreed: Command | None = gather_json(self._comm, verdict)[0]
        return agreed

    def finish(self) -> None:
        """The loop has come to its end: close its last epoch where it left before `epochs` could, and save."""
        optimization = self._prepared()
        if self._at.step:
            self._end_epoch()
        self._begin()
        if self._saved != (self._at.epoch, self._at.step):
            self._save()
        digest = weights_sha256(optimization.model.state_dict()) if self.rank == 0 else ""
        metrics = finite(self._at.metrics)
        self._reporter.event("finished", epoch=self._at.epoch - 1, metrics=metrics, weights_sha256=digest)

    def where(self) -> dict[str, int]:
        """Own epoch and step in it."""
        return {"epoch": self._at.epoch, "step": self._at.step}

    def _save(self) -> None:
        """Write the member's whole state; rank 0 does, for all."""
        at = self._at
        self._saved = (at.epoch, at.step)
        if self.rank != 0:
            return
        parts = self._prepared().state_dict()
        path = self._files.checkpoint(self.identity.member)
        save_checkpoint(path, checkpoint.pack(self.identity, self._data.first_epoch or 0, at, parts))
        self._reporter.event(
            "checkpoint", **self.where(), path=str(path), weights_sha256=weights_sha256(parts["model"])
        )

    def close(self) -> None:
        """Leave the stream, and tell the CPU time used to the end."""
        self._data.close()
        self._reporter.usage(self._data.stats()["prepare_cpu_s"])
