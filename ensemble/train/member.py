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

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ensemble.comm.autotune.plan import ExchangeOptions
from ensemble.spec.losses import NamedLoss
from ensemble.train.accumulation import MicroBatches
from ensemble.train.compilation import compile_forward, release_caches
from ensemble.train.data import describe_not_finite
from ensemble.train.evaluated_member import EvaluatedMember
from ensemble.train.hyperparameters import Hyperparameters
from ensemble.train.job import Diverged, TrainingError
from ensemble.train.mixup import MixedBatch, mix
from ensemble.train.optimization import Optimization
from ensemble.train.seeding import seed_everything, step_seed

if TYPE_CHECKING:
    from pipelines import Batch
    from pipelines.loader.collate import Collate

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class TrainContext(EvaluatedMember):
    """One member in training, on one of its ranks; the only argument of a train function.

    Attributes:
        identity: hyperparameters, seed, workers, epochs and all else that distinguishes this member.
        params: its hyperparameters.
        device: of its model and batches.
        rank: of this worker, from 0.
        world: the number of workers.
        comm: its connection to the others.
        steps_per_epoch: global batches of an epoch.
        steps: global batches of all epochs that were declared: of a member that was given more later, the number
            stays, since schedules are computed from it.
        splits: those of "valid", "test" and "shifted" that the ensemble has: members are evaluated on the first,
            and predict all of them.
        objective: the metric that ranks members.
        observer: what is known of a Recipe's model: how it is called, what it predicts.
    """

    _has_stepped = _has_mixed = False

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
        self._data.on_wait = self._on_wait
        declared = ExchangeOptions(own.compression, own.communicator, own.seed)
        self._optimization = Optimization(
            model, optimizer, schedule, clip_norm, self._precision, self.comm, self.device, declared, own
        )
        self._life.resume(self._optimization)
        if own.compile is not None:
            compile_forward(model, own.compile, Path(self._run_dir))
        return model, optimizer

    # --- the loop ---------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Yield the member's own epochs, 0-based, from its current to its last.

        It ends before the last where the member stops early. Afterwards the model has the weights that are kept:
        predictions are made then. A loop that is left after a whole epoch ends the member there, as `stop` does.
        """
        optimization, life = self._prepared(), self._life
        self._effects.open(self._inbox, None if life.is_over else life.at)
        while not life.is_over:
            life.throughput.begin_epoch(self._data.stats())
            if life.at.step == self.steps_per_epoch:  # only its evaluation is left, in which it was stopped
                life.begin()
            try:
                yield life.at.epoch
            except GeneratorExit:  # nothing is to be done here: the loop may be left by an exception
                self._has_left = True
                raise
            self._end_epoch()
        life.conclude(optimization)

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
        self._life.stop(" ".join(reason.split()))

    def batches(self, split: str = "train", collate: Collate | None = None) -> Iterator[Batch]:
        """Yield this rank's part of each batch: of the epoch in training, or of a resident split (`splits`).

        Each training batch needs one `backward` and one `step`. A global batch of which this rank has no sample is
        handled here; the loop does not see it. Every batch is valid until the loop continues.

        Args:
            split: "train", or one of `splits`.
            collate: `f(batch)` or `f(batch, rng)`, applied to each batch, instead of `Recipe.collate`; it is kept
                for the evaluations that follow.
        """
        self._collate = collate or self._collate
        return self._train_batches() if split == "train" else self._resident_batches(split)

    def _train_batches(self) -> Iterator[Batch]:
        optimization, life = self._prepared(), self._life
        for batch in self._data.epoch(life.at.epoch, self._collate):
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

    def _validate_within_epoch(self) -> None:
        if self._validate is None:
            raise TrainingError(
                "validate_every= evaluates within epochs: call member.validate_with(measure) before the loop"
            )
        with self._life.throughput.pausing():
            self._life.add_validation(self._validate(), self._prepared())

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
        own, seen = self.identity, self.observer.seen
        inputs: Sequence[str] = () if seen is None or seen.call is None else seen.call.fields
        if isinstance(self._loss, NamedLoss) and not self._is_own_loop:
            inputs = self._loss.find_inputs(batch)
        step, weighted = self._life.global_step, own.weights is not None
        mixed = mix(batch, self._target, own.mixup, own.seed, self.rank, step, inputs, weighted=weighted)
        self._has_mixed = True
        if own.mixup:  # its fields are what the model is called with
            self.observer.begin(self._prepared().model, mixed)
        return mixed

    def _on_wait(self) -> None:
        """Report progress and execute commands while the stream keeps this rank waiting.

        Several ranks execute a command after a step only, when they have agreed on it.
        """
        self._life.report_progress()
        if self.world == 1:
            self._life.execute(self._life.poll_command(), self._prepared())

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
        command = self._life.choose_action() if last else None
        self._prepared().begin(command, losses, part, weight, last=last)

    def step(self) -> None:
        """Exchange the gradients, step the optimizer and the schedule, and execute commands.

        Raises:
            TrainingError: it is not called once after `backward` of each batch.
            Diverged: the loss is NaN or infinite.
        """
        parts, self._micro_batches = self._micro_batches, None
        if parts is None or not parts.is_complete:
            raise TrainingError("member.step() comes after member.backward(losses), once for each batch")
        optimization, life, batch = self._prepared(), self._life, parts.batch
        is_unmixed = bool(self.identity.mixup) and not self._has_mixed and len(batch["index"]) > 0
        if is_unmixed and life.global_step == 0:  # later a loop may leave it out
            raise TrainingError("mixup= is declared, and nothing is mixed: train on member.mixup(batch)")
        try:
            result = optimization.end(batch, life.throughput.synchronizing())
        except Diverged as error:
            where = f"epoch {life.at.epoch}, step {life.at.step}{describe_not_finite(batch)}"
            self._effects.end_diverged(Diverged(f"{error}, {where}"))
            life.at.step += 1
            return
        self._end_gpu_work()
        is_epoch_over = life.at.step + 1 == self.steps_per_epoch
        if not self._has_stepped or is_epoch_over:
            self._has_stepped = True
            self.observer.agree(is_epoch_over=is_epoch_over)
        life.end_step(result, batch.global_size, optimization)

    def report_unused(self) -> None:
        """Report the hyperparameters that nothing has read so far; the run warns about them once."""
        assert isinstance(self.params, Hyperparameters)
        unused = [] if self._pipeline_reads_params else self.params.unused
        if unused:
            meant = {name: near for name in unused if (near := self.params.suggest(name)) is not None}
            self._effects.reporter.event(
                "unused_hyperparameters", params=unused, **({"meant": meant} if meant else {})
            )

    # --- for the worker ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Save and report the end of the training loop; end an epoch that it left after the last step."""
        self._has_left = self._has_left or not self._life.is_over
        self._end_left_epoch()
        self._life.finish(self._prepared())

    def save(self) -> None:
        """Save a member that was stopped in its evaluation."""
        self._life.save(self._prepared())

    def close(self) -> None:
        """Leave the stream, and report the CPU time used to the end.

        The parts that hold the ensemble are emptied: their callbacks lead back to the member, so that its arrays
        would stay in memory where the process lives on.
        """
        self._life.close()
        if self._optimization is not None:
            self._optimization.close()
        release_caches()
        for part in (self._data, self._life, self._effects):
            vars(part).clear()
