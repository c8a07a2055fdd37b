"""Plans a run: has waiting members measured, chooses their widths and order, and rebalances running cohorts.

The planner keeps what was measured (profiles) and observed (rates at the end of epochs), calls the pure functions
of `ensemble.schedule` with it, and logs their decisions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ensemble.controller.attempt_commands import AttemptCommands
from ensemble.controller.feeders import Feeders
from ensemble.controller.plain_planner import PlainPlanner
from ensemble.controller.profiler import Profiler
from ensemble.controller.rebalancer import Rebalancer
from ensemble.controller.rehearser import Rehearser
from ensemble.controller.session_state import SessionState
from ensemble.controller.waitlist import PendingRetry
from ensemble.events import Profiled
from ensemble.schedule.flotilla.allocate import revise
from ensemble.schedule.flotilla.grouping import group_streams
from ensemble.schedule.flotilla.model import Allocation, RatedMember
from ensemble.schedule.needs import Node, Placement, compute_need, uses_gpus
from ensemble.schedule.packing import pack
from ensemble.schedule.placement import ClusterSnapshot, Start, decide_starts, has_node
from ensemble.schedule.profiles import (
    MemoryCap,
    Profile,
    apply_profile,
    estimate_capacity,
    plan_core_shares,
    rate_members,
)
from ensemble.schedule.selection import is_selected
from ensemble.spec import Ensemble, Identity
from ensemble.store import RunDir

MAX_WAITING_CONSIDERED = 256  # waiting members that a decision about a straggler takes into account


class Planner(PlainPlanner):
    """Decides the widths and the order of waiting members.

    Args:
        profiles: `profile` events of earlier sessions that are still valid.
    """

    def __init__(
        self,
        session: SessionState,
        ensemble: Ensemble,
        run_dir: RunDir,
        profiles: Sequence[Profiled],
        commands: AttemptCommands,
        feeders: Feeders,
        rehearser: Rehearser,
    ) -> None:
        super().__init__(rehearser)
        self._session, self._state, self._log = session, session.run, session.log
        self._ensemble = ensemble
        self._profiler = Profiler(session.actions, run_dir, session.log, profiles)
        self._rebalancer = Rebalancer(session, ensemble, self._profiler, commands, feeders)
        self._ended_epochs: list[str] = []
        self._allocation: Allocation | None = None
        self._flotillas: dict[str, int] = {}
        self._widths: dict[str, int] = {}  # as planned, whatever nodes offer now
        self._shares: dict[str, float] = {}
        self._planned_for: tuple[frozenset[str], float, bool] = frozenset(), 1.0, True

    @property
    def is_measuring(self) -> bool:
        return super().is_measuring or self._profiler.is_busy

    @property
    def is_due(self) -> bool:
        return bool(self._ended_epochs)

    def count_measured(self) -> int:
        return len(self._profiler.profiles)

    def watch(self, now_s: float) -> None:
        super().watch(now_s)
        self._profiler.watch(now_s)

    def stop(self) -> None:
        super().stop()
        self._profiler.stop()

    def handle(self, event: Mapping[str, Any]) -> bool:
        if event["type"] == "epoch":
            self._rebalancer.observe(event)
            self._ended_epochs.append(event["member"])
        return super().handle(event) or self._profiler.handle(event, self._session.now)

    # -- before members start -----------------------------------------------------------------------------------

    def prepare_waiting(
        self,
        waiting: Sequence[Identity],
        returning: Sequence[PendingRetry],
        cluster: ClusterSnapshot,
        coming: int,
    ) -> tuple[list[Identity], list[PendingRetry]]:
        super().prepare_waiting(waiting, returning, cluster, coming)
        if self.rehearser.is_busy:
            return list(waiting), list(returning)
        added = [identity for identity, _ in returning if not self._has_begun(identity)]
        new = [*waiting, *added]
        if self._ensemble.train is not None and not self._profiler.is_busy and cluster.nodes:
            wanted = self._profiler.select_members(
                new, cluster.nodes, coming, bool(self._shares), cluster.devices, self._ensemble.samples
            )
            node, measured = _choose_profiling_node(cluster, wanted)
            if node is not None:
                self._profiler.start(measured, node, self._session.now, cluster.nodes, cluster.devices)
        if self._profiler.is_busy or not cluster.nodes:
            return list(waiting), list(returning)
        self._widths |= self._choose_widths(new, cluster)
        fill_in = functools.partial(
            self._fill_in,
            cap=MemoryCap(self._session.nodes.list_potential(), cluster.devices),
            cluster=cluster,
        )
        filled = [fill_in(identity) for identity in waiting]
        back = [(fill_in(identity), cohort) for identity, cohort in returning]
        return sorted(filled, key=self.flotilla_of), back

    def make_example(self, identity: Identity, nodes: Sequence[Node]) -> Identity:
        profiles = self._profiler.profiles.values()
        most = max(
            profiles, key=lambda one: (max(one.gpus.values(), default=0.0), max(one.cpus.values())), default=None
        )
        return apply_profile(identity, most, None, MemoryCap(nodes, self._session.nodes.devices))

    def choose_starts(self, cluster: ClusterSnapshot) -> list[Start]:
        """Start flotillas in their order, each as a cohort, until one does not find places for all its members."""
        chosen: list[Start] = []
        free, returning, cohort = cluster.free_capacity(), cluster.returning, cluster.next_cohort
        for flotilla in self._group_by_flotilla(cluster.waiting) or [[]]:
            names = {one.member for one in flotilla}
            some = decide_starts(
                dataclasses.replace(cluster, waiting=flotilla, returning=returning, next_cohort=cohort, free=free)
            )
            free.reserve(*(start.placement for start in some))
            new = [start for start in some if start.placement.member in names]
            old = [start for start in some if start.placement.member not in names]
            parted = new if cluster.joins_late else self._split_by_rate(new, cluster)
            chosen, returning = chosen + old + parted, ()
            unplaced = names - {start.placement.member for start in new}
            if any(has_node(one, cluster.nodes) for one in flotilla if one.member in unplaced):
                break
            if not cluster.joins_late:
                cohort = max([cohort, *(start.cohort + 1 for start in parted if start.cohort is not None)])
        free.release(*(start.placement for start in chosen))
        return chosen

    def _split_by_rate(self, starts: list[Start], cluster: ClusterSnapshot) -> list[Start]:
        """Divide members that start together into several cohorts, if that shortens the run."""
        together = [start.placement.identity for start in starts]
        names = {one.member for one in together}
        members = rate_members(
            [(one, self._epochs_left(one.member)) for one in together], self._find_profiles(together), names
        )
        if members is None or (offered := estimate_capacity(cluster.nodes, together, cluster.devices)).streams < 2:
            return starts
        others = dataclasses.replace(cluster, waiting=[one for one in cluster.waiting if one.member not in names])
        cores, waiting = self._rebalancer.core_budget(cluster), self._rate_waiting(others)
        groups = group_streams(members, offered, self._ensemble.samples, cores=cores, waiting=waiting).groups
        stream = {member: n for n, group in enumerate(groups) for member in group}
        return [
            dataclasses.replace(start, cohort=(start.cohort or 0) + stream[start.placement.member])
            for start in starts
        ]

    def _group_by_flotilla(self, waiting: Sequence[Identity]) -> list[list[Identity]]:
        return [
            list(members) for _, members in groupby(sorted(waiting, key=self.flotilla_of), key=self.flotilla_of)
        ]

    def flotilla_of(self, identity: Identity) -> int:
        return self._flotillas.get(identity.member, len(self._flotillas))

    def _fill_in(self, identity: Identity, cap: MemoryCap, cluster: ClusterSnapshot) -> Identity:
        if not identity.auto and identity.span_nodes != "auto":
            return identity  # it left nothing to measurement
        chosen = None
        if "workers" in identity.auto and not self._has_begun(identity):
            # a node for which it was planned may be lost by now, or given back for a while
            widest = _max_workers_per_node(cluster, on_gpus=uses_gpus(identity, cluster.devices))
            chosen = min(widest, self._widths.get(identity.member, identity.workers))
        filled = self._apply_core_share(
            apply_profile(identity, self._profiler.find_profile(identity), chosen, cap)
        )
        if filled != identity:
            self._log("member", **filled.as_dict())
        return filled

    def _apply_core_share(self, identity: Identity) -> Identity:
        """The member with its planned share of the cores, if it left that to measurement."""
        cpus = self._shares.get(identity.member)
        return identity if cpus is None else dataclasses.replace(identity, cpus_per_worker=cpus)

    def apply_core_shares(self, running: Sequence[Placement]) -> list[Placement]:
        return [
            dataclasses.replace(one, identity=self._apply_core_share(one.identity))
            if one.member in self._shares
            else one
            for one in running
        ]

    def _choose_widths(self, waiting: Sequence[Identity], cluster: ClusterSnapshot) -> Mapping[str, int]:
        """Choose numbers of workers for waiting members.

        The choice is made anew when other members wait, when running ones are slower than measured, and when the
        cluster has cores for one more member, or has none any more. Only in the second case are those that the run
        holds divided: before that members ask for what they keep busy.
        """
        names, slowdown = frozenset(one.member for one in waiting), self._rebalancer.estimate_slowdown()
        free_width = any("workers" in one.auto for one in waiting)
        if not waiting or (cluster.joins_late and not free_width):
            return {}
        together = [*waiting, *(one.identity for one in cluster.running)]
        on_cpus = not any(node.gpus for node in cluster.nodes)
        on_cpus |= not any(uses_gpus(one, cluster.devices) for one in together)
        least = min(one.cpus_per_worker * one.workers for one in waiting)
        has_all = not on_cpus or not self._session.nodes.can_get_cores(least)
        is_same = (slowdown, has_all) == self._planned_for[1:]
        if names <= self._planned_for[0] and is_same:  # the plan still holds
            return {}
        self._planned_for = names, slowdown, has_all
        left_open = all("cpus_per_worker" in one.auto for one in waiting)
        if on_cpus and has_all and left_open and not cluster.joins_late:
            return self._share_cores(waiting, cluster)
        if self._ensemble.sharing == "independent" and not free_width:  # no member waits for another one
            return {}
        return self._plan_flotillas(waiting, cluster)

    def _share_cores(self, waiting: Sequence[Identity], cluster: ClusterSnapshot) -> Mapping[str, int]:
        """Divide the cores so that all members, running ones included, have the same epoch time."""
        running = {one.member: one.identity for one in cluster.running}
        together = [*waiting, *(one for one in running.values() if one.member in self._shares)]
        fixed = sum(
            one.cpus_per_worker * one.workers for one in running.values() if one.member not in self._shares
        )
        selections = {compute_need(one).selection for one in (*together, *running.values())}
        usable = [node for node in cluster.nodes if any(is_selected(selection, node) for selection in selections)]
        shared = plan_core_shares(
            [(one, self._profiler.find_profile(one)) for one in together],
            self._ensemble.samples,
            cores=sum(node.cpus for node in usable) - fixed,
            widest=_max_workers_per_node(cluster, on_gpus=False),
            begun={one.member for one in together if one.member in running or self._has_begun(one)},
        )
        if shared is None:
            return {}
        self._shares, self._flotillas = dict(shared.cpus), {}
        self._log("planned", concurrent=[one.member for one in together], pace_s=shared.pace_s)
        return shared.workers

    def _plan_flotillas(self, waiting: Sequence[Identity], cluster: ClusterSnapshot) -> Mapping[str, int]:
        """Group members of similar rates into flotillas, which start one after another as places become free."""
        guessed = [apply_profile(one, self._profiler.find_profile(one)) for one in waiting]
        profiles = self._find_profiles(guessed)
        started = {one.member for one in waiting if self._has_begun(one)}
        slowdown = self._rebalancer.estimate_slowdown()
        offered = estimate_capacity(cluster.nodes, guessed, cluster.devices)
        with_epochs = [(one, self._epochs_left(one.member)) for one in guessed]
        members = rate_members(with_epochs, profiles, started, slowdown, offered.most_workers)
        if members is None:
            return {}
        running = self._rebalancer.list_cohorts(cluster.nodes)
        plan = revise(members, running, offered, self._ensemble.samples, self._allocation)
        self._allocation = plan
        self._flotillas = {member: n for n, flotilla in enumerate(plan.flotillas) for member in flotilla.members}
        self._log(
            "planned",
            flotillas=[dataclasses.asdict(flotilla) for flotilla in plan.flotillas],
            makespan_s=plan.makespan_s,
            lower_bound_s=plan.lower_bound_s,
            slowdown=slowdown,
        )
        return plan.workers

    def _has_begun(self, identity: Identity) -> bool:
        return self._state.members[identity.member].attempts > 0

    # -- while members train ------------------------------------------------------------------------------------

    def rebalance(self, cluster: ClusterSnapshot, coming: int, cohort: int) -> int:
        ended, self._ended_epochs = self._ended_epochs, []
        next_up = dataclasses.replace(
            cluster, waiting=sorted(cluster.waiting, key=self.flotilla_of)[:MAX_WAITING_CONSIDERED]
        )
        waiting = self._rate_waiting(next_up) if ended else []
        for member in ended:
            cohort = self._rebalancer.rebalance(member, cluster, waiting, coming, cohort)
        return cohort

    def _rate_waiting(self, cluster: ClusterSnapshot) -> list[list[RatedMember]]:
        """The rates of waiting members with their present widths, by flotilla."""
        with_epochs = [(one, self._epochs_left(one.member)) for one in cluster.waiting]
        names = {one.member for one in cluster.waiting}
        members = rate_members(with_epochs, self._find_profiles(cluster.waiting), names) if with_epochs else None
        by_name = {one.member: one for one in members or ()}
        groups = self._group_by_flotilla([one for one in cluster.waiting if one.member in by_name])
        return [[by_name[one.member] for one in group] for group in groups]

    def _find_profiles(self, members: Iterable[Identity]) -> dict[str, Profile]:
        return {one.member: profile for one in members if (profile := self._profiler.find_profile(one))}

    def _epochs_left(self, member: str) -> int:
        state = self._state.members[member]
        return max(1, int(state.identity["epochs"]) - state.epoch)


def _choose_profiling_node(
    cluster: ClusterSnapshot, wanted: Sequence[Identity]
) -> tuple[Node | None, Sequence[Identity]]:
    """Where members are measured: where all find room, on devices that they will train on, beside the fewest.

    Returns:
        The node, None where nobody may be on any, and those that may be there; others are measured later.
    """
    running = Counter(placement.node for placement in cluster.running)
    wanted = [one for one in wanted if has_node(one, cluster.nodes)]
    if not wanted:
        return None, ()
    widest = max(wanted, key=lambda one: (one.workers, one.workers * one.cpus_per_worker))

    def merit(node: Node) -> tuple[bool, bool, bool, int]:
        holds = bool(pack([widest], [], [node], cluster.devices))
        is_full = cluster.devices != "cpu" and not any(node.gpu_free)
        return not is_selected(compute_need(widest).selection, node), not holds, is_full, running[node.name]

    node = min(cluster.nodes, key=merit)
    return node, [one for one in wanted if is_selected(compute_need(one).selection, node)]


def _max_workers_per_node(cluster: ClusterSnapshot, *, on_gpus: bool) -> int:
    """Most workers of one member on a node."""
    if on_gpus and (most := max((node.physical_gpus for node in cluster.nodes), default=0)):
        return most
    return max(1, *(int(node.cpus) for node in cluster.nodes))
