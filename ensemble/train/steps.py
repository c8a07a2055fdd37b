"""`TrainingSteps`: the steps of a member's epochs, from a batch to new weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ensemble.spec.sample_weights import needs_weighing
from ensemble.train.accumulation import MicroBatches
from ensemble.train.data import describe_not_finite
from ensemble.train.job import Diverged, TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.optimization import OWN_STEPS
from ensemble.train.seeding import seed_everything, step_seed
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from pipelines import Batch


class TrainingSteps:
    """The steps of one member on one of its ranks; `TrainContext` has the methods of the same names.

    Attributes:
        validate: evaluates the member within an epoch; None: nothing was given.
    """

    def __init__(self, state: TrainState, life: Lifecycle) -> None:
        self._state, self._life = state, life
        self.validate: Callable[[], Mapping[str, float]] | None = None
        self._needs_weighing = needs_weighing(state.identity.weights)
        self._has_stepped = False

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's batches of the epoch in training, each of which gets its step."""
        state, optimization, every = self._state, self._state.optimization, self._state.identity.validate_every
        optimization.begin_epoch()
        optimization.take_modes()
        for batch in state.data.epoch(state.at.epoch, state.collate):
            self._life.begin()
            if every:
                self._validate_where_due(every)
            before = state.global_step
            if state.gpu_busy is not None:
                state.gpu_busy.begin()
            seed_everything(step_seed(state.identity.seed, state.comm.rank, before), state.device)
            if state.comm.world > 1:
                with state.throughput.synchronizing():
                    optimization.share_buffers()
            state.micro_batches = MicroBatches(batch, state.identity.accumulate)
            if batch["index"].shape[0]:
                yield batch
            else:
                self.backward(None)
                self.step()
            if state.global_step != before + 1:
                why = "for each batch of member.batches(); a loop with optimizer.step() reads member.dataloader()"
                raise TrainingError(f"member.step() must be called exactly once {why}")

    def _validate_where_due(self, every: int) -> None:
        """Evaluate the member within its epoch, also after a resume from before it, but not twice."""
        state, at = self._state, self._state.at
        is_place = 0 < at.step < state.steps_per_epoch and state.global_step % every == 0
        if not is_place or (at.validations and at.validations[-1][0] == at.step):
            return
        if self.validate is None:
            raise TrainingError(
                "validate_every= evaluates within epochs: call member.validate_with(measure) before the loop"
            )
        with state.throughput.pausing():
            self._life.add_validation(self.validate())

    def backward(self, losses: Tensor | None) -> None:
        """Compute this rank's part of the gradient of the global batch's mean loss.

        Args:
            losses: [b]; None from a rank without samples.
        """
        state = self._state
        if state.micro_batches is None:
            raise TrainingError("member.backward() is for the losses of a batch of member.batches()")
        part, is_last = state.micro_batches.pop()
        weight = part["weight"] if self._needs_weighing else None
        command = self._life.choose_action() if is_last else None
        state.optimization.begin(command, losses, part, weight, last=is_last)

    def step(self) -> None:
        """Exchange the gradients, step the optimizer and the schedule, and execute commands."""
        state, at = self._state, self._state.at
        parts = state.micro_batches
        if parts is None or not parts.is_complete:
            raise TrainingError(f"member.step() comes after member.backward(losses), once a batch; {OWN_STEPS}")
        batch = parts.batch
        lr = state.optimization.lr
        waiting = contextlib.nullcontext() if state.comm.world == 1 else state.throughput.synchronizing()
        try:
            result = state.optimization.end(batch, waiting, ends_at_nan=state.ends_at_nan)
        except Diverged as error:
            state.micro_batches = None
            describe = lambda index: state.data.describe_sample("train", index)  # noqa: E731
            where_from = describe_not_finite(batch, describe, state.precision.largest)
            where_from = where_from or state.precision.suspect(lr)
            raise Diverged(f"{error}, epoch {at.epoch + 1}, step {at.step}{where_from}") from None
        state.micro_batches = None
        if state.gpu_busy is not None:
            state.gpu_busy.end()
        if not self._has_stepped or at.step + 1 == state.steps_per_epoch:
            self._has_stepped = True
            state.callbacks.check_wrapped()
        self._life.end_step(result, batch.global_size)
