"""Observes a Recipe's member in its first training steps: how the loss calls the model, what the outputs predict.

One step shows it, as a rule. Where it depends on the targets that a batch happens to hold, the steps of the first
epoch are observed until one of them decides, and at its end what they have shown holds. All ranks then know the
same (`ensemble.train.call.Observation`), and the checkpoint keeps it.

To look at a target waits for the GPU. Of steps like the one that left it open only those count whose target has a
value that it had not, which is computed where the target is and read for `_TOGETHER` steps at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.comm import Communicator
from ensemble.spec import Recipe
from ensemble.spec.task import find_known
from ensemble.train.call import Call, Observation, find_target
from ensemble.train.gather import gather_json
from ensemble.train.infer_task import take_logits
from ensemble.train.outputs import FirstCall, observe, watch_call

if TYPE_CHECKING:
    from pipelines import Batch

_TOGETHER = 32


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
        self._noted: Any = None  # the layout of the step that was looked at last
        self._later: list[tuple[Tensor, dict[str, Tensor], FirstCall]] = []  # steps to look at: whether they count

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to find out; the same on all ranks."""
        seen = self.seen
        return seen is not None and not seen.is_open and (seen.task or seen.reason) is not None

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
        """Watch the model from here to `end`, unless training steps show nothing more on this rank."""
        own = _choose([self._own, self.seen])
        if not self.is_settled and (own is None or own.is_open):
            self.end()
            watch = contextlib.ExitStack()
            self._watch = watch, watch.enter_context(watch_call(model, batch)), batch

    def end(self) -> None:
        """Note the first call since `begin`, which was in a training step."""
        if self._watch is not None:
            (watch, first, batch), self._watch = self._watch, None
            watch.close()
            field, own = self._recipe.target, _choose([self._own, self.seen])
            layout = _lay_out(find_target(batch, field), first)
            if own is None or not own.is_open or layout is None or layout != self._noted:
                self._note(batch, first)
                self._noted = layout
                return
            target = find_target(batch, field)
            self._later.append((_has_more(target, own), {field: target.clone()}, first.shapes()))
            if len(self._later) == _TOGETHER:
                self._look()

    def _look(self) -> None:
        """Note the steps that are still to be looked at, as far as they count."""
        later, self._later = self._later, []
        counts = torch.stack([each[0] for each in later]).tolist() if later else []
        for (_, batch, first), is_counted in zip(later, counts, strict=True):
            own = _choose([self._own, self.seen])
            if is_counted and (own is None or own.is_open):
                self._note(batch, first)

    def _note(self, batch: Mapping[str, Tensor], first: FirstCall) -> None:
        self._look()
        if first.is_seen and not self.is_settled:
            self._own = _choose([self._own, observe(self._recipe, batch, first)])

    def find(self, batch: Batch, values: Tensor | None = None) -> Observation:
        """What this rank knows so far; the first `values` that `Recipe.predict` gave may say the task."""
        self._look()
        seen = _choose([self._own, self.seen]) or Observation()
        if values is not None and seen.task is None and (seen.reason is None or seen.is_open):
            found = observe(self._recipe, batch, values=values)
            self._own = seen = replace(found, call=seen.call)
        return seen

    def agree(self, *, is_epoch_over: bool = False) -> None:
        """Let all ranks know what the one of them has seen that has seen most; all ranks call it together.

        Args:
            is_epoch_over: whether all batches of an epoch were seen: what is open then stays as it is.
        """
        self.end()
        self._look()
        if self.is_settled:
            return
        own = None if self._own is None else [replace(self._own, is_open=False).as_record(), self._own.is_open]
        shares = [each for each in gather_json(self._comm, own) if each is not None]
        found = [replace(_read(record), is_open=is_open) for record, is_open in shares]
        self.seen, self._own = _choose([self.seen, *found]), None
        if is_epoch_over and self.seen is not None and self.seen.is_open:
            nothing = f"no value of the target {self._recipe.target!r} took part in the first epoch"
            reason = None if self.seen.task is not None else self.seen.reason or nothing
            self.seen = replace(self.seen, is_open=False, reason=reason)


def _lay_out(target: Tensor | None, first: FirstCall) -> Any:
    """Shapes and dtypes of a step, but for its number of samples; None where they are not those of tensors."""
    outputs = take_logits(first.output()) if first.is_seen else None
    if target is None or not isinstance(outputs, Tensor) or outputs.shape[:1] != target.shape[:1]:
        return None
    return target.dtype, target.shape[1:], outputs.dtype, outputs.shape[1:]


def _has_more(target: Tensor, own: Observation) -> Tensor:
    """Whether a target shows what its like that left this open did not: a bool where the target is."""
    known = find_known(target)
    if own.task is None and not own.reason:  # no value has taken part
        return known.any()
    return (known & (target != 0) & (target != 1)).any()


def _read(record: dict[str, Any]) -> Observation:
    found = Observation.from_checkpoint(record)
    assert found is not None
    return found


def _choose(observations: list[Observation | None]) -> Observation | None:
    """The first of those that say most: what is settled, a task, a reason why there is none."""
    known = [each for each in observations if each is not None]
    return max(known, key=lambda each: (not each.is_open, each.task is not None, bool(each.reason)), default=None)
