"""Places agents and ranks on nodes of a Ray cluster: GPUs that may be used, options of actors, states of ranks.

Ray names the GPU of a process in CUDA_VISIBLE_DEVICES, and does not publish which processes hold the other GPUs.
Here the run chooses the GPU of a rank: so Ray must not set that variable, and no GPU of a node is used while other
jobs hold some of them.

Ray starts an actor once its resources are free, which may take hours on a shared cluster. No rank of a member
trains before all its ranks have their resources. Meanwhile a `waiting` event is repeated, so that the member does
not count as hanging.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.executors.base import Event
from ensemble.executors.ray import _compat
from ensemble.executors.ray.actors import MemberWorker, NodeAgent, Share, list_import_directories
from ensemble.schedule import Node
from ensemble.store.trust import TRUST_GROUP
from ensemble.train.job import Job

WAITING_EVERY_S = 5.0  # time before the first `waiting` event of a rank, and between two of them
FEEDERS = "feeders"  # concurrency group of an agent: its calls are executed one by one, in order
_RELEASE_S = 5.0  # time in which Ray notices that the actors of a run which has just ended are gone


def count_usable_gpus(record: dict[str, Any], seen: int) -> tuple[int, str]:
    """How many GPUs of a node the run may use, and the reason if these are not all (else empty).

    Args:
        record: Ray's record of the node.
        seen: number of GPUs that a process on the node sees; the first of them are those that Ray offers.
    """
    offered = int(record["Resources"].get("GPU", 0))
    if not seen or not offered:
        return 0, "Ray offers none of its GPUs" if seen else ""
    until = time.monotonic() + _RELEASE_S
    while True:
        taken = offered - _compat.list_free_resources().get(record["NodeID"], {}).get("GPU", 0.0)
        if taken <= 0:
            return min(seen, offered), ""
        if time.monotonic() >= until:
            break
        time.sleep(0.2)
    return 0, f"Ray has given {taken:g} of its {offered} GPUs to others and does not say which: none is used"


def make_node(described: dict[str, Any], record: dict[str, Any], *, on_gpus: bool) -> Node:
    """A node with at most the resources that Ray offers there, since no actor can get more.

    Args:
        described: fields of the node, from `NodeAgent.describe`.
        record: Ray's record of the node.
        on_gpus: whether the run may use GPUs.
    """
    offered = record["Resources"]
    offers = {
        "cpus": min(described["cpus"], offered.get("CPU", 0.0)),
        "memory_gb": min(described["memory_gb"], offered.get("memory", 0.0) / 2**30),
    }
    if on_gpus:
        most, offers["no_gpus"] = count_usable_gpus(record, len(described["gpus"]))
        offers |= {key: tuple(described[key][:most]) for key in ("gpus", "gpu_memory_gb")}
    return Node(**{**described, **offers})


def make_agent(ray_id: str, arguments: Sequence[Any], *, sees_all: bool) -> Any:
    """The agent of a node as an actor; `arguments` are those of `NodeAgent`."""
    import ray

    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 8, "concurrency_groups": {FEEDERS: 1}}
    options |= _make_options(ray_id, sees_all=sees_all)
    make_remote: Any = ray.remote(**options)
    return make_remote(NodeAgent).remote(*arguments)


def make_worker(ray_id: str, share: Share, gpus: float | None) -> Any:
    """An actor that holds the resources of a rank; `gpus` is its share of a GPU, None for the CPU."""
    import ray

    options: dict[str, Any] = {"num_cpus": share[1], "memory": share[2], "max_concurrency": 2}
    if gpus is not None:
        options["num_gpus"] = gpus
    options |= _make_options(ray_id, sees_all=gpus is not None)
    make_remote: Any = ray.remote(**options)
    return make_remote(MemberWorker).remote(list_import_directories())


def _make_options(ray_id: str, *, sees_all: bool) -> dict[str, Any]:
    """Options of an actor on one node of the cluster; its process inherits nothing of this environment.

    Args:
        ray_id: Ray's id of the node.
        sees_all: whether it sees all GPUs that its raylet sees.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if sees_all else {}
    if TRUST_GROUP in os.environ:
        variables[TRUST_GROUP] = os.environ[TRUST_GROUP]
    options: dict[str, Any] = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)}
    return options | ({"runtime_env": {"env_vars": variables}} if variables else {})


@dataclass(eq=False)
class Agent:
    """The agent of a node.

    Attributes:
        record: Ray's record of the node.
        forks: address of the node's fork server.
        cohorts: cohorts with a feeder on the node.
        starting: calls that start a feeder and have not been answered.
        up: False for an agent that replaces another and has not reported yet.
        held: attempts to launch once it is up.
    """

    node: Node
    record: dict[str, Any]
    actor: Any
    forks: str
    cohorts: set[int] = field(default_factory=set)
    starting: set[Any] = field(default_factory=set)
    up: bool = True
    held: list[tuple[Sequence[Job], Sequence[int | None]]] = field(default_factory=list)

    @property
    def node_name(self) -> str:
        """The name of its node."""
        return self.node.name

    @property
    def ray_id(self) -> str:
        """Ray's id of its node."""
        return str(self.record["NodeID"])

    @property
    def is_ready(self) -> bool:
        """Whether members can start here: all feeders listen."""
        return self.up and not self.starting


@dataclass(frozen=True)
class FeederStart:
    """A call that starts the feeder of a cohort; `since` is when it was made (monotonic clock)."""

    node_name: str
    cohort: int
    since: float


@dataclass(eq=False)
class Rank:
    """One rank of one attempt, and its actor.

    Attributes:
        share: resources of the actor, which can be kept for another rank; None if it holds a GPU.
        gang: all ranks of the attempt.
        is_reused: whether the actor has run another rank and has not answered yet.
        is_placed: whether Ray has given it its resources.
        is_running: whether `start` was called.
        is_killed: whether its actor was killed; its last events may still arrive, but the actor cannot be kept.
        unsent: commands to send once it runs.
        asked_at: time of the request for its actor, or of the last `waiting` event (monotonic clock).
    """

    job: Job
    device: int | None
    actor: Any
    share: Share | None
    gang: list[Rank]
    is_reused: bool = False
    is_placed: bool = False
    is_running: bool = False
    is_killed: bool = False
    unsent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def node_name(self) -> str:
        """The name of its node."""
        return self.job.node

    @property
    def is_gang_placed(self) -> bool:
        """Whether all ranks of the attempt have their resources."""
        return all(rank.is_placed for rank in self.gang)

    def send(self) -> None:
        """Send all unsent commands."""
        for command, fields in self.unsent:
            self.actor.send.remote(self.job.identity.member, self.job.attempt, command, fields)
        self.unsent.clear()

    def start(self, forks: str) -> Any:
        """Start training; returns the stream of its events."""
        self.is_running = True
        unsent, self.unsent = self.unsent, []
        return self.actor.run.options(num_returns="streaming").remote(
            self.job.as_json(), self.device, forks, unsent
        )


def make_waiting_events(ranks: Iterable[Rank], now: float) -> list[Event]:
    """A `waiting` event for each rank that has not started, every `WAITING_EVERY_S` seconds."""
    events = []
    for rank in ranks:
        if not rank.is_running and now - rank.asked_at >= WAITING_EVERY_S:
            rank.asked_at = now
            job, gpu = rank.job, rank.device is not None and rank.job.identity.gpus_per_worker
            wants = f"{job.identity.cpus_per_worker:g} cpus" + (f" and {gpu:g} GPU" if gpu else "")
            if not rank.is_placed:
                detail = f"Ray has no place for rank {job.rank} ({wants}) on node {job.node} yet"
            else:
                detail = f"rank {job.rank} waits for the other ranks, or for a feeder, on node {job.node}"
            who = {"member": job.identity.member, "attempt": job.attempt, "rank": job.rank}
            events.append({"type": "waiting", **who, "node": job.node, "detail": detail})
    return events


def compute_share(job: Job, node: Node) -> Share:
    """The resources, beside a GPU, that the actor of a rank holds."""
    wanted = job.identity
    # An estimate of cores may exceed those of the node (`ensemble.schedule.needs`).
    cpus = min(wanted.cpus_per_worker, node.cpus / wanted.workers)
    memory = None if wanted.memory_gb is None else int(wanted.memory_gb * 2**30)
    return node.name, cpus, memory


def describe_error(error: Exception) -> str:
    """The cause of one of Ray's errors in one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if getattr(error, "cause", None) is None and lines else (lines[0] if lines else repr(cause))
