"""`TrainContext`: the member that a training loop trains, as the loop sees it.

The built-in loop (`ensemble.train.recipe`) and a user's own `train(member)` are written on it. All ranks of a
member run the same loop; what they must do together happens inside the calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ensemble.comm.exchange_plan import ExchangeOptions
from ensemble.spec.callbacks import Loss
from ensemble.spec.recipe import list_member_options
from ensemble.spec.task import Task
from ensemble.store import PredictedRows
from ensemble.train.callbacks import Callbacks
from ensemble.train.compilation import compile_forward, release_caches
from ensemble.train.evaluator import Evaluator, Measure
from ensemble.train.footprint import measure_footprint
from ensemble.train.framework_member import FrameworkMember
from ensemble.train.gather import read_metric
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.lr_schedulers import check_schedule
from ensemble.train.optimization import OWN_STEPS, Optimization
from ensemble.train.outputs import UNDECLARED
from ensemble.train.own_tensors import own_state, refuse_shared
from ensemble.train.predictions import Predict, predict, predict_batch
from ensemble.train.state import TrainState
from ensemble.train.steps import TrainingSteps
from ensemble.train.structure import describe_outline
from pipelines.providers import import_object

if TYPE_CHECKING:
    from pipelines import Batch
    from pipelines.loader.collate import Collate

#: Loaded where a member uses them.
NOT_MIXED = "ensemble.train.mixup:not_mixed"
PROGRAM = "ensemble.train.own_program:OwnProgram"

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class TrainContext(FrameworkMember):
    """One member in training, on one of its ranks; the only argument of a train function.

        model, optimizer = member.prepare(model, optimizer)
        for epoch in member.epochs():               # a resume begins where the checkpoint was written
            for batch in member.batches():          # this rank's part of each global batch
                with member.autocast():
                    losses = loss(model, batch)     # one per sample, unreduced
                member.backward(losses)
                member.step()
            member.report(**member.evaluate(measure))

    Checkpoints, events, a pruner's decision and commands to stop are handled between steps and between epochs.

    Attributes:
        identity: hyperparameters, seed, workers, epochs and all else that distinguishes this member.
        params: its hyperparameters.
        seed: of its weights and random numbers.
        device: of its model and batches.
        rank: of this worker, from 0.
        world: the number of workers.
        comm: its connection to the others.
        steps_per_epoch: global batches of an epoch, those included of which nothing is left (`weights=`).
        steps: global batches of all epochs that were declared: of a member that was given more later, the number
            stays, since schedules are computed from it.
        splits: those of "valid" and "test" that the ensemble has: members are evaluated on the first,
            and predict all of them.
        objective: the metric that ranks members.
        program: ends its epochs where it reads no pipeline (`Ensemble.train`); else None.
    """

    def __init__(self, state: TrainState) -> None:
        job, ensemble, comm, self._state = state.job, state.ensemble, state.comm, state
        state.callbacks = Callbacks(ensemble, job.identity, self, state.checkpointer.check_code, state.name_parts)
        self._evaluator = Evaluator(state)
        self._life = Lifecycle(state, self._evaluator)
        self._steps = TrainingSteps(state, self._life)
        self.program = None if ensemble.train is not None else import_object(PROGRAM)(self, state, self._life)
        own = self.identity = job.identity
        params = ensemble.as_declared(own.params)
        self.params: dict[str, Any] = Hyperparameters(params, used=list_member_options(ensemble.recipe))
        self.device, self.comm, self.objective = state.device, comm, str(ensemble.objective)
        self.seed, self.rank, self.world = own.seed, comm.rank, comm.world
        self.steps_per_epoch, self.splits = state.steps_per_epoch, state.splits
        self.steps = self.steps_per_epoch * own.scheduled_epochs

    def prepare(
        self, model: ModelT, optimizer: OptimizerT, schedule: Any = None, clip_norm: float | None = None
    ) -> tuple[ModelT, OptimizerT]:
        """Register the model and its optimizer, load the last checkpoint into them, and return both.

        Args:
            model: moved to `device`; with several workers, all get the weights of rank 0. A warm clone without a
                checkpoint gets the weights with which it starts.
            optimizer: of parameters of the model.
            schedule: a torch LRScheduler, stepped after each step.
            clip_norm: largest L2 norm of a step's gradient, taken over the global batch.
        """
        state, own = self._state, self.identity
        if state.prepared is not None:
            raise TrainingError(f"member.prepare() is called once, with one model and optimizer; {OWN_STEPS}")
        refuse_shared(model)
        if schedule is not None:
            check_schedule(schedule, self.steps_per_epoch, own.scheduled_epochs, self.remark)
        declared = ExchangeOptions(own.compression, own.communicator, own.seed)
        state.prepared = Optimization(
            model, optimizer, schedule, clip_norm, state.precision, self.comm, self.device, declared
        )
        state.prepared.keep(state.callbacks, keeps_best=own.keep == "best")
        self._life.resumption.resume()
        self._life.outline = describe_outline(state.prepared.structure, own_state(model))
        state.callbacks.call("begin_training")
        state.callbacks.check_states()
        if own.compile is not None:
            compile_forward(model, own.compile, Path(state.job.run_dir))
        return model, optimizer

    @property
    def model(self) -> nn.Module:
        """The model that was prepared."""
        return self._state.optimization.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""
        return self._state.optimization.optimizer

    def wrap_loss(self, loss: Loss) -> Loss:
        """The loss of training batches, as the member's callbacks have it (`MemberCallback.wrap_loss`).

        Args:
            loss: `loss(model, batch) -> [b]`.
        """
        wrapped: Loss = self._state.callbacks.wrap_loss(loss)
        return wrapped

    def epochs(self) -> Iterator[int]:
        """Yield the member's own epochs, 0-based, from its current to its last, or until it stops early.

        Afterwards the model has the weights that are kept: predictions are made then. A loop that is left after a
        whole epoch ends the member there, as `stop` does.
        """
        return (self.program or self._life).epochs()

    def stop(self, reason: str = "its train function ended it") -> None:
        """End the member after the epoch in progress: `epochs()` yields no more; a resume trains no further epoch.

        The epoch is trained to its end, as a member sees each sample of an epoch once. The weights that are kept
        count; `finished` and the report have the reason. It suffices that one of several workers calls it.

        Args:
            reason: for people, a few words.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise TrainingError(f"member.stop() takes the reason as text, got {reason!r}")
        at = self._state.at
        at.stop_asked = at.stop_asked or " ".join(reason.split())

    def batches(self, split: str = "train", collate: Collate | None = None) -> Iterator[Batch]:
        """Yield this rank's part of each batch: of the epoch in training, or of a resident split (`splits`).

        Each training batch needs one `backward` and one `step`. Every batch is valid until the loop continues.

        Args:
            split: "train", or one of `splits`.
            collate: `f(batch)` or `f(batch, rng)`, applied to each batch, instead of `Recipe.collate`; it is kept
                for the evaluations that follow.
        """
        self._state.collate = collate or self._state.collate
        return self._steps.batches() if split == "train" else self._evaluator.batches(split)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for forward passes in the member's precision."""
        return self._state.precision.autocast()

    def mixup(self, batch: Batch) -> Any:
        """Mix the samples of a training batch, or of a part of it, as `mixup=` declares; without it, nothing.

        Args:
            batch: of `batches()`, or a part of `parts()`.

        Returns:
            The batch with mixed inputs; its `losses(f)` are those of both targets, [b].

        Examples:
            mixed = member.mixup(batch)
            outputs = model(mixed["image"])
            member.backward(mixed.losses(lambda target: cross_entropy(outputs, target, reduction="none")))
        """
        callback = self._state.callbacks.mixup
        return (
            import_object(NOT_MIXED)(batch, self._state.target) if callback is None else callback.mix(self, batch)
        )

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield the micro-batches of a training batch, as many as the member accumulates gradients over
        (`accumulate=`); each needs one `backward`, all together one `step`.

        Args:
            batch: the one that `batches()` has just yielded.

        Raises:
            TrainingError: it is another batch.
        """
        micro_batches = self._state.micro_batches
        if micro_batches is None or batch is not micro_batches.batch:
            raise TrainingError("member.parts(batch) is for the batch that member.batches() has just given")
        return micro_batches.parts()

    def backward(self, losses: Tensor) -> None:
        """Compute this rank's part of the gradient of the global batch's mean loss.

        With sample weights (`identity.weights`) each loss is multiplied by `batch["weight"]` here, and the sum is
        divided by the number of samples, not by the sum of weights: those have the mean 1 over the epoch.

        Args:
            losses: [b], one for each sample of the batch, or of a part of it, unreduced and unweighted.
        """
        self._steps.backward(losses)

    def step(self) -> None:
        """Exchange the gradients, step the optimizer and the schedule, and execute commands.

        Raises:
            TrainingError: it is not called once after `backward` of each batch.
            Diverged: the loss is NaN or infinite.
        """
        self._steps.step()

    # --- evaluation -------------------------------------------------------------------------------------

    def report(self, **metrics: float) -> None:
        """Report the member's metrics after this epoch; the values of rank 0 are recorded.

        An epoch without a report keeps the metrics of the one before, and does not count for early stopping.
        Without `Ensemble.train` each report outside of `epochs()` ends an epoch.

        Args:
            metrics: by name, means over the validation split; a NaN is recorded as unknown.
        """
        named = {name: read_metric(name, value) for name, value in metrics.items()}
        if self._is_idle or (self.program is not None and self.program.takes(named)):
            return
        self._state.at.metrics, self._state.at.is_reported = named, True

    def evaluate(self, measure: Measure, split: str = "valid") -> dict[str, float]:
        """The means of metrics over all samples of a split, of all ranks; empty where the ensemble has no such
        split.

        Args:
            measure: `measure(model, batch) -> dict` of tensors [b] or scalars, called without gradients, in the
                member's precision, the model in evaluation mode.
            split: "valid" or "test".

        Returns:
            The mean of each metric, weighted by samples; the same on all ranks.
        """
        self._life.end_left_epoch()
        return self._evaluator.evaluate(measure, split)

    def validate_with(self, measure: Measure) -> None:
        """Let the member be evaluated within epochs, each `validate_every` steps; a train function calls it once.

        Args:
            measure: see `evaluate`.
        """
        self._state.forward = measure
        self.validate_by(lambda: self.evaluate(measure))

    def validate_by(self, evaluate: Callable[[], Mapping[str, float]]) -> None:
        """`validate_with`, for a function that evaluates the member: all ranks call it together.

        Args:
            evaluate: `evaluate() -> dict` of metrics, such as one that calls `member.evaluate`.
        """
        self._steps.validate = evaluate

    def evaluating(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context manager that yields the model in evaluation mode, without gradients, its buffers equal
        on all ranks; where weights are averaged, with the averages.
        """
        if self._foreign is not None:
            self._foreign.end_last_step()
        self._life.end_left_epoch()
        return self._evaluator.evaluating()

    # --- the end ----------------------------------------------------------------------------------------

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
        self._end_loop()
        self._evaluator.save_predictions(split, task, values, index, target)

    def predict_all(self, function: Predict | None = None) -> None:
        """Predict each of `splits` with the weights that are kept, and save the predictions; all ranks call it.

        Args:
            function: `f(model, batch) -> values [b, ...]`, laid out by the task (`ensemble.spec.task`), called
                without gradients, in the member's precision, in evaluation mode; no model can be loaded then.
                None: `Recipe.predict`, or what follows from the outputs by a loss or a framework.

        Raises:
            TrainingError: nothing says how the model predicts, or `function` and the Recipe both do.
        """
        state, own = self._state, functools.partial(predict_batch, self._state)
        if function is None and not state.can_predict:
            raise TrainingError(f"member.predict_all(): {UNDECLARED}")
        if function is not None and function is not state.recipe.predict:
            if state.recipe.predict or state.recipe.loss:
                raise TrainingError("member.predict_all(function): declare the function as Recipe.predict")
            if state.call is not None:  # nor can a model be loaded by the call of the framework
                state.call = state.seen = state.saved_at = None
        self._end_loop()
        for split in self.splits:
            predict(self._evaluator, state, split, function or own)
        self._evaluator.footprint = measure_footprint(self._evaluator, state, function or own)

    def report_unused(self) -> None:
        """Report the hyperparameters that nothing read in the whole training; the run warns about them once."""
        assert isinstance(self.params, Hyperparameters)
        is_known = self._state.job.attempt == 0 and not callable(self._state.ensemble.train)
        if is_known and (unused := self.params.unused):
            meant = {name: near for name in unused if (near := self.params.suggest(name)) is not None}
            fields = {"meant": meant} if meant else {}
            self._state.reporter.event("unused_hyperparameters", params=unused, **fields)

    def log(self, text: str) -> None:
        """Write a line into the member's log (rank 0 does).

        Args:
            text: the line, without its end; several lines are allowed.
        """
        self._state.reporter.log(text)

    @property
    def is_over(self) -> bool:
        """Whether all epochs are trained, or the member has stopped early: only its predictions may be left."""
        return self._state.is_over

    @property
    def position(self) -> dict[str, int]:
        """Own epoch and step in it."""
        return self._state.position

    def make_rows(self) -> PredictedRows:
        """Where predictions are collected until all are there."""
        return self._evaluator.make_rows()

    def finish(self) -> None:
        """Save and report the end of the training loop; end an epoch that it left after the last step."""
        self._end_loop()
        self._life.finish()

    def save(self) -> None:
        """Save a member that was stopped in its evaluation."""
        self._life.save()

    def close(self) -> None:
        """Leave the stream, report the CPU time used to the end, and let go of the ensemble's arrays."""
        state = self._state
        state.data.close()
        state.reporter.usage(state.data.stats()["prepare_cpu_s"], is_last=True)
        if state.prepared is not None:
            state.prepared.close()
        release_caches()
        self._foreign = None
        for part in (state.data, self._evaluator, self._life, self._steps, state):
            vars(part).clear()
