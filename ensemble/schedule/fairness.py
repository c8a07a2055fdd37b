"""Divides a cluster between the runs that share it (a stub of what follows)."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class Amount(NamedTuple):
    """GPUs, cores and GiB of memory."""

    gpus: float
    cpus: float
    memory_gb: float = 0.0


class Holding(Struct, frozen=True):
    """What a run was given as a whole, and gives back as a whole.

    Attributes:
        id: unique within the run.
        parts: what it is, by node.
        is_busy: whether members use it.
        held_s: for how long it has been held, in seconds.
        is_pausable: whether its members may be paused for others.
    """

    id: str
    parts: dict[str, Amount]
    is_busy: bool = True
    held_s: float = 0.0
    is_pausable: bool = True


class Want(Struct, frozen=True):
    """What a run waits for: so many times these parts, each on one node, all together or not at all."""

    parts: tuple[Amount, ...]
    count: int = 1


class Claim(Struct, frozen=True, kw_only=True):
    """What a run holds and wants.

    Attributes:
        priority: a run of a higher one is served first.
        weight: runs of one priority have parts in proportion to their weights.
        limits: the most GPUs (`gpus`) and cores (`cpus`) that it holds, where it has limits.
        waited_s: seconds since it waits for something, or was last given something, in vain.
    """

    run: str
    priority: int = 0
    weight: float = 1.0
    limits: dict[str, float] = {}
    holdings: tuple[Holding, ...] = ()
    wants: tuple[Want, ...] = ()
    waited_s: float = 0.0

    def sum_held(self) -> dict[str, Amount]:
        """What it holds of each node."""
        held: dict[str, Amount] = {}
        for holding in self.holdings:
            for node, part in holding.parts.items():
                known = held.get(node, Amount(0, 0))
                held[node] = Amount(*(a + b for a, b in zip(known, part, strict=True)))
        return held
