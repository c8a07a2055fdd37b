"""A member whose train function is a program of its own: it reads no pipeline, and may have no model of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ensemble.spec import Recipe
from ensemble.train.job import TrainingError
from ensemble.train.lifecycle import Lifecycle
from ensemble.train.optimization import Optimization
from ensemble.train.state import TrainState

if TYPE_CHECKING:
    from ensemble.train.member import TrainContext


class OwnProgram:
    """Runs such a train function, and takes its reports; an epoch has no steps."""

    def __init__(self, member: TrainContext, state: TrainState, life: Lifecycle) -> None:
        self._member, self._state, self._life = member, state, life
        self._reports = 0
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
        if not (self._life.is_looping or state.is_over):
            at.stop_reason = "its train function returned"

    def _prepare_nothing(self) -> Optimization:
        """Go on with an empty model, where the function has given none."""
        own = self._state.identity
        if own.keep == "best" or own.averaging is not None:
            raise TrainingError("keep='best' and averaging= are of a model's weights: give it to member.prepare()")
        self._member.prepare(nn.Module(), torch.optim.SGD([{"params": []}]))
        return self._state.optimization

    def _end_training(self) -> None:
        self._state.throughput.add_step(0)
        self._state.throughput.end_training()

    def takes(self, metrics: dict[str, float]) -> bool:
        """End an epoch by its report outside of `TrainContext.epochs`; returns whether it was outside."""
        if self._life.is_looping:
            return False
        state, self._reports = self._state, self._reports + 1
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
        elif self._reports == at.epoch:  # what it is evaluated on may have changed since
            at.metrics = metrics
        return True
