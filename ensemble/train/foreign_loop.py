"""A member in a training loop that is not ours, with steps of its own: a framework's, or a script as it was.

What it reads of an `EpochLoader` says where the member is: each pass over the training split is an own epoch, the
next batch ends a step, the next pass an epoch. Events, checkpoints and commands are between epochs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.store import weights_sha256
from ensemble.train.call import take
from ensemble.train.evaluator import Evaluator
from ensemble.train.gather import gather_json
from ensemble.train.job import StopTraining, TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.seeding import seed_everything, step_seed
from ensemble.train.state import TrainState
from ensemble.train.step_sync import StepResult

if TYPE_CHECKING:
    from pipelines import Batch

#: How a batch is given to a loop: as it is; a tuple of these fields; a dict, names of its entries -> fields.
Fields = Sequence[str] | Mapping[str, str] | None


class ForeignLoop:
    """The passes of a loop over one member's data, on one of its ranks.

    Attributes:
        counts_from_0: whether the loop makes the passes that were trained before a resume once more. A framework
            that restores its own position does not.
        is_idle: whether the pass in progress is of no epoch: it was trained before, or the member has ended. The
            loop may have changed its objects meanwhile; `end`, or the next epoch, gives them their states again.
            Until then they have the structure with which they were built, as the loop changes that once more.
    """

    def __init__(self, state: TrainState, life: Lifecycle) -> None:
        self._state, self._life = state, life
        self.counts_from_0, self.is_idle = True, False
        self._passes = 0  # with those of an earlier attempt
        self._first = 0  # the own epoch at which this attempt begins
        self._is_in_epoch = self._has_trained = self._is_restored = False
        self._own: dict[str, Any] | None = None  # their states when the member had ended
        self._reading: Iterator[Batch] = iter(())
        self._given = 0  # batches of the pass in progress

    def make_loader(self, evaluator: Evaluator, split: str, fields: Fields) -> EpochLoader:
        """The batches of a split; see `TrainContext.dataloader`."""
        return EpochLoader(self._state, evaluator, self, split, fields)

    def read(self) -> Iterator[Batch]:
        """Yield this rank's batches of the next epoch; of one that was trained before a resume, none.

        A loop that drops this iterator before its end does not end the last step within that.
        """
        if self._begin_epoch():
            self._reading, self._given = self._read_epoch(), 0
            yield from iter(self._next_batch, None)

    def _next_batch(self) -> Batch | None:
        self._given += 1
        return next(self._reading, None)

    def count_batches(self) -> int:
        """Batches of the next pass, without empty ones."""
        self._start()
        epoch = self._state.at.epoch + int(self._is_in_epoch)
        return self._state.data.count_batches(epoch, self._state.steps_per_epoch)

    def end_last_step(self) -> None:
        """End the last step of a pass, where the loop knows that no batch follows, before it evaluates."""
        state = self._state
        if self._is_in_epoch and self._given == state.data.count_batches(state.at.epoch, state.steps_per_epoch):
            next(self._reading, None)

    def end_epoch(self) -> None:
        """Report and save the epoch in progress, and execute the pruner's decision.

        Before the first, a framework's callback may have frozen layers at its start, and unfreezes some next.
        """
        if self._is_in_epoch:
            self._end_pass()
            self._life.end_epoch()
        elif not (self._has_trained or self.counts_from_0 or self._is_restored):
            self._is_restored = True
            self._state.optimization.restore_structure()

    def end(self) -> None:
        """End the member after the epoch in progress; the train function has left its loop."""
        if self._is_in_epoch:
            self._end_pass()
            self._life.has_left = True
        elif self.is_idle:
            self.is_idle = False
            if self._own is not None:
                self._state.own.load(self._own)
            else:
                self._life.resumption.reload()

    def _end_pass(self) -> None:
        """End the last step, where the loop knew that there was no next batch, and pass over empty ones."""
        self._is_in_epoch, state = False, self._state
        if state.at.step + 1 == state.steps_per_epoch or state.identity.weights is not None:
            next(self._reading, None)
        if state.comm.world > 1:
            weights = dict(state.optimization.model.named_parameters())
            if len(set(gather_json(state.comm, weights_sha256(weights)))) > 1:
                raise TrainingError(
                    f"the workers have different weights after epoch {state.at.epoch + 1}: a loop over "
                    "member.dataloader() exchanges its gradients itself; wrap the model, after member.prepare(), "
                    "in torch.nn.parallel.DistributedDataParallel"
                )

    def _start(self) -> None:
        """Open the stream, once."""
        state = self._state
        if not state.steps_elsewhere:
            self._check_options()
            state.steps_elsewhere = True
            self._first = state.at.epoch
            self._passes = 0 if self.counts_from_0 else self._first
            state.open()

    def _begin_epoch(self) -> bool:
        """End the epoch before, and begin the next; returns whether there is one to be trained."""
        state = self._state
        self._start()
        self.end_epoch()
        self._passes += 1
        if self._passes > (epochs := state.identity.epochs):
            raise TrainingError(
                f"member.dataloader('train') is read beyond the last of {epochs} epochs: declare more epochs=, or "
                f"end the loop after {epochs} passes or {epochs * state.steps_per_epoch} steps, of which "
                "member.position says how many were done before a resume"
            )
        state.catches_up = self._passes <= self._first and not state.is_over
        if self._passes <= self._first or state.is_over:
            if self._has_trained and self._own is None:
                self._own = copy.deepcopy(state.own.state_dict())
            if state.catches_up and not self.is_idle:
                state.optimization.restore_structure(as_built=True)
            self.is_idle = True
            return False
        if self.is_idle:
            self.is_idle = False
            self._life.resumption.reload()
        self._is_in_epoch = self._has_trained = True
        self._life.begin_epoch()
        state.optimization.begin_epoch()
        return True

    def _read_epoch(self) -> Iterator[Batch]:
        state, at = self._state, self._state.at
        for shared in state.data.epoch(at.epoch, state.collate):
            size = shared.global_size
            if size and not self._is_in_epoch:
                return  # the loop has left the epoch before its end
            self._life.begin()
            batch = own_memory(shared)
            if size:
                yield from self._read_step(batch)
            is_last = at.step + 1 == state.steps_per_epoch
            command = state.poll_command() if state.comm.world == 1 else None
            if command == "stop" and not is_last:  # only the loop knows its state: a resume begins the epoch anew
                raise StopTraining("stopped")
            self._life.end_step(StepResult(0.0, command), size)

    def _read_step(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batch of a step, which ends with the next one."""
        state, busy = self._state, self._state.gpu_busy
        if not len(batch["index"]):
            raise TrainingError(
                f"a global batch of {batch.global_size} samples has none for rank {state.comm.rank}: take a "
                "larger batch_size, or drop_last=True, as the loop steps together with those of the other workers"
            )
        if busy is not None:
            busy.begin()
        seed_everything(step_seed(state.identity.seed, state.comm.rank, state.global_step), state.device)
        yield batch
        if busy is not None:
            busy.end()

    def _check_options(self) -> None:
        """Refuse options that are executed by `member.step`, which such a loop does not call."""
        self._state.callbacks.check_foreign()
        if wrong := self._state.identity.list_step_options():
            raise TrainingError(
                f"{', '.join(f'{name}=' for name in wrong)}: has no effect on a loop over member.dataloader(), "
                "which computes its own steps: do it in the loop, or loop over member.batches()"
            )


def own_memory(batch: Batch) -> Batch:
    """The batch, in memory that is not written to again: frameworks keep batches, and fetch the next one early."""
    return batch.clone() if batch["index"].device.type == "cpu" else batch


class EpochLoader:
    """The batches of a split, as a DataLoader has them: `len` of them, and a pass over each epoch.

    Attributes:
        counts_next: whether the length of "train" is that of the next pass; else empty batches are part of it.
    """

    counts_next = False

    def __init__(
        self, state: TrainState, evaluator: Evaluator, loop: ForeignLoop, split: str, fields: Fields
    ) -> None:
        self._state, self._evaluator, self._loop = state, evaluator, loop
        self._split, self._fields = split, fields
        self.batch_size = state.identity.batch_size

    def __len__(self) -> int:
        """This rank's batches."""
        is_fixed = self._split == "train" and not self.counts_next
        return self._state.steps_per_epoch if is_fixed else self.count_batches()

    def count_batches(self) -> int:
        """Those of the next pass, without empty ones."""
        is_train = self._split == "train"
        return self._loop.count_batches() if is_train else self._state.data.split_steps(self._split)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or of the split."""
        if self._split == "train":
            return (take(batch, self._fields) for batch in self._loop.read())
        return (take(own_memory(batch), self._fields) for batch in self._evaluator.batches(self._split))
