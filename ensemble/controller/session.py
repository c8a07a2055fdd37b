"""One session of a run as a state machine without input or output: events come in, actions come out.

There is no clock, file, process or thread here, so that a test can replay a whole run with faults. Everything
that it needs to know is in the events (`ensemble.controller.performer.EventReader` completes them), and every
decision is an action, which the controller performs. The parts of a session share one `SessionState`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.controller.actions import Action, Demand, ReduceCheckpoint
from ensemble.controller.attempt import ATTEMPT_EVENTS
from ensemble.controller.attempt_commands import AttemptCommands
from ensemble.controller.attempts import Attempts
from ensemble.controller.failure_policy import FailurePolicy
from ensemble.controller.feeders import Feeders, SharedStream
from ensemble.controller.node_table import NodeTable
from ensemble.controller.planner import Planner
from ensemble.controller.profiler import Profiler
from ensemble.controller.queue import MemberQueue
from ensemble.controller.rebalancer import Rebalancer
from ensemble.controller.requests import RequestHandler
from ensemble.controller.retention import list_unselected, plan_reduction
from ensemble.controller.session_state import SessionState
from ensemble.controller.waitlist import Waitlist
from ensemble.events import Profiled, Report
from ensemble.schedule import ClusterSnapshot, Node, count_placeable, explain_memory_wait, explain_unplaceable
from ensemble.schedule.profiles import max_node_memory_gb
from ensemble.spec import Ensemble, Identity, SpecError
from ensemble.spec.hyperparameters import describe_unused
from ensemble.store import RunDir, RunState

log = logging.getLogger(__name__)

#: Trials to come for which resources are asked, beside those that wait.
MOST_COMING = 64

#: Events that do not change how many members read each stream.
ROUTINE = frozenset(("started", "progress", "epoch", "checkpoint", "usage", "power", "feeder"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a session is given at its start.

    Attributes:
        ensemble: what is trained.
        run_dir: names paths; nothing is read or written there.
        run: the fold of the log so far.
        nodes: on which the executor can place members.
        stream: what the feeders prepare.
        policy: decides whether a member that failed is tried again.
        awaits_pruner, streaming, trials_left: see `ensemble.search.trials.Trials`.
        list_cluster: returns `Executor.cluster`.
        profiles: `profile` events of earlier sessions that are still valid.
        can_measure: whether the executor can start processes that measure members.
        stop_timeout_s: how long members may take to write a checkpoint when the run is stopped.
    """

    ensemble: Ensemble
    run_dir: RunDir
    run: RunState
    nodes: Sequence[Node]
    stream: SharedStream
    policy: FailurePolicy
    awaits_pruner: bool
    streaming: bool
    trials_left: int
    list_cluster: Callable[[], Sequence[Node] | None] = lambda: None
    profiles: Sequence[Profiled] = ()
    can_measure: bool = True
    stop_timeout_s: float = 60.0


class Session:
    """Decides what a run does next.

    Each method that takes the time (`now` in seconds of a monotonic clock, `t` in Unix seconds as in the log)
    returns the actions to be performed in their order, `Log` actions first.
    """

    def __init__(self, setup: Setup) -> None:
        self._ensemble, self._streaming = setup.ensemble, setup.streaming
        self._stop_timeout_s = setup.stop_timeout_s
        self.state = SessionState(
            setup.run,
            NodeTable(setup.run, setup.nodes, setup.ensemble.devices, setup.list_cluster),
            Waitlist(setup.trials_left),
            setup.ensemble.keep_checkpoints,
        )
        self.attempts = Attempts(
            self.state, setup.ensemble, setup.run_dir, setup.policy, awaits_pruner=setup.awaits_pruner
        )
        failures = self.attempts.failures
        self.commands = AttemptCommands(
            self.state, failures, elastic=setup.ensemble.elastic, hang_timeout_s=setup.ensemble.hang_timeout_s
        )
        self.queue = MemberQueue(
            self.state,
            self.commands,
            failures,
            setup.ensemble,
            setup.run_dir,
            streaming=setup.streaming,
            explain_unplaceable=self._explain,
        )
        self._requests = RequestHandler(self.state, self.queue, self._stop, setup.stop_timeout_s)
        self.feeders = Feeders(self.state, setup.ensemble, setup.run_dir, setup.stream)
        profiler = Profiler(
            self.state.actions,
            setup.run_dir,
            self.state.log,
            setup.profiles,
            is_possible=setup.can_measure,
        )
        rebalancer = Rebalancer(self.state, setup.ensemble, profiler, self.commands, self.feeders)
        self._planner = Planner(self.state, setup.ensemble, profiler, rebalancer)
        self._demand: Demand | None = None  # as it was last said
        self._unused: set[str] = set()  # hyperparameters for which `unused_hyperparameters` was logged
        self._readers_changed = True
        spans = [span.cohort for member in setup.run.members.values() for span in member.spans]
        self._stream = 1 + max((cohort for cohort in spans if cohort is not None), default=-1)
        self._cohort = self._stream + setup.streaming  # the next number; all trials of a search are in `_stream`

    def start(self, events: Sequence[Report], now: float, t: float) -> list[Action]:
        """Log the first events of the session."""
        self.state.set_time(now, t)
        for event in events:
            self._log(event)
        return self.state.drain_actions()

    def open_queue(
        self, redeclared: Mapping[str, Identity], unstartable: Mapping[str, str], now: float, t: float
    ) -> list[Action]:
        """Queue the unfinished members of an earlier start: see `MemberQueue.open`."""
        self.state.set_time(now, t)
        self.queue.open(redeclared, unstartable)
        return self.state.drain_actions()

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops before its members have ended; None: it goes on."""
        return self.state.stop_reason

    @property
    def is_over(self) -> bool:
        """Whether no member has processes or will be placed, and the cost of each trial is known, if it counts."""
        return not self.attempts and (self.stop_reason is not None or not self.state.waitlist)

    @property
    def is_placement_due(self) -> bool:
        """Whether `reconcile` has to place members."""
        return self.state.placement_due and self.stop_reason is None

    def find_reporter(self, event: Mapping[str, Any]) -> Identity | None:
        """The member whose attempt reports an event; None where that attempt's outcome is known already."""
        live = self.attempts.find(event)
        return live.identity if live is not None and not live.is_exiting else None

    def handle(self, event: Report, now: float, t: float) -> list[Action]:
        """Handle one event of the executor, an answer to an action, or a user's request.

        Raises:
            SpecError: measuring has shown, before any member was started, that the declaration cannot be trained.
        """
        self.state.set_time(now, t)
        self._handle(event)
        self._readers_changed |= event["type"] not in ROUTINE
        return self.state.drain_actions()

    def reconcile(self, now: float, t: float) -> list[Action]:
        """Do what is due: deadlines, measurements, placement, rebalancing."""
        self.state.set_time(now, t)
        if self.state.placement_due or self._readers_changed:
            self.feeders.expect_at_most(self.state.count_readers())
            self._readers_changed = False
        self.state.log_due()
        self.attempts.watch()
        was_measuring = self._planner.is_measuring
        self._planner.watch()
        self.state.placement_due |= was_measuring and not self._planner.is_measuring
        if self.is_placement_due:
            self._place()
        if self.stop_reason is None and self._planner.is_due:
            self._cohort = self._planner.rebalance(
                self._take_cluster_snapshot(), self.queue.count_trials_left(), self._cohort
            )
        return self.state.drain_actions()

    def stop(self, reason: str, now: float, t: float) -> list[Action]:
        """Let all members write a checkpoint and end; only the first reason is kept."""
        self.state.set_time(now, t)
        self._stop(reason, now + self._stop_timeout_s)
        return self.state.drain_actions()

    def stop_feeders(self) -> list[Action]:
        """Stop all feeders."""
        self.feeders.stop_unneeded(set())
        return self.state.drain_actions()

    def reduce_checkpoints(self, now: float, t: float) -> list[Action]:
        """Take out of the checkpoints of ended members what is not to be kept, where that has failed before."""
        self.state.set_time(now, t)
        for member in self.state.run.members.values():
            if plan_reduction(member, self.state.keep_checkpoints) is not None:
                self.state.remove_leftovers(member.id)
        return self.state.drain_actions()

    def remove_unselected(self, now: float, t: float) -> list[Action]:
        """Remove the weights of members that the combination does not need, if only those of others are kept."""
        self.state.set_time(now, t)
        run, keep = self.state.run, self.state.keep_checkpoints
        for member in list_unselected(list(run.members.values()), run.combined) if keep == "selected" else ():
            for name, digest in member.list_checkpoints():
                self.state.actions.append(ReduceCheckpoint(member.id, name, digest, keeps_weights=False))
        return self.state.drain_actions()

    def log_held(self, now: float, t: float) -> list[Action]:
        """Log all figures that were held back."""
        self.state.set_time(now, t)
        self.state.log_held()
        return self.state.drain_actions()

    # -- events -------------------------------------------------------------------------------------------------

    def _handle(self, event: Report) -> None:
        kind = event["type"]
        of_the_spec = kind == "failed" and event.get("reason") == "spec"
        if of_the_spec and not any(member.attempts for member in self.state.run.members.values()):
            raise SpecError(event["error"])
        if self._planner.handle(event):
            self.state.placement_due |= not self._planner.is_measuring
        elif kind in ATTEMPT_EVENTS or kind in ("exited", "launch_failed"):
            self.attempts.handle(event)
        elif kind in ("proposed", "impossible"):
            self.queue.handle_proposal(event)
        elif kind in ("request", "added", "add_refused"):
            self._requests.handle(event)
        elif kind == "bad_record":
            self.attempts.handle_bad_record(event)
        elif kind == "feeder_ready":
            key = self.feeders.handle_ready(event)
            self.attempts.supply_feeder(key, self.feeders.address(key))
        elif kind == "feeder_exited":
            self._restart_feeder(event)
        elif kind == "unused_hyperparameters":
            self._log_unused(event)
        elif kind == "checkpoint_reduced":
            self.state.end_reduction(event)
        elif kind == "cost":
            self.attempts.costs.handle(event)
        elif kind == "node_lost":
            self.state.log(kind, node=event["node"], detail=event.get("detail", ""))
            self.state.nodes.remove(event["node"])
            self.feeders.forget_node(event["node"])
            self.state.placement_due = True
        elif kind == "node_draining":
            self.commands.leave_node(event["node"], event["deadline"])
        elif kind == "node":
            self._change_node(Node.from_event(event))
        elif kind == "gpu_quarantined":
            self._log(event)
            self.state.nodes.leave_out_broken()
            self.state.placement_due = True
        else:
            self.attempts.costs.note_power(event)
            self._log(event)

    def _change_node(self, node: Node) -> None:
        """The run holds more or less of a node than before, or of a new one."""
        node = self.state.nodes.change(node)
        if node.name not in self.state.nodes:
            self.feeders.forget_node(node.name)
        self.state.placement_due = True
        self._log({"type": "node", **node.as_event()})

    def _log(self, event: Report) -> None:
        if event["type"] == "node":
            self.state.nodes.warn_of_gpus(event["node"], event["no_gpus"])
        self.state.log_report(event["type"], event)

    def _restart_feeder(self, event: Report) -> None:
        key = (event["node"], event["cohort"])
        if event["node"] in self.state.nodes:
            reading, started = self.state.list_feeders_read().count(key), event.get("started", True)
            self.feeders.restart(*key, reading, event.get("detail", ""), started=started)

    def _log_unused(self, event: Report) -> None:
        new = [name for name in event["params"] if name not in self._unused]
        self._unused.update(new)
        if new:
            meant = {name: near for name, near in event.get("meant", {}).items() if name in new}
            known = {"meant": meant} if meant else {}
            self.state.log(
                "unused_hyperparameters", member=event["member"], attempt=event["attempt"], params=new, **known
            )
            log.warning("%s (%s)", describe_unused(new, meant), event["member"])

    def _stop(self, reason: str, until: float) -> None:
        if self.stop_reason is None:
            self.state.stop_reason = reason
            self._planner.stop()
        self.commands.stop(until)
        self._say_demand([])

    # -- placement ----------------------------------------------------------------------------------------------

    def _take_cluster_snapshot(self) -> ClusterSnapshot:
        state, nodes, waitlist = self.state, self.state.nodes, self.state.waitlist
        failures, measuring = self.attempts.failures, self._planner.is_measuring
        most_gb = max_node_memory_gb(nodes.list_potential())
        left_gb = max_node_memory_gb(nodes.held) if nodes.list_cluster() is None else math.inf
        waiting = () if measuring else waitlist.waiting
        return ClusterSnapshot(
            nodes=failures.list_usable_nodes(nodes.held, list(waitlist), nodes.devices, state.now),
            devices=nodes.devices,
            waiting=[failures.grants.apply(each, most_gb, left_gb) for each in waiting],
            returning=[
                (failures.grants.apply(identity, most_gb, left_gb), cohort)
                for identity, cohort in waitlist.returning
                if not measuring or state.run.members[identity.member].attempts
            ],
            running=self._planner.apply_core_shares(state.list_placements()),
            limits=self.attempts.limits,
            tenants=self._planner.tenant_limits(nodes.held),
            next_cohort=self._stream if self._streaming else self._cohort,
            streaming=self._streaming,
        )

    def _place(self) -> None:
        state, waitlist = self.state, self.state.waitlist
        state.placement_due = False
        if self._streaming and not self._planner.is_measuring:
            self.queue.propose(self._count_wanted_trials())
        prepared = self._planner.prepare_waiting(
            waitlist.waiting,
            waitlist.returning,
            self._take_cluster_snapshot(),
            self.queue.count_trials_left(),
        )
        waitlist.arrange(*prepared)
        starts = self._planner.choose_starts(self._take_cluster_snapshot())
        new = (start.cohort + 1 for start in starts if start.cohort is not None)
        self._cohort = max(self._cohort, *new, 0)
        waitlist.remove({start.placement.member for start in starts})
        readers = {start.placement.member for start in starts if self._epochs_left(start.placement.identity)}
        for start in starts:
            keys = self.feeders.assign(start, starts, readers)
            awaits = [key for key in keys if self.feeders.is_starting(key)]
            self.attempts.reserve(start, {key[0]: self.feeders.address(key) for key in keys}, awaits)
        self.feeders.stop_unneeded(self._list_needed_feeders())
        left_out = list(waitlist)
        self._say_demand(left_out)
        if left_out and not self.attempts and not state.placement_due and not self._planner.is_measuring:
            self._give_up_unplaceable(left_out)
        elif self.attempts:
            self._say_memory_wait("")

    def _explain(self, identity: Identity) -> str | None:
        """Why no node can ever hold a member; None where one can."""
        return explain_unplaceable(identity, self.state.nodes.list_potential(), self.state.nodes.devices)

    def _give_up_unplaceable(self, left_out: Sequence[Identity]) -> None:
        """Handle members that find no place although nothing runs.

        Those fail that no node could ever hold. The run stops if there is no node at all, or if nodes of which it
        holds all have no place; else it waits for the cluster.
        """
        why = {one.member: reason for one in left_out if (reason := self._explain(one)) is not None}
        if not self.state.nodes.list_potential() or (not why and not self.state.nodes.has_more()):
            reason = next(iter(why.values()), "no place is left")
            self._stop(reason, self.state.now + self._stop_timeout_s)
            return
        for member, reason in why.items():
            self.queue.give_up(member, reason)
        self._say_memory_wait(explain_memory_wait(self._take_cluster_snapshot()) or "")

    def _say_memory_wait(self, detail: str) -> None:
        """Say that no member can start because of what others hold of the memory, or (empty) that one could."""
        if bool(detail) == bool(self.state.run.awaited_memory):
            return
        self.state.log("memory_awaited", detail=detail)
        if detail:
            log.warning("no member can start now: %s; the run goes on when others give memory back", detail)

    def _say_demand(self, left_out: Sequence[Identity]) -> None:
        """Say for which members resources are missing, and which places are taken, if either has changed."""
        state, coming = self.state, self.queue.count_trials_left()
        if state.stop_reason is not None:
            missing: list[Identity] = []
        elif self._planner.is_measuring:  # what they need is not known yet
            missing = [] if self._demand is None else list(self._demand.waiting)
        else:
            most_gb = max_node_memory_gb(state.nodes.list_potential())
            missing = [self.attempts.failures.grants.apply(each, most_gb) for each in left_out]
            if coming and self._streaming:
                example = self._planner.make_example(self._ensemble.identify(0, {}), state.nodes.list_potential())
                missing += [example] * min(coming, MOST_COMING)
        demand = Demand(missing, state.list_placements())
        if demand != self._demand:
            self._demand = demand
            state.actions.append(demand)

    def _count_wanted_trials(self) -> int:
        """The number of trials to propose: those that fit now, and at least one while no member runs or waits."""
        left, cluster = self.queue.count_trials_left(), self._take_cluster_snapshot()
        if not left:
            return 0
        example = self._planner.make_example(self._ensemble.identify(0, {}), cluster.nodes)
        nobody = not (self.attempts or cluster.waiting or cluster.returning)
        return max(count_placeable(example, left, cluster), int(nobody))

    def _epochs_left(self, identity: Identity) -> int:
        """The number of epochs after a member's last checkpoint."""
        checkpoint = self.state.run.members[identity.member].checkpoint
        return identity.epochs - (checkpoint.epoch if checkpoint else 0)

    def _list_needed_feeders(self) -> set[tuple[str, int]]:
        """The feeders that running, returning or later members read."""
        state, waitlist = self.state, self.state.waitlist
        coming = {cohort for _, cohort in waitlist.returning} | self.attempts.failures.pending_cohorts()
        if self._streaming and self.stop_reason is None and (waitlist.waiting or self.queue.count_trials_left()):
            coming.add(self._stream)
        # Those of a node that is being drained end with its members.
        kept = (key for key in self.feeders.running if key[0] in state.nodes and key[1] in coming)
        return {*state.list_feeders_read(), *kept}
