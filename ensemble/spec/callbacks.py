"""`MemberCallback`: what a user adds to the training of members, without a training loop of their own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from ensemble.spec.validation import SpecError, as_json_value

#: `ensemble.train.member.TrainContext`, of a room below.
TrainContext = Any
#: `loss(model, batch) -> tensor [b]`
Loss = Callable[[Any, Any], Any]

#: The hooks of a callback.
HOOKS = (
    "begin_training", "begin_epoch", "wrap_loss", "after_backward", "end_step", "other_weights", "evaluated",
    "end_epoch",
)  # fmt: skip


class MemberCallback:
    """Empty hooks around the training of a member: a subclass overrides those that it needs.

    `Ensemble(callbacks=[...])` and `Member(callbacks=[...])` take objects. Each worker of each member has copies
    of its own, so they can be pickled; their hooks are called in this order, on all workers of a member.
    Averaging, early stopping and mixup are such callbacks, which come before the user's.
    """

    def begin_training(self, member: TrainContext) -> None:
        """Training begins, or goes on from a checkpoint: model and optimizer have their states.

        The model of a Recipe is in training mode; a module that the hook puts into `eval()` stays so.

        Args:
            member: the member in training; `member.model` and `member.optimizer` are what it trains.
        """

    def begin_epoch(self, member: TrainContext, epoch: int) -> None:
        """An epoch begins; where the member goes on within it, the hook is not called again.

        What it changes counts from this epoch on, with several workers too, and is there after a resume:
        `requires_grad`, groups of the optimizer, buffers, plain numbers of modules, modules in `eval()`.

        Args:
            member: the member in training.
            epoch: its own epoch, from 0.
        """

    def wrap_loss(self, member: TrainContext, loss: Loss) -> Loss:
        """The loss of training batches in place of another; the built-in loop of a Recipe calls it.

        Args:
            member: the member in training.
            loss: `loss(model, batch) -> [b]`.

        Returns:
            Such a function, which may call `loss` on another batch.
        """
        return loss

    def after_backward(self, member: TrainContext) -> None:
        """The gradients are those of the global batch's mean loss, before they are clipped and used.

        Args:
            member: the member in training.
        """

    def end_step(self, member: TrainContext, *, applied: bool) -> None:
        """A step is done; `member.position` counts it.

        Args:
            member: the member in training.
            applied: whether it changed the weights; False where an overflow in fp16 skipped it.
        """

    def other_weights(self, member: TrainContext) -> contextlib.AbstractContextManager[None] | None:
        """Other weights than those in training that are to be evaluated, kept and saved.

        Args:
            member: the member in training.

        Returns:
            A context manager within which the model has them; None: there are none now.
        """
        return None

    def evaluated(self, member: TrainContext, metrics: Mapping[str, float]) -> None:
        """The member was evaluated, at the end of an epoch or within it (`validate_every=`).

        Args:
            member: the member in training.
            metrics: as they were reported by the first worker.
        """

    def end_epoch(self, member: TrainContext, epoch: int, metrics: dict[str, float]) -> None:
        """An epoch was trained and evaluated; `member.stop(reason)` ends the member with it.

        Args:
            member: the member in training.
            epoch: its own epoch, from 0.
            metrics: the metrics of the epoch; what is added to them is recorded.
        """

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints hold of the callback: plain containers and values, tensors, other objects as pickles.

        Returns:
            Its private attributes.
        """
        return {name: value for name, value in vars(self).items() if name.startswith("_")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: set the attributes. `begin_training` follows.

        Args:
            state: as it was returned before the checkpoint was written; tensors are on the CPU.
        """
        for name, value in state.items():
            own = vars(self).get(name)
            if isinstance(own, MutableMapping) and isinstance(value, Mapping):  # it may be a Counter
                own.clear()
                own.update(value)
            else:
                setattr(self, name, value)

    def identity(self) -> dict[str, Any] | None:
        """What of the callback determines the weights, as JSON values: part of the member's identity.

        Returns:
            Its public attributes; None: it determines nothing (it only observes), so that a run may go on without
            it.
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class GradientNorm(MemberCallback):
    """Records the mean L2 norm of an epoch's gradients, before they are clipped, as the metric `gradient_norm`."""

    def __init__(self) -> None:
        self._norms: list[Any] = []  # tensors until the end of the epoch

    def after_backward(self, member: TrainContext) -> None:
        """See `MemberCallback`."""
        import torch

        gradients = [weight.grad for weight in member.model.parameters() if weight.grad is not None]
        dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]
        self._norms.append(torch.nn.utils.get_total_norm(dense).detach())

    def end_epoch(self, member: TrainContext, epoch: int, metrics: dict[str, float]) -> None:
        """See `MemberCallback`."""
        norms = [float(norm) for norm in self._norms]  # read once an epoch: it waits for a GPU
        metrics["gradient_norm"] = sum(norms) / len(norms) if norms else math.nan
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """See `MemberCallback`."""
        return {"norms": [float(norm) for norm in self._norms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `MemberCallback`."""
        self._norms = list(state["norms"])

    def identity(self) -> None:
        """None: it observes."""


def as_callbacks(where: str, callbacks: Any) -> tuple[MemberCallback, ...]:
    """The callbacks that an option names.

    Raises:
        SpecError: one is none.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise SpecError(f"{where} must be a list of MemberCallback objects, got {callbacks!r:.60}")
    for callback in callbacks:
        if not isinstance(callback, MemberCallback):
            made = ": give an instance of it" if isinstance(callback, type) else ""
            raise SpecError(f"{where} must be a list of MemberCallback objects, got {callback!r:.60}{made}")
        if hidden := [hook for hook in HOOKS if hook in vars(callback)]:
            raise SpecError(
                f"{where}: {type(callback).__name__} has an attribute {hidden[0]!r}, as a hook is called"
            )
        describe_callback(where, callback)
        if not any(overrides(callback, hook) for hook in HOOKS):
            own = [name for name in vars(type(callback)) if not name.startswith("_")]
            raise SpecError(
                f"{where}: {type(callback).__name__} has no hook, so that nothing is called"
                f"{f' (it has {own[0]!r})' if own else ''}: {', '.join(HOOKS)}"
            )
    return tuple(callbacks)


def describe_callback(where: str, callback: MemberCallback) -> list[Any] | None:
    """The name of a callback's class, and its identity, as a member's identity has them; None for an observer.

    Raises:
        SpecError: its identity is not made of JSON values.
    """
    kind, identity = type(callback), callback.identity()
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.")
    return None if identity is None else [name, as_json_value(f"{where}: {kind.__name__}.identity()", identity)]


def overrides(callback: MemberCallback, hook: str) -> bool:
    """Whether a callback has a hook of its own."""
    return getattr(type(callback), hook) is not getattr(MemberCallback, hook)
