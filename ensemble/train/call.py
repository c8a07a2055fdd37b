"""How a member's model is called and what its first evaluated batch shows of it, as a checkpoint has both.

Needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ensemble.spec.task import Task
from ensemble.spec.validation import unknown_name
from ensemble.train.job import FieldError


@dataclass(frozen=True)
class Call:
    """A call of a model, or of a method of it, with arguments made of a batch.

    An argument is the name of a field, None for the batch itself, a list or a dict of names, or a number.

    Attributes:
        method: None: the forward pass.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None

    @property
    def fields(self) -> list[str]:
        """The fields that are arguments, or parts of one, each once."""
        names: list[Any] = []
        for part in (*self.args, *self.kwargs.values()):
            part = list(part.values()) if isinstance(part, Mapping) else part
            names += part if isinstance(part, list | tuple) else [part]
        return [name for name in dict.fromkeys(names) if isinstance(name, str)]

    def list_needed(self, target: str) -> list[str]:
        """Return the fields without which it cannot be called: a method gets the whole batch, its target too."""
        return [name for name in self.fields if self.method is None or name != target]

    def call(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return what the model returns for a batch."""
        function = model if self.method is None else getattr(model, self.method)
        return function(*[take(batch, part) for part in self.args], **take(batch, self.kwargs))

    def as_record(self) -> dict[str, Any]:
        """The call as JSON; see `from_record`."""
        method = {} if self.method is None else {"method": self.method}
        return {"args": list(self.args), "kwargs": dict(self.kwargs), **method}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Call:
        """The call that `as_record` describes."""
        unused = record.get("unused", "")  # of earlier checkouts: a label among the arguments by name
        kwargs = {name: part for name, part in record["kwargs"].items() if part != unused}
        return cls(tuple(record["args"]), kwargs, record.get("method"))


def forward_call(fields: Sequence[str] | Mapping[str, str], target: str) -> Call:
    """Return the call of the forward pass with the fields but for the target: by name where they have names."""
    if isinstance(fields, Mapping):
        return Call(kwargs={name: field for name, field in fields.items() if field != target})
    return Call(tuple(field for field in fields if field != target))


def take(batch: Mapping[str, Any], argument: Any) -> Any:
    """An argument of a `Call`, made of a batch; a list gives a tuple."""
    if argument is None or isinstance(argument, str):
        return batch if argument is None else batch[argument]
    if isinstance(argument, Mapping):
        return {name: take(batch, part) for name, part in argument.items()}
    return tuple(take(batch, part) for part in argument) if isinstance(argument, Sequence) else argument


def find_target(batch: Mapping[str, Any], name: str) -> Any:
    """The target of a batch, a tensor [b, ...]; None where the batch has none.

    Args:
        name: of a field, or the path of a field inside another, such as "target.label".
    """
    value: Any = batch.get(name)
    if value is None and "." in name:
        value = batch
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value if hasattr(value, "is_floating_point") else None


def take_fields(batch: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields of a batch that metrics of the split ask for: arrays [b, ...] of numbers or texts."""
    taken: dict[str, Any] = {}
    for name in names:
        if name not in batch:
            raise FieldError(unknown_name("Recipe.split_metrics: the batch has no field", name, list(batch)))
        value = batch[name]
        with contextlib.suppress(Exception):  # what cannot be made an array is named below
            taken[name] = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if name not in taken or taken[name].dtype.kind not in "biufU" or len(taken[name]) != len(batch["index"]):
            what = f"a {type(value).__name__}, no tensor [b, ...], and no numbers or texts of each sample"
            raise FieldError(f"Recipe.split_metrics: the field {name!r} is {what}")
    return taken


@dataclass(frozen=True)
class Observation:
    """What the first batch that was evaluated shows of a member; fields are None where it shows nothing.

    Attributes:
        call: how the model is called, where a loss by name or a framework says it.
        task: what the outputs predict; None: as the Recipe says.
        target: dtype and shape of a sample's target.
        class_axis: of a classification: the axis of the outputs that holds the classes, 1 or -1; 0 where there is
            none, because outputs are the logit of the second of two classes.
        is_probability: whether what the call returns are probabilities, not scores.
    """

    call: Call | None = None
    task: Task | None = None
    target: tuple[str, tuple[int, ...]] | None = None
    class_axis: int | None = None
    is_probability: bool = False

    def as_record(self) -> dict[str, Any]:
        """The observation as JSON, in two parts, which a checkpoint holds; see `from_checkpoint`."""
        target = None if self.target is None else {"dtype": self.target[0], "shape": list(self.target[1])}
        return {
            "call": None if self.call is None else self.call.as_record(),
            "outputs": {
                "task": None if self.task is None else self.task.as_record(),
                "target": target,
                "class_axis": self.class_axis,
                **({"is_probability": True} if self.is_probability else {}),
            },
        }

    @classmethod
    def from_checkpoint(cls, state: Mapping[str, Any]) -> Observation | None:
        """The observation in a checkpoint; None where it has none."""
        outputs, call = state.get("outputs"), state.get("call")
        if outputs is None:
            return None
        target = outputs["target"]
        return cls(
            None if call is None else Call.from_record(call),
            None if outputs["task"] is None else Task.from_record(outputs["task"]),
            None if target is None else (target["dtype"], tuple(target["shape"])),
            outputs["class_axis"],
            outputs.get("is_probability", False),
        )
