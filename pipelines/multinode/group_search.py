"""Looks for a group for a node that has none, and notices when an existing group should form anew.

A node polls the rendezvous directory often at first and seldom when no other node has come for a while; after
failures it pauses for longer and longer.
"""

from __future__ import annotations

import contextlib
import time
import warnings

from pipelines.multinode.rendezvous import GroupAssignment, Peers, Rendezvous

POLL_S = 0.2
_SLOW_POLL_S = 2.0
_FAST_POLLING_S = 10.0  # how long after leaving a group the directory is polled often
_REGROUP_S = 6.0  # how long the nodes that left one group wait for each other
_CHECK_S = 1.0
_MAX_PAUSE_S = 30.0


class GroupSearch:
    """One node's search for a group, in its feeder's thread.

    Args:
        peers: the rendezvous directory and this node's number.
        identity: equal for all feeders that may share a stream (`Rendezvous`).
        near: the largest distance of streams that continue together, in samples.
        first_timeout_s: how long the first group waits for all nodes to be complete.

    Attributes:
        has_met: whether this node has ever joined a group.
    """

    def __init__(self, peers: Peers, identity: str, near: int, first_timeout_s: float) -> None:
        self.has_met = False
        self._peers = peers
        self._rendezvous = Rendezvous(peers, identity, near)
        self._first_timeout_s = first_timeout_s
        self._failures = 0
        self._not_before = 0.0
        self._warned: set[str] = set()
        self._led_generations: list[int] = []
        self._last_poll = 0.0
        self._alone_since = time.monotonic()

    @property
    def has_failed(self) -> bool:
        """Whether the last group failed before its nodes had exchanged a state."""
        return self._failures > 0

    def interval_s(self, now: float) -> float:
        """Seconds between two polls of the directory."""
        return POLL_S if now - self._alone_since < _FAST_POLLING_S else _SLOW_POLL_S

    def is_due(self, now: float) -> bool:
        """Whether it is time to poll the directory again."""
        return now >= self._not_before and now - self._last_poll >= self.interval_s(now)

    def find_group(self, head: int, now: float) -> GroupAssignment | None:
        """Poll the directory once; returns the group that this node has been assigned to, or None.

        Args:
            head: the position of this node's stream; -1 for any.
        """
        self._last_poll = now
        # Nodes that leave a group together should form the next one together, even if some take longer.
        timeout_s = _REGROUP_S if self.has_met else self._first_timeout_s
        everybody = now - self._alone_since < timeout_s
        try:
            assignment = self._rendezvous.poll(head, everybody=everybody)
            mismatched = [] if assignment else self._rendezvous.mismatched_nodes()
        except OSError as error:
            self._warn_once(f"cannot meet other nodes in {self._peers.directory}: {error}")
            return None
        if mismatched:
            nodes = ", ".join(map(str, mismatched))
            other = "another pipeline, capacity, block or design, or another version of ray-ensemble"
            self._warn_once(f"shares no stream with node {nodes}, which has {other}")
        if assignment is not None and assignment.rank == 0:
            self._led_generations.append(assignment.generation)
        return assignment

    def is_superseded(self, assignment: GroupAssignment, now: float) -> bool:
        """Whether the group can no longer become complete; the directory is read once a second at most."""
        if now - self._last_poll <= _CHECK_S:
            return False
        self._last_poll = now
        with contextlib.suppress(OSError):
            return self._rendezvous.is_superseded(assignment)
        return False

    def has_newcomers(self, assignment: GroupAssignment, head: int) -> bool:
        """Whether nodes outside the group wait to join it; the directory is read once a second at most."""
        now = time.monotonic()
        if now - self._last_poll < _CHECK_S or now - self._alone_since < _FAST_POLLING_S:
            return False
        self._last_poll = now
        try:
            return bool(self._rendezvous.joinable_nodes(assignment.nodes, head))
        except OSError as error:
            self._warn_once(f"cannot see whether other nodes wait in {self._peers.directory}: {error}")
            return False

    def record_success(self) -> None:
        """The nodes of the group have exchanged their states."""
        self._failures = 0

    def record_failure(self) -> None:
        """A group failed before its nodes had exchanged a state: pause before the next one."""
        self._failures += 1
        self._not_before = time.monotonic() + min(_MAX_PAUSE_S, 2.0**self._failures)

    def record_leave(self) -> None:
        """This node has left its group."""
        self._alone_since = time.monotonic()

    def withdraw(self) -> None:
        """Stop waiting for a group."""
        self._rendezvous.withdraw()

    def remove_files(self) -> None:
        """Remove the files of the groups that this node led."""
        for generation in self._led_generations:
            self._rendezvous.remove_group(generation)

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            warnings.warn(f"node {self._peers.node} {problem}; it prepares for itself", stacklevel=2)
