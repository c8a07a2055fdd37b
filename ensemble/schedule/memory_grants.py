"""Decides how much memory a member is granted: the measured amount plus a margin, and more after it ran out.

A member that runs out of its grant is retried with twice as much, as long as its node has more; so are all members
with the same cost key (`ensemble.spec.identity`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ensemble.events import MemoryIncrease
from ensemble.schedule.needs import compute_need
from ensemble.spec import Identity
from ensemble.spec.identity import compute_cost_key

#: A few steps do not show the peak: fragmentation, the longest sample, batches that a member prepares for itself
#: after it has lost its feeder. The kernel limits address space, of which a process reserves more than it touches.
MARGIN, SPARE_GB = 1.25, 0.25

_ALL = 0.99  # fraction of a node's memory from which a grant cannot grow


def add_margin(measured_gb: float) -> float:
    """Host memory in GiB to grant a worker whose measured private memory was `measured_gb`."""
    return round(measured_gb * MARGIN + SPARE_GB, 3)


def compute_gpu_share(busy: float, memory_gb: float, size_gb: float) -> float:
    """The share of a GPU that a worker is packed by: the larger of its shares of time and memory.

    The worker is limited to its share of the memory (PyTorch's `set_per_process_memory_fraction`), so that share
    includes a margin.

    Args:
        busy: fraction of the time in which it keeps the GPU busy.
        memory_gb, size_gb: its peak GPU memory and the memory of the GPU, in GiB; 0 where unknown.
    """
    held = memory_gb / size_gb * MARGIN if size_gb > 0 else 0.0
    return min(1.0, max(busy, held))


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Minimum resources of the members with one cost key; None where nothing is known."""

    memory_gb: float | None = None
    gpus_per_worker: float | None = None

    def apply(self, identity: Identity) -> Identity:
        """The member with at least these resources."""
        more = {
            name: value
            for name in ("memory_gb", "gpus_per_worker")
            if (value := getattr(self, name)) is not None and value > (getattr(identity, name) or 0.0)
        }
        return dataclasses.replace(identity, **more) if more else identity


def increase_grant(
    identity: Identity, error: str, *, on_gpu: bool, together: int, node_memory_gb: float | None, ranks: int
) -> Grant | None:
    """Double the memory of a member that ran out of it; None if it had all there is.

    A member without a known grant is taken to have had an equal part of its node.

    Args:
        error: its error message; PyTorch's OutOfMemoryError means the memory of a GPU.
        on_gpu: whether it trained on GPUs.
        together: number of members on its node, itself included.
        node_memory_gb: host memory of its node in GiB.
        ranks: of this member on the node.
    """
    if on_gpu and error.startswith("OutOfMemoryError"):
        had = identity.gpus_per_worker or 1.0 / together
        return Grant(gpus_per_worker=min(1.0, 2 * had)) if had < _ALL else None
    if not node_memory_gb:
        return None
    most = node_memory_gb / ranks
    had = identity.memory_gb or most / together
    return Grant(memory_gb=round(min(most, 2 * had), 3)) if had < _ALL * most else None


class Grants:
    """Grants by cost key.

    Args:
        events: the `memory_increase` events of the run's log.
    """

    def __init__(self, events: Iterable[MemoryIncrease] = ()) -> None:
        self._grants: dict[str, Grant] = {}
        self._outlines: dict[str, str] = {}
        for event in events:
            self.add(event)

    def add(self, event: MemoryIncrease) -> None:
        """Record the grant of a `memory_increase` event; grants only grow."""
        fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(Grant)}
        before = self._grants.get(event.outline, Grant())
        fields = {name: max(value or 0.0, getattr(before, name) or 0.0) or None for name, value in fields.items()}
        self._grants[event.outline] = Grant(**fields)

    def apply(
        self, identity: Identity, max_node_memory_gb: float = math.inf, left_gb: float = math.inf
    ) -> Identity:
        """The member with the grant of its cost key.

        Args:
            max_node_memory_gb: memory of the largest node in GiB, an upper bound for the ranks on one node.
            left_gb: what others leave of it now. A member that did not declare its memory gives up as much of the
                margin as it lacks: it would wait for memory that it may never touch.
        """
        granted = self._apply_grant(identity, max_node_memory_gb) if self._grants else identity
        memory_gb, most_gb = granted.memory_gb or 0.0, left_gb / identity.workers
        is_declared = granted.memory_gb == identity.memory_gb and "memory_gb" not in identity.auto
        if memory_gb <= most_gb or is_declared:
            return granted
        return dataclasses.replace(granted, memory_gb=max(most_gb, (memory_gb - SPARE_GB) / MARGIN))

    def _apply_grant(self, identity: Identity, max_node_memory_gb: float) -> Identity:
        outline = self._outlines.get(identity.member)
        if outline is None:
            outline = self._outlines[identity.member] = compute_cost_key(identity)
        grant = self._grants.get(outline)
        if grant is not None and grant.memory_gb is not None:
            together = 1 if compute_need(identity).spans_nodes else identity.workers
            grant = dataclasses.replace(grant, memory_gb=min(grant.memory_gb, max_node_memory_gb / together))
        return identity if grant is None else grant.apply(identity)


def as_event(identity: Identity, node: str, grant: Grant) -> dict[str, Any]:
    """The fields of a `memory_increase` event: plain JSON values."""
    return {
        "member": identity.member,
        "node": node,
        "outline": compute_cost_key(identity),
        **dataclasses.asdict(grant),
    }
