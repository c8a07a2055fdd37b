"""What else a checkpoint of a member holds: the states of objects that its train function has registered.

A state of plain containers, numbers, texts and tensors is kept as such; any other object in it, such as what a
hook of a framework adds, as a pickle, which is read from checkpoints only that nobody else could have written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ensemble.store import StoreError
from ensemble.train.job import TrainingError
from ensemble.train.pickled import join_tensors, split_tensors

_PICKLE = "ensemble.pickle"
_PLAIN = (type(None), bool, int, float, str)


class OwnStates:
    """Objects with `state_dict()` and `load_state_dict(state)`, by the names under which they are saved.

    Args:
        find_parts: returns what states refer to and have no copy of (`TrainState.name_parts`).
    """

    def __init__(self, find_parts: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._find_parts = find_parts
        self.objects: dict[str, Any] = {}
        self._saved: Mapping[str, Any] | None = None
        self._check: Callable[[], None] = lambda: None

    def add(self, name: str, value: Any) -> None:
        """Register an object; where the member resumes, it gets its state at once, or from `load`."""
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TrainingError(
                f"member.state({name!r}): {type(value).__name__} has no state_dict() and load_state_dict(state)"
            )
        if name in self.objects:
            raise TrainingError(f"member.state({name!r}) was called before, with another object")
        self.objects[name] = value
        if self._saved is not None:
            self._load(name)
        else:
            state = None
            with contextlib.suppress(Exception):  # some objects have none yet
                state = value.state_dict()
            to_plain(state, name, self._find_parts)  # raises before anything is trained

    def state_dict(self) -> dict[str, Any]:
        """The states, of plain containers, numbers, texts and tensors; see `to_plain`."""
        parts = functools.cache(self._find_parts)
        return {name: to_plain(value.state_dict(), name, parts) for name, value in self.objects.items()}

    def load(self, saved: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
        """Give the objects the states of a checkpoint; those that are registered later get theirs then.

        Args:
            check: called before a pickle in it is read; raises where it must not be.
        """
        self._saved, self._check = saved, check
        for name in self.objects:
            self._load(name)

    def _load(self, name: str) -> None:
        assert self._saved is not None
        if name not in self._saved:
            raise TrainingError(
                f"member.state({name!r}): the checkpoint has no such state; declare the run as it was, or take a "
                "new run directory"
            )
        self.objects[name].load_state_dict(from_plain(self._saved[name], self._check, self._find_parts))


def to_plain(value: Any, where: str = "the state", find_parts: Callable[[], Mapping[str, Any]] = dict) -> Any:
    """A state in the containers of a checkpoint: kinds of dict become dict, kinds of list and tuple these.

    Args:
        find_parts: returns objects by name that other objects refer to, and that are not copied.
    """
    if isinstance(value, Mapping):
        return {key: to_plain(item, f"{where}.{key}", find_parts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_plain(item, f"{where}.{number}", find_parts) for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    try:
        content, tensors = split_tensors(value, find_parts())
    except Exception as error:  # objects raise whatever they like from __reduce__
        raise TrainingError(
            f"a checkpoint cannot hold {where}, a {type(value).__name__} that cannot be pickled: {error}; it "
            "comes from state_dict(), or from a hook such as on_save_checkpoint"
        ) from None
    return {_PICKLE: torch.frombuffer(bytearray(content), dtype=torch.uint8), "tensors": tensors}


def from_plain(value: Any, check: Callable[[], None], find_parts: Callable[[], Mapping[str, Any]] = dict) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, dict) and _PICKLE in value:
        try:
            check()
        except StoreError as error:
            raise TrainingError(
                "the checkpoint holds objects that a hook such as on_save_checkpoint has added, in a pickle that "
                f"is not read here: {error}; resume the run where it was trained"
            ) from None
        return join_tensors(value[_PICKLE].numpy().tobytes(), value["tensors"], find_parts())
    if isinstance(value, dict):
        return {key: from_plain(item, check, find_parts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([from_plain(item, check, find_parts) for item in value])
    return value
