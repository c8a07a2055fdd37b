"""The callbacks of a member: those of its options `averaging`, `early_stopping` and `mixup`, and the user's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.spec.callbacks import HOOKS, MemberCallback, describe_callback, overrides
from ensemble.train.job import TrainingError
from ensemble.train.own_states import from_plain, to_plain
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.spec import Ensemble, Identity
    from ensemble.train.member import TrainContext

#: The callbacks of options; loaded where a member has them.
AVERAGING = "ensemble.train.averaging:Averaging"
EARLY_STOPPING = "ensemble.train.early_stopping:StopEarly"
MIXUP = "ensemble.train.mixup:Mixup"


class Callbacks:
    """Calls the hooks of a member's callbacks, of each hook only those that override it.

    Args:
        check: called before a pickle in a checkpoint is read; raises where it must not be.
        find_parts: returns what their states refer to and have no copy of (`TrainState.name_parts`).

    Attributes:
        mixup: the callback of `mixup=`, or None.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        identity: Identity,
        member: TrainContext,
        check: Callable[[], None],
        find_parts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        made: list[MemberCallback] = []
        if identity.averaging is not None:
            made.append(import_object(AVERAGING)(identity.averaging, identity.scheduled_epochs))
        if identity.early_stopping is not None:
            made.append(import_object(EARLY_STOPPING)(**identity.early_stopping, **(identity.selected_by or {})))
        self.mixup: Any = import_object(MIXUP)(identity.mixup) if identity.mixup else None
        own = ensemble.find_own_callbacks(identity.number, identity.lineage)
        self._declared = [copy.deepcopy(callback) for callback in (ensemble.callbacks if own is None else own)]
        records = [record for one in self._declared if (record := describe_callback("callbacks", one)) is not None]
        if records != identity.callbacks:
            raise TrainingError(f"the callbacks of {identity.member} were {identity.callbacks}, and are {records}")
        if self.mixup is not None:
            made.append(self.mixup)
        self._callbacks: list[MemberCallback] = [*made, *self._declared]
        self._member, self._is_wrapped = member, False
        self._check, self._find_parts = check, find_parts
        hooks: dict[str, list[Any]] = {
            hook: [getattr(callback, hook) for callback in self._callbacks if overrides(callback, hook)]
            for hook in HOOKS
        }
        self._hooks = hooks
        self.after_backward, self.end_step = hooks["after_backward"], hooks["end_step"]
        self.evaluated, self.end_epoch = hooks["evaluated"], hooks["end_epoch"]

    def call(self, hook: str, *args: Any, **named: Any) -> None:
        """Call a hook of all."""
        for function in self._hooks[hook]:
            function(self._member, *args, **named)

    def wrap_loss(self, loss: Any) -> Any:
        """The loss of training batches."""
        self._is_wrapped = True
        for function in self._hooks["wrap_loss"]:
            loss = function(self._member, loss)
        return loss

    def check_wrapped(self) -> None:
        """Refuse a train function that leaves out what a callback makes of its loss."""
        names = [type(one).__name__ for one in self._declared if overrides(one, "wrap_loss")]
        if names and not self._is_wrapped:
            raise TrainingError(f"{', '.join(names)}: their loss is left out: train on member.wrap_loss(loss)")

    def check_foreign(self) -> None:
        """Refuse callbacks whose hooks a loop over `member.dataloader()` does not call."""
        unused = ("wrap_loss", "after_backward")
        hooks = [hook for hook in unused if any(overrides(one, hook) for one in self._declared)]
        if hooks:
            raise TrainingError(
                f"callbacks with {' and '.join(hooks)}() need a loop over member.batches(): one over "
                "member.dataloader() computes its own steps"
            )

    @property
    def may_have_weights(self) -> bool:
        """Whether the weights that count may be others than those in training."""
        return bool(self._hooks["other_weights"])

    @property
    def has_weights(self) -> bool:
        """Whether they are."""
        return any(function(self._member) is not None for function in self._hooks["other_weights"])

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Within the block the model has the weights of the callbacks, where they have any."""
        with contextlib.ExitStack() as stack:
            for function in self._hooks["other_weights"]:
                if (own := function(self._member)) is not None:
                    stack.enter_context(own)
            yield

    def state_dict(self) -> list[Any]:
        """The qualified name and the state of each callback."""
        states = [(one, f"the state of {type(one).__name__}") for one in self._callbacks]
        return [[_name(one), to_plain(one.state_dict(), what, self._find_parts)] for one, what in states]

    def check_states(self) -> None:
        """Refuse before anything is trained what no checkpoint can hold."""
        for callback in self._callbacks:
            state = None
            with contextlib.suppress(Exception):  # some have none before their first epoch
                state = callback.state_dict()
            to_plain(state, f"the state of {type(callback).__name__}", self._find_parts)

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """Go on from a checkpoint: of several callbacks of one class, in their order."""
        remaining = list(states)
        for callback in self._callbacks:  # one that only observes may be new, or gone
            pair = next((pair for pair in remaining if pair[0] == _name(callback)), None)
            if pair is not None:
                remaining.remove(pair)
                if pair[1]:
                    callback.load_state_dict(from_plain(pair[1], self._check, self._find_parts))


def _name(callback: MemberCallback) -> str:
    """The name of a callback in checkpoints; a module of the user's may have another name at a resume."""
    kind = type(callback)
    module = f"{kind.__module__}." if kind.__module__.startswith("ensemble.") else ""
    return f"{module}{kind.__qualname__}"
