"""What else a checkpoint of a member holds: the states of objects that its train function has registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ensemble.train.job import TrainingError


class OwnStates:
    """Objects with `state_dict()` and `load_state_dict(state)`, by the names under which they are saved."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._saved: Mapping[str, Any] | None = None

    def add(self, name: str, value: Any) -> None:
        """Register an object; where the member resumes, it gets its state at once, or from `load`.

        Raises:
            TrainingError: the name is taken, the object has no state, or the checkpoint has none of it.
        """
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TrainingError(
                f"member.state({name!r}): {type(value).__name__} has no state_dict() and load_state_dict(state)"
            )
        if name in self._objects:
            raise TrainingError(f"member.state({name!r}) was called before, with another object")
        self._objects[name] = value
        if self._saved is not None:
            self._load(name)

    def state_dict(self) -> dict[str, Any]:
        """The states, of plain containers, numbers, texts and tensors."""
        return {name: to_plain(value.state_dict()) for name, value in self._objects.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Give the objects the states of a checkpoint; those that are registered later get theirs then."""
        self._saved = saved
        for name in self._objects:
            self._load(name)

    def _load(self, name: str) -> None:
        assert self._saved is not None
        if name not in self._saved:
            raise TrainingError(
                f"member.state({name!r}): the checkpoint has no such state; declare the run as it was, or take a "
                "new run directory"
            )
        self._objects[name].load_state_dict(self._saved[name])


def to_plain(value: Any) -> Any:
    """A state in the containers of a checkpoint: kinds of dict become dict, kinds of list and tuple these."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    return value
