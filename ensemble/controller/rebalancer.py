"""Rebalances cohorts: moves, separates or widens a member that slows down the others that read its stream.

`ensemble.schedule.flotilla.straggler` decides at the end of each epoch of a cohort's slowest member. Where no
member waits for a place nothing is changed, because the slowest member's end is the end of the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ensemble.controller.attempt_commands import AttemptCommands
from ensemble.controller.feeders import Feeders
from ensemble.controller.profiler import Profiler
from ensemble.controller.session_state import SessionState
from ensemble.schedule.flotilla.model import (
    Cohort,
    CoreBudget,
    RatedMember,
    RunningMember,
    correct_rates,
    interpolate_rate,
)
from ensemble.schedule.flotilla.straggler import RebalanceDecision, decide_rebalance
from ensemble.schedule.needs import Node
from ensemble.schedule.placement import ClusterSnapshot
from ensemble.schedule.profiles import compute_own_rate, estimate_capacity
from ensemble.spec import Ensemble, Identity

RESTART_S = 5.0  # what a member loses when it is restarted from a checkpoint, as long as none was observed
MAX_TRIALS_CONSIDERED = 64  # trials still to be proposed that a decision takes into account


class Rebalancer:
    """Observes the rates of running members, and rebalances cohorts with stragglers."""

    def __init__(
        self,
        session: SessionState,
        ensemble: Ensemble,
        profiler: Profiler,
        commands: AttemptCommands,
        feeders: Feeders,
    ) -> None:
        self._session, self._state = session, session.run
        self._ensemble, self._profiler = ensemble, profiler
        self._commands, self._feeders = commands, feeders
        self._rates: dict[str, float] = {}
        self._changed_at: dict[str, int] = {}

    def observe(self, epoch: Mapping[str, Any]) -> None:
        """Learn a member's rate and memory from its `epoch` event."""
        is_weighted = self._state.members[epoch["member"]].identity.get("weights") is not None
        # Rates are of the stream, of which such a member has only the samples of weight above 0.
        seen = compute_own_rate({**epoch, "samples": self._ensemble.samples} if is_weighted else epoch)
        if seen is not None:
            self._rates[epoch["member"]] = seen
        self._profiler.observe(epoch)

    def estimate_slowdown(self) -> float:
        """The median factor by which members train slower than measured, in steps of 0.1, at least 1."""
        factors = [
            alone / self._rates[name]
            for name, member in self._state.members.items()
            if name in self._rates and (alone := self._solo_rate(name, member.identity["workers"])) is not None
        ]
        return max(1.0, round(statistics.median(factors), 1)) if factors else 1.0

    def _solo_rate(self, member: str, workers: int) -> float | None:
        profile = self._profiler.profiles.get(member)
        return None if profile is None else interpolate_rate(profile.samples_per_s, workers)

    def list_cohorts(self, nodes: Sequence[Node]) -> list[Cohort]:
        """The running cohorts with their members' known rates; a member that works alone is a cohort by itself."""
        number = {node.name: n for n, node in enumerate(nodes)}
        groups: dict[int, list[tuple[RunningMember, int]]] = {}
        for identity, node, cohort in self._session.live.list_training():
            rated = self._rate_running(identity, number[node]) if node in number else None
            if rated is not None:
                epoch = (self._state.members[identity.member].first_epoch or 0) + identity.epochs - rated.epochs
                groups.setdefault(-1 - identity.number if cohort is None else cohort, []).append((rated, epoch))
        return [
            Cohort(
                number=key,
                members=tuple(member for member, _ in group),
                epoch=min(epoch for _, epoch in group),
                private=key < 0,
            )
            for key, group in groups.items()
        ]

    def _rate_running(self, identity: Identity, node: int) -> RunningMember | None:
        seen, profile = self._rates.get(identity.member), self._profiler.profiles.get(identity.member)
        epochs = identity.epochs - self._state.members[identity.member].epoch
        if epochs < 1 or (seen is None and profile is None):
            return None
        workers, rates = identity.workers, dict(profile.samples_per_s) if profile is not None else {}
        if seen is not None:
            rates = dict(correct_rates(rates, workers, seen)) if rates else {workers: seen}
        return RunningMember(
            member=identity.member, samples_per_s=rates, epochs=epochs, workers=workers, node=node
        )

    def core_budget(self, cluster: ClusterSnapshot) -> CoreBudget | None:
        """The cores that preparation and members share on CPU nodes; None where preparation was not measured."""
        profiles = self._profiler.profiles
        prepare_s = max((one.prepare_s for one in profiles.values()), default=0.0)
        total = sum(node.cpus for node in cluster.nodes)  # 0 while all of it is given back to other runs
        if not prepare_s or not total or (cluster.devices != "cpu" and any(node.gpus for node in cluster.nodes)):
            return None
        busy = {
            identity.member: workers * profiles[identity.member].cpus.get(workers, 1.0)
            for identity in _list_identities(cluster)
            if identity.member in profiles and (workers := identity.workers)
        }
        return CoreBudget(total=total, prepared_per_s=1 / prepare_s, members=busy)

    # -- stragglers ---------------------------------------------------------------------------------------------

    def rebalance(
        self,
        member: str,
        cluster: ClusterSnapshot,
        waiting: Sequence[Sequence[RatedMember]],
        coming: int,
        free_cohort: int,
    ) -> int:
        """Decide about a member that has ended an epoch, if it is the slowest of its cohort, and act on it.

        Args:
            waiting: flotillas that follow, their widths known.
            coming: trials still to be proposed.

        Returns:
            The first cohort number that was never used.
        """
        is_kept = self._feeders.keep_all(cluster.nodes)  # then a slow member holds up nobody
        if not (self._ensemble.elastic or ((waiting or coming) and not is_kept)):
            return free_cohort
        cohorts = self.list_cohorts(cluster.nodes)
        home = next((cohort for cohort in cohorts if any(one.member == member for one in cohort.members)), None)
        if home is None or (len(cohorts) == 1 and len(home.members) == 1 and not self._ensemble.elastic):
            return free_cohort
        follow = [*waiting, *self._expect_trials(coming, home)]
        offered = estimate_capacity(cluster.nodes, [*_list_identities(cluster)], cluster.devices)
        decision = decide_rebalance(
            member,
            cohorts,
            offered,
            self._ensemble.samples,
            waiting=follow,
            cores=self.core_budget(cluster),
            elastic=self._ensemble.elastic,
            free=_count_free_slots(offered.slots, cluster),
            restart_s=self._estimate_restart_s(),
            settled_epochs=self._state.members[member].epoch - self._changed_at.get(member, -1),
        )
        return free_cohort if is_kept and decision.kind != "widen" else self._apply(decision, cluster, free_cohort)

    def _expect_trials(self, coming: int, home: Cohort) -> list[list[RatedMember]]:
        """Trials that will be proposed, assumed to be like the median member of a cohort."""
        by_rate = sorted(home.members, key=lambda one: interpolate_rate(one.samples_per_s, one.workers or 1))
        middle = by_rate[len(home.members) // 2]
        return [
            [
                RatedMember(
                    member=f"coming-{n}",
                    samples_per_s=middle.samples_per_s,
                    epochs=self._ensemble.epochs,
                    workers=middle.workers,
                )
            ]
            for n in range(min(coming, MAX_TRIALS_CONSIDERED))
        ]

    def _estimate_restart_s(self) -> float:
        """The median time from a member's placement to its first step, in seconds."""
        spans = [span for member in self._state.members.values() for span in member.spans]
        # A member that moves to another cohort is not restarted.
        taken = [span.started - span.placed for span in spans if span.started and span.started > span.placed]
        return statistics.median(taken) if taken else RESTART_S

    def _apply(self, decision: RebalanceDecision, cluster: ClusterSnapshot, free_cohort: int) -> int:
        if decision.kind == "pace":
            return free_cohort
        running = {one.member: one for one in cluster.running}
        nodes = {node.name: node for node in cluster.nodes}
        moving = [running[name] for name in decision.members if name in running]
        cohort = free_cohort if decision.kind == "apart" else decision.cohort
        done = False
        for placement in moving:
            name = placement.member
            if decision.kind == "alone":
                done |= self._commands.alone(name)
            elif decision.kind == "widen" and decision.workers is not None:
                done |= self._commands.widen(name, decision.workers)
            elif cohort is not None:
                beside = [one.identity for one in moving if one.node == placement.node]
                key = self._feeders.assign_late(beside, cohort, nodes[placement.node])
                feeder = self._feeders.address(key)
                if key is not None and (feeder is not None or self._feeders.is_starting(key)):
                    done |= self._commands.join(name, key, feeder)
            self._changed_at[name] = self._state.members[name].epoch
        if done:
            self._session.log(
                "remedy",
                what=decision.kind,
                members=list(decision.members),
                cohort=cohort,
                workers=decision.workers,
                run_s=decision.run_s,
                pace_s=decision.pace_s,
            )
        return free_cohort + (done and decision.kind == "apart")


def _list_identities(cluster: ClusterSnapshot) -> Iterable[Identity]:
    yield from cluster.waiting
    yield from (placement.identity for placement in cluster.running)


def _count_free_slots(slots: Sequence[int], cluster: ClusterSnapshot) -> list[int]:
    held = {node.name: 0 for node in cluster.nodes}
    for placement in cluster.running:
        for name, ranks in placement.ranks_by_node.items():
            if name in held:
                held[name] += len(ranks)
    return [max(0, many - held[node.name]) for many, node in zip(slots, cluster.nodes, strict=True)]
