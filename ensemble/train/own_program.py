"""A member whose train function is a program of its own: it reads no pipeline, and may have no model of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ensemble.spec import Recipe
from ensemble.train.job import TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.optimization import Optimization
from ensemble.train.seeding import seed_everything, step_seed
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext


class OwnProgram:
    """Runs such a train function, and takes its reports; an epoch has no steps."""

    def __init__(self, member: TrainContext, state: TrainState, life: Lifecycle) -> None:
        self._member, self._state, self._life = member, state, life
        self._reports, self._is_looping, self._has_model = 0, False, True
        state.prepare_nothing, state.on_trained = self._prepare_nothing, self._end_training

    def run(self, member: TrainContext) -> None:
        """Call the function; all that it does counts as training."""
        state, recipe = self._state, self._state.ensemble.recipe
        function: Any = recipe.train if isinstance(recipe, Recipe) else recipe
        state.callbacks.check_foreign()
        state.open()
        if state.job.checkpoints:  # where it goes on is known once it is prepared
            state.reporter.training_begins(state.data.stats()["prepare_cpu_s"])
        else:
            self._life.begin()
        function(member)
        at = state.at
        if not (at.epoch or at.is_reported):
            raise TrainingError(
                "the member has reported nothing: its train function calls member.report(NAME=VALUE)"
            )
        if not (self._is_looping or state.is_over):
            at.stop_reason = "its train function returned"

    def epochs(self) -> Iterator[int]:
        """See `TrainContext.epochs`; what is drawn in an epoch is the same after a resume."""
        self._is_looping, own = True, self._state.identity
        for epoch in self._life.epochs():
            seed_everything(step_seed(own.seed, 0, epoch), self._state.device)
            yield epoch

    def _prepare_nothing(self) -> Optimization:
        """Go on with an empty model, where the function has given none."""
        if self._state.identity.keep == "best":
            raise TrainingError("keep='best' is of a model's weights: give it to member.prepare()")
        self._has_model = False
        self._member.prepare(nn.Module(), torch.optim.SGD([{"params": []}]))
        return self._state.optimization

    def _end_training(self) -> None:
        self._state.throughput.add_step(0)
        self._state.throughput.end_training()

    def takes(self, metrics: dict[str, float]) -> bool:
        """End an epoch by its report outside of `TrainContext.epochs`; returns whether it was outside."""
        if self._is_looping:
            return False
        state, self._reports = self._state, self._reports + 1
        if self._reports == 1 and (state.own.state_dict() or (state.prepared is not None and self._has_model)):
            raise TrainingError(
                "the model of member.prepare() and the objects of member.state() go on from a checkpoint, and a "
                "function that reports on its own begins again: write `for _ in member.epochs():` around both"
            )
        _ = state.optimization  # it goes on from its checkpoint
        self._life.begin()
        at, epochs = state.at, state.identity.epochs
        if self._reports > epochs:
            raise TrainingError(
                f"member.report() was called {self._reports} times, and each call ends one of {epochs} epochs: "
                "declare epochs= for the number of reports, or write `for _ in member.epochs():` around them"
            )
        if self._reports > at.epoch and not state.is_over:
            at.metrics, at.is_reported = metrics, True
            state.callbacks.call("begin_epoch", at.epoch)
            self._life.end_epoch()
            state.throughput.begin_epoch(state.data.stats())
        else:
            self._life.wait()  # else it would be taken to hang
            if self._reports == at.epoch:  # what it is evaluated on may have changed since
                at.metrics = metrics
        return True
