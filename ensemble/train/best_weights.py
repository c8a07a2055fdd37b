"""The weights that count for a member where they are not those in training: averages, or those of the best epoch.

A checkpoint has them as its `model`: whatever loads a member, names it by its digest or starts with its weights
uses them. The weights in training, with which a resume goes on, are then beside them (`kept`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ensemble.spec import Identity
from ensemble.train.averaging import WeightAverage


class BestWeights:
    """What a member keeps beside the weights in training.

    Args:
        model: on its device.
        identity: its options `averaging` and `keep`; None: it keeps nothing.

    Attributes:
        average: None where weights are not averaged.
        is_in_use: whether the weights that count may be others than those in training.
    """

    def __init__(self, model: nn.Module, identity: Identity | None) -> None:
        self._model = model
        self.average: WeightAverage | None = None
        if identity is not None and identity.averaging is not None:
            self.average = WeightAverage(model, identity.averaging, identity.scheduled_epochs)
        self._keeps_best = identity is not None and identity.keep == "best"
        self.is_in_use = self.average is not None or self._keeps_best
        self._best: dict[str, Tensor] | None = None
        self._trained: dict[str, Tensor] | None = None  # once the model has the weights that are kept

    def end_step(self, epoch: int, *, is_last: bool, applied: bool) -> None:
        """Take note of a step; see `WeightAverage.end_step`."""
        if self.average is not None:
            self.average.end_step(epoch, is_last=is_last, applied=applied)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the averages, if there are any and it is still in training."""
        if self.average is None or self._trained is not None:
            yield
            return
        with self.average.applied():
            yield

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Within the block the model has the weights that count, as a checkpoint has them."""
        if self._best is None or self._trained is not None:
            with self.applied():
                yield
            return
        trained = _copy(self._model.state_dict())
        self._model.load_state_dict(self._best)
        try:
            yield
        finally:
            self._model.load_state_dict(trained)

    @property
    def statistics_are_stale(self) -> bool:
        """See `WeightAverage`."""
        return self.average is not None and self._trained is None and self.average.statistics_are_stale

    def renew_statistics(self) -> None:
        """See `WeightAverage`."""
        if self.average is not None:
            self.average.renew_statistics()

    def keep_best(self) -> None:
        """Keep the weights that are evaluated now as the best so far."""
        with self.applied():
            self._best = _copy(self._model.state_dict(), "cpu")

    def explain_absence(self) -> str | None:
        """Why the weights in training count although others were asked for; None where they do not."""
        if self._best is None and self._keeps_best:
            return "keep='best' keeps the last weights: no evaluation had a finite value of the objective"
        if self.average is not None and not self.average.count:
            return "nothing was averaged: training ended before that began"
        return None

    def adopt(self) -> None:
        """Give the model the weights that are kept: training is over."""
        if self._trained is not None or not self._differs:
            return
        counting = self._list_counting()
        self._trained = _copy(self._model.state_dict())
        self._model.load_state_dict(counting)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights of the user's into the model; `take` lets them count."""
        if self._trained is None:
            self._trained = _copy(self._model.state_dict())
        self._model.load_state_dict(weights)

    def take(self) -> None:
        """Let the weights that the model has now be those that are kept; those in training stay beside them."""
        if self._trained is None:
            self._trained = _copy(self._model.state_dict())
        self._best = _copy(self._model.state_dict(), "cpu")

    def drop_best(self) -> None:
        """Keep none of the weights so far: training goes on from those in training."""
        self._best = None

    @property
    def _differs(self) -> bool:
        return self._best is not None or (self.average is not None and self.average.count > 0)

    def _list_counting(self) -> dict[str, Tensor]:
        """The weights that count: the best, or else the averages."""
        if self._best is not None:
            return self._best
        with self.applied():
            return _copy(self._model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The parts of a checkpoint that differ from those of a member that keeps nothing."""
        if not self._differs:
            return {}
        trained = self._model.state_dict() if self._trained is None else self._trained
        kept: dict[str, Any] = {"trained": dict(trained), "is_best": self._best is not None}
        if self.average is not None:
            kept["average"] = self.average.state_dict()
        return {"model": dict(self._list_counting()), "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; the model has its `model`."""
        kept = state.get("kept")
        if kept is None:
            return
        if "trained" not in kept:  # it has ended: `keep_weights_only`
            self._trained, self._best = _copy(self._model.state_dict()), dict(state["model"])
            if self.average is not None:
                self.average.count = kept["count"]
            return
        self._model.load_state_dict(kept["trained"])
        self._best = dict(state["model"]) if kept["is_best"] else None
        if self.average is not None and "average" in kept:
            self.average.load_state_dict(kept["average"])


def _copy(state: Mapping[str, Any], device: str | None = None) -> dict[str, Tensor]:
    copies = {name: tensor.detach().to(device or tensor.device, copy=True) for name, tensor in state.items()}
    return {name: copies[name] for name in state}
