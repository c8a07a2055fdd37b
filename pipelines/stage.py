"""One stage of a pipeline: a function, the field that it works on, and its source of randomness."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pipelines import fingerprint
from pipelines.checks import check_integer
from pipelines.errors import PipelineError
from pipelines.samples.nested import Slot
from pipelines.stages._batched import Batched, make_batched
from pipelines.stages._sample import Transform

Randomness = Literal["numpy", "torch", "python", "global", "own"]
_RANDOMNESS: dict[Any, str] = {
    "numpy": "it takes a generator, f(sample, rng)",
    "torch": "it draws from torch's global generator",
    "python": "from Python's `random` or numpy's global generator",
    "global": "from any of these three",
    "own": "it has a method set_random_seed or set_random_state, which takes a seed",
}


@dataclass(frozen=True)
class Stage:
    """One `map` of a pipeline.

    Attributes:
        call: the function.
        field: the field that it receives and returns; None if it receives the whole sample.
        random: what it draws from; None if it is deterministic.
        id: stands for the function in fingerprints.
        version: of what a description of the function does not cover.
        held: what the function held before it was used; None where nobody has asked yet.
    """

    call: Callable[..., Any]
    field: str | None
    random: Randomness | None
    id: str | None
    version: str | int | None = None
    held: fingerprint.Held | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        call = getattr(self.call, "transform", self.call) if fingerprint.is_ours(type(self.call)) else self.call
        return f"{_name(call)}({self.field!r})" if self.field else _name(call)

    @property
    def description(self) -> fingerprint.Description:
        """What this stage is, for fingerprints: its code as it is, with what the object held before use."""
        if self.id is not None:
            shape = [self.call.batch_size, self.call.device] if isinstance(self.call, Batched) else []
            return fingerprint.Description([["id", self.id], self.field, self.random, *shape])
        what = self._describe_call(self.hold())
        parts = [what.digest, self.field, self.random]
        if self.version is not None:
            return fingerprint.Description([*parts, self.version])
        return fingerprint.Description(parts, what.gaps)

    def hold(self) -> fingerprint.Held | None:
        """What the object holds when somebody first asks, or before it is used; None where that cannot be told.

        An object that counts its calls, or makes a table at its first, stays what it was.
        """
        if self.held is None and self.id is None:
            what = self._describe_call(None)
            object.__setattr__(self, "held", None if what.gaps else what.held)
        return self.held

    def __getstate__(self) -> dict[str, Any]:
        self.hold()
        return self.__dict__

    def _describe_call(self, held: fingerprint.Held | None) -> fingerprint.Description:
        is_seeded = self.random == "own" or (
            fingerprint.is_ours(type(self.call)) and type(self.call).__name__ == "Albumentation"
        )
        return fingerprint.describe(self.call, is_seeded=is_seeded, before=held)


def make_stage(
    call: Callable[..., Any],
    field: str | None,
    random: Randomness | Literal[False] | None,
    id: str | None,
    version: str | int | None = None,
) -> Stage:
    """Makes the stage of `Pipeline.map`, which describes the arguments."""
    from pipelines.stages._pictures import adapt
    from pipelines.stages._transforms import SEEDING_METHODS, find_randomness, find_seeding

    if not callable(call):
        raise PipelineError(f"map() takes a function of a sample, got {call!r}")
    is_factory = getattr(sys.modules.get("pipelines.stages"), getattr(call, "__name__", ""), None) is call
    if is_factory or (isinstance(call, type) and any("__call__" in vars(base) for base in call.__mro__)):
        raise PipelineError(f"map() takes what {_name(call)}(...) returns: call it with its own arguments first")
    if random not in (None, False, *_RANDOMNESS):
        valid = "; ".join(f"{name!r}: {meaning}" for name, meaning in _RANDOMNESS.items())
        raise PipelineError(f"random must be left out, False, or one of {valid}; got {random!r}")
    found_random = find_randomness(call)
    if random == "own" and find_seeding(call) is None:
        raise PipelineError(f"random='own' is for what has a method {' or '.join(SEEDING_METHODS)}, got {call!r}")
    if random is None:
        random = "numpy" if found_random is None and has_generator_parameter(call) else found_random
    elif random not in (False, "numpy") and found_random is False:
        warnings.warn(
            f"{_name(call)} draws nothing at random: leave out random={random!r}, which keeps its samples from "
            "being cached, and a validation set from being prepared once",
            stacklevel=3,
        )
    return Stage(adapt(call, field, is_still=not random), field, random or None, id, version)


def make_batch_stage(
    call: Callable[..., Any],
    field: str | None,
    batch_size: int,
    device: str,
    id: str | None,
    version: str | int | None,
) -> Stage:
    """Makes the stage of `Pipeline.map_batches`, which describes the arguments."""
    if not callable(call) or isinstance(call, type):
        raise PipelineError(f"map_batches() takes a function of a batch or a torch.nn.Module, got {call!r}")
    takes_generators = has_generator_parameter(getattr(call, "forward", call))
    batched = make_batched(call, check_integer("batch_size", batch_size, 1), device)
    return Stage(batched, field, "numpy" if takes_generators else None, id, version)


def _name(call: Any) -> str:
    return str(getattr(call, "__qualname__", None) or type(call).__qualname__)


def has_generator_parameter(function: Callable[..., Any]) -> bool:
    """Whether a function is `f(sample, rng)` or `f(batch, rngs)`, rather than `f(sample)`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and (p.default is p.empty or p.name in ("rng", "rngs"))
    ]
    return len(positional) >= 2


def find_slots(stages: Iterable[Stage]) -> dict[str, Slot]:
    """Path -> what stages have declared of the field there."""
    slots: dict[str, Slot] = {}
    for stage in stages:
        call: Any = stage.call
        if isinstance(call, Transform):
            slots = call.change_slots(slots, "" if stage.field is None else f"{stage.field}.")
    return slots
