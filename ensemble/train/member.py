"""`TrainContext`: the member that a training loop trains, as the loop sees it.

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

Checkpoints, events, a pruner's decision and commands to stop are handled between steps and between epochs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ensemble.comm import Communicator
from ensemble.comm.autotune.plan import ExchangeOptions
from ensemble.spec import Ensemble
from ensemble.spec.positions import count_bytes
from ensemble.spec.recipe import list_member_options
from ensemble.spec.task import Task
from ensemble.store import PredictedRows, RunDir
from ensemble.train.compilation import compile_forward, release_caches
from ensemble.train.effects import Effects
from ensemble.train.evaluator import Evaluator, Measure
from ensemble.train.footprint import measure_footprint
from ensemble.train.foreign_loop import EpochLoader, Fields, ForeignLoop
from ensemble.train.gather import find_first, read_metric
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import Inbox, Job, TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.mixup import MixedBatch
from ensemble.train.optimization import OWN_STEPS, Optimization
from ensemble.train.own_parameters import refuse_shared
from ensemble.train.plain_trainers import noticing
from ensemble.train.predictions import Predict, predict
from ensemble.train.state import TrainState
from ensemble.train.steps import TrainingSteps

if TYPE_CHECKING:
    from pipelines import Batch
    from pipelines.loader.collate import Collate

#: Of predictions, from which on a member saves its state before its last evaluation.
MUCH_BYTES = 2**26

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class TrainContext:
    """One member in training, on one of its ranks; the only argument of a train function.

    Attributes:
        identity: hyperparameters, seed, workers, epochs and all else that distinguishes this member.
        params: its hyperparameters.
        device: of its model and batches.
        rank: of this worker, from 0.
        world: the number of workers.
        comm: its connection to the others.
        steps_per_epoch: global batches of an epoch, those included of which nothing is left (`weights=`).
        steps: global batches of all epochs that were declared: of a member that was given more later, the number
            stays, since schedules are computed from it.
        splits: those of "valid", "test" and "shifted" that the ensemble has: members are evaluated on the first,
            and predict all of them.
        objective: the metric that ranks members.
        observer: what is known of a Recipe's model: how it is called, what it predicts.
    """

    def __init__(self, job: Job, ensemble: Ensemble, comm: Communicator, effects: Effects, inbox: Inbox) -> None:
        state = self._state = TrainState(job, ensemble, comm, effects, inbox)
        self._evaluator = Evaluator(state)
        self._life = Lifecycle(state, self._evaluator)
        self._steps = TrainingSteps(state, self._life)
        self._foreign = ForeignLoop(state, self._life)
        own = self.identity = job.identity
        params = ensemble.as_declared(own.params)
        self.params: dict[str, Any] = Hyperparameters(params, used=list_member_options(ensemble.recipe))
        self.device, self.observer, self.comm = state.device, state.observer, comm
        self.rank, self.world = comm.rank, comm.world
        self.steps_per_epoch, self.splits = effects.steps_per_epoch, effects.splits
        self.steps = self.steps_per_epoch * own.scheduled_epochs
        self.objective = str(ensemble.objective)

    def prepare(
        self, model: ModelT, optimizer: OptimizerT, schedule: Any = None, clip_norm: float | None = None
    ) -> tuple[ModelT, OptimizerT]:
        """Register the model and its optimizer, and load the last checkpoint into them.

        Args:
            model: moved to `device`; with several workers, all get the weights of rank 0. A warm clone without a
                checkpoint gets the weights with which it starts.
            optimizer: of parameters of the model.
            schedule: a torch LRScheduler, stepped after each step.
            clip_norm: largest L2 norm of a step's gradient, taken over the global batch.

        Returns:
            The same model and optimizer.
        """
        state, own = self._state, self.identity
        if state.prepared is not None:
            raise TrainingError(f"member.prepare() is called once, with one model and optimizer; {OWN_STEPS}")
        refuse_shared(model)
        declared = ExchangeOptions(own.compression, own.communicator, own.seed)
        state.prepared = Optimization(
            model, optimizer, schedule, clip_norm, state.precision, self.comm, self.device, declared, own
        )
        self._life.resumption.resume()
        if own.compile is not None:
            compile_forward(model, own.compile, Path(state.job.run_dir))
        return model, optimizer

    def state(self, name: str, value: Any) -> None:
        """Let checkpoints hold the state of another object: a scheduler, averaged weights, a framework's trainer.

        Where the member resumes, the object gets its state: here, or in `prepare` if that is called later.

        Args:
            name: under which it is saved; the same in each attempt.
            value: has `state_dict()` and `load_state_dict(state)`; the state is of dicts, lists, tuples, numbers,
                texts, None and tensors.

        Raises:
            TrainingError: the name is taken, the object has no state, or the checkpoint has none of it.
        """
        self._state.own.add(name, value)

    # --- the loop ---------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Yield the member's own epochs, 0-based, from its current to its last.

        It ends before the last where the member stops early. Afterwards the model has the weights that are kept:
        predictions are made then. A loop that is left after a whole epoch ends the member there, as `stop` does.
        """
        return self._life.epochs()

    def stop(self, reason: str = "its train function ended it") -> None:
        """End the member after the epoch in progress, before its last: `epochs()` yields no more.

        The epoch is trained to its end, as a member sees each sample of an epoch once. The member has finished,
        with the weights that are kept; `finished` and the report have the reason. With several workers it suffices
        that one of them calls it: all end after that epoch. A resume trains no further epoch.

        Args:
            reason: for people, a few words.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise TrainingError(f"member.stop() takes the reason as text, got {reason!r}")
        at = self._state.at
        at.stop_asked = at.stop_asked or " ".join(reason.split())

    def batches(self, split: str = "train", collate: Collate | None = None) -> Iterator[Batch]:
        """Yield this rank's part of each batch: of the epoch in training, or of a resident split (`splits`).

        Each training batch needs one `backward` and one `step`. A global batch of which this rank has no sample of
        weight above 0 is handled here; the loop does not see it. Every batch is valid until the loop continues.

        Args:
            split: "train", or one of `splits`.
            collate: `f(batch)` or `f(batch, rng)`, applied to each batch, instead of `Recipe.collate`; it is kept
                for the evaluations that follow.
        """
        self._state.collate = collate or self._state.collate
        return self._steps.batches() if split == "train" else self._evaluator.batches(split)

    def dataloader(
        self,
        split: str = "train",
        *,
        fields: Fields = None,
        collate: Collate | None = None,
        counts_from_0: bool = True,
    ) -> EpochLoader:
        """This rank's batches of a split, for a loop that calls backward and its optimizer itself.

        Each pass over "train" is an epoch: `for epoch in range(epochs): for batch in loader:` stays as it is, and
        `member.step()` is not called. What is reported until the next pass is of this epoch. After a resume,
        passes that were trained before are empty, what is reported after them is left out, and all that `prepare`
        and `state` were given has its state again when the first pass begins that is not. A pass beyond the last
        epoch is an error. Checkpoints and commands are between epochs.

        Args:
            split: "train", for which `prepare` comes before the first pass; or one of `splits`.
            fields: names of fields: a batch is a tuple of them. A dict, names -> fields: a dict of those. None: it
                is the batch. Tensors stay valid.
            collate: see `batches`.
            counts_from_0: of "train": False for a loop that begins at the epoch of the checkpoint by itself.
        """
        if split == "train":
            self._foreign.counts_from_0 = counts_from_0
        self._state.collate = collate or self._state.collate
        return EpochLoader(self._state, self._evaluator, self._foreign, split, fields)

    def end_epoch(self) -> None:
        """End the epoch of `dataloader("train")` here, not where the next pass begins: report and save it, and
        execute the pruner's decision. A framework's hook calls it."""
        self._foreign.end_epoch()

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for forward passes in the member's precision."""
        return self._state.precision.autocast()

    def mixup(self, batch: Batch) -> MixedBatch:
        """Mix the samples of a training batch, or of a part of it, as `mixup=` declares; without it, nothing.

        Args:
            batch: of `batches()`, or a part of `parts()`.

        Returns:
            The batch with mixed inputs; its `losses(f)` are those of both targets, [b].

        Raises:
            TrainingError: the batch has no target, or no field that can be mixed.

        Examples:
            mixed = member.mixup(batch)
            outputs = model(mixed["image"])
            member.backward(mixed.losses(lambda target: cross_entropy(outputs, target, reduction="none")))
        """
        return self._steps.mixup(batch)

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield the micro-batches of a training batch, as many as the member accumulates gradients over
        (`accumulate=`).

        Each needs one `backward`, all together one `step`. With `accumulate=1` the only part is the batch itself:

            for batch in member.batches():
                for part in member.parts(batch):
                    with member.autocast():
                        losses = loss(model, part)
                    member.backward(losses)
                member.step()

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

        Where the member has sample weights (`identity.weights`), samples of weight 0 are in no batch. The loss of
        another is multiplied by `batch["weight"]` here, and the sum is divided by the number of samples. Over the
        samples that are left weights have the mean 1. Divided by the batch's sum of weights instead, the weight of
        a sample would depend on the others in its batch.

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

        Args:
            metrics: by name, means over the validation split; a NaN is recorded as unknown.
        """
        if self._foreign.is_idle:
            return
        at = self._state.at
        at.metrics, at.is_reported = {name: read_metric(name, value) for name, value in metrics.items()}, True

    def evaluate_later(self) -> None:
        """Let epochs before the first report be unranked: a framework's loop evaluates in some epochs only, and
        its adapter at the end if in none (`report_end`)."""
        self._state.reports_later = True

    def report_end(self, metrics: Mapping[str, float]) -> None:
        """Report the metrics of the weights that are kept, of a member that trains no more."""
        self._life.report_end(metrics)

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
        self._evaluator.measure = measure
        self._life.end_left_epoch()
        return self._evaluator.evaluate(measure, split)

    def validate_with(self, measure: Measure) -> None:
        """Let the member be evaluated within epochs, each `validate_every` steps; a train function calls it once.

        Args:
            measure: see `evaluate`.
        """
        self._evaluator.measure = measure
        self.validate_by(lambda: self.evaluate(measure))

    def validate_by(self, evaluate: Callable[[], Mapping[str, float]]) -> None:
        """`validate_with`, for a function that evaluates the member: all ranks call it together.

        Args:
            evaluate: `evaluate() -> dict` of metrics, such as one that calls `member.evaluate`.
        """
        self._steps.validate = evaluate

    def renew_statistics(self, measure: Measure) -> None:
        """Compute the running statistics of batch normalization for averaged weights, by the epoch in progress.

        Nothing happens where they are those of the weights. `evaluate` calls it.

        Args:
            measure: see `evaluate`.
        """
        self._evaluator.measure = measure
        self._life.end_left_epoch()
        self._evaluator.renew_statistics(measure)

    def evaluating(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context manager that yields the model in evaluation mode, without gradients, its buffers equal
        on all ranks; where weights are averaged, with the averages.
        """
        self._foreign.end_last_step()
        self._life.end_left_epoch()
        return self._evaluator.evaluating()

    # --- the end ----------------------------------------------------------------------------------------

    def use_weights(
        self, weights: nn.Module | Mapping[str, Tensor] | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Let weights of the function's own count for the member, such as those that a framework kept as its best.

        It comes after the end of `epochs()`, before predictions are made; all ranks call it. The model gets the
        weights. They are what is saved, combined and loaded, whatever `keep=` and `averaging=` say; a resume of a
        member that was interrupted later has them, too.

        Args:
            weights: the state_dict of the model that was prepared, or a module that has such a one, as that of
                averaged weights (`averaged.module`). Those of rank 0 count; other ranks may give None.
            metrics: of these weights, the objective among them, which ranks the member; without them, those that
                were reported last count.

        Raises:
            TrainingError: the member is still in training, or the weights are not of its model.
        """
        if self._foreign.is_idle and isinstance(weights, Mapping):
            raise TrainingError(
                "member.use_weights() needs the module itself here, such as averaged.module: its weights of "
                "before the resume, or of before the member ended, are loaded first"
            )
        self._end_loop()
        self._life.use_weights(weights.state_dict() if isinstance(weights, nn.Module) else weights, metrics)

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

        Where there are none, the member's log says why.

        Args:
            function: `f(model, batch) -> values [b, ...]`, laid out by the task (`ensemble.spec.task`), called
                without gradients, in the member's precision, the model in evaluation mode. None: `Recipe.predict`;
                or what follows from the outputs of the model, where training called it with fields of the batch.
        """
        self._end_loop()
        for split in self.splits:
            predict(self._evaluator, self._state, split, function)
        self._evaluator.footprint = measure_footprint(self._evaluator, self._state, function)

    def _end_loop(self) -> None:
        """End the epoch in progress of a loop that the train function has left."""
        self._foreign.end()
        self._life.end_left_epoch()

    def report_unused(self) -> None:
        """Report the hyperparameters that nothing has read so far; the run warns about them once."""
        assert isinstance(self.params, Hyperparameters)
        unused = [] if callable(self._state.ensemble.train) else self.params.unused
        if unused:
            meant = {name: near for name in unused if (near := self.params.suggest(name)) is not None}
            found = {"params": unused, **({"meant": meant} if meant else {})}
            self._state.reporter.event("unused_hyperparameters", **found)

    def log(self, text: str) -> None:
        """Write a line into the member's log (rank 0 does).

        Args:
            text: the line, without its end; several lines are allowed.
        """
        self._state.reporter.log(text)

    def remark(self, text: str) -> None:
        """Let the run's status and page show a sentence about the member (rank 0 does), once."""
        self._state.remark(text)

    def describe_sample(self, split: str, index: int) -> str:
        """A sample by its number in a split, and where its record lies: the file, and the row."""
        return self._state.data.describe_sample(split, index)

    @property
    def is_over(self) -> bool:
        """Whether all epochs are trained, or the member has stopped early: only its predictions may be left."""
        return self._state.is_over

    @property
    def directory(self) -> Path:
        """Of the member's files, in the run directory; it is kept with the run."""
        return RunDir(self._state.job.run_dir).member(self.identity.member)

    @property
    def position(self) -> dict[str, int]:
        """Own epoch and step in it."""
        return self._state.position

    # --- for the worker ---------------------------------------------------------------------------------

    def note_predicted(self, task: Task, values: Tensor) -> None:
        """Count what predictions take, of those of a batch [b, ...]."""
        state = self._state
        state.effects.predictions_bytes = count_bytes(state.ensemble, task, values.shape[1:])

    def save_before_evaluation(self) -> None:
        """Save in the last epoch, once trained, where much is predicted: what fails there is repeated alone."""
        state = self._state
        is_large = (state.effects.predictions_bytes or 0) >= MUCH_BYTES
        if state.at.epoch + 1 == self.identity.epochs and find_first(state.comm, is_large or None):
            self.save()

    def noticing_plain_trainers(self) -> contextlib.AbstractContextManager[None]:
        """Refuse a framework's own Trainer in the train function, at its first step."""
        return noticing(self._state)

    def make_rows(self) -> PredictedRows:
        """Where predictions are collected until all are there."""
        return self._state.effects.make_rows()

    def restore_network(self) -> nn.Module:
        """The network of the checkpoint to resume from, where `Recipe.model` raises.

        Raises:
            NotKept: there is none, or it is of other code.
        """
        return self._state.effects.checkpointer.restore_network()

    def finish(self) -> None:
        """Save and report the end of the training loop; end an epoch that it left after the last step."""
        self._foreign.end()
        self._life.finish()

    def save(self) -> None:
        """Save a member that was stopped in its evaluation."""
        self._life.save()

    def close(self) -> None:
        """Leave the stream, and report the CPU time used to the end.

        The parts that hold the ensemble are emptied: their callbacks lead back to the member, so that its arrays
        would stay in memory where the process lives on.
        """
        state = self._state
        state.data.close()
        state.reporter.usage(state.data.stats()["prepare_cpu_s"], is_last=True)
        if state.prepared is not None:
            state.prepared.close()
        release_caches()
        for part in (state.data, state.effects, self._evaluator, self._life, self._steps, self._foreign, state):
            vars(part).clear()
