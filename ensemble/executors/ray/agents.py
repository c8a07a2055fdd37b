"""The agents of a run as the driver sees them: their start, what is sent to them, what their nodes offer."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.executors.ray.agent import Command, NodeAgent, list_import_directories
from ensemble.schedule import Node
from ensemble.schedule.needs import OF_GPUS
from ensemble.store.trust import TRUST_FOLDER, TRUST_GROUP
from ensemble.train.job import PROFILE, Job

if TYPE_CHECKING:
    from ensemble.executors.ray.leases import Lease
    from ensemble.store import RunDir

_ATTRIBUTE = re.compile(r"(class_name|actor_id|pid|name|namespace|ip): ")  # of an actor, in an error
_ID = re.compile(r"\b\w+ (Id|Ip address): \S+ ?")
_RankKey = tuple[str, int, int]  # member, attempt, rank


@dataclass(eq=False)
class Agent:
    """The agent of a node.

    Attributes:
        name: of the node.
        record: Ray's record of the node.
        actor: Ray's handle.
        described: the fields of the node as the agent sees it; None until it has answered.
        directory: of the node; empty until it has answered.
        up: False for an agent that replaces another and has not reported yet: commands are kept.
        is_closing: whether it was told to end.
        heard_at: time of its last events (monotonic clock).
        unsent: commands to be sent.
        feeders: cohorts with a feeder on the node.
        ranks: that were launched and have not ended.
        is_frozen: whether it has been silent for long, and its replacement has not reported yet.
        replacements: how often another actor has taken over.
        broken: what Ray may call the GPUs that are quarantined.
        reported: what was last reported that the run holds of the node; None until then.
    """

    name: str
    record: dict[str, Any]
    actor: Any
    described: dict[str, Any] | None = None
    directory: str = ""
    up: bool = True
    is_closing: bool = False
    is_frozen: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    unsent: list[Command] = field(default_factory=list)
    feeders: set[int] = field(default_factory=set)
    ranks: dict[_RankKey, Job] = field(default_factory=dict)
    replacements: int = 0
    broken: set[str] = field(default_factory=set)
    reported: Node | None = None
    _sent: int = 0

    @property
    def is_measuring(self) -> bool:
        """Whether processes that measure members run there."""
        return any(member == PROFILE for member, _, _ in self.ranks)

    @property
    def ray_id(self) -> str:
        """Ray's id of its node."""
        return str(self.record["NodeID"])

    def find_devices(self, gpus: Iterable[str]) -> tuple[str, ...]:
        """The ids of GPUs that Ray names; of one in MIG mode, those of its instances."""
        assert self.described is not None
        named, asked = zip(self.described["gpu_ids"], self.described["gpu_names"], strict=True), set(gpus)
        return tuple(device for device, names in named if asked.intersection(names))

    def update(self, event: Mapping[str, Any]) -> None:
        """Its node offers other GPUs, or more or less of them or of its memory: an event of its `NodeServices`."""
        assert self.described is not None
        changing = (*OF_GPUS, "gpu_names", "gpu_reasons", "power", "memory_left_gb")
        self.described |= {name: event[name] for name in changing}

    def quarantine(self, devices: Iterable[str]) -> None:
        """GPUs of its node have broken, by the ids of all their instances."""
        assert self.described is not None
        known = dict(zip(self.described["gpu_ids"], self.described["gpu_names"], strict=True))
        self.broken.update(name for device in devices for name in known.get(device, (device,)))

    def is_unusable(self, lease: Lease) -> bool:
        """Whether a GPU of a lease is quarantined, or nothing of its GPUs can be used.

        Either processes of others hold all of their memory, or the node does not offer them: they are in compute
        mode PROHIBITED, or the driver has lost them.
        """
        assert self.described is not None
        free = dict(zip(self.described["gpu_ids"], self.described.get("gpu_free", ()), strict=False))
        is_vain = bool(lease.gpus) and not any(free.get(device, 1.0) for device in lease.devices)
        return is_vain or not self.broken.isdisjoint(lease.gpus)

    def send(self) -> None:
        """Send all unsent commands, if it is up."""
        if self.unsent and self.up:
            self.actor.perform.remote(self._sent, self.unsent)
            self.unsent, self._sent = [], self._sent + 1

    def replace(self, actor: Any) -> None:
        """Another actor takes over: it counts commands from 0, and its events are awaited."""
        self.actor, self._sent, self.up, self.heard_at = actor, 0, False, time.monotonic()
        self.unsent = []  # for ranks and feeders that have ended


@functools.cache
def make_actor_class() -> Any:
    """Ray's class of agents' actors: one, since each takes Ray 0.04 CPU-seconds to describe."""
    import ray

    return ray.remote(NodeAgent)


def start_agent(
    record: dict[str, Any],
    name: str,
    run_dir: RunDir,
    session: Path | None,
    *,
    on_gpus: bool,
    takes_over: str | None = None,
) -> Any:
    """Start the agent of a node as an actor.

    Its process inherits nothing of this environment, and holds no resources.

    Args:
        session: the directory of a Ray that was started for this run.
        on_gpus: whether it is to see the GPUs that its raylet sees.
        takes_over: the directory of an agent of this node that has ended.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    sees_gpus = on_gpus and record["Resources"].get("GPU", 0)
    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if sees_gpus else {}
    variables |= {name: os.environ[name] for name in (TRUST_GROUP, TRUST_FOLDER) if name in os.environ}
    run_id = run_dir.info["run_id"]
    options = {
        "name": f"{run_dir.path.name}/{name}/agent-{time.monotonic_ns():x}",
        "num_cpus": 0,
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=record["NodeID"], soft=False),
    }
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    own = None if session is None else str(session)
    path = list_import_directories()
    return make_actor_class().options(**options).remote(name, str(run_dir.path), run_id, own, path, takes_over)


def name_nodes(records: Sequence[dict[str, Any]], known: dict[str, str]) -> dict[str, str]:
    """Ray's id -> name of each node: that of its host, made distinct where a host has several nodes.

    Args:
        known: names that were given before, which stay.
    """
    names = dict(known)
    for record in records:
        ray_id, host = str(record["NodeID"]), str(record["NodeManagerHostname"])
        if ray_id not in names:
            distinct = (host, *(f"{host}-{ray_id[:length]}" for length in range(6, len(ray_id) + 1)))
            names[ray_id] = next(name for name in distinct if name not in names.values())
    return names


def describe_offer(record: dict[str, Any], name: str, agent: Agent | None, *, on_gpus: bool) -> Node:
    """A node with all that Ray could ever give of it, as far as the agent, if there is one, sees it too."""
    resources = record["Resources"]
    gpus = int(resources.get("GPU", 0)) if on_gpus else 0
    kind = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), "GPU")
    cpus, memory_gb, host = resources.get("CPU", 0.0), resources.get("memory", 0.0) / 2**30, name
    models = (kind,) * gpus
    if agent is not None and agent.described is not None:
        seen = agent.described
        cpus, memory_gb, host = min(cpus, seen["cpus"]), min(memory_gb, seen["memory_gb"]), seen["host"]
        models = tuple(seen["gpus"][:gpus])
    return Node(name=name, cpus=cpus, gpus=models, memory_gb=memory_gb, host=host)


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
        asked = {gpu for lease in leases for gpu in lease.gpus}
        reasons = [(names, text) for names, text in reasons if asked.intersection(names)]
        if asked and not usable:
            reasons = reasons or [((), "Ray offers GPUs that NVIDIA's driver does not show")]
    seen["no_gpus"] = "; ".join(text for _, text in reasons)
    chosen = {key: tuple(seen[key][i] for i in usable) for key in OF_GPUS if seen.get(key)}
    return Node(
        **{**seen, **chosen, "cpus": min(cpus, seen["cpus"]), "memory_gb": min(memory_gb, seen["memory_gb"])}
    )


def describe_error(error: Exception) -> str:
    """The cause of one of Ray's errors in one line; Ray's ids and codes say nothing here."""
    import ray

    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "the connection to its agent broke"
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    lines = [_ID.sub("", line) for line in lines if not _ATTRIBUTE.match(line)]
    return lines[-1] if getattr(error, "cause", None) is None and lines else (lines[0] if lines else repr(cause))
