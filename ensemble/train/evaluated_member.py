"""`EvaluatedMember`: what a `TrainContext` consists of, and the part of it that evaluates and predicts.

The weights that are evaluated, and those that predictions are saved of, are those that count for the member: see
`ensemble.train.best_weights`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ensemble.comm import Communicator
from ensemble.spec import Ensemble
from ensemble.spec.recipe import has_own_loop
from ensemble.spec.task import CLASSIFICATION, Task, as_task
from ensemble.train.accumulation import MicroBatches
from ensemble.train.averaging import LossProbe
from ensemble.train.call import Observation
from ensemble.train.effects import Effects
from ensemble.train.gather import Means, find_first, gather_rows
from ensemble.train.gpu_busy import open_gpu_busy
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import Inbox, Job, TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.observer import Observer
from ensemble.train.optimization import Optimization
from ensemble.train.precision import MixedPrecision
from ensemble.train.seeding import seed_everything, step_seed

if TYPE_CHECKING:
    from pipelines import Batch
    from pipelines.loader.collate import Collate

Measure = Callable[[nn.Module, "Batch"], Mapping[str, Any]]


class EvaluatedMember:
    """One member on one of its ranks, as far as it is evaluated; see `TrainContext`."""

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        effects: Effects,
        inbox: Inbox,
    ) -> None:
        self.identity = job.identity
        self.params: dict[str, Any] = Hyperparameters(job.identity.params)
        self._pipeline_reads_params = callable(ensemble.train)
        self.device = torch.device(job.device)
        self.rank, self.world = comm.rank, comm.world
        self.steps_per_epoch = effects.steps_per_epoch
        self.steps = self.steps_per_epoch * (job.identity.epochs_before or job.identity.epochs)
        self.splits = effects.splits
        self.objective = str(ensemble.objective)
        self.observer = Observer(ensemble.recipe, comm)
        self._loss = getattr(ensemble.recipe, "loss", None)
        self._target = getattr(ensemble.recipe, "target", "label")
        self._declared_task = as_task("Recipe.task", getattr(ensemble.recipe, "task", None))
        self._is_own_loop = has_own_loop(ensemble.recipe)
        self.comm, self._run_dir, self._inbox = comm, job.run_dir, inbox
        self._effects, self._data = effects, effects.data
        self._life = Lifecycle(job, ensemble, comm, effects, inbox, self.observer)
        self._data.on_resident_wait = self._life.report_progress
        self._precision = MixedPrecision(job.identity.precision, self.device, job.identity.loss_scale)
        self._gpu_busy = open_gpu_busy(self.device)
        self._optimization: Optimization | None = None
        self._validate: Callable[[], Mapping[str, float]] | None = None
        self._measure: Measure | None = None
        self._is_renewing = self._has_warned = self._has_left = False
        self._micro_batches: MicroBatches | None = None
        self._collate: Collate | None = getattr(ensemble.recipe, "collate", None)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for forward passes in the member's precision."""
        return self._precision.autocast()

    # --- evaluation -------------------------------------------------------------------------------------

    def report(self, **metrics: float) -> None:
        """Report the member's metrics after this epoch; the values of rank 0 are recorded.

        An epoch without a report keeps the metrics of the one before, and does not count for early stopping.

        Args:
            metrics: by name, means over the validation split; a NaN is recorded as unknown.
        """
        at = self._life.at
        at.metrics, at.is_reported = {name: float(value) for name, value in metrics.items()}, True

    def evaluate(self, measure: Measure, split: str = "valid") -> dict[str, float]:
        """The means of metrics over all samples of a split, of all ranks; empty where the ensemble has no such
        split.

        Args:
            measure: `measure(model, batch) -> dict` of tensors [b] or scalars, called without gradients, in the
                member's precision, the model in evaluation mode.
            split: "valid", "test" or "shifted".

        Returns:
            The mean of each metric, weighted by samples; the same on all ranks.
        """
        self.renew_statistics(measure)
        if split not in self.splits:
            return {}
        means = Means()
        with self.evaluating() as model:
            for batch in self._resident_batches(split):
                with self.autocast():
                    values = measure(model, batch)
                means.add(values, len(batch["index"]))
        return means.over_all(self.comm)

    def validate_with(self, measure: Measure) -> None:
        """Let the member be evaluated within epochs, each `validate_every` steps; a train function calls it once.

        Args:
            measure: see `evaluate`.
        """
        self._measure = measure
        self.validate_by(lambda: self.evaluate(measure))

    def validate_by(self, evaluate: Callable[[], Mapping[str, float]]) -> None:
        """`validate_with`, for a function that evaluates the member: all ranks call it together.

        Args:
            evaluate: `evaluate() -> dict` of metrics, such as one that calls `member.evaluate`.
        """
        self._validate = evaluate

    def renew_statistics(self, measure: Measure) -> None:
        """Compute the running statistics of batch normalization for averaged weights, by the epoch in progress.

        Nothing happens where they are those of the weights. `evaluate` calls it.

        Args:
            measure: see `evaluate`.
        """
        self._measure = measure
        if not self._prepared().kept.statistics_are_stale:
            return
        life = self._life
        seed_everything(step_seed(self.identity.seed, self.rank, life.global_step), self.device)

        def batches() -> Iterator[Batch]:
            for batch in self._data.reread(life.at.epoch, self._collate):
                if len(batch["index"]):
                    yield batch
                life.report_progress()

        self._is_renewing = True
        try:
            with self.evaluating() as model, self.autocast():
                update_bn(batches(), LossProbe(model, measure))
                self._prepared().kept.renew_statistics()
        finally:
            self._is_renewing = False

    def _renew_known_statistics(self) -> None:
        """`renew_statistics` for a train function that has not done it: by the last `measure`, or by the call of
        the model that was observed. Where neither is known, the function may do it itself; the log says so.
        """
        seen = self.observer.seen
        call = None if seen is None else seen.call
        if self._is_renewing or not self._prepared().kept.statistics_are_stale:
            return
        if self._measure is not None:
            self.renew_statistics(self._measure)
        elif call is not None:
            self.renew_statistics(lambda model, batch: {"outputs": call.call(model, batch)})
        elif not self._has_warned:
            self._has_warned = True
            self.log(
                "averaged weights need running statistics of their own, and it is not known how the model is "
                "called: they have the average of those in training, unless the train function computes them "
                "within member.evaluating(); use member.evaluate(measure), or call member.validate_with(measure) "
                "before the loop"
            )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, without gradients, its buffers equal on all ranks.

        Where weights are averaged, it has the averages within the block.
        """
        self._end_left_epoch()
        self._renew_known_statistics()
        optimization = self._prepared()
        model = optimization.model
        training = model.training
        with optimization.kept.applied():
            optimization.share_buffers()
            model.eval()
            try:
                with torch.no_grad():
                    yield model
            finally:
                model.train(training)

    def _resident_batches(self, split: str) -> Iterator[Batch]:
        for batch in self._data.split(split, self._collate):
            is_measured = self._micro_batches is None  # else it is within a training step, which is measured
            if is_measured:
                self._begin_gpu_work()
            yield batch
            if is_measured:
                self._end_gpu_work()
            self._life.report_progress()
            # A function of the user's may have changed what is to be saved, and several ranks must agree.
            if is_measured and self.world == 1 and not self._is_own_loop:
                self._life.interrupt_evaluation()

    # --- the end ----------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        self._effects.end_training(self._prepared())
        self._life.agree_on_stop()
        if self._life.at.step == self.steps_per_epoch and self._life.may_be_kept:
            self._renew_known_statistics()
        self._life.end_epoch(self._prepared())

    def _end_left_epoch(self) -> None:
        """Where the function has left `epochs()` early: end the epoch in progress, and the member with it.

        Raises:
            TrainingError: it has trained no epoch.
        """
        if not self._has_left:
            return
        self._has_left = False
        life, reason = self._life, "its train function left member.epochs()"
        if life.at.step:
            life.stop(reason)
            self._end_epoch()
            life.conclude(self._prepared())
        elif not life.is_over:
            optimization = self._prepared()
            if not life.at.epoch:
                raise TrainingError(
                    "the member has trained no epoch: its train function never entered member.epochs(), or left "
                    "it before the first step; train each epoch's member.batches(), with member.step() after each"
                )
            life.stop_between_epochs(reason, optimization)

    def use_weights(
        self, state_dict: Mapping[str, Tensor] | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Let weights of the function's own count for the member, such as those that a framework kept as its best.

        It comes after the end of `epochs()`, before predictions are made; all ranks call it. The model gets the
        weights. They are what is saved, combined and loaded, whatever `keep=` and `averaging=` say; a resume of a
        member that was interrupted later has them, too.

        Args:
            state_dict: of the model that was prepared. That of rank 0 counts; other ranks may give None.
            metrics: of these weights, the objective among them, which ranks the member; without them, those that
                were reported last count.

        Raises:
            TrainingError: the member is still in training, or the weights are not of its model.
        """
        self._end_left_epoch()
        optimization = self._prepared()
        if not self._life.is_over:
            raise TrainingError("member.use_weights() comes after the end of member.epochs()")
        self._life.use_weights(optimization, state_dict, metrics)

    # --- predictions ------------------------------------------------------------------------------------

    def predictions(
        self,
        split: str,
        values: Tensor | None,
        index: Tensor | None,
        target: Tensor | None = None,
        task: str | Task | None = None,
    ) -> None:
        """Save the member's predictions for a split; all ranks call it, each with its own rows.

        Args:
            split: one of `splits`.
            values: [m, ...], laid out by the task (`ensemble.spec.task`); None from a rank without rows.
            index: int64 [m], the samples' `index`.
            target: [m, ...]; None for the Recipe's target field, or "label", where it holds what the task needs.
            task: what is predicted; None for the Recipe's task, or that which was inferred, or a classification.

        Raises:
            TrainingError: the weights that are kept are not known yet; the shapes do not fit, or a sample is there
                twice.
        """
        self._end_left_epoch()
        if self._prepared().kept.is_in_use and not self._life.is_over:
            raise TrainingError(
                "member.predictions() comes after the end of member.epochs(): only then are the weights known "
                "that are kept"
            )
        declared = as_task("task", task) or self._declared_task or (self.observer.seen or Observation()).task
        record = find_first(self.comm, None if declared is None else declared.as_record())
        what = CLASSIFICATION if record is None else Task.from_record(record)
        rows = [gather_rows(self.comm, part) for part in (values, index, target)]
        if self.rank == 0 and rows[0] is not None and rows[1] is not None:
            digest = self._effects.save_predictions(split, what, rows[0], rows[1], rows[2], self._target)
            self._life.add_predictions(split, digest)

    # --- for both parts ---------------------------------------------------------------------------------

    def restore_network(self) -> nn.Module:
        """The network of the checkpoint to resume from, where `Recipe.model` raises.

        Raises:
            NotKept: there is none, or it is of other code.
        """
        return self._life.restore_network()

    def log(self, text: str) -> None:
        """Write a line into the member's log (rank 0 does).

        Args:
            text: the line, without its end; several lines are allowed.
        """
        self._effects.reporter.log(text)

    @property
    def position(self) -> dict[str, int]:
        """Own epoch and step in it."""
        return self._life.position

    def _begin_gpu_work(self) -> None:
        if self._gpu_busy is not None:
            self._gpu_busy.begin()

    def _end_gpu_work(self) -> None:
        if self._gpu_busy is not None:
            self._gpu_busy.end()

    def _prepared(self) -> Optimization:
        if self._optimization is None:
            raise TrainingError("call member.prepare(model, optimizer) before anything else")
        return self._optimization
