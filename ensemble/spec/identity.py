"""A member's `Identity`: everything that determines its weights, recorded before its first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that determines a member's weights, and what it needs of a node.

    Attributes:
        member: its name, `member-<number>`.
        first_epoch: the stream's epoch in which it trains its first epoch; None until it is known: a member that
            joins a running stream gets it when it starts.
        weights: its sample weights as `ensemble.spec.sample_weights.as_record` returns them; None: all are 1.
        optimizer, schedule, compression, communicator: as `ensemble.spec.options.resolve` returns them; None: the
            Recipe's own or none, no compression, torch.distributed.
        auto: which of `workers`, `cpus_per_worker`, `gpus_per_worker` and `memory_gb` are to be measured. Until
            then
            these fields hold a safe guess: one worker, a whole core, a whole GPU, unknown.
        added: whether it was added to the run in progress, beyond what the ensemble declares.
        outside: why a search does not learn from it; None where it does.
        widened_from: its number of workers before it was given more; None where it was not. Learning-rate rules
            that count workers use it, because the global batch has not grown with the workers.
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

    def compared_fields(self) -> dict[str, Any]:
        """The fields that determine the weights, except `first_epoch`."""
        ignored = {"cpus_per_worker", "gpus_per_worker", "memory_gb", "first_epoch", "auto", "added", "outside"}
        ignored.add("widened_from")  # the width itself is compared
        if "workers" in self.auto:
            ignored.add("workers")
        return {name: value for name, value in self.as_dict().items() if name not in ignored}

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Whether a recorded identity has the same `compared_fields`; fields that it lacks are not compared."""
        return all(record[name] == value for name, value in self.compared_fields().items() if name in record)


def field_defaults() -> dict[str, Any]:
    """The default values of the identity's optional fields."""
    return {
        one.name: one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        for one in dataclasses.fields(Identity)
        if (one.default, one.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    }
