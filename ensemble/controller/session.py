"""One session of a run as a state machine without input or output: events come in, actions come out.

There is no clock, file, process or thread here, so that a test can replay a whole run with faults. All that it
needs to know is in the events (`complete_event` adds it). The parts of a session share one `SessionState`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ensemble.controller.actions import Action, ReduceCheckpoint
from ensemble.controller.attempt import ATTEMPT_EVENTS
from ensemble.controller.attempt_commands import AttemptCommands
from ensemble.controller.attempt_table import AttemptTable
from ensemble.controller.attempts import Attempts
from ensemble.controller.failures import ALIKE, explain_alike
from ensemble.controller.feeders import Feeders, SharedStream
from ensemble.controller.node_table import NodeTable
from ensemble.controller.placer import Placer
from ensemble.controller.plain_planner import PlainPlanner
from ensemble.controller.policies import load_planner
from ensemble.controller.queue import MemberQueue, RefusedError
from ensemble.controller.rehearser import Rehearser
from ensemble.controller.retention import list_unselected, plan_reduction
from ensemble.controller.session_state import SessionState
from ensemble.controller.waitlist import Waitlist
from ensemble.events import Profiled, Report, RunStopped
from ensemble.executors.node_health import is_news
from ensemble.schedule.needs import Node
from ensemble.spec import Ensemble, Identity, SpecError
from ensemble.spec.functions import describe_unused
from ensemble.store import RunDir, RunState

log = logging.getLogger(__name__)

#: Events that do not change how many members read each stream.
ROUTINE = frozenset(("started", "progress", "epoch", "checkpoint", "usage", "power", "feeder"))


class Session:
    """Decides what a run does next.

    Each method that takes the time (`now_s` in seconds of a monotonic clock, `t` in Unix seconds as in the log)
    returns the actions to be performed in their order, `Log` actions first.

    Args:
        run: the fold of the log so far.
        awaits_pruner, streaming, trials_left: see `ensemble.schedule.trials.Trials`.
        list_cluster: returns `Executor.cluster`.
        profiles: `profile` events of earlier sessions that are still valid.
        can_measure: whether the executor can start processes that measure members.
        stop_timeout_s: how long members may take to write a checkpoint when the run is stopped.
    """

    def __init__(
        self,
        *,
        ensemble: Ensemble,
        run_dir: RunDir,
        run: RunState,
        nodes: Sequence[Node],
        stream: SharedStream,
        awaits_pruner: bool,
        streaming: bool,
        trials_left: int,
        list_cluster: Callable[[], Sequence[Node] | None] = lambda: None,
        profiles: Sequence[Profiled] = (),
        can_measure: bool = True,
        stop_timeout_s: float = 60.0,
    ) -> None:
        self._stop_timeout_s = stop_timeout_s
        table = NodeTable(run, nodes, ensemble.devices, list_cluster, ensemble.limits)
        waitlist = Waitlist(trials_left, trials_ready=trials_left)
        self.state = SessionState(run, table, AttemptTable(run), waitlist, ensemble.keep_checkpoints)
        self.attempts = Attempts(self.state, ensemble, run_dir, awaits_pruner=awaits_pruner)
        self.commands = AttemptCommands(
            self.state, run_dir, awaits_pruner=awaits_pruner, hang_timeout_s=ensemble.hang_timeout_s
        )
        self.queue = MemberQueue(self.state, self.commands, ensemble, run_dir, streaming=streaming)
        self.feeders = Feeders(self.state, ensemble, run_dir, stream)
        planner = load_planner() if can_measure else None
        rehearser = Rehearser(self.state, ensemble, run_dir)
        parts = self.state, ensemble, run_dir, profiles, self.commands, self.feeders, rehearser
        self._planner: PlainPlanner = PlainPlanner(rehearser) if planner is None else planner(*parts)
        self._placer = Placer(
            self.state,
            ensemble,
            self.attempts,
            self.commands,
            self.queue,
            self.feeders,
            self._planner,
            streaming=streaming,
        )
        self.unusable_data: str | None = None
        self._stopped_before = run.ended.reason or "" if isinstance(run.ended, RunStopped) else ""
        self._is_search = ensemble.search is not None
        self._unused: set[str] = set()  # hyperparameters for which `unused_hyperparameters` was logged
        self._readers_changed = True

    def start(self, events: Sequence[Report], now_s: float, t: float) -> list[Action]:
        """Log the first events of the session."""
        self.state.began = now_s
        self.state.set_time(now_s, t)
        for event in events:
            self._log(event)
        return self.state.drain_actions()

    def open_queue(
        self, redeclared: Mapping[str, Identity], unstartable: Mapping[str, str], now_s: float, t: float
    ) -> list[Action]:
        """Queue the unfinished members of an earlier start: see `MemberQueue.open`."""
        self.state.set_time(now_s, t)
        self.queue.open(redeclared, unstartable)
        return self.state.drain_actions()

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops before its members have ended; None: it goes on."""
        return self.state.stop_reason

    @property
    def is_over(self) -> bool:
        """Whether no member has processes or will be placed, and the cost of each trial is known, if it counts."""
        has_ended = not self.attempts and (self.stop_reason is not None or not self.state.waitlist)
        return has_ended and (self.stop_reason is not None or not self._planner.rehearser.is_proving)

    def limit_trials(self, most: int, ready: int) -> None:
        """Propose so many members more, at most, and so many now: a sampler may have nothing more to propose."""
        waitlist = self.state.waitlist
        waitlist.trials_left, waitlist.trials_ready = min(waitlist.trials_left, most), ready

    @property
    def is_placement_due(self) -> bool:
        """Whether `reconcile` has to place members."""
        return self.state.placement_due and self.stop_reason is None

    def find_reporter(self, event: Mapping[str, Any]) -> Identity | None:
        """The member whose attempt reports an event; None where that attempt's outcome is known already."""
        live = self.state.live.find(event)
        return live.identity if live is not None and not live.is_exiting else None

    def handle(self, event: Report, now_s: float, t: float) -> list[Action]:
        """Handle one event of the executor, an answer to an action, or a user's request.

        Raises:
            SpecError: measuring has shown, before any member was started, that the declaration cannot be trained.
        """
        self.state.set_time(now_s, t)
        self._handle(event)
        self._readers_changed |= event["type"] not in ROUTINE
        return self.state.drain_actions()

    def reconcile(self, now_s: float, t: float) -> list[Action]:
        """Do what is due: deadlines, measurements, placement, rebalancing.

        Raises:
            SpecError: a rehearsal has refused what is declared, before any member was started.
        """
        self.state.set_time(now_s, t)
        if (refusal := self._planner.rehearser.refusal) is not None:
            raise SpecError(refusal)
        if self.state.placement_due or self._readers_changed:
            self.feeders.expect_at_most(self.state.live.count_readers())
            self._readers_changed = False
        self.attempts.watch()
        was_measuring = self._planner.is_measuring
        self._planner.watch(now_s)
        self.state.placement_due |= was_measuring and not self._planner.is_measuring
        if self.is_placement_due and (reason := self._placer.place()) is not None:
            self._stop(reason, now_s + self._stop_timeout_s)
        if self.stop_reason is None:
            self._placer.rebalance()
        return self.state.drain_actions()

    def stop(self, reason: str, now_s: float, t: float, *, failed: bool = True) -> list[Action]:
        """Let all members write a checkpoint and end; only the first reason is kept.

        Args:
            failed: whether it is an error.
        """
        self.state.set_time(now_s, t)
        self._stop(reason, now_s + self._stop_timeout_s, failed=failed)
        return self.state.drain_actions()

    def stop_feeders(self) -> list[Action]:
        self.feeders.stop_unneeded(set())
        return self.state.drain_actions()

    def reduce_checkpoints(self, now_s: float, t: float) -> list[Action]:
        """Take out of the checkpoints of ended members what is not to be kept, where that has failed before."""
        self.state.set_time(now_s, t)
        for member in self.state.run.members.values():
            if plan_reduction(member, self.state.keep_checkpoints) is not None:
                self.state.remove_leftovers(member.id)
        return self.state.drain_actions()

    def remove_unselected(self, now_s: float, t: float) -> list[Action]:
        """Remove the weights of members that the combination does not need, if only those of others are kept."""
        self.state.set_time(now_s, t)
        run, keep = self.state.run, self.state.keep_checkpoints
        for member in list_unselected(list(run.members.values()), run.combined) if keep == "selected" else ():
            for name, digest in member.list_checkpoints():
                self.state.actions.append(ReduceCheckpoint(member.id, name, digest, keeps_weights=False))
        return self.state.drain_actions()

    # -- events -------------------------------------------------------------------------------------------------

    def _handle(self, event: Report) -> None:
        kind = event["type"]
        of_the_spec = kind == "failed" and event.get("reason") == "spec"
        if kind == "failed" and event.get("reason") == "data":
            self.unusable_data = self.unusable_data or event["error"]  # which fails all: none is at fault
            self._stop(event["error"], self.state.now + self._stop_timeout_s)
            event, kind = {**event, "type": "stopped"}, "stopped"
        if of_the_spec and not any(member.attempts for member in self.state.run.members.values()):
            raise SpecError(event["error"])
        if kind == "checkpoint" and event.get("changed") and (reporter := self.find_reporter(event)) is not None:
            self._planner.rehearser.prove(reporter, event)
        if self._planner.handle(event):
            self.state.placement_due |= not self._planner.is_measuring
        elif kind in ATTEMPT_EVENTS or kind in ("exited", "launch_failed"):
            given_up = len(self.attempts.failures.given_up)
            self.attempts.handle(event)
            if len(self.attempts.failures.given_up) > given_up:
                self._spare_others()
        elif kind in ("proposed", "impossible"):
            self.queue.handle_proposal(event)
        elif kind in ("request", "added", "add_refused"):
            self._answer(event)
        elif kind == "bad_record":
            self.attempts.handle_bad_record(event)
        elif kind == "feeder_ready":
            key = self.feeders.handle_ready(event)
            self.commands.supply_feeder(key, self.feeders.address(key))
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
        elif kind == "node_health":
            if is_news(self.state.run.node(event["node"]).health, event):
                self._log(event)
        elif kind == "gpu_quarantined":
            self._log(event)
            self.state.nodes.leave_out_broken()
            self.state.placement_due = True
        else:
            self.attempts.costs.note_power(event)
            self._log(event)

    def _answer(self, event: Report) -> None:
        """Answer a request, or the result of one (`added`, `add_refused`), with exactly one `request` event."""
        request = event["request"]
        done: str | None = None
        why = event.get("error") or event.get("refused") or request["unreadable"]
        try:
            if event["type"] == "added":
                done = self.queue.handle_addition(event["identity"])
                request = {**request, "member": event["identity"].member}
            elif not why:
                done = self._fulfil(request)
        except RefusedError as error:
            why = str(error)
        except Exception as error:  # a malformed request must not end the run
            log.exception("the request %s", request["id"])
            why = f"it could not be done: {type(error).__name__}: {error}"
        if why:
            log.warning("refused to %s %s: %s", request["verb"], request.get("member") or "", why)
        if why or done is not None:
            answer = {"request": request["id"], **{name: request.get(name) for name in ("verb", "member", "by")}}
            named = request.get("members")
            if isinstance(named, list) and all(isinstance(name, str) for name in named):
                answer["members"] = list(dict.fromkeys(named))
            self.state.log("request", **answer, done=not why, message=why or done)

    def _fulfil(self, request: Mapping[str, Any]) -> str | None:
        until = self.state.now + self._stop_timeout_s
        if request["verb"] == "stop":
            self._stop("asked to", self.state.now if request.get("at_once") else until, failed=False)
            return "members write a checkpoint and end"
        return self.queue.fulfil(request, until)

    def _spare_others(self) -> None:
        """Stop the run where members fail alike, one after the other, and there are more that would.

        Not a search: its trials fail by their hyperparameters, and it is given up after more of them.
        """
        members = self.state.run.members.values()
        if (
            self._is_search
            or any(m.has_result or m.state == "pruned" for m in members)
            or self.stop_reason is not None
        ):
            return
        are_others = self.state.waitlist or any(not live.is_exiting for live in self.state.live.values())
        furthest = max((member.epoch, member.step) for member in members)
        reason = explain_alike(self.attempts.failures.given_up, furthest) if are_others else None
        how = (reason or "").partition(ALIKE)[2]
        if reason is not None and how not in self._stopped_before:  # else it was resumed all the same
            self._stop(reason, self.state.now + self._stop_timeout_s)

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
            reading, started = self.state.live.list_feeders_read().count(key), event.get("started", True)
            self.feeders.restart(*key, reading, event.get("detail", ""), started=started)

    def _log_unused(self, event: Report) -> None:
        new = [name for name in event["params"] if name not in self._unused]
        self._unused.update(new)
        if new:
            meant = {name: near for name, near in event.get("meant", {}).items() if name in new}
            near_names = {"meant": meant} if meant else {}
            self.state.log(
                "unused_hyperparameters",
                member=event["member"],
                attempt=event["attempt"],
                params=new,
                **near_names,
            )
            log.warning("%s (%s)", describe_unused(new, meant), event["member"])

    def _stop(self, reason: str, until: float, *, failed: bool = True) -> None:
        if self.stop_reason is None:
            self.state.stop_reason, self.state.stop_failed = reason, failed
            self._planner.stop()
        self.commands.stop(until)
        self._placer.say_demand([])
