"""Decides how much memory a member is granted: the measured amount plus a margin, and more after it ran out.

Members are packed by their grant, and the kernel limits them to it. A member that runs out of memory is retried
with twice as much, as long as its node has more. All members with the same cost key (`ensemble.schedule.cost_key`)
get the larger grant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.schedule.cost_key import compute_cost_key
from ensemble.spec import Identity

#: A few steps do not show everything: fragments, the longest sample, batches that a member prepares for itself
#: when it has lost its feeder. Of address space, which the kernel limits, a process takes more than it touches.
MARGIN, SPARE_GB = 1.25, 0.25

_WORSE = 0.99  # of a node's memory: who has been granted as much has all


def add_margin(measured_gb: float) -> float:
    """Host memory to grant a worker that was seen to hold `measured_gb` for itself, in GiB."""
    return round(measured_gb * MARGIN + SPARE_GB, 3)


def compute_gpu_share(busy: float, memory_gb: float, size_gb: float) -> float:
    """The share of a GPU that a worker is packed by: of its time or of its memory, whichever is more.

    Members that share a GPU need both. A share of the memory is what the worker is held to (PyTorch's
    `set_per_process_memory_fraction`), so it has the margin of one that must not fail for a little more.

    Args:
        busy: the share of the time that it keeps the GPU at work.
        memory_gb, size_gb: the most that it held of the GPU's memory, and all that the GPU has; 0 where not known.
    """
    held = memory_gb / size_gb * MARGIN if size_gb > 0 else 0.0
    return min(1.0, max(busy, held))


@dataclass(frozen=True, kw_only=True)
class Grant:
    """At least what members of one outline get from now on; None where nothing was learnt."""

    memory_gb: float | None = None
    gpus_per_worker: float | None = None

    def apply(self, identity: Identity) -> Identity:
        """The member with at least so much."""
        more = {
            name: value
            for name in ("memory_gb", "gpus_per_worker")
            if (value := getattr(self, name)) is not None and value > (getattr(identity, name) or 0.0)
        }
        return dataclasses.replace(identity, **more) if more else identity


def increase_grant(
    identity: Identity, error: str, *, on_gpu: bool, together: int, node_memory_gb: float | None
) -> Grant | None:
    """What a member is granted after it ran out of memory; None when it had all there is.

    Twice what it had. Of one of which nothing was known, what it had is taken to be an equal part of the node.

    Args:
        error: what it said; PyTorch's OutOfMemoryError is a GPU's.
        on_gpu: whether it trained on GPUs.
        together: members on its node, itself included.
        node_memory_gb: host memory of its node.
    """
    if on_gpu and error.startswith("OutOfMemoryError"):
        had = identity.gpus_per_worker or 1.0 / together
        return Grant(gpus_per_worker=min(1.0, 2 * had)) if had < _WORSE else None
    if not node_memory_gb:
        return None
    most = node_memory_gb / identity.workers
    had = identity.memory_gb or most / together
    return Grant(memory_gb=round(min(most, 2 * had), 3)) if had < _WORSE * most else None


class Grants:
    """What has been granted so far, by outline.

    Args:
        events: the `room` events of the run's log.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self._grants: dict[str, Grant] = {}
        self._outlines: dict[str, str] = {}
        for event in events:
            self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep in mind what a `room` event says."""
        fields = {field.name: event.get(field.name) for field in dataclasses.fields(Grant)}
        before = self._grants.get(event["outline"], Grant())
        fields = {name: max(value or 0.0, getattr(before, name) or 0.0) or None for name, value in fields.items()}
        self._grants[event["outline"]] = Grant(**fields)

    def apply(self, identity: Identity, max_node_memory_gb: float = math.inf) -> Identity:
        """The member with what those like it were granted.

        Args:
            largest_gb: memory of the largest node: one that is wider than those who ran out of it finds no more.
        """
        if not self._grants:
            return identity
        known = self._outlines.get(identity.member)
        if known is None:
            known = self._outlines[identity.member] = compute_cost_key(identity)
        grant = self._grants.get(known)
        if grant is not None and grant.memory_gb is not None:
            grant = dataclasses.replace(
                grant, memory_gb=min(grant.memory_gb, max_node_memory_gb / identity.workers)
            )
        return identity if grant is None else grant.apply(identity)


def as_event(identity: Identity, node: str, grant: Grant) -> dict[str, Any]:
    """The fields of a `room` event: plain JSON values."""
    return {
        "member": identity.member,
        "node": node,
        "outline": compute_cost_key(identity),
        **dataclasses.asdict(grant),
    }
