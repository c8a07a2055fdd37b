"""Events of nodes, of their places, and of how members are packed."""

from __future__ import annotations

from typing import Any

from ensemble.events.base import Event, Json, MemberEvent


class NodeChanged(Event, tag="node"):
    """A node joins, or what it offers changes.

    Attributes:
        labels: that it has in a Ray cluster.
        memory_left_gb: what others leave of it; null: all.
        power: `source`, `origin`, `cores`, `idle`: `origin`, `watts` by part, `reason`.
    """

    node: str
    host: str | None = None
    interface: str | None = None
    cpus: float = 0.0
    memory_gb: float | None = None
    memory_left_gb: float | None = None
    gpus: list[Any] = []
    gpu_ids: list[int | str] = []
    gpu_memory_gb: list[float] = []
    gpu_free: list[float] = []
    gpu_shares: list[float] = []
    gpu_parents: list[int | str] = []
    gpu_exclusive: list[bool] = []
    no_gpus: str = ""
    labels: dict[str, str] = {}
    power: Json | None = None


class NodeHealth(Event):
    """How a node is, where that has changed since it was last logged.

    Attributes:
        free_gb: GiB free of file systems, by what they are for: "run directory", "/tmp", "/dev/shm".
        cpus, memory_gb, gpus: what the node has, also where the run holds less.
    """

    node: str
    free_gb: dict[str, float] = {}
    cpus: float | None = None
    memory_gb: float | None = None
    gpus: int = 0


class NodeDraining(Event):
    """A node is to be left."""

    node: str
    deadline: float | None = None


class NodeLost(Event):
    """A node is gone."""

    node: str
    detail: str = ""


class NodeUnusable(Event):
    """A node offers no place.

    Attributes:
        retry_s: when it is tried again.
    """

    node: str
    detail: str = ""
    retry_s: float | None = None


class AgentReplaced(Event):
    """Ray's agent of a node has ended, and there is a new one."""

    node: str
    detail: str = ""


class ClusterLost(Event):
    """What gives out the nodes is gone."""

    detail: str = ""


class GpuQuarantined(Event):
    """A GPU has a hardware error."""

    node: str
    gpu: str
    devices: list[Any] = []
    detail: str = ""


class ResourcesAwaited(Event, tag="resources"):
    """What the run waits for from Ray; empty: for nothing."""

    missing: str = ""


class MemoryAwaited(Event):
    """No member can start because of memory that others hold; empty: one has."""

    detail: str = ""


class Rehearsing(Event):
    """A member is rehearsed, before any is trained."""

    of: str
    node: str | None = None


class Rehearsed(Event):
    """What the rehearsal of a member has shown.

    Attributes:
        of: the member.
        code: of the run then.
        refused: why the run should not start.
        remarks: what else was seen.
        failed: why it was not rehearsed to the end; None: it was.
        epochs: short ones; 0 where a checkpoint of a member in training was tried.
        took_s: seconds.
    """

    of: str
    code: str | None = None
    refused: list[str] = []
    remarks: list[str] = []
    failed: str | None = None
    epochs: int = 0
    took_s: float = 0.0


class Measuring(Event):
    """Members are measured before they are placed."""

    members: list[str] = []
    node: str | None = None


class Unmeasured(Event):
    """The measurement of members failed."""

    members: list[str] = []
    error: str = ""


class Profiled(Event, tag="profile"):
    """What was measured (`ensemble.schedule.profiles.Profile`)."""

    shape: str
    device: str
    members: list[str] = []
    outlines: list[str] = []
    step_s: dict[int, float] = {}
    samples_per_s: dict[int, float] = {}
    spread_samples_per_s: dict[int, float] = {}
    cpus: dict[int, float] = {}
    gpus: dict[int, float] = {}
    prepare_s: float | None = None
    memory_gb: float | None = None
    gpu_memory_gb: float | None = None
    gpu_size_gb: float | None = None


class Planned(Event):
    """Which members train together."""

    concurrent: list[str] = []
    pace_s: float | None = None
    flotillas: list[Any] = []
    makespan_s: float | None = None
    lower_bound_s: float | None = None
    slowdown: float | None = None


class Remedy(Event):
    """What is done about members that are slower than those that they share a stream with."""

    what: str
    members: list[str] = []
    cohort: int | None = None
    workers: int | None = None
    run_s: float | None = None
    pace_s: float | None = None


class MemoryIncrease(MemberEvent):
    """A member that exceeded its memory gets more."""

    node: str | None = None
    outline: str = ""
    memory_gb: float | None = None
    gpus_per_worker: float | None = None
