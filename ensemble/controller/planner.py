"""The plan of a run: what waits is measured, settled and put in order; what runs is kept in step.

A thin keeper between the controller and the pure functions of `ensemble.schedule`: it remembers what was measured
(profiles) and what is observed (rates at the end of epochs), asks those functions, tells the log what they say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ensemble.controller.profiler import Profiler
from ensemble.controller.rebalancer import Rebalancer
from ensemble.controller.session_state import PendingRetry, SessionState
from ensemble.schedule import (
    Allocation,
    Node,
    Placement,
    PlacementState,
    Profile,
    RatedMember,
    Start,
    apply_profile,
    decide_starts,
    group_streams,
    pack,
    revise,
)
from ensemble.schedule.cpu_sharing import LEAST_SHARE, share_cores
from ensemble.schedule.profiles import estimate_capacity, max_node_memory_gb, rate_member, rate_members
from ensemble.spec import Ensemble, Identity

MOST_AHEAD = 256  # members that wait, of which is reckoned with when something is to be done about a laggard


class Planner:
    """Decides widths and order of the members that wait; tells the log through `emit`."""

    def __init__(
        self,
        session: SessionState,
        ensemble: Ensemble,
        profiler: Profiler,
        rebalancer: Rebalancer,
    ) -> None:
        self._session, self._state, self._log = session, session.run, session.log
        self._ensemble, self._profiler, self._rebalancer = ensemble, profiler, rebalancer
        self._ended: list[str] = []
        self._plan_before: Allocation | None = None
        self._turns: dict[str, int] = {}
        self._shares: dict[str, float] = {}
        self._planned_for: tuple[frozenset[str], float] = frozenset(), 1.0

    @property
    def measuring(self) -> bool:
        """Whether members are being measured: those that wait are placed after that."""
        return self._profiler.busy

    @property
    def due(self) -> bool:
        """Whether members have ended an epoch since their cohorts were looked after."""
        return bool(self._ended)

    def handle(self, event: Mapping[str, Any]) -> bool:
        """Handle an event; True for one of the processes that measure, which concerns nobody else."""
        if event["type"] == "epoch":
            self._rebalancer.observe(event, self._session.nodes)
            self._ended.append(event["member"])
        return self._profiler.handle(event, self._session.now)

    def watch(self) -> None:
        """Start the next measurement, end one that hangs."""
        self._profiler.watch(self._session.now)

    def stop(self) -> None:
        """Measure nothing more."""
        self._profiler.stop()

    # -- before members start -----------------------------------------------------------------------------------

    def settle(
        self,
        waiting: Sequence[Identity],
        returning: Sequence[PendingRetry],
        board: PlacementState,
        coming: int,
    ) -> tuple[list[Identity], list[PendingRetry]]:
        """The members that wait, in the order in which they are to be placed, and those that return.

        What they left to measurement is filled in, unless it is still being measured (`measuring`).

        Args:
            coming: trials of a search that will still be proposed.
        """
        added = [identity for identity, _ in returning if not self._begun(identity)]
        new = [*waiting, *added]
        if not self._profiler.busy and board.nodes:
            wanted = self._profiler.wanted(new, board.nodes, coming, crowded=bool(self._shares))
            if wanted:
                self._profiler.begin(wanted, _quietest(board, wanted), self._session.now)
        if self.measuring or not board.nodes:
            return list(waiting), list(returning)
        plan = self._plan(new, board)
        settle = functools.partial(
            self._settle, workers=plan, most_gb=max_node_memory_gb(board.nodes), widest=_widest(board)
        )
        known = [settle(identity) for identity in waiting]
        back = [(settle(identity), cohort) for identity, cohort in returning]
        return sorted(known, key=self._turn), back

    def example(self, identity: Identity, nodes: Sequence[Node]) -> Identity:
        """A trial that has not been proposed yet: taken to need as much as the most demanding one measured."""
        profiles = self._profiler.profiles.values()
        most = max(
            profiles, key=lambda one: (max(one.gpus.values(), default=0.0), max(one.cpus.values())), default=None
        )
        return apply_profile(identity, most, None, max_node_memory_gb(nodes))

    def choose_starts(self, board: PlacementState) -> list[Start]:
        """What starts now: flotilla by flotilla, each a cohort of its own, as long as all of one find a place."""
        found: list[Start] = []
        free, returning, cohort = board.free_capacity(), board.returning, board.next_cohort
        for flotilla in self._groups(board.waiting) or [[]]:
            names = {one.member for one in flotilla}
            some = decide_starts(
                dataclasses.replace(board, waiting=flotilla, returning=returning, next_cohort=cohort, free=free)
            )
            free.reserve(*(start.placement for start in some))
            new = [start for start in some if start.placement.member in names]
            old = [start for start in some if start.placement.member not in names]
            parted = new if board.streaming else self._by_rate(new, board)
            found, returning = found + old + parted, ()
            if len(new) < len(flotilla):
                break
            if not board.streaming:
                cohort = max([cohort, *(start.cohort + 1 for start in parted if start.cohort is not None)])
        free.release(*(start.placement for start in found))
        return found

    def _by_rate(self, starts: list[Start], board: PlacementState) -> list[Start]:
        """Members that start at once, parted into streams where that shortens the run; mostly it does not."""
        together = [start.placement.identity for start in starts]
        names = {one.member for one in together}
        members = rate_members(
            [(one, self._epochs_left(one.member)) for one in together], self._profiles(together), names
        )
        if members is None or (offered := estimate_capacity(board.nodes, together, board.devices)).streams < 2:
            return starts
        left = dataclasses.replace(board, waiting=[one for one in board.waiting if one.member not in names])
        cores, waiting = self._rebalancer.cores(board), self._rated_waiting(left)
        groups = group_streams(members, offered, self._ensemble.samples, cores=cores, waiting=waiting).groups
        stream = {member: n for n, group in enumerate(groups) for member in group}
        return [
            dataclasses.replace(start, cohort=(start.cohort or 0) + stream[start.placement.member])
            for start in starts
        ]

    def _groups(self, waiting: Sequence[Identity]) -> list[list[Identity]]:
        return [list(members) for _, members in groupby(sorted(waiting, key=self._turn), key=self._turn)]

    def _turn(self, identity: Identity) -> int:
        """Those that came after the plan was made come last."""
        return self._turns.get(identity.member, len(self._turns))

    def _settle(self, identity: Identity, workers: Mapping[str, int], most_gb: float, widest: int) -> Identity:
        chosen = None
        if "workers" in identity.auto and not self._begun(identity):
            # a node for which it was planned may be lost by now
            chosen = min(widest, workers.get(identity.member, identity.workers))
        known = self._apply_core_share(
            apply_profile(identity, self._profiler.profile_of(identity), chosen, most_gb)
        )
        if known != identity:
            self._log("member", **known.as_dict())
        return known

    def _apply_core_share(self, identity: Identity) -> Identity:
        """The share of the cores that it needs at the pace of all, where it was left to measurement."""
        cpus = self._shares.get(identity.member)
        return identity if cpus is None else dataclasses.replace(identity, cpus_per_worker=cpus)

    def apply_core_shares(self, running: Sequence[Placement]) -> list[Placement]:
        """Where members run, each with the share of the cores that it needs beside those that have come since."""
        return [
            dataclasses.replace(one, identity=self._apply_core_share(one.identity))
            if one.member in self._shares
            else one
            for one in running
        ]

    def _plan(self, waiting: Sequence[Identity], board: PlacementState) -> Mapping[str, int]:
        """Numbers of workers for those that wait; decided anew when others wait or members turn out slower."""
        names, slowdown = frozenset(one.member for one in waiting), self._rebalancer.slowdown()
        free_width = any("workers" in one.auto for one in waiting)
        if not waiting or (board.streaming and not free_width):
            return {}
        if names <= self._planned_for[0] and slowdown == self._planned_for[1]:  # it goes as planned
            return {}
        self._planned_for = names, slowdown
        on_cpus = board.devices == "cpu" or not any(node.gpus for node in board.nodes)
        left_open = all("cpus_per_worker" in one.auto for one in waiting)
        if on_cpus and left_open and not board.streaming:
            return self._share_cores(waiting, board)
        if self._ensemble.sharing == "independent" and not free_width:  # nobody keeps another one's pace
            return {}
        return self._plan_flotillas(waiting, board)

    def _share_cores(self, waiting: Sequence[Identity], board: PlacementState) -> Mapping[str, int]:
        """Let all share the cores at one pace, with those that run and left their share to measurement."""
        running = {one.member: one.identity for one in board.running}
        together = [*waiting, *(one for one in running.values() if one.member in self._shares)]
        profiles = [self._profiler.profile_of(one) for one in together]
        measured = [one for one in profiles if one is not None]
        if not measured:
            return {}
        slowest = min(measured, key=lambda one: min(one.samples_per_s.values()))
        # one that could not be measured is taken to be as slow as the slowest
        known = [(one, profile or slowest) for one, profile in zip(together, profiles, strict=True)]
        promised = sum(
            one.cpus_per_worker * one.workers for one in running.values() if one.member not in self._shares
        )
        found = share_cores(
            [
                rate_member(one, profile, self._ensemble.samples, one.member in running or self._begun(one))
                for one, profile in known
            ],
            cores=max(LEAST_SHARE, sum(node.cpus for node in board.nodes) - promised),
            widest=_widest(board),
            prepare_s=max(profile.prepare_s for _, profile in known) * self._ensemble.samples,
        )
        self._shares = dict(found.cpus)
        self._log("planned", abreast=[one.member for one, _ in known], pace_s=found.pace_s)
        return found.workers

    def _plan_flotillas(self, waiting: Sequence[Identity], board: PlacementState) -> Mapping[str, int]:
        """Let members of like rate start together, one flotilla after another as places become free."""
        guessed = [apply_profile(one, self._profiler.profile_of(one)) for one in waiting]
        profiles = self._profiles(guessed)
        begun = {one.member for one in waiting if self._begun(one)}
        slowdown = self._rebalancer.slowdown()
        offered = estimate_capacity(board.nodes, guessed, board.devices)
        known = [(one, self._epochs_left(one.member)) for one in guessed]
        members = rate_members(known, profiles, begun, slowdown, offered.most_workers)
        if members is None:
            return {}
        running = self._rebalancer.cohorts(board.nodes)
        plan = revise(members, running, offered, self._ensemble.samples, self._plan_before)
        self._plan_before = plan
        self._turns = {member: n for n, each in enumerate(plan.flotillas) for member in each.members}
        self._log(
            "planned",
            flotillas=[dataclasses.asdict(each) for each in plan.flotillas],
            makespan_s=plan.makespan_s,
            lower_bound_s=plan.lower_bound_s,
            slowdown=slowdown,
        )
        return plan.workers

    def _begun(self, identity: Identity) -> bool:
        return self._state.members[identity.member].attempts > 0

    def tenants(self, nodes: Sequence[Node]) -> Mapping[str, int]:
        """Most members on one GPU, by its model, as far as they were seen to slow each other down."""
        return self._rebalancer.tenants(nodes)

    # -- while members train ------------------------------------------------------------------------------------

    def keep_in_step(self, board: PlacementState, coming: int, cohort: int) -> int:
        """Look after the cohorts whose members have ended an epoch.

        Args:
            coming: trials of a search that will still be proposed.
            cohort: the first number that no cohort has had.

        Returns:
            The first number that is free now.
        """
        ended, self._ended = self._ended, []
        next_up = dataclasses.replace(board, waiting=sorted(board.waiting, key=self._turn)[:MOST_AHEAD])
        waiting = self._rated_waiting(next_up) if ended else []
        for member in ended:
            cohort = self._rebalancer.keep_in_step(member, board, waiting, coming, cohort)
        return cohort

    def _rated_waiting(self, board: PlacementState) -> list[list[RatedMember]]:
        """The members that wait, flotilla by flotilla, their widths fixed."""
        known = [(one, self._epochs_left(one.member)) for one in board.waiting]
        names = {one.member for one in board.waiting}
        members = rate_members(known, self._profiles(board.waiting), names) if known else None
        by_name = {one.member: one for one in members or ()}
        groups = self._groups([one for one in board.waiting if one.member in by_name])
        return [[by_name[one.member] for one in group] for group in groups]

    def _profiles(self, members: Iterable[Identity]) -> dict[str, Profile]:
        return {one.member: known for one in members if (known := self._profiler.profile_of(one)) is not None}

    def _epochs_left(self, member: str) -> int:
        known = self._state.members[member]
        return max(1, int(known.identity["epochs"]) - known.epoch)


def _quietest(board: PlacementState, wanted: Sequence[Identity]) -> Node:
    """Where members are measured: where all find room, on devices that they will train on, beside the fewest."""
    tenants = Counter(placement.node for placement in board.running)
    widest = max(wanted, key=lambda one: (one.workers, one.workers * one.cpus_per_worker))

    def merit(node: Node) -> tuple[bool, bool, int]:
        holds = bool(pack([widest], [], [node], board.devices))
        return not holds, board.devices != "cpu" and not node.gpus, tenants[node.name]

    return min(board.nodes, key=merit)


def _widest(board: PlacementState) -> int:
    """Most workers of one member on a node."""
    if board.devices != "cpu" and (most := max((len(node.gpus) for node in board.nodes), default=0)):
        return most
    return max(1, *(int(node.cpus) for node in board.nodes))
