"""The weights that count for a member where they are not those in training: averages, or those of the best epoch.

A checkpoint has them as its `model`: whatever loads a member, names it by its digest or starts with its weights
uses them. The weights in training, with which a resume goes on, are then beside them (`kept`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ensemble.train.own_tensors import load_own, own_state

if TYPE_CHECKING:
    from ensemble.train.callbacks import Callbacks


class BestWeights:
    """What a member keeps beside the weights in training.

    Args:
        keeps_best: whether the weights after the best evaluation count.

    Attributes:
        is_in_use: whether the weights that count may be others than those in training.
    """

    def __init__(self, model: nn.Module, callbacks: Callbacks | None, *, keeps_best: bool) -> None:
        self._model, self._callbacks, self._keeps_best = model, callbacks, keeps_best
        self.is_in_use = keeps_best or (callbacks is not None and callbacks.may_have_weights)
        self._best: dict[str, Tensor] | None = None
        self._trained: dict[str, Tensor] | None = None  # once the model has the weights that are kept

    @property
    def is_adopted(self) -> bool:
        """Whether training is over, and the model has the weights that are kept."""
        return self._trained is not None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the weights of its callbacks, if it is still in training."""
        with contextlib.ExitStack() as stack:
            if self._callbacks is not None and not self.is_adopted:
                stack.enter_context(self._callbacks.weights())
            yield

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Within the block the model has the weights that count, as a checkpoint has them."""
        if self._best is None or self.is_adopted:
            with self.applied():
                yield
            return
        trained = _copy(own_state(self._model))
        load_own(self._model, self._best)
        try:
            yield
        finally:
            load_own(self._model, trained)

    def keep_best(self) -> None:
        """Keep the weights that are evaluated now as the best so far."""
        with self.applied():
            self._best = _copy(own_state(self._model), "cpu")

    def explain_absence(self) -> str | None:
        """Why the weights in training count although others were asked for; None where they do not."""
        if self._best is None and self._keeps_best:
            return "keep='best' keeps the last weights: no evaluation had a finite value of the objective"
        if not self.is_adopted and self._callbacks is not None and self._callbacks.may_have_weights:
            return "nothing was averaged: training ended before that began"
        return None

    def adopt(self) -> None:
        """Give the model the weights that are kept: training is over."""
        if not self.is_adopted and self._differs:
            counting = self._copy_counting()
            self._trained = _copy(own_state(self._model))
            load_own(self._model, counting)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights of the user's into the model; `take` lets them count."""
        if self._trained is None:
            self._trained = _copy(own_state(self._model))
        load_own(self._model, weights)

    def take(self) -> None:
        """Let the weights that the model has now be those that are kept; those in training stay beside them."""
        if self._trained is None:
            self._trained = _copy(own_state(self._model))
        self._best = _copy(own_state(self._model), "cpu")

    def drop_best(self) -> None:
        """Keep none of the weights so far: training goes on from those in training."""
        self._best = None

    @property
    def _differs(self) -> bool:
        return self._best is not None or (self._callbacks is not None and self._callbacks.has_weights)

    def _copy_counting(self) -> dict[str, Tensor]:
        """The weights that count: the best, or else those of the callbacks."""
        if self._best is not None:
            return self._best
        with self.applied():
            return _copy(own_state(self._model))

    def state_dict(self) -> dict[str, Any]:
        """The parts of a checkpoint that differ from those of a member that keeps nothing."""
        if not self._differs:
            return {}
        trained = own_state(self._model) if self._trained is None else self._trained
        kept: dict[str, Any] = {"trained": dict(trained), "is_best": self._best is not None}
        return {"model": dict(self._copy_counting()), "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; the model has its `model`."""
        kept = state.get("kept")
        if kept is None:
            return
        if "trained" not in kept:  # it has ended: `keep_weights_only`
            self._trained, self._best = _copy(own_state(self._model)), dict(state["model"])
            return
        load_own(self._model, kept["trained"])
        self._best = dict(state["model"]) if kept["is_best"] else None


def _copy(state: Mapping[str, Any], device: str | None = None) -> dict[str, Tensor]:
    return {name: tensor.detach().to(device or tensor.device, copy=True) for name, tensor in state.items()}
