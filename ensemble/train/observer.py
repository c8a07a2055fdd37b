"""Observes how a member's loss calls its model in the first training step: with which fields, and what it returns.

All ranks then know the same (`ensemble.train.call.Observation`), and the checkpoint keeps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ensemble.comm import Communicator
from ensemble.spec import Recipe
from ensemble.train.call import Call, Observation
from ensemble.train.gather import gather_json
from ensemble.train.outputs import FirstCall, observe, watch_call

if TYPE_CHECKING:
    from pipelines import Batch


class Observer:
    """What is known of one member, on one of its ranks.

    Attributes:
        seen: what all ranks know; None before the first step.
        offered: the call by which a framework predicts, tried before the first step.
        is_relied_on: whether there are no predictions but those that follow from a call.
        otherwise: why what was predicted is not what a loaded model would predict; None where it is.
    """

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        self._recipe, self._comm = recipe, comm
        self.seen: Observation | None = None
        self.offered: Call | None = None
        self.is_relied_on = False
        self.otherwise: str | None = None
        self._own: Observation | None = None  # since the ranks have agreed
        self._watch: tuple[contextlib.ExitStack, FirstCall, Batch] | None = None

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
        """Watch the model from here to `end`, unless it is known how it is called."""
        if self.seen is None and self._own is None:
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
        if first.is_seen and self.seen is None and (self._own is None or self._own.reason is not None):
            self._own = observe(self._recipe, batch, first)

    def find(self) -> Observation:
        """What this rank knows so far."""
        return self.seen or self._own or Observation()

    def agree(self) -> None:
        """Let all ranks know what the first of them knows how to predict has seen; all call it together."""
        self.end()
        if self.seen is not None:
            return
        records = gather_json(self._comm, None if self._own is None else self._own.as_record())
        observations = [one for record in records if record and (one := Observation.from_checkpoint(record))]
        self.seen = min(observations, key=lambda one: one.reason is not None, default=None)
        self._own = None
