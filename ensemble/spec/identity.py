"""What makes a member that model and no other: its `Identity`, fixed and recorded before its first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """All that decides what a member becomes, and what it asks of a node; see the module's docstring.

    `first_epoch` is the stream epoch of its first own epoch; None until it is known, which for a member that
    joins a running stream is when it starts. `weights` is what `ensemble.spec.sample_weights` records; None: all
    weigh 1.
    `optimizer`, `schedule`, `compression` and `communicator` are what `ensemble.spec.options.resolve` makes of the
    words; None: the Recipe's own or none, the gradients as they are, torch.distributed. `auto` names what was left
    to measurement, of `workers`, `cpus_per_worker`, `gpus_per_worker` and `memory_gb`: until it is measured they
    hold a careful guess (one worker, a whole core, a whole GPU, unknown). `added`: it came to a running ensemble,
    beyond what the ensemble declares; `outside`: why a search does not learn from it, None where it does.
    `widened_from` is how many workers it had before it was given more, None where it was not: laws of the learning
    rate that count workers go by it, because the batch has not grown with them.
    """

    member: str
    number: int
    params: dict[str, Any]
    seed: int
    workers: int
    threads: int
    precision: Precision
    epochs: int
    batch_size: int
    cpus_per_worker: float
    gpus_per_worker: float
    memory_gb: float | None
    first_epoch: int | None = 0
    weights: dict[str, Any] | None = None
    loss_scale: float | Literal["dynamic"] = "dynamic"
    accumulate: int = 1
    optimizer: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None
    compression: dict[str, Any] | None = None
    communicator: dict[str, Any] | None = None
    auto: list[str] = field(default_factory=list)
    added: bool = False
    outside: str | None = None
    widened_from: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The identity as plain JSON values."""
        return dataclasses.asdict(self)

    def compared(self) -> dict[str, Any]:
        """What of it decides the weights: not what it asks of a node or how it came; `first_epoch` is apart."""
        apart = {"cpus_per_worker", "gpus_per_worker", "memory_gb", "first_epoch", "auto", "added", "outside"}
        apart.add("widened_from")  # the width itself is compared
        if "workers" in self.auto:
            apart.add("workers")
        return {name: value for name, value in self.as_dict().items() if name not in apart}

    def same(self, recorded: Mapping[str, Any]) -> bool:
        """Whether a recorded identity is this one's, as far as it decides the weights and was recorded."""
        return all(recorded[name] == value for name, value in self.compared().items() if name in recorded)


def defaults() -> dict[str, Any]:
    """The fields of an identity that have a default, with it."""
    return {
        one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        for one in dataclasses.fields(Identity)
        if (one.default, one.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    }
