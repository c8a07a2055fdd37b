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

Checkpoints, events, a pruner's verdicts and commands to stop are handled between steps and between epochs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ensemble.comm import Communicator
from ensemble.comm.autotune.plan import ExchangeOptions
from ensemble.spec import PREDICTED_SPLITS, Ensemble
from ensemble.spec.recipe import has_own_loop
from ensemble.spec.task import CLASSIFICATION, Task, as_task
from ensemble.store import RunDir, save_predictions
from ensemble.train.accumulation import MicroBatches
from ensemble.train.averaging import Measured
from ensemble.train.call import Observation
from ensemble.train.checkpoint import Checkpointer, FileCheckpointer
from ensemble.train.compilation import compile_forward
from ensemble.train.data import Data, as_stored_target, steps_per_epoch
from ensemble.train.deadly_records import DeadlyRecords
from ensemble.train.gather import Means, find_first, gather_rows
from ensemble.train.gpu_busy import open_gpu_busy
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import Diverged, Inbox, Job, TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.mixup import MixedBatch, mix
from ensemble.train.observer import Observer
from ensemble.train.optimization import Optimization
from ensemble.train.precision import MixedPrecision
from ensemble.train.reporter import Reporter
from ensemble.train.seeding import seed_everything, step_seed

if TYPE_CHECKING:
    from pipelines import Batch

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Measure = Callable[[nn.Module, "Batch"], Mapping[str, Any]]


class TrainContext:
    """One member in training, on one of its ranks; the only argument of a train function.

    Attributes:
        identity: hyperparameters, seed, workers, epochs and all else that distinguishes this member.
        params: its hyperparameters.
        device: of its model and batches.
        rank, world: of this worker, and the number of workers.
        comm: its connection to the others.
        steps_per_epoch, steps: global batches of an epoch, and of all epochs that were declared: of a member that
            was given more later, the number stays, since schedules are computed from it.
        splits: those of "valid", "test" and "shifted" that the ensemble has: members are evaluated on the first,
            and predict all of them.
        objective: the metric that ranks members.
        observer: what is known of a Recipe's model: how it is called, what it predicts.
    """

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        reporter: Reporter,
        inbox: Inbox,
        *,
        data: Data | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.identity = job.identity
        self.params: dict[str, Any] = Hyperparameters(job.identity.params)
        self._pipeline_reads_params = callable(ensemble.train)
        self.device = torch.device(job.device)
        self.rank, self.world = comm.rank, comm.world
        self.steps_per_epoch = steps_per_epoch(ensemble, job.identity)
        self.steps = self.steps_per_epoch * (job.identity.extended_from or job.identity.epochs)
        self.splits = [name for name in PREDICTED_SPLITS if getattr(ensemble, name) is not None]
        self.objective = str(ensemble.objective)
        self.observer = Observer(ensemble.recipe, comm)
        self._target = getattr(ensemble.recipe, "target", "label")
        self._declared_task = as_task("Recipe.task", getattr(ensemble.recipe, "task", None))
        self._is_own_loop = has_own_loop(ensemble.recipe)
        self._files, self.comm, self._reporter = RunDir(job.run_dir), comm, reporter
        self._attempt = job.attempt
        self._data = data or Data(ensemble, job.identity, job.feeder, self.device, comm, job.local_world)
        checkpointer = checkpointer or FileCheckpointer(job, ensemble)
        self._life = Lifecycle(
            job, ensemble, comm, self._data, reporter, inbox, self.steps_per_epoch, checkpointer, self.observer
        )
        self._data.on_resident_wait, self._data.on_wait = self._life.report_progress, self._on_wait
        self._find_deadly_records: Callable[[], None] = lambda: DeadlyRecords(
            job,
            ensemble,
            comm,
            {name: self._data.pipeline(name) for name in ("train", *self.splits)},
            reporter.event,
        ).start(inbox)
        self._precision = MixedPrecision(job.identity.precision, self.device, job.identity.loss_scale)
        self._gpu_busy = open_gpu_busy(self.device)
        self._optimization: Optimization | None = None
        self._validate: Callable[[], Mapping[str, float]] | None = None
        self._micro_batches: MicroBatches | None = None
        self._has_stepped = False

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
        if self._optimization is not None:
            raise TrainingError("member.prepare() is called once, with the one model and optimizer of the member")
        own = self.identity
        declared = ExchangeOptions(own.compression, own.communicator, own.seed)
        self._optimization = Optimization(
            model, optimizer, schedule, clip_norm, self._precision, self.comm, self.device, declared, own
        )
        self._life.resume(self._optimization)
        if own.compile is not None:
            compile_forward(model, own.compile, self._files.path / "compiled")
        return model, optimizer

    # --- the loop ---------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Yield the member's own epochs, 0-based, from its current to its last.

        It ends before the last where the member stops early. Afterwards the model has the weights that are kept:
        predictions are made then.
        """
        optimization, life = self._prepared(), self._life
        self._find_deadly_records()
        if not life.is_over:
            self._data.open(life.at.epoch, life.at.step)
        while not life.is_over:
            life.throughput.begin_epoch(self._data.stats())
            yield life.at.epoch
            life.end_epoch(optimization)
        life.conclude(optimization)

    def batches(self, split: str = "train") -> Iterator[Batch]:
        """Yield this rank's part of each batch: of the epoch in training, or of a resident split (`splits`).

        Each training batch needs one `backward` and one `step`. A global batch of which this rank has no sample is
        handled here; the loop does not see it. Every batch is valid until the loop continues.
        """
        return self._train_batches() if split == "train" else self._resident_batches(split)

    def _resident_batches(self, split: str) -> Iterator[Batch]:
        for batch in self._data.split(split):
            is_measured = self._micro_batches is None  # else it is within a training step, which is measured
            if is_measured:
                self._begin_gpu_work()
            yield batch
            if is_measured:
                self._end_gpu_work()
            self._life.report_progress()

    def _train_batches(self) -> Iterator[Batch]:
        optimization, life = self._prepared(), self._life
        for batch in self._data.epoch(life.at.epoch):
            life.begin()
            if life.validation_is_due():  # also after a resume from before it
                self._validate_within_epoch()
            before = life.global_step
            self._begin_gpu_work()
            seed_everything(step_seed(self.identity.seed, self.rank, before), self.device)
            with life.throughput.synchronizing():
                optimization.share_buffers()
            self._micro_batches = MicroBatches(batch, self.identity.accumulate)
            if self._is_own_loop:
                self.observer.begin(optimization.model, batch)
            if len(batch["index"]):
                yield batch
            else:
                self._backward(None)
                self.step()
            if life.global_step != before + 1:
                raise TrainingError("member.step() must be called exactly once for each batch of member.batches()")

    def validate_with(self, measure: Measure) -> None:
        """Let the member be evaluated within epochs, each `validate_every` steps; a train function calls it once.

        Args:
            measure: see `evaluate`.
        """
        self.validate_by(lambda: self.evaluate(measure))

    def validate_by(self, evaluate: Callable[[], Mapping[str, float]]) -> None:
        """`validate_with`, for a function that evaluates the member: all ranks call it together."""
        self._validate = evaluate

    def _validate_within_epoch(self) -> None:
        if self._validate is None:
            raise TrainingError(
                "validate_every= evaluates within epochs: call member.validate_with(measure) before the loop"
            )
        with self._life.throughput.pausing():
            self._life.add_validation(self._validate(), self._prepared())

    def mixup(self, batch: Batch) -> MixedBatch:
        """Mix the samples of a training batch, or of a part of it, as `mixup=` declares; without it, nothing.

        Example:
            mixed = member.mixup(batch)
            outputs = model(mixed["image"])
            member.backward(mixed.losses(lambda target: cross_entropy(outputs, target, reduction="none")))
        """
        own = self.identity
        mixed = mix(batch, self._target, own.mixup, own.seed, self.rank, self._life.global_step)
        if own.mixup:  # its fields are what the model is called with
            self.observer.begin(self._prepared().model, mixed)
        return mixed

    def _begin_gpu_work(self) -> None:
        if self._gpu_busy is not None:
            self._gpu_busy.begin()

    def _end_gpu_work(self) -> None:
        if self._gpu_busy is not None:
            self._gpu_busy.end()

    def _on_wait(self) -> None:
        """Report progress and execute commands while the stream keeps this rank waiting.

        Several ranks execute a command after a step only, when they have agreed on it.
        """
        self._life.report_progress()
        if self.world == 1:
            self._life.execute(self._life.poll_command(), self._prepared())

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for forward passes in the member's precision."""
        return self._precision.autocast()

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
        """
        if self._micro_batches is None or batch is not self._micro_batches.batch:
            raise TrainingError("member.parts(batch) is for the batch that member.batches() has just given")
        return self._micro_batches.parts()

    def backward(self, losses: Tensor) -> None:
        """Compute this rank's part of the gradient of the global batch's mean loss.

        Where the member has sample weights (`identity.weights`), each loss is multiplied by `batch["weight"]`
        here, and the sum is divided by the number of samples. Weights have the mean 1 over the data, so this is an
        unbiased estimate of the weighted risk, with the same learning rate for every batch. Divided by the batch's
        sum of weights instead, the weight of a sample would depend on the others in its batch.

        Args:
            losses: [b], one for each sample of the batch, or of a part of it, unreduced and unweighted.
        """
        self._backward(losses)

    def _backward(self, losses: Tensor | None) -> None:
        if self._micro_batches is None:
            raise TrainingError("member.backward() is for the losses of a batch of member.batches()")
        part, last = self._micro_batches.pop()
        weight = None if self.identity.weights is None else part["weight"]
        command = self._life.poll_command() if last else None
        self._prepared().begin(command, losses, part, weight, last=last)

    def step(self) -> None:
        """Exchange the gradients, step the optimizer and the schedule, and execute commands."""
        parts, self._micro_batches = self._micro_batches, None
        if parts is None or not parts.is_complete:
            raise TrainingError("member.step() comes after member.backward(losses), once for each batch")
        optimization, life, batch = self._prepared(), self._life, parts.batch
        try:
            result = optimization.end(batch, life.throughput.synchronizing())
        except Diverged as error:
            raise Diverged(f"{error}, epoch {life.at.epoch}, step {life.at.step}") from None
        self._end_gpu_work()
        if not self._has_stepped:
            self._has_stepped = True
            self.observer.agree()
        life.end_step(result, batch.global_size, optimization)

    # --- results ----------------------------------------------------------------------------------------

    def report(self, **metrics: float) -> None:
        """Report the member's metrics after this epoch; the values of rank 0 are recorded."""
        self._life.at.metrics = {name: float(value) for name, value in metrics.items()}

    def evaluate(self, measure: Measure, split: str = "valid") -> dict[str, float]:
        """The means of metrics over all samples of a split, of all ranks; empty where the ensemble has no such
        split.

        Args:
            measure: `measure(model, batch) -> dict` of tensors [b] or scalars, called without gradients, in the
                member's precision, the model in evaluation mode.
        """
        self.renew_statistics(measure)
        if split not in self.splits:
            return {}
        means = Means()
        with self.evaluating() as model:
            for batch in self.batches(split):
                with self.autocast():
                    values = measure(model, batch)
                means.add(values, len(batch["index"]))
        return means.over_all(self.comm)

    def renew_statistics(self, measure: Measure) -> None:
        """Compute the running statistics of batch normalization for averaged weights, by the epoch in progress.

        Nothing happens where they are those of the weights. `evaluate` calls it.

        Args:
            measure: see `evaluate`.
        """
        if not self._prepared().kept.statistics_are_stale:
            return
        life = self._life
        seed_everything(step_seed(self.identity.seed, self.rank, life.global_step), self.device)

        def batches() -> Iterator[Batch]:
            for batch in self._data.reread(life.at.epoch):
                if len(batch["index"]):
                    yield batch
                life.report_progress()

        with self.evaluating() as model, self.autocast():
            update_bn(batches(), Measured(model, measure))
            self._prepared().kept.renew_statistics()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, without gradients, its buffers equal on all ranks.

        Where weights are averaged, it has the averages within the block.
        """
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
        """
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
            if rows[2] is None:
                rows[2] = self._data.targets(split, self._target, rows[1], what)
            path = self._files.predictions(self.identity.member, split, self._attempt)
            save_predictions(path, rows[0].float(), rows[1], as_stored_target(what, rows[2]), what)

    def report_unread(self) -> None:
        """Report the hyperparameters that nothing has read so far; the run warns about them once."""
        assert isinstance(self.params, Hyperparameters)
        unread = [] if self._pipeline_reads_params else self.params.unread
        if unread:
            self._reporter.event("unread", params=unread)

    def log(self, text: str) -> None:
        """Write a line into the member's log (rank 0 does)."""
        self._reporter.log(text)

    # --- for the worker ---------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, int]:
        """Own epoch and step in it."""
        return self._life.position

    # The earlier names.
    where = position
    name_unread = report_unread

    def finish(self) -> None:
        """Save and report the end of the training loop."""
        self._life.finish(self._prepared())

    def close(self) -> None:
        """Leave the stream, and report the CPU time used to the end."""
        self._life.close()
        if self._optimization is not None:
            self._optimization.close()

    def _prepared(self) -> Optimization:
        if self._optimization is None:
            raise TrainingError("call member.prepare(model, optimizer) before anything else")
        return self._optimization


#: The earlier name of `TrainContext`.
Training = TrainContext
