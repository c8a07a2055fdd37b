"""Places members on the nodes, and says for which of them the cluster lacks resources."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence

from ensemble.controller.actions import Demand
from ensemble.controller.attempt_commands import AttemptCommands
from ensemble.controller.attempts import Attempts
from ensemble.controller.feeders import Feeders
from ensemble.controller.plain_planner import PlainPlanner
from ensemble.controller.queue import MemberQueue
from ensemble.controller.session_state import SessionState
from ensemble.controller.waiting_window import FIRST, WaitingWindow
from ensemble.controller.waitlist import leave_out
from ensemble.schedule.explain import explain_memory_wait
from ensemble.schedule.needs import compute_need, max_node_memory_gb
from ensemble.schedule.placement import ClusterSnapshot, Start, count_placeable
from ensemble.spec import Ensemble, Identity
from ensemble.spec.identity import find_first_own_epoch

log = logging.getLogger(__name__)

#: Trials to come for which resources are asked, beside those that wait.
MOST_COMING = 64
#: Waiting members from which on only the first of each kind are looked at: for so many seconds as nothing changes.
#: Within the last ones, nodes that come or change are taken into account, and what is missing is said.
MANY, AS_PREPARED_S, DEMAND_S = 64, 30.0, 5.0


class Placer:
    """Gives waiting members places and feeders, as the planner chooses.

    Args:
        streaming: whether members are proposed when there is room for them.
    """

    def __init__(
        self,
        session: SessionState,
        ensemble: Ensemble,
        attempts: Attempts,
        commands: AttemptCommands,
        queue: MemberQueue,
        feeders: Feeders,
        planner: PlainPlanner,
        *,
        streaming: bool,
    ) -> None:
        self._session, self._ensemble, self._streaming = session, ensemble, streaming
        self._attempts, self._commands, self._queue, self._feeders = attempts, commands, queue, feeders
        self._planner = planner
        self._demand: Demand | None = None  # as it was last said
        self._demand_at = self._until = self._soon = -math.inf
        self._nodes, self._is_demand_late = 0, False
        self._window: WaitingWindow | None = None
        self._most, self._stamp = FIRST, self._make_stamp()
        spans = [span.cohort for member in session.run.members.values() for span in member.spans]
        self._stream = 1 + max((cohort for cohort in spans if cohort is not None), default=-1)
        self._cohort = self._stream + streaming  # the next number; who joins late is in `_stream`

    def place(self) -> str | None:
        """Place the members for which there is room; returns why the run has to stop: no member runs, and none
        ever can.
        """
        session, waitlist = self._session, self._session.waitlist
        session.placement_due = False
        if self._streaming and not self._planner.is_measuring:
            self._queue.propose(self._count_wanted_trials())
        if not self._is_prepared():
            self._prepare()
        if self._planner.is_measuring:
            self._feeders.start_early(self._stream, session.nodes.held)
        starts = self._choose_starts()
        new = (start.cohort + 1 for start in starts if start.cohort is not None)
        self._cohort = max(self._cohort, *new, 0)
        self._remove({start.placement.member for start in starts})
        readers = {start.placement.member for start in starts if self._epochs_left(start.placement.identity)}
        for start in starts:
            keys = self._feeders.assign(start, starts, readers)
            awaits = [key for key in keys if self._feeders.is_starting(key)]
            self._commands.reserve(start, {key[0]: self._feeders.address(key) for key in keys}, awaits)
        self._feeders.stop_unneeded(self._list_needed_feeders())
        left_out = waitlist.list_all()
        self.say_demand(left_out)
        if left_out and not self._attempts and not session.placement_due and not self._planner.is_measuring:
            return self._give_up_unplaceable(left_out)
        if self._attempts:
            self._say_memory_wait("")
        return None

    def _is_prepared(self) -> bool:
        """Whether the many members that wait are as they were prepared last, which takes long."""
        if self._window is None or self._stamp != self._make_stamp():
            return False
        is_late = self._session.nodes.changes != self._nodes and not (
            self._attempts and self._session.now < self._soon
        )
        return not is_late and self._session.now < self._until

    def _make_stamp(self) -> Hashable:
        """What members are prepared by: another one where some were added or measured."""
        session, planner = self._session, self._planner
        return (
            session.waitlist.changes,
            planner.is_measuring,
            planner.count_measured(),
            session.nodes.devices,
            bool(session.nodes.held),
        )

    def _prepare(self) -> None:
        """Fill in what members left to measurement, and sort them; where many wait, by kinds."""
        session, waitlist, self._window = self._session, self._session.waitlist, None
        coming = self._queue.count_trials_left()
        waiting, returning = self._planner.prepare_waiting(
            waitlist.waiting, waitlist.returning, self._take_cluster_snapshot(), coming
        )
        waitlist.arrange(waiting, returning)
        if len(waiting) > MANY and not self._planner.is_measuring:
            self._window = WaitingWindow(waiting, lambda one: (self._planner.flotilla_of(one), compute_need(one)))
            self._stamp, self._until = self._make_stamp(), session.now + AS_PREPARED_S
            self._nodes, self._soon = session.nodes.changes, session.now + DEMAND_S
            self._most = FIRST

    def _choose_starts(self) -> list[Start]:
        """Choose the members that start now, among the first of each kind where many wait."""
        while True:
            starts = self._planner.choose_starts(self._take_cluster_snapshot())
            if self._window is None or 2 * len(starts) < self._most or not self._window.hides(self._most):
                return starts
            self._most *= 2

    def _remove(self, placed: set[str]) -> None:
        self._session.waitlist.remove(placed)
        if self._window is not None:
            self._window.remove(placed, self._most)
            self._most = max(FIRST, min(self._most, 4 * len(self._session.live)))

    def rebalance(self) -> None:
        """Decide about stragglers among the members that have ended an epoch; say what is missing, where that is
        due.
        """
        if self._is_demand_late and self._session.now >= self._demand_at:
            self.say_demand(self._session.waitlist.list_all())
        if self._planner.is_due:
            coming = self._queue.count_trials_left()
            self._cohort = self._planner.rebalance(self._take_cluster_snapshot(), coming, self._cohort)

    @property
    def _joins_late(self) -> bool:
        """Whether members that wait read the stream of those that run as soon as they fit."""
        return self._streaming or self._feeders.keep_all(self._session.nodes.held)

    def _take_cluster_snapshot(self) -> ClusterSnapshot:
        session, nodes, waitlist = self._session, self._session.nodes, self._session.waitlist
        failures, measuring, joins_late = self._attempts.failures, self._planner.is_measuring, self._joins_late
        most_gb = max_node_memory_gb(nodes.list_potential())
        left_gb = max_node_memory_gb(nodes.packed) if nodes.list_cluster() is None else math.inf
        waiting = () if measuring else waitlist.waiting if self._window is None else self._window.head(self._most)
        return ClusterSnapshot(
            nodes=nodes.packed,
            devices=nodes.devices,
            waiting=[failures.grants.apply(one, most_gb, left_gb) for one in waiting],
            returning=[
                (failures.grants.apply(identity, most_gb, left_gb), cohort)
                for identity, cohort in waitlist.returning
                if not measuring or session.run.members[identity.member].attempts
            ],
            running=self._planner.apply_core_shares(session.live.list_placements()),
            limits=self._attempts.failures.limits,
            next_cohort=self._stream if joins_late else self._cohort,
            joins_late=joins_late,
            is_gated=self._feeders.is_sharing,
        )

    def _give_up_unplaceable(self, left_out: Sequence[Identity]) -> str | None:
        """Handle members that find no place although nothing runs; returns why the run has to stop.

        Those fail that no node could ever hold. The run stops if there is no node at all, or if nodes of which it
        holds all have no place; else it waits for the cluster.
        """
        session = self._session
        why = session.nodes.explain_each(left_out)
        if not session.nodes.list_potential() or (not why and not session.nodes.has_more()):
            return next(iter(why.values()), "no place is left")
        for member, reason in why.items():
            self._queue.give_up(member, reason)
        self._say_memory_wait(explain_memory_wait(self._take_cluster_snapshot()) or "")
        return None

    def _say_memory_wait(self, detail: str) -> None:
        """Say that no member can start because of what others hold of the memory, or (empty) that one could."""
        if bool(detail) == bool(self._session.run.awaited_memory):
            return
        self._session.log("memory_awaited", detail=detail)
        if detail:
            log.warning("no member can start now: %s; the run waits until others free memory", detail)

    def say_demand(self, left_out: Sequence[Identity]) -> None:
        """Say for which members resources are missing, and which places are taken, if either has changed.

        Where many are left out, what is missing is found out from time to time: it hardly changes, and it takes
        long. Which places are taken is said at once: an executor gives back what no member uses.
        """
        session, coming, placed = (
            self._session,
            self._queue.count_trials_left(),
            self._session.live.list_placements(),
        )
        self._is_demand_late = len(left_out) > MANY and session.now < self._demand_at
        if self._is_demand_late and session.stop_reason is None and self._demand is not None:
            if placed != self._demand.placed:
                new = {one.member for one in placed} - {one.member for one in self._demand.placed}
                self._tell(Demand(leave_out(self._demand.waiting, new), placed))
            return
        self._demand_at = session.now + DEMAND_S
        if session.stop_reason is not None:
            missing: list[Identity] = []
        elif self._planner.is_measuring:  # what they need is not known yet
            if self._demand is None:  # an executor keeps what it holds for members that it knows
                return
            missing = list(self._demand.waiting)
        else:
            most_gb = max_node_memory_gb(session.nodes.list_potential())
            missing = [self._attempts.failures.grants.apply(one, most_gb) for one in left_out]
            if coming and self._streaming:
                example = self._planner.make_example(
                    self._ensemble.identify(0, {}), session.nodes.list_potential()
                )
                missing += [example] * min(coming, MOST_COMING)
        self._tell(Demand(missing, placed))

    def _tell(self, demand: Demand) -> None:
        if demand != self._demand:
            self._demand = demand
            self._session.actions.append(demand)

    def _count_wanted_trials(self) -> int:
        """The number of trials to propose: those that fit now, and at least one while no member runs or waits."""
        most, cluster = self._queue.count_trials_left(), self._take_cluster_snapshot()
        most = min(most, self._session.waitlist.trials_ready)
        if most <= 0:
            return 0
        example = self._planner.make_example(self._ensemble.identify(0, {}), cluster.nodes)
        nobody = not (self._attempts or cluster.waiting or cluster.returning)
        return max(count_placeable(example, most, cluster), int(nobody))

    def _epochs_left(self, identity: Identity) -> int:
        """The number of epochs after a member's last checkpoint."""
        checkpoint = self._session.run.members[identity.member].checkpoint
        return identity.epochs - (checkpoint.epoch if checkpoint else find_first_own_epoch(identity.lineage))

    def _list_needed_feeders(self) -> set[tuple[str, int]]:
        """The feeders that running, returning or later members read."""
        session, waitlist = self._session, self._session.waitlist
        coming = waitlist.cohorts
        if (
            self._joins_late
            and session.stop_reason is None
            and (waitlist.waiting or self._queue.count_trials_left())
        ):
            coming.add(self._stream)
        # Those of a node that is being drained end with its members.
        kept = (key for key in self._feeders.running if key[0] in session.nodes and key[1] in coming)
        return {*session.live.list_feeders_read(), *kept}
