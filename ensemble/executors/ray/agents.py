"""The agents of a run as the driver knows them, and what their nodes offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ensemble.events import Report
from ensemble.executors.ray.agent import Command
from ensemble.schedule.needs import OF_GPUS, Node
from ensemble.spec.nodes import GPU_TYPE, NODE_ID
from ensemble.train.job import PROFILE, REHEARSAL, Job

if TYPE_CHECKING:
    from ensemble.executors.ray.leases import Lease

MIXED = "GPUs of several models"  # in place of the models of a node
_RankKey = tuple[str, int, int]  # member, attempt, rank


class StartAgent(NamedTuple):
    """Decided: start the agent of a node, of which Ray has this record; `replaces`: the last one's directory."""

    name: str
    record: dict[str, Any]
    replaces: str = ""


class KillAgent(NamedTuple):
    """Decided: kill the agent of a node, perhaps only a thread of which has ended, and listen to it no more."""

    name: str


class Answered(NamedTuple):
    """News: an agent has started. The fields of its node as it sees them, and its directory."""

    described: dict[str, Any]
    directory: str


class Ended(NamedTuple):
    """News: an agent has ended as it was told to."""


class Died(NamedTuple):
    """News: an agent has died, or could not start; its node is still reachable, or is not."""

    reason: str
    is_node_alive: bool = True


Action = StartAgent | KillAgent
News = Answered | Ended | Died | Sequence[Report]


@dataclass(eq=False)
class Agent:
    """The agent of a node.

    Attributes:
        name: of the node.
        record: Ray's record of the node.
        described: the fields of the node as the agent sees it; None until it has answered.
        directory: of the node; empty until it has answered.
        is_closing: whether it was told to end.
        heard_at: time of its last events, or of its start (monotonic clock).
        unsent: commands to be sent.
        feeders: cohorts with a feeder on the node.
        ranks: that were launched and have not ended.
        replacements: how many agents of this node have died before it.
        broken: what Ray may call the GPUs that are quarantined.
        reported: what was last reported that the run holds of the node; None until then.
    """

    name: str
    record: dict[str, Any]
    described: dict[str, Any] | None = None
    directory: str = ""
    is_closing: bool = False
    heard_at: float = 0.0
    unsent: list[Command] = field(default_factory=list)
    feeders: set[int] = field(default_factory=set)
    ranks: dict[_RankKey, Job] = field(default_factory=dict)
    replacements: int = 0
    broken: set[str] = field(default_factory=set)
    reported: Node | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether processes that measure members run there."""
        return any(member in (PROFILE, REHEARSAL) for member, _, _ in self.ranks)

    @property
    def ray_id(self) -> str:
        """Ray's id of its node."""
        return str(self.record["NodeID"])

    def find_devices(self, gpus: Iterable[str]) -> tuple[str, ...]:
        """The ids of GPUs that Ray names; of one in MIG mode, those of its instances."""
        assert self.described is not None
        named, wanted = zip(self.described["gpu_ids"], self.described["gpu_names"], strict=True), set(gpus)
        return tuple(device for device, names in named if wanted.intersection(names))

    def update(self, event: Mapping[str, Any]) -> None:
        """Its node offers other GPUs, or more or less of them or of its memory: an event of its `NodeServices`."""
        assert self.described is not None
        changing = (*OF_GPUS, "gpu_names", "gpu_reasons", "power", "memory_left_gb")
        self.described |= {name: event[name] for name in changing}

    def quarantine(self, devices: Iterable[str]) -> None:
        """GPUs of its node have broken, by the ids of all their instances."""
        assert self.described is not None
        names = dict(zip(self.described["gpu_ids"], self.described["gpu_names"], strict=True))
        self.broken.update(name for device in devices for name in names.get(device, (device,)))

    def is_unusable(self, lease: Lease) -> bool:
        """Whether a GPU of a lease is quarantined, or nothing of its GPUs can be used.

        Either processes of others hold all of their memory, or the node does not offer them: they are in compute
        mode PROHIBITED, or the driver has lost them.
        """
        assert self.described is not None
        free = dict(zip(self.described["gpu_ids"], self.described.get("gpu_free", ()), strict=False))
        is_vain = bool(lease.gpus) and not any(free.get(device, 1.0) for device in lease.devices)
        return is_vain or not self.broken.isdisjoint(lease.gpus)

    def tell(self, *command: Any) -> None:
        """Keep a command that is to be sent; one that was told to end gets no more."""
        if not self.is_closing:
            self.unsent.append(command)

    def retire(self) -> None:
        """End it: the run holds nothing of its node any more."""
        self.tell("close")
        self.is_closing = True

    def take_unsent(self) -> list[Command]:
        """Return the commands that have not been sent."""
        commands, self.unsent = self.unsent, []
        return commands


def name_nodes(records: Sequence[dict[str, Any]], earlier: dict[str, str]) -> dict[str, str]:
    """Ray's id -> name of each node: that of its host, made distinct where a host has several nodes.

    Args:
        earlier: names that were given before, which stay.
    """
    names, taken = dict(earlier), set(earlier.values())
    for record in records:
        ray_id, host = str(record["NodeID"]), str(record["NodeManagerHostname"])
        if ray_id not in names:
            distinct = (host, *(f"{host}-{ray_id[:length]}" for length in range(6, len(ray_id) + 1)))
            names[ray_id] = next(name for name in distinct if name not in taken)
            taken.add(names[ray_id])
    return names


def read_labels(record: Mapping[str, Any]) -> dict[str, str]:
    """The labels of a node, without its id."""
    return {key: value for key, value in record.get("Labels", {}).items() if key != NODE_ID}


def describe_offer(
    record: dict[str, Any], name: str, agent: Agent | None, *, on_gpus: bool, before: Node | None = None
) -> Node:
    """A node with all that Ray could ever give of it, as far as the agent, if there is one, sees it too.

    Which of its GPUs Ray will give is not known: all are described as the least of them.

    Args:
        before: as it was described when it had an agent.
    """
    resources = record["Resources"]
    gpus = int(resources.get("GPU", 0)) if on_gpus else 0
    kind = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), "GPU")
    cpus, memory_gb, host = resources.get("CPU", 0.0), resources.get("memory", 0.0) / 2**30, name
    labels, models, sizes = read_labels(record), (kind,) * gpus, tuple[float, ...]()
    if before is not None and len(before.gpus) == gpus:
        models, sizes = before.gpus, before.gpu_memory_gb
    if agent is not None and agent.described is not None:
        seen = agent.described
        cpus, memory_gb, host = min(cpus, seen["cpus"]), min(memory_gb, seen["memory_gb"]), seen["host"]
        models = tuple(seen["gpus"][:gpus])
        sizes = _find_least_memory(seen) * len(models)
    if len(set(models)) > 1 or MIXED in models:  # its label is of one of them
        labels.pop(GPU_TYPE, None)
        models = (MIXED,) * gpus
    return Node(
        name=name, cpus=cpus, gpus=models, memory_gb=memory_gb, host=host, gpu_memory_gb=sizes, labels=labels
    )


def _find_least_memory(seen: Mapping[str, Any]) -> tuple[float, ...]:
    """The memory in GiB of the largest instance of that GPU whose largest one is the smallest; () if unknown."""
    largest: dict[str, float] = {}
    parents = seen.get("gpu_parents") or seen["gpu_ids"]
    for parent, gb in zip(parents, seen.get("gpu_memory_gb", ()), strict=False):
        largest[parent] = max(gb, largest.get(parent, 0.0))
    return (min(largest.values()),) if largest else ()


def describe_node(agent: Agent, leases: Sequence[Lease] | None, *, on_gpus: bool) -> Node:
    """A node with what the run holds of it.

    Args:
        leases: those on this node; None: Ray was started for this run, which has all of it.
    """
    seen, offered = dict(agent.described or {}), agent.record["Resources"]
    del seen["gpu_names"]
    reasons = seen.pop("gpu_reasons")
    parents = seen.get("gpu_parents") or seen["gpu_ids"]
    if leases is None:
        cpus, memory_gb = offered.get("CPU", 0.0), offered.get("memory", 0.0) / 2**30
        lent = list(dict.fromkeys(parents))[: int(offered.get("GPU", 0)) if on_gpus else 0]
        usable = [i for i, parent in enumerate(parents) if parent in lent]
    else:
        cpus = sum(lease.cpus for lease in leases)
        memory_gb = sum(lease.memory_gb for lease in leases)
        leased = {device for lease in leases for device in lease.devices}
        usable = [i for i, device in enumerate(seen["gpu_ids"]) if device in leased]
        lent_gpus = {gpu for lease in leases for gpu in lease.gpus}
        reasons = [(names, text) for names, text in reasons if lent_gpus.intersection(names)]
        if lent_gpus and not usable:
            reasons = reasons or [((), "Ray offers GPUs that NVIDIA's driver does not show")]
    seen["no_gpus"] = "; ".join(text for _, text in reasons)
    chosen = {key: tuple(seen[key][i] for i in usable) for key in OF_GPUS if seen.get(key)}
    return Node(
        **{**seen, **chosen, "cpus": min(cpus, seen["cpus"]), "memory_gb": min(memory_gb, seen["memory_gb"])}
        | {"labels": read_labels(agent.record)}
    )
