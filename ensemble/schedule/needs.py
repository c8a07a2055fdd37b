"""Describes what a node offers, what a member needs, and where a member was placed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ensemble.spec import Identity
from ensemble.spec.nodes import Selection, as_items, selects_gpus

UNITS = 10**12  # integer units of a core, a GPU, a GiB, so that ten tenths of a core are exactly one core
SLACK = 1000  # units: what rounding may add up to, a billionth of a core
_ROUND = 1000  # units; sizes that differ by less are equal

#: The attributes of `Node` with a value for each GPU.
OF_GPUS = ("gpus", "gpu_ids", "gpu_memory_gb", "gpu_free", "gpu_parents", "gpu_shares", "gpu_exclusive")


@dataclass(frozen=True)
class Node:
    """What one node offers.

    Attributes:
        name: unique among the nodes of a run.
        cpus: cores for members.
        gpus: model name of each GPU.
        memory_gb: host memory in GiB.
        host: host name.
        places: maximum number of members at one time; None: only resources limit it.
        interface: the network interface towards the other nodes; None if unknown.
        power: source and origin of its energy figures, and its idle power, for the log.
        gpu_memory_gb: memory of each GPU in GiB; empty if unknown.
        gpu_ids: what names each GPU (its UUID where NVIDIA's driver gives one); its number unless given.
        gpu_free: the part of each GPU's memory that processes of others leave, from 0 to 1; 1 unless given.
        gpu_parents: the id of the physical GPU of each, which instances in MIG mode share; itself unless given.
        gpu_shares: the part of its physical GPU that each is, by slices; unless given, instances have equal ones.
        gpu_exclusive: whether each GPU admits one process at a time (compute mode EXCLUSIVE_PROCESS).
        no_gpus: why it offers less than its GPUs; empty otherwise.
        memory_left_gb: what processes of others leave of its host memory in GiB; None: all of it.
        labels: what a Ray cluster calls it by; a node without Ray has none.
    """

    name: str
    cpus: float
    gpus: tuple[str, ...]
    memory_gb: float
    host: str
    places: int | None = None
    interface: str | None = "lo"
    power: Mapping[str, Any] = field(default_factory=dict, compare=False)
    gpu_memory_gb: tuple[float, ...] = ()
    gpu_ids: tuple[str, ...] = ()
    gpu_free: tuple[float, ...] = ()
    gpu_parents: tuple[str, ...] = ()
    gpu_shares: tuple[float, ...] = ()
    gpu_exclusive: tuple[bool, ...] = ()
    no_gpus: str = field(default="", compare=False)
    memory_left_gb: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        gpus = len(self.gpus)
        if len(self.gpu_ids) != gpus:
            object.__setattr__(self, "gpu_ids", tuple(map(str, range(gpus))))
        usual = {"gpu_free": (1.0,) * gpus, "gpu_parents": self.gpu_ids, "gpu_exclusive": (False,) * gpus}
        for name, values in usual.items():
            if len(getattr(self, name)) != gpus:
                object.__setattr__(self, name, values)
        if len(self.gpu_shares) != gpus:
            shares = tuple(1 / self.gpu_parents.count(parent) for parent in self.gpu_parents)
            object.__setattr__(self, "gpu_shares", shares)

    def as_event(self) -> dict[str, Any]:
        """The fields of its `node` event: plain JSON values."""
        fields = {name: value for name, value in vars(self).items() if name not in ("name", "places")}
        fields |= {name: list(fields[name]) for name in OF_GPUS}
        return {"node": self.name, **fields, "power": dict(self.power), "labels": dict(self.labels)}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Node:
        fields: dict[str, Any] = {
            name: event[name] for name in ("cpus", "memory_gb", "host", "interface", "power")
        }
        fields |= {name: tuple(event[name]) for name in OF_GPUS}
        fields |= {"memory_left_gb": event["memory_left_gb"], "labels": event["labels"]}
        return cls(name=event["node"], no_gpus=event["no_gpus"], **fields)

    @property
    def physical_gpus(self) -> int:
        """The number of its GPUs; the instances of one in MIG mode count as one."""
        return len(set(self.gpu_parents))

    def sort_by_gpu(self, left: Sequence[int], none: int) -> list[int]:
        """What the emptiest instance of each physical GPU has left, in decreasing order; as long as `left`."""
        best: dict[str, int] = {}
        for parent, units in zip(self.gpu_parents, left, strict=False):
            best[parent] = max(units, best.get(parent, none))
        return sorted(best.values(), reverse=True) + [none] * (len(left) - len(best))

    def select_gpus(self, keep: Callable[[int], bool]) -> Node:
        """The node with some of its GPUs, chosen by their positions."""
        chosen = [i for i in range(len(self.gpus)) if keep(i)]
        kept: dict[str, Any] = {
            name: tuple(values[i] for i in chosen) for name in OF_GPUS if (values := getattr(self, name))
        }
        return replace(self, **kept)

    def limit(self, limits: Mapping[str, float]) -> Node:
        """The node with no more of its GPUs and cores than these limits of `Ensemble.limits` allow."""
        parents = list(dict.fromkeys(self.gpu_parents))
        kept = parents[: int(limits.get("gpus", len(parents)))]
        chosen = self if len(kept) == len(parents) else self.select_gpus(lambda i: self.gpu_parents[i] in kept)
        return replace(chosen, cpus=min(self.cpus, limits.get("cpus", self.cpus)))

    def without_others(self) -> Node:
        """The node as if no process of others held memory of it or of its GPUs."""
        if self.memory_left_gb is None and all(part == 1.0 for part in self.gpu_free):
            return self
        return replace(self, gpu_free=(), memory_left_gb=None)

    def without_base(self, base_gb: float) -> Node:
        """The node without the memory of the network that its members share (`Recipe.base`): once for all."""
        left_gb = None if self.memory_left_gb is None else max(0.0, self.memory_left_gb - base_gb)
        return replace(self, memory_gb=max(0.0, self.memory_gb - base_gb), memory_left_gb=left_gb)

    @property
    def free_memory_gb(self) -> float:
        """Its host memory in GiB without what others hold: what it offers to all members of the run together."""
        return self.memory_gb if self.memory_left_gb is None else min(self.memory_gb, self.memory_left_gb)

    def find_gpu(self, device: str) -> str:
        """The model name of one of its GPUs."""
        return self.gpus[self.gpu_ids.index(device)]


class Need(NamedTuple):
    """What a member takes, in `UNITS`: cores and memory of all ranks, and the GPU share of each rank.

    `requires_gpu`: it declared a share; `cpu_only`: it declared none, `gpus_per_worker=0`; neither: the share is a
    guess. `spans_nodes`: its ranks may be on several nodes; `spreads`: better on two than on one.
    `selection`: on which nodes it may be (`ensemble.schedule.selection`).
    """

    workers: int
    cpus: int
    memory: int
    share: int
    guessed_cpus: bool
    requires_gpu: bool
    cpu_only: bool = False
    spans_nodes: bool = False
    spreads: bool = False
    selection: Selection = ()

    @property
    def size(self) -> tuple[int, int, int]:
        """Sort key of placement, the largest first: (GPUs, cores, memory) in rounded units."""
        return (_round(self.share * self.workers), _round(self.cpus), _round(self.memory))

    def take_ranks(self, ranks: int) -> Need:
        return self._replace(
            workers=ranks, cpus=self.cpus // self.workers * ranks, memory=self.memory // self.workers * ranks
        )

    def cpus_on(self, total: int) -> int:
        """Cores that it takes on a node with `total` cores, both in units.

        A member that did not declare its cores, and has no more workers than the node has cores, takes at most all
        of them: a guessed core fits on a node with half a core.
        """
        is_capped = self.guessed_cpus and total > 0 and self.workers * UNITS <= max(UNITS, total)
        return min(self.cpus, total) if is_capped else self.cpus


def _round(units: int) -> int:
    return (units + _ROUND // 2) // _ROUND


@dataclass(frozen=True)
class Placement:
    """Where a member's ranks are.

    Attributes:
        node: of rank 0.
        devices: of each rank: a GPU's id (`Node.gpu_ids`) or None for the CPU.
        nodes: of each rank, where they are on several nodes; empty where all are on `node`.
    """

    identity: Identity
    node: str
    devices: tuple[str | None, ...]
    nodes: tuple[str, ...] = ()

    @property
    def ranks_by_node(self) -> dict[str, list[int]]:
        """The ranks on each node, the nodes in the order of their first rank."""
        ranks: dict[str, list[int]] = {}
        for rank in range(len(self.devices)):
            ranks.setdefault(self.find_node(rank), []).append(rank)
        return ranks

    def find_node(self, rank: int) -> str:
        return self.nodes[rank] if self.nodes else self.node

    def count_ranks(self, node: str) -> int:
        return self.nodes.count(node) if self.nodes else len(self.devices) * (self.node == node)

    def describe_device(self, nodes: Sequence[Node]) -> str:
        """On what it trains: "cpu", or the model of its GPUs; of several models all, in order."""
        by_name = {node.name: node for node in nodes}
        where = [(by_name[self.find_node(rank)], gpu) for rank, gpu in enumerate(self.devices)]
        return " + ".join(sorted({"cpu" if gpu is None else node.find_gpu(gpu) for node, gpu in where}))

    @property
    def member(self) -> str:
        """The member's id."""
        return self.identity.member

    @functools.cached_property
    def need(self) -> Need:
        """What it takes of the node."""
        return compute_need(self.identity)


def resolve_devices(devices: str, *, has_gpus: bool) -> str:
    """How members are packed: as declared, but on CPUs where "auto" was declared and there was never a GPU.

    Args:
        devices: "auto", "cpu" or "cuda", as the ensemble declares it.
        has_gpus: whether the run knows, or has known, any GPU. Once it has, members wait for the share of one that
            they declare, also after the last GPU is lost.
    """
    return "cpu" if devices == "auto" and not has_gpus else devices


def needs_gpu(need: Need, devices: str) -> bool:
    """Whether a member is placed on GPUs or not at all; `devices` as `resolve_devices` returns it."""
    if need.cpu_only or selects_gpus(need.selection):
        return not need.cpu_only
    return devices != "cpu" and (devices == "cuda" or need.requires_gpu)


def uses_gpus(identity: Identity, devices: str) -> bool:
    """Whether a member may be placed on GPUs; `devices` as `resolve_devices` returns it."""
    need = compute_need(identity)
    return needs_gpu(need, devices) or (devices != "cpu" and not need.cpu_only)


def compute_need(identity: Identity) -> Need:
    """Compute what a member takes of a node."""
    auto = identity.auto
    return _need(
        identity.workers,
        identity.cpus_per_worker,
        identity.memory_gb,
        identity.gpus_per_worker,
        "cpus_per_worker" in auto,
        "gpus_per_worker" in auto,
        # a width that was chosen for one node stays there
        identity.workers > 1 and identity.span_nodes is not False and "workers" not in auto,
        identity.workers > 1 and identity.span_nodes == "spread",
        as_items(identity.nodes),
    )


@functools.lru_cache(maxsize=1 << 16)
def _need(
    workers: int,
    cpus: float,
    memory_gb: float | None,
    gpus: float,
    guessed_cpus: bool,
    guessed_gpus: bool,
    spans_nodes: bool,
    spreads: bool,
    selection: Selection,
) -> Need:
    return Need(
        workers=workers,
        cpus=round(cpus * workers * UNITS),
        memory=round((memory_gb or 0.0) * workers * UNITS),
        share=round(gpus * UNITS),
        guessed_cpus=guessed_cpus,
        requires_gpu=gpus > 0 and not guessed_gpus,
        cpu_only=not gpus and not guessed_gpus,
        spans_nodes=spans_nodes,
        spreads=spreads,
        selection=selection,
    )


def max_node_memory_gb(nodes: Sequence[Node]) -> float:
    """Free memory in GiB of the node with the most; only nodes with GPUs count where there are some."""
    counted = [node for node in nodes if node.gpus] or nodes
    return max((node.free_memory_gb for node in counted), default=math.inf)
