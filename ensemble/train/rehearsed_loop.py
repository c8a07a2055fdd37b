"""The training loop of a member over short epochs, in a process that is thrown away."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ensemble.comm import Communicator
from ensemble.meter import CpuClock, read_clocks
from ensemble.spec import Ensemble, Identity
from ensemble.store import RunDir
from ensemble.train.batchnorm import BATCH_NORMS
from ensemble.train.checkpoint import Checkpointer, Position
from ensemble.train.gather import gather_json
from ensemble.train.job import PROFILE, REHEARSAL, Inbox, Job
from ensemble.train.member import TrainContext
from ensemble.train.own_tensors import own_state
from ensemble.train.recipe import run_training_loop
from ensemble.train.reporter import EventReporter
from ensemble.train.seeding import process_settings, seed_everything
from ensemble.train.short_epochs import EndOfRehearsal, ShortData
from ensemble.train.state import TrainState
from ensemble.train.trajectory import Digests, describe_state

#: Short epochs at most, and at least where so many are declared.
MOST_EPOCHS, LEAST_EPOCHS = 12, 3
#: What a rehearsal may take: this share of an epoch, or so many seconds.
SHARE, LEAST_S = 0.1, 3.0
_ENDS = "the rehearsal ends here"


class RehearsedLoop:
    """Runs the loop of a member from the beginning, or from the checkpoint of a job.

    Args:
        folder: of the checkpoints, by the name of a member.

    Attributes:
        last: the short epochs to be trained; None until some have shown what they take.
        is_end: whether the loop runs to its end then; else it is left.
        trajectory: the state where each epoch began, and where the last one ended.
        keeps, weights: before which epochs the weights are kept, and these.
        checkpoints: name and digest of each that was written, by the number of epochs before it.
        epoch_s, whole_epoch_s: seconds of a short epoch, and of a whole one.
        failed_in: the batch that the user's code had when it failed; is_late: whether it had done a step.
    """

    def __init__(
        self,
        job: Job,
        ensemble: Ensemble,
        comm: Communicator,
        inbox: Inbox,
        say_alive: Callable[[], None],
        folder: str = REHEARSAL,
    ) -> None:
        self._job = dataclasses.replace(
            job, identity=dataclasses.replace(job.identity, member=REHEARSAL), rehearsal=None
        )
        self._ensemble = copy.copy(ensemble)
        object.__setattr__(self._ensemble, "checkpoint_every", 1)
        self._comm, self._inbox, self.say_alive, self.folder = comm, inbox, say_alive, folder
        self._began = (0.0, 0.0, 0.0)
        self.last: int | None = None
        self.is_end, self.has_batch_norm, self.is_late, self.failed_in = True, False, False, ""
        self.trajectory: dict[int, Digests] = {}
        self.keeps: tuple[int, ...] = ()
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.checkpoints: dict[str, tuple[str, str]] = {}
        self.epoch_s = self.whole_epoch_s = 0.0

    def run(self, check: Callable[[TrainState], None] = lambda state: None) -> None:
        """Train the member; `check` is called at the end, with its kept weights."""
        job, device = self._job, torch.device(self._job.device)
        with process_settings(job.identity.threads, device):
            seed_everything(job.identity.seed, device)
            data = ShortData(self._ensemble, job.identity, None, device, self._comm)
            reporter, saves = _Reporter(job, self.say_alive), _Checkpoints(job, self._ensemble, self)
            state = TrainState(job, self._ensemble, self._comm, reporter, self._inbox, data, saves)
            state.steps_per_epoch, state.throughput.memory = data.steps, None
            member = TrainContext(state)
            save = member._life.save
            member._life.save = lambda: save() if self._wants(state.at) else None  # type: ignore[method-assign]
            data.on_epoch = lambda epoch: self._begin_epoch(state, data, epoch)
            try:
                with contextlib.suppress(EndOfRehearsal):
                    run_training_loop(self._ensemble.recipe, member)
                    member.finish()
                self._note(state, state.at.epoch)
                check(state)
            except Exception:
                self.is_late, self.failed_in = state.global_step > 0, data.describe_given()
                raise
            finally:
                member.close()

    def _begin_epoch(self, state: TrainState, data: ShortData, epoch: int) -> None:
        own, (began_s, _, queued_s) = state.identity, self._began
        self._began = now_s, _, now_queued_s = read_clocks()
        if self.last is None and own.epochs < LEAST_EPOCHS:
            self.last = own.epochs
        elif self.last is None and epoch == LEAST_EPOCHS - 1:  # the first epochs load what they need
            self.epoch_s = max(0.0, now_s - began_s - (now_queued_s - queued_s))  # others may have had the cores
            self.whole_epoch_s = self.epoch_s * -(-self._ensemble.samples // own.batch_size) / data.steps
            self.last = gather_json(self._comm, self._choose_last(own))[0]
        self._note(state, epoch)
        if self.last is not None and epoch >= self.last:
            raise EndOfRehearsal
        ends = epoch + 1 == self.last and self.is_end and self.last < own.epochs
        if ends and not state.steps_elsewhere:
            state.at.stop_asked = _ENDS

    def _choose_last(self, own: Identity) -> int:
        """Return how many short epochs take about a third of what a rehearsal may take."""
        affordable = max(LEAST_S, SHARE * self.whole_epoch_s) / 3 / max(self.epoch_s, 1e-6)
        return min(own.epochs, MOST_EPOCHS, max(LEAST_EPOCHS, int(affordable)))

    def _note(self, state: TrainState, epoch: int) -> None:
        self.say_alive()
        model = state.optimization.model
        self.has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in model.modules())
        self.trajectory[epoch] = describe_state(state)
        if epoch in self.keeps:
            self.weights[epoch] = {name: own.detach().cpu().clone() for name, own in own_state(model).items()}

    def _wants(self, position: Position) -> bool:
        """Whether the checkpoint at a position is one to go on from: after the first, a middle, the last epoch."""
        places = {1, 2} if self.last is None else {1, (self.last + 1) // 2, self.last}
        return not self._job.checkpoints and position.step == 0 and position.epoch in places


class _Checkpoints(Checkpointer):
    """Writes the checkpoints from which a fresh process goes on."""

    def __init__(self, job: Job, ensemble: Ensemble, loop: RehearsedLoop) -> None:
        own = dataclasses.replace(job.identity, member=loop.folder)
        super().__init__(dataclasses.replace(job, identity=own), ensemble)
        self._loop = loop

    def load_initial_weights(self) -> None: ...

    def load_inherited(self) -> None: ...

    def save(self, first_epoch: int, position: Position, parts: Mapping[str, Any]) -> dict[str, str]:
        saved = super().save(first_epoch, position, parts)
        self._loop.checkpoints[str(position.epoch)] = Path(saved["path"]).name, saved["digest"]
        return saved


class _Reporter(EventReporter):
    """Writes lines to the log of the rehearsal; nothing else is reported."""

    def __init__(self, job: Job, say_alive: Callable[[], None]) -> None:
        super().__init__(job, lambda event: None, CpuClock())
        self._say_alive, self._log = say_alive, RunDir(job.run_dir).log(PROFILE)

    def event(self, type: str, **fields: Any) -> None: ...

    def progress(self, fields: Callable[[], Mapping[str, Any]]) -> bool:
        self._say_alive()
        return False
