"""One stage of a pipeline: a function, the field that it works on, and its source of randomness."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pipelines import fingerprint
from pipelines.errors import PipelineError
from pipelines.stages._pictures import Imaged, is_torchvision

Randomness = Literal["numpy", "torch"]


@dataclass(frozen=True)
class Stage:
    """One `map` of a pipeline.

    Attributes:
        call: the function.
        field: the field that it receives and returns; None if it receives the whole sample.
        random: the generator that it draws from; None if it is deterministic.
        id: stands for the function in fingerprints.
    """

    call: Callable[..., Any]
    field: str | None
    random: Randomness | None
    id: str | None

    @property
    def name(self) -> str:
        """The name of this stage in error messages."""
        call = self.call.transform if isinstance(self.call, Imaged) else self.call
        named = getattr(call, "__qualname__", None) or type(call).__qualname__
        return f"{named}({self.field!r})" if self.field else str(named)

    def describe(self) -> Any:
        """Describes this stage as a JSON value, for fingerprints.

        Raises:
            fingerprint.Unsure: the function cannot be described surely.
        """
        what = ["id", self.id] if self.id is not None else fingerprint.describe(self.call)
        return [what, self.field, self.random]


def make_stage(
    call: Callable[..., Any], field: str | None, random: Randomness | Literal[False] | None, id: str | None
) -> Stage:
    """Makes the stage of `Pipeline.map`, which describes the arguments.

    Raises:
        PipelineError: `call` is not callable, or `random` is invalid.
    """
    if not callable(call):
        raise PipelineError(f"map() takes a function of a sample, got {call!r}")
    if random not in (None, False, "numpy", "torch"):
        raise PipelineError(f"random must be 'torch', 'numpy', False or left out, got {random!r}")
    if random is None and has_generator_parameter(call):
        random = "numpy"
    if field is not None and is_torchvision(call):
        call = Imaged(call)
    return Stage(call, field, random or None, id)


def has_generator_parameter(function: Callable[..., Any]) -> bool:
    """Whether a function is `f(sample, rng)` rather than `f(sample)`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and (p.default is p.empty or p.name == "rng")
    ]
    return len(positional) >= 2
