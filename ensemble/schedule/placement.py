"""Decides which members start now, and in which cohort.

Members of a fixed list that are placed together form a **cohort**, which shares one feeder per node; a later
cohort opens only when it is worth one. Trials of a search join the one running stream as soon as they fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ensemble.schedule.needs import Node, Placement, compute_need
from ensemble.schedule.packing import FreeCapacity
from ensemble.schedule.selection import is_selected
from ensemble.spec import Identity
from ensemble.spec.nodes import Selection


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """The input of `decide_starts`.

    Attributes:
        nodes: from the executor.
        devices: "auto", "cpu" or "cuda".
        waiting: members never placed in this session, in order.
        returning: members to be placed again, each with its cohort; None for one that prepares its own batches.
        running: members that hold a place, until their last process has ended.
        limits: most members at one time, by node, learnt from members that ran out of memory.
        next_cohort: the number of the next new cohort.
        joins_late: whether all are in cohort `next_cohort`, placed as soon as they fit: trials of a search, and
            members that read rings which hold all samples.
        is_gated: whether a place waits for others, so that more members share a feeder; not where there is none.
        free: free capacity beside the running members, kept by the caller; None: computed when needed.
    """

    nodes: Sequence[Node]
    devices: str = "auto"
    waiting: Sequence[Identity] = ()
    returning: Sequence[tuple[Identity, int | None]] = ()
    running: Sequence[Placement] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    next_cohort: int = 0
    joins_late: bool = False
    is_gated: bool = True
    free: FreeCapacity | None = field(default=None, compare=False)

    def free_capacity(self) -> FreeCapacity:
        """The free capacity beside the running members."""
        return self.free or FreeCapacity(self.nodes, self.devices, self.running)


@dataclass(frozen=True)
class Start:
    """The decision to start a member; with cohort None it prepares its own batches."""

    placement: Placement
    cohort: int | None


def decide_starts(cluster: ClusterSnapshot) -> list[Start]:
    """Decide which members start now; the state is left unchanged.

    Returning members are placed first. A new cohort of a fixed list opens when all waiting members fit at once, or
    nothing runs, or at least half of all places are free, where a place is what one of these members takes; or at
    once where `cluster.joins_late` or not `cluster.is_gated`. Members that select other nodes are looked at apart.
    """

    free = cluster.free_capacity()
    cohorts = {identity.member: cohort for identity, cohort in cluster.returning}
    back = free.place([identity for identity, _ in cluster.returning], cluster.limits)
    starts = [Start(placement, cohorts[placement.member]) for placement in back]
    new = free.place(cluster.waiting, cluster.limits)
    if cluster.is_gated and not cluster.joins_late and len(new) < len(cluster.waiting):
        late = _find_late(new, free, cluster)
        free.release(*(placement for placement in new if placement.need.selection in late))
        new = [placement for placement in new if placement.need.selection not in late]
    free.release(*back, *new)  # the caller reserves the places of the members that it starts
    return starts + [Start(placement, cluster.next_cohort) for placement in new]


def _find_late(new: Sequence[Placement], free: FreeCapacity, cluster: ClusterSnapshot) -> set[Selection]:
    """The selections of waiting members for which a new cohort is not worth it yet; `new` hold their places.

    Members that select other nodes are looked at apart: they do not wait for the same places.
    """
    late = set[Selection]()
    waiting = Counter(compute_need(identity) for identity in cluster.waiting)
    held = free.held_needs - Counter(placement.need for placement in new)
    for selection in {need.selection for need in waiting}:
        busy = Counter({need: count for need, count in held.items() if need.selection == selection})
        alike = Counter({need: count for need, count in waiting.items() if need.selection == selection})
        starting = sum(placement.need.selection == selection for placement in new)
        enough, everyone = 2 * starting + 1, busy + alike
        if (
            busy
            and starting < alike.total()
            and free.count_if_empty(everyone, cluster.limits, most=enough) == enough
        ):
            late.add(selection)
    return late


def has_node(identity: Identity, nodes: Iterable[Node]) -> bool:
    """Whether some node fits what a member selects, so that it only waits for a place there."""
    return any(is_selected(compute_need(identity).selection, node) for node in nodes)


def count_placeable(example: Identity, most: int, cluster: ClusterSnapshot) -> int:
    """How many members like `example`, up to `most`, fit beside all that run, wait for a place or return."""
    free = cluster.free_capacity()
    ahead = [*cluster.waiting, *(identity for identity, _ in cluster.returning)]
    ahead = [each for each in ahead if has_node(each, cluster.nodes)]
    placed = free.place(ahead, cluster.limits)
    copies = free.place([example] * most, cluster.limits) if len(placed) == len(ahead) else []
    free.release(*placed, *copies)
    return len(copies)
