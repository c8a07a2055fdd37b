"""Tracks failures: members waiting for a retry, nodes to avoid.

A thin keeper over the policies of `ensemble.controller.failure_policy`, which decide.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ensemble.controller.failure_policy import Decision, Failure, FailurePolicy, NodePolicy, exclude_avoided
from ensemble.controller.session_state import PendingRetry
from ensemble.schedule import Node, Placement
from ensemble.schedule.memory_grants import Grants, as_event, increase_grant
from ensemble.spec import Identity

log = logging.getLogger(__name__)


class FailureTracker:
    """The failures of a session in their order, on the controller's clock; tells the log through `emit`.

    Args:
        policy: says what becomes of a member that failed.
        nodes: says which nodes are to be left alone.
        rooms: the `room` events of the run so far.

    Attributes:
        grants: what members get at least, learnt from running out of memory.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        emit: Callable[..., None],
        nodes: NodePolicy | None = None,
        rooms: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._policy, self._emit = policy, emit
        self.grants = Grants(rooms)
        self._of_nodes = nodes or NodePolicy()
        self._failures: list[Failure] = []
        self._avoided: frozenset[str] = frozenset()
        self._resting: list[tuple[float, PendingRetry]] = []  # from when on
        self._stopping = False

    def __len__(self) -> int:
        """How many rest."""
        return len(self._resting)

    def decide(self, failure: Failure) -> Decision:
        """What becomes of the member; the failure is kept in mind."""
        decision = self._policy.decide(failure, self._failures)
        self._failures.append(failure)
        return decision

    def forgive(self, member: str) -> None:
        """Its last failure was a record's, which it will not prepare again: it does not count."""
        for place in reversed(range(len(self._failures))):
            if self._failures[place].member == member:
                self._failures[place] = dataclasses.replace(self._failures[place], a_records=True)
                return

    def more_room(self, placement: Placement, error: str, together: int, memory_gb: float | None) -> bool:
        """Grant a member that ran out of memory more of it, and those like it; False where it had all.

        Args:
            error: what it said.
            together: members on its node, itself included.
            memory_gb: host memory of its node, in GiB.
        """
        identity, on_gpu = placement.identity, None not in placement.devices
        grant = increase_grant(identity, error, on_gpu=on_gpu, together=together, node_memory_gb=memory_gb)
        if grant is None:
            return False
        told = as_event(identity, placement.node, grant)
        self._emit("room", **told)
        self.grants.add(told)
        return True

    def defer(self, member: PendingRetry, until: float) -> None:
        """Let a member wait before it is tried again."""
        self._resting.append((until, member))

    def pop_due(self, now: float) -> list[PendingRetry]:
        """Those whose rest is over, each told once; nobody rests any more once the run is to end."""
        up = [item for item in self._resting if item[0] <= now or self._stopping]
        self._resting = [item for item in self._resting if item not in up]
        return [member for _, member in up]

    def stop(self) -> None:
        """The run is to end: nobody is to be waited for."""
        self._stopping = True

    def pending_cohorts(self) -> set[int | None]:
        """Those that resting members go back to."""
        return {cohort for _, (_, cohort) in self._resting}

    def withdraw(self, member: str) -> PendingRetry | None:
        """Let a member that rests not be tried again; None where it does not rest."""
        found = next((item for _, item in self._resting if item[0].member == member), None)
        self._resting = [item for item in self._resting if item[1] is not found]
        return found

    def usable_nodes(
        self, nodes: Sequence[Node], wanted: Sequence[Identity], devices: str, now: float
    ) -> list[Node]:
        """The nodes to place on now: without those on which members fail that do well elsewhere.

        Args:
            wanted: who waits for a place; one that fits on no other node goes there all the same.
        """
        avoided = self._of_nodes.avoided(self._failures, [node.name for node in nodes], now)
        for name in sorted(avoided - self._avoided):
            log.warning("node %s is left alone for a while: members have failed there again and again", name)
            self._emit("node_avoided", node=name)
        self._avoided = avoided
        return exclude_avoided(nodes, avoided, wanted, devices)
