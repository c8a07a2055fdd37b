"""Tracks failures: what members have been granted since, nodes to avoid.

The policies of `ensemble.controller.failure_policy` decide; this keeps what they decide from.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from ensemble.controller.failure_policy import Decision, Failure, NodePolicy, RetryPolicy, exclude_avoided
from ensemble.events import MemoryIncrease
from ensemble.schedule import Node, Placement
from ensemble.schedule.memory_grants import Grants, as_event, increase_grant
from ensemble.spec import Identity

log = logging.getLogger(__name__)


class FailureTracker:
    """The failures of a session in their order, at times of the controller's clock.

    Args:
        policy: decides whether a member that failed is tried again.
        log_event: `log_event(kind, **fields)` logs an event.
        memory_increases: the `memory_increase` events of the run so far.

    Attributes:
        grants: the least memory of members, learnt from those that ran out of it.
        limits: node -> most members at one time, learnt from the same.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        log_event: Callable[..., None],
        memory_increases: Sequence[MemoryIncrease] = (),
    ) -> None:
        self._policy, self._log, self._node_policy = policy, log_event, NodePolicy()
        self.grants = Grants(memory_increases)
        self.limits: dict[str, int] = {}
        self._failures: list[Failure] = []
        self._avoided: frozenset[str] = frozenset()

    def decide(self, failure: Failure) -> Decision:
        """Decide whether the member is tried again, and remember the failure."""
        decision = self._policy.decide(failure, self._failures)
        self._failures.append(failure)
        return decision

    def excuse_last(self, member: str) -> None:
        """Do not count a member's last failure: it was due to a record that will not be prepared again."""
        for position in reversed(range(len(self._failures))):
            if self._failures[position].member == member:
                self._failures[position] = dataclasses.replace(self._failures[position], is_due_to_record=True)
                return

    def relieve(
        self,
        placement: Placement,
        error: str,
        together: int,
        memory_gb: Mapping[str, float],
        rank: int = 0,
        *,
        may_grow: bool = True,
    ) -> bool:
        """Grant more memory to a member that ran out of it, and to members like it, or let fewer run beside it.

        Args:
            error: its exception's text.
            together: members on its node, itself included.
            memory_gb: host memory of each node, in GiB.
            rank: that ran out of it.
            may_grow: whether it is tried again.

        Returns:
            Whether it was granted more; False where it had all the memory that there is.
        """
        has_more = may_grow and self._grant_memory(placement, error, together, memory_gb, rank)
        if not has_more or placement.identity.memory_gb is None:  # else it exceeded its own limit
            node, fewer = placement.find_node(rank), max(1, together - 1)
            self.limits[node] = min(fewer, self.limits.get(node, fewer))
        return has_more

    def _grant_memory(
        self, placement: Placement, error: str, together: int, memory_gb: Mapping[str, float], rank: int
    ) -> bool:
        identity, on_gpu = placement.identity, None not in placement.devices
        node = placement.find_node(rank)
        # all ranks get the same: where the member has been it finds room again
        parts = {
            name: memory_gb[name] / len(r) for name, r in placement.ranks_by_node.items() if name in memory_gb
        }
        least = min(parts, key=parts.__getitem__) if node in parts else node
        grant = increase_grant(
            identity,
            error,
            on_gpu=on_gpu,
            together=together,
            node_memory_gb=memory_gb.get(least),
            ranks=placement.count_ranks(least),
        )
        if grant is None:
            return False
        event = as_event(identity, node, grant)
        self._log("memory_increase", **event)
        self.grants.add(MemoryIncrease(**event))
        return True

    def list_usable_nodes(
        self, nodes: Sequence[Node], wanted: Iterable[Identity], devices: str, now: float
    ) -> list[Node]:
        """The nodes without those on which members fail that succeed elsewhere.

        Args:
            wanted: the members that wait; all nodes are usable where one of them fits on no other node.
        """
        avoided = self._node_policy.choose_avoided(self._failures, [node.name for node in nodes], now)
        for name in sorted(avoided - self._avoided):
            log.warning("node %s is avoided for a while: members have failed there repeatedly", name)
            self._log("node_avoided", node=name)
        self._avoided = avoided
        return exclude_avoided(nodes, avoided, wanted, devices)
