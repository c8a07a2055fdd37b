"""What a session asks about the order and the width of members; where nothing is measured, there is no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ensemble.controller.rehearser import Rehearser
from ensemble.controller.waitlist import PendingRetry
from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.placement import ClusterSnapshot, Start, decide_starts
from ensemble.spec import Identity


class PlainPlanner:
    """Members start in their order, with what they declare. `Planner` measures them first."""

    def __init__(self, rehearser: Rehearser) -> None:
        self.rehearser = rehearser

    @property
    def is_measuring(self) -> bool:
        """Whether members are or will be rehearsed or measured, or processes that did so have not exited."""
        return self.rehearser.is_busy

    @property
    def is_due(self) -> bool:
        """Whether members have ended an epoch since the last call of `rebalance`."""
        return False

    def count_measured(self) -> int:
        """The number of members of which the needs are known."""
        return 0

    def handle(self, event: Mapping[str, Any]) -> bool:
        """Handle an event; returns whether it came from processes that measure, so that nobody else has to."""
        return self.rehearser.handle(event)

    def watch(self, now_s: float) -> None:
        """Do what is due; called when all pending events have been handled."""
        self.rehearser.watch()

    def stop(self) -> None:
        """Measure nothing more, and kill the processes that measure."""
        self.rehearser.stop()

    def prepare_waiting(
        self,
        waiting: Sequence[Identity],
        returning: Sequence[PendingRetry],
        cluster: ClusterSnapshot,
        coming: int,
    ) -> tuple[list[Identity], list[PendingRetry]]:
        """Fill in what waiting and returning members left to measurement, and sort the waiting ones.

        While members are measured, nothing is changed. `coming` counts trials that will still be proposed.
        """
        self.rehearser.begin([*waiting, *(identity for identity, _ in returning)], cluster)
        return list(waiting), list(returning)

    def flotilla_of(self, identity: Identity) -> int:
        """The position of a member's flotilla in the plan; members that the plan does not have come last."""
        return 0

    def make_example(self, identity: Identity, nodes: Sequence[Node]) -> Identity:
        """A trial that was not proposed yet, with the demands of the most demanding member that was measured."""
        return identity

    def choose_starts(self, cluster: ClusterSnapshot) -> list[Start]:
        return decide_starts(cluster)

    def apply_core_shares(self, running: Sequence[Placement]) -> list[Placement]:
        """The placements of running members with their present shares of the cores."""
        return list(running)

    def rebalance(self, cluster: ClusterSnapshot, coming: int, cohort: int) -> int:
        """Decide about stragglers in cohorts whose members have ended an epoch; returns the first unused cohort
        number.
        """
        return cohort
