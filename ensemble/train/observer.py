"""Observes a Recipe's member in its first training step: how the loss calls the model, what the outputs predict.

All ranks then know the same (`ensemble.train.call.Observation`), and the checkpoint keeps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ensemble.comm import Communicator
from ensemble.spec import Recipe
from ensemble.train.call import Observation
from ensemble.train.gather import gather_json
from ensemble.train.outputs import FirstCall, observe, watch_call

if TYPE_CHECKING:
    from pipelines import Batch


class Observer:
    """What is known of one member, on one of its ranks.

    Attributes:
        seen: what all ranks know; None before the first step, and of a train function.
    """

    def __init__(self, recipe: Any, comm: Communicator) -> None:
        self._recipe, self._comm = recipe, comm
        self.seen: Observation | None = None
        self._own: Observation | None = None
        self._watch: tuple[contextlib.ExitStack, FirstCall, Batch] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to find out; the same on all ranks."""
        is_recipe = isinstance(self._recipe, Recipe)
        return not is_recipe or (self.seen is not None and (self.seen.task or self.seen.reason) is not None)

    @contextlib.contextmanager
    def watching(self, model: nn.Module, batch: Batch) -> Iterator[FirstCall]:
        """Yield the first call of the model inside the block, which is a loss of this batch outside training.

        Where the loss calls the model in another way than in training, this way counts.
        """
        with watch_call(model, batch) as first:
            yield first
        self._note(batch, first)
        if self.seen is not None and first.is_seen and first.call != self.seen.call:
            self.seen = replace(self.seen, call=first.call)

    def begin(self, model: nn.Module, batch: Batch) -> None:
        """Watch the model from here to `end`, unless there is nothing left to find out on this rank."""
        if not self.is_settled and self._own is None:
            self.end()
            watch = contextlib.ExitStack()
            self._watch = watch, watch.enter_context(watch_call(model, batch)), batch

    def end(self) -> None:
        """Note the first call since `begin`, which was in a training step."""
        if self._watch is not None:
            (watch, first, batch), self._watch = self._watch, None
            watch.close()
            self._note(batch, first)

    def _note(self, batch: Batch, first: FirstCall) -> None:
        if self.seen is None and self._own is None and first.is_seen:
            self._own = observe(self._recipe, batch, first)

    def find(self, batch: Batch, values: Tensor | None = None) -> Observation:
        """What this rank knows so far; the first `values` that `Recipe.predict` gave may say the task."""
        seen = self._own or self.seen or Observation()
        if values is not None and seen.task is None and seen.reason is None:
            predicted = observe(self._recipe, batch, values=values)
            seen = replace(seen, task=predicted.task, reason=predicted.reason, target=predicted.target)
            self._own = seen
        return seen

    def agree(self) -> None:
        """Let all ranks know what the first of them has seen; all ranks call it together."""
        self.end()
        if self.is_settled:
            return
        own = None if self._own is None else self._own.as_record()
        shares = [each for each in gather_json(self._comm, own) if each is not None]
        shares.sort(key=lambda each: each["outputs"]["task"] is None)
        if shares:
            self.seen, self._own = Observation.from_checkpoint(shares[0]), None
