"""Describes what a node offers, what a member needs, and where a member was placed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ensemble.spec import Identity

UNITS = 10**12  # of a core, a GPU, a GiB: counted in integers, ten tenths of a core are one core
_ROUND = 1000  # units: less makes no difference between sizes


@dataclass(frozen=True)
class Node:
    """What one node offers.

    Attributes:
        name: unique among the nodes of a run.
        cpus: cores that members may be packed on.
        gpus: model names; a name's index is its device number.
        memory_gb: host memory in GiB.
        host: host name.
        places: most members at one time; None for as many as their resources allow.
        interface: the network interface through which the other nodes are reached; None where that is not known.
        power: the source and the origin of its energy figures, for the record.
        gpu_memory_gb: memory of each GPU in GiB; empty where it is not known.
        no_gpus: why it offers none, or fewer than it has; empty where there is nothing to say.
    """

    name: str
    cpus: float
    gpus: tuple[str, ...]
    memory_gb: float
    host: str
    places: int | None = None
    interface: str | None = "lo"
    power: Mapping[str, str] = field(default_factory=dict, compare=False)
    gpu_memory_gb: tuple[float, ...] = ()
    no_gpus: str = field(default="", compare=False)


class Need(NamedTuple):
    """What a member takes of a node, in units; all ranks together, but for the share of a GPU, which each has."""

    workers: int
    cpus: int
    memory: int
    share: int
    guessed_cpus: bool
    requires_gpu: bool

    @property
    def size(self) -> tuple[int, int, int]:
        """What members are placed by, the largest first: three thirds of a GPU are as much as a whole one."""
        return (_round(self.share * self.workers), _round(self.cpus), _round(self.memory))

    def cpus_on(self, total: int) -> int:
        """Cores on a node that has so many in all.

        A member that did not declare them, and has no more workers than there are cores, asks for no more than
        that: a guess of a whole core finds its place on half of one.
        """
        content = self.guessed_cpus and total > 0 and self.workers * UNITS <= max(UNITS, total)
        return min(self.cpus, total) if content else self.cpus


def _round(units: int) -> int:
    return (units + _ROUND // 2) // _ROUND


@dataclass(frozen=True)
class Placement:
    """A member on a node; `devices` has one entry a rank, a GPU's number or None for the CPU."""

    identity: Identity
    node: str
    devices: tuple[int | None, ...]

    @property
    def member(self) -> str:
        """The member's id."""
        return self.identity.member

    @functools.cached_property
    def need(self) -> Need:
        """What it takes."""
        return compute_need(self.identity)


def compute_need(identity: Identity) -> Need:
    """What a member takes of a node."""
    auto = identity.auto
    return _need(
        identity.workers,
        identity.cpus_per_worker,
        identity.memory_gb,
        identity.gpus_per_worker,
        "cpus_per_worker" in auto,
        "gpus_per_worker" in auto,
    )


@functools.lru_cache(maxsize=1 << 16)
def _need(
    workers: int, cpus: float, memory_gb: float | None, gpus: float, guessed_cpus: bool, guessed_gpus: bool
) -> Need:
    return Need(
        workers=workers,
        cpus=round(cpus * workers * UNITS),
        memory=round((memory_gb or 0.0) * workers * UNITS),
        share=round(gpus * UNITS),
        guessed_cpus=guessed_cpus,
        requires_gpu=gpus > 0 and not guessed_gpus,
    )
