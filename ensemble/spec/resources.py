"""What a member needs of a node: workers, cores, GPUs, threads, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ensemble.spec.validation import SpecError, check_choice, check_number, option_class


@option_class
@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one member needs of a node. Fields that are None are measured before members are packed.

    Attributes:
        workers: data-parallel workers (the member's width); "auto" measures several widths and chooses them so
            that members which share a stream train at similar rates.
        cpus_per_worker: cores, may be a fraction; used for packing.
        gpus_per_worker: GPUs, from 0 to 1, may be a fraction; used only on nodes that have GPUs.
        threads: torch threads of each worker. Part of the identity: it changes the last bits of results.
        memory_gb: host memory of each worker in GiB.
    """

    workers: int | Literal["auto"] = 1
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    threads: int = 1
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.workers, str):
            check_choice("Resources.workers", self.workers, ("auto",))
        else:
            check_number("Resources.workers", self.workers, low=1, integer=True)
        if self.cpus_per_worker is not None:
            check_number("Resources.cpus_per_worker", self.cpus_per_worker, low=0, above=True)
        if self.gpus_per_worker is not None:
            check_number("Resources.gpus_per_worker", self.gpus_per_worker, low=0)
            if self.gpus_per_worker > 1:
                raise SpecError(
                    f"Resources.gpus_per_worker must be at most 1, got {self.gpus_per_worker!r}: "
                    "a worker trains on one device; ask for more workers instead"
                )
        check_number("Resources.threads", self.threads, low=1, integer=True)
        if self.memory_gb is not None:
            check_number("Resources.memory_gb", self.memory_gb, low=0, above=True)
