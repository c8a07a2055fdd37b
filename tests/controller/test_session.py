"""Whole runs without a process: a session against a world in which anything may happen at any time.

The world performs actions on a model of processes, feeders and trials, and reports in a random order what they
do, what befalls them and what users ask. After each step it is checked that no member is lost, none is placed
twice, no place is leaked, and that the log says what the session decides from.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import as_dict, collect_notices, fold
from kit.property_examples import examples
from test_controller import DECLARED, an_ensemble

from ensemble.controller.actions import (
    Action,
    Add,
    Demand,
    EndTrial,
    ExpectReaders,
    Kill,
    Launch,
    Log,
    MeasureCost,
    Propose,
    ReduceCheckpoint,
    Send,
    StartFeeder,
    StopFeeder,
)
from ensemble.controller.feeders import SharedStream
from ensemble.controller.session import Session
from ensemble.events import COSTS
from ensemble.schedule.needs import Node
from ensemble.spec import Ensemble, Identity, Member, Search, uniform
from ensemble.store import RunDir, RunState
from ensemble.store.member import ENDED

NODES = [Node(name, 2, (), 8.0, name, interface="lo") for name in ("a", "b")]
TRIALS = 6
NOWHERE = Path("/nowhere/run")

CLUSTER_FAULTS = ("given back", "lent", "drained")
FAULTS = ("failed", "nan", "oom", "died", "rank died", "node lost", "feeder died", "bad record", "silence")
REQUESTS = (
    "pause",
    "resume",
    "cancel",
    "add",
    "add clone",
    "add warm",
    "pause all",
    "resume all",
    "cancel all",
    "stop",
    "stop at once",
    "no",
)


@dataclass
class Process:
    """The ranks of one attempt, as the world knows them."""

    identity: Identity
    attempt: int
    nodes: tuple[str, ...]  # of each rank
    epoch: int
    alive: set[int]
    has_started: bool = False
    awaits_decision: bool = False
    commands: list[Send] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)  # what it will report next, its exits in the end

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "member": self.identity.member, "attempt": self.attempt, **fields}

    def end(self, kind: str, outcome: str | None, **fields: Any) -> None:
        """It reports its end, and its ranks exit."""
        self.reports.append(self.event(kind, epoch=self.epoch, step=0, **fields))
        self.exit(outcome)

    def exit(self, outcome: str | None, **fields: Any) -> None:
        gone = {event["rank"] for event in self.reports if event["type"] == "exited"}
        self.reports += [
            self.event("exited", rank=rank, outcome=outcome, detail="killed", note=None, preparing=[], **fields)
            for rank in sorted(self.alive - gone)
        ]


class World:
    """All that is outside of a session, and the checks."""

    def __init__(
        self,
        ensemble: Ensemble,
        random: Random,
        *,
        slow_feeders: bool = False,
        on_cluster: bool = False,
        failing_launches: float = 0.05,
        nodes: Sequence[Node] = NODES,
    ) -> None:
        self.offered = nodes
        self.failing_launches = failing_launches
        self.ensemble, self.random, self.slow_feeders = ensemble, random, slow_feeders
        self.on_cluster, self.demand = on_cluster, Demand([], [])
        self.processes: dict[str, Process] = {}
        self.past: list[Process] = []
        self.nodes = {node.name for node in nodes}
        self.held = set(self.nodes)  # of which the run holds something
        self.draining: set[str] = set()
        self.feeders: set[tuple[str, int]] = set()
        self.log: list[dict[str, Any]] = []
        self.later: list[dict[str, Any]] = []  # answers that take their time
        self.ended: Counter[int] = Counter()
        self.asked = itertools.count()
        self.unanswered: set[str] = set()
        self.cancelled: set[str] = set()  # of which a user asked it
        self.seen = 0  # events of the log in which answers were looked for
        self.now = 100.0
        stream = SharedStream(ensemble)
        stream.check()
        self.streaming = ensemble.search is not None
        self.minimizes = ensemble.search is not None and bool(ensemble.search.further_objectives)
        self.declared = 0
        self.session = Session(
            ensemble=ensemble,
            run_dir=RunDir(NOWHERE),
            run=RunState(),
            nodes=nodes,
            list_cluster=lambda: [n for n in nodes if n.name in self.nodes] if on_cluster else None,
            stream=stream,
            awaits_pruner=self.streaming,
            streaming=self.streaming,
            trials_left=TRIALS if self.streaming else len(ensemble.members or ()),
        )
        started = {"type": "run_started", "name": ensemble.name, "members": 0, "epochs": ensemble.epochs}
        known = [{"type": "node", **node.as_event()} for node in nodes]
        self.perform(self.session.start([started, *known], *self.time))
        self.perform(self.session.open_queue({}, {}, *self.time))
        self.reconcile()

    @property
    def time(self) -> tuple[float, float]:
        return self.now, 1e9 + self.now

    def handle(self, event: dict[str, Any]) -> None:
        if event["type"] == "epoch" and self.session.find_reporter(event) is not None:
            event = {**event, "prune_decision": self.random.choice(["continue"] * 5 + ["prune"])}
        self.perform(self.session.handle(event, *self.time))

    def reconcile(self) -> None:
        self.perform(self.session.reconcile(*self.time))
        for _ in range(100):
            if not self.session.is_placement_due:
                break
            self.perform(self.session.reconcile(*self.time))
        else:
            raise AssertionError("members are placed for ever")
        self.check()

    # -- performing ---------------------------------------------------------------------------------------------

    def perform(self, actions: Sequence[Action]) -> None:
        self.log += [as_dict(action.event) for action in actions if isinstance(action, Log)]
        answers = [answer for action in actions if (answer := self._perform(action)) is not None]
        for answer in answers:
            self.handle(answer)

    def _perform(self, action: Action) -> dict[str, Any] | None:
        match action:
            case Launch(jobs, _):
                return self._launch(jobs)
            case Send(member, _, _):
                if member in self.processes:
                    self.processes[member].commands.append(action)
            case Kill(member):
                if member in self.processes:
                    self.processes[member].reports.clear()
                    self.processes[member].exit(None)
            case StartFeeder(node, cohort):
                return self._start_feeder(node, cohort, action.number)
            case StopFeeder(node, cohort):
                self.feeders.discard((node, cohort))
            case Demand():
                self.demand = action
            case ExpectReaders(_, _, members):
                assert members >= 0
            case Propose():
                return self._propose()
            case Add(request, declared, lineage):
                self.declared += 1
                params = {"n": 0.5} if self.streaming else declared.params
                identity = self.ensemble.identify(self.declared - 1, Member(params))
                assert (action.checkpoint is not None) == bool(request.get("warm"))
                if lineage is not None and lineage["warm"]:
                    lineage = {**lineage, **{name: getattr(action.logged, name) for name in ("epoch", "step")}}
                identity = dataclasses.replace(identity, lineage=lineage)
                return {"type": "added", "request": request, "identity": identity}
            case MeasureCost(member, attempt):
                assert member not in self.processes, "its processes still use energy"
                energy_j = self.random.choice([None, 2.5])
                used = {"energy_j": energy_j, "energy_origin": "estimated", "cpu_s": 1.0}
                return {"type": "cost", "member": member, "attempt": attempt, **used}
            case ReduceCheckpoint(member, name, _, keeps_weights):
                assert member not in self.processes, "it may go on from its checkpoint"
                path = f"/nowhere/{member}/{name}-weights" if keeps_weights else None
                return {"type": "checkpoint_reduced", "member": member, "removed": name, "path": path}
            case EndTrial(number, state, _):
                assert state in ("finished", "pruned", "failed", "cancelled")
                costs = [e["member"] for e in self.log if e["type"] == "cost"].count(f"member-{number}")
                assert costs == (self.minimizes and state == "finished"), (
                    "a finished trial has one cost, logged first"
                )
                self.ended[number] += 1
        return None

    def _launch(self, jobs: Sequence[Any]) -> dict[str, Any] | None:
        identity, attempt = jobs[0].identity, jobs[0].attempt
        member = identity.member
        assert member not in self.processes, "it is launched while its previous attempt has processes"
        assert [job.rank for job in jobs] == list(range(identity.workers))
        assert any(e["type"] == "placed" and e["member"] == member and e["attempt"] == attempt for e in self.log)
        nodes = tuple(job.node for job in jobs)
        assert self.nodes & {*nodes} <= self.held, "it is launched on what was given back"
        assert all(job.local_world == nodes.count(job.node) for job in jobs)
        assert not self.draining.intersection(nodes), "it is launched on a node that is being drained"
        if not {*nodes} <= self.nodes or self.random.random() < self.failing_launches:
            return {"type": "launch_failed", "member": member, "attempt": attempt, "detail": "no memory"}
        checkpoint = self.session.state.run.members[member].checkpoint
        begins = checkpoint.epoch if checkpoint else 0
        self.processes[member] = Process(identity, attempt, nodes, begins, {job.rank for job in jobs})
        return None

    def _start_feeder(self, node: str, cohort: int, number: int) -> dict[str, Any] | None:
        assert (node, cohort) not in self.feeders, "two feeders of a cohort on one node"
        ready = {"type": "feeder_ready", "node": node, "cohort": cohort, "number": number}
        ready |= {"address": None, "error": "no memory"}
        if node in self.nodes and self.random.random() > 0.1:
            self.feeders.add((node, cohort))
            ready |= {"address": f"{node}-{cohort}", "error": None}
        if not self.slow_feeders:
            return ready
        self.later.append(ready)
        return None

    def _propose(self) -> dict[str, Any]:
        self.declared += 1
        given = {"n": self.random.random()} if self.streaming else None
        identity = self.ensemble.identify(self.declared - 1, given)
        if self.streaming and self.random.random() < 0.1:
            return {"type": "impossible", "identity": identity, "error": "it cannot be"}
        return {"type": "proposed", "identity": identity}

    # -- what happens -------------------------------------------------------------------------------------------

    def report(self, process: Process) -> None:
        """A process goes on by one event."""
        if not process.reports:
            self._go_on(process)
        if not process.reports:
            return
        event = process.reports.pop(0)
        if event["type"] == "exited":
            process.alive.discard(event["rank"])
            if not process.alive:
                del self.processes[process.identity.member]
                self.past.append(process)
        self.handle(event)

    def _go_on(self, process: Process) -> None:
        if process.commands:
            self._obey(process, process.commands.pop(0))
        elif not process.has_started:
            process.has_started = True
            joins = {"first_epoch": 3} if process.identity.first_epoch is None else {}
            process.reports.append(process.event("started", pid=1, epoch=process.epoch, step=0, **joins))
        elif process.awaits_decision:
            pass
        elif process.epoch < process.identity.epochs:
            done = process.epoch
            process.epoch += 1
            process.awaits_decision = self.streaming
            process.reports.append(process.event("epoch", epoch=done, metrics={"accuracy": 0.5}))
            if self.random.random() < 0.7:
                path = f"checkpoint-{process.attempt}-{process.epoch}-0.safetensors"
                process.reports.append(process.event("checkpoint", epoch=process.epoch, step=0, path=path))
        else:
            process.end("finished", "finished", metrics={"accuracy": 0.5})

    def _obey(self, process: Process, command: Send) -> None:
        match command.command:
            case "continue":
                process.awaits_decision = False
            case "prune":
                process.end("pruned", "pruned", metrics={})
            case "stop" | "stop_after_epoch":
                process.end("stopped", "stopped")
            case "cancel":
                process.end("cancelled", "cancelled")
            case "alone" | "join":
                where = {"cohort": command.fields.get("cohort"), "feeder": command.fields.get("feeder")}
                process.reports.append(process.event("moved", **where, epoch=process.epoch, shared=True))

    def strike(self, fault: str) -> None:
        """Something fails."""
        process = self.random.choice(list(self.processes.values())) if self.processes else None
        if fault == "silence":
            self.now += self.ensemble.hang_timeout_s + 1
        elif fault == "node lost" and self.list_dispensable():
            self.lose_node(self.random.choice(self.list_dispensable()))
        elif fault == "given back":
            self._give_back()
        elif fault == "lent":
            self.lend()
        elif fault == "drained" and set(self.list_dispensable()) - self.draining:
            self.drain(self.random.choice(sorted(set(self.list_dispensable()) - self.draining)))
        elif fault == "feeder died" and self.feeders:
            node, cohort = self.random.choice(sorted(self.feeders))
            self.feeders.discard((node, cohort))
            self.handle({"type": "feeder_exited", "node": node, "cohort": cohort, "detail": "was killed"})
        elif fault == "bad record":
            self.handle({"type": "bad_record", "split": "train", "index": 1, "code": 1, "node": "a"})
        elif process is not None and not process.reports:
            if fault in ("failed", "nan"):
                reason = "error" if fault == "failed" else "nan"
                process.end("failed", "failed", error="it broke", reason=reason, retry=fault == "failed")
            elif fault == "oom":
                process.exit(None, reason="oom")
            elif fault == "died":
                process.exit(None)
            elif fault == "rank died":
                rank = max(process.alive)
                lost = process.event("exited", rank=rank, outcome=None, detail="died", note=None, preparing=[])
                process.reports.append(lost)

    def _give_back(self) -> None:
        """As the executor does: only where no member is placed and nothing is fed, while nobody waits."""
        used = {node for placement in self.demand.placed for node in placement.ranks_by_node}
        used |= {node for node, _ in self.feeders}
        idle = sorted(self.held - used - self.draining)
        if idle and not self.demand.waiting and not self.later:
            self.held.discard(idle[0])
            self.handle({"type": "node", **Node(idle[0], 0, (), 0.0, idle[0]).as_event()})

    def lend(self) -> None:
        """The cluster gives a node that the run has given back, as soon as somebody waits for it."""
        free = sorted(self.nodes - self.held)
        if free and self.demand.waiting:
            self.held.add(free[0])
            [node] = [node for node in self.offered if node.name == free[0]]
            self.handle({"type": "node", **node.as_event()})

    def list_dispensable(self) -> list[str]:
        """The nodes that may go: another stays, on which members can be placed."""
        return sorted(self.held if len(self.nodes - self.draining) > 1 else self.held & self.draining)

    def drain(self, node: str) -> None:
        """The cluster is about to end a node, perhaps at a known time."""
        self.draining.add(node)
        deadline = self.random.choice([None, self.time[1] + 5, self.time[1] + 500])
        self.handle({"type": "node_draining", "node": node, "deadline": deadline})

    def leave_drained(self) -> None:
        """As the executor does: a node is given back once nothing runs there."""
        for node in sorted(self.draining):
            used = {node for process in self.processes.values() for node in process.nodes}
            used |= {node for node, _ in self.feeders}
            if node in self.held - used:
                self.held.discard(node)
                self.nodes.discard(node)
                self.handle({"type": "node", **Node(node, 0, (), 0.0, node).as_event()})

    def lose_node(self, node: str) -> None:
        self.nodes.discard(node)
        self.held.discard(node)
        self.feeders = {key for key in self.feeders if key[0] != node}
        self.handle({"type": "node_lost", "node": node})
        for process in self.processes.values():
            lost = {rank for rank in process.alive if process.nodes[rank] == node}
            if not lost:
                continue
            process.reports.clear()
            left, process.alive = process.alive - lost, lost
            process.exit(None, node_lost=True)
            process.alive |= left
            if 0 in left and self.random.random() < 0.7:  # the others notice, some before it is known why
                noticed = {"error": "lost rank 1", "reason": "lost", "retry": True, "rank": 0}
                process.reports.insert(self.random.randrange(2), process.event("failed", **noticed))
            process.exit("failed")

    def ask(self, what: str) -> None:
        """A user asks for something; it is answered before anything else happens, if it can be."""
        verb, _, how = what.partition(" ")
        request: dict[str, Any] = {"id": f"{verb}-{next(self.asked)}", "verb": verb, "unreadable": None}
        members = list(self.session.state.run.members)
        if verb == "add":
            request["declared"] = {"seed": 9} if how else {"params": {"n": 9}}
            if how:
                request |= {"from": self.random.choice([*members, "nobody"]), "warm": how == "warm"}
        elif verb == "stop":
            request["at_once"] = how != ""
        elif how != "all":
            request["member"] = self.random.choice([*members, "nobody"])
        self.unanswered.add(request["id"])
        if verb == "cancel":
            to_come = (f"member-{number}" for number in range(len(members) + TRIALS))  # trials are cancelled, too
            of_all = [*members, *to_come]
            self.cancelled.update([request["member"]] if "member" in request else of_all)
        self.handle({"type": "request", "request": request, "refused": None})

    def step(self) -> None:
        """Whatever may happen next."""
        self.now += self.random.random()
        what = self.random.random()
        if self.later and self.random.random() < 0.3:
            self.handle(self.later.pop(self.random.randrange(len(self.later))))
        elif what < 0.12:
            self.strike(self.random.choice(FAULTS + CLUSTER_FAULTS * self.on_cluster))
        elif what < 0.17:
            self.ask(self.random.choice(REQUESTS))
        elif what < 0.2 and self.past:
            old = self.random.choice(self.past)
            kinds = ("progress", "epoch", "failed", "finished")
            late = old.event(self.random.choice(kinds), epoch=0, step=1, error="late", metrics={}, detail="late")
            self.handle(late)
        elif what < 0.25:
            self.handle(
                {
                    "type": "power",
                    "origin": "estimated",
                    "node": self.random.choice(sorted(self.nodes)),
                    "watts": 1.0,
                }
            )
        elif self.processes:
            self.report(self.random.choice(list(self.processes.values())))
        self.reconcile()
        self.leave_drained()

    def live_through(self, steps: int) -> None:
        """Whatever may happen, for so many steps; then the run comes to its end, and is checked."""
        for _ in range(steps):
            self.step()
            if self.session.is_over and not self.later:
                break
        self.finish()
        self.check_end()

    def finish(self) -> None:
        """Nothing fails any more, and whoever is paused goes on: the run comes to its end."""
        for _ in range(3000):
            if self.session.is_over:
                return
            self.now += 1.0
            self.leave_drained()
            self.lend()
            while self.later:
                self.handle(self.later.pop())
            held = self.session.state.waitlist.paused or self.session.state.waitlist.trials_left
            if not self.processes and held and self.session.stop_reason is None:
                self.ask("resume all")
            for process in list(self.processes.values()):
                self.report(process)
            self.reconcile()
        raise AssertionError("the run does not end")

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        state = self.session.state
        resting = [item for _, item in state.waitlist.deferred]
        places = Counter(
            [*state.live]
            + [identity.member for identity in state.waitlist.waiting]
            + [identity.member for identity, _ in (*state.waitlist.returning, *state.waitlist.paused, *resting)]
        )
        assert not places or max(places.values()) == 1, f"in two places: {places}"
        open_members = {id for id, member in state.run.members.items() if member.state not in ENDED}
        if self.session.stop_reason is None:
            assert open_members <= set(places), "a member is lost"
        assert all(state.live[id].is_exiting for id in set(places) - open_members), "it has ended"

        launched = {id: live for id, live in state.live.items() if live.is_launched}
        assert set(launched) == set(self.processes), "a place is held by nobody, or a process has none"
        for id, process in self.processes.items():
            assert (launched[id].number, launched[id].ranks) == (process.attempt, process.alive)
        for node in state.nodes.held:
            held = [live.start.placement for live in state.live.values()]
            cores = [each.count_ranks(node.name) * each.identity.cpus_per_worker for each in held]
            assert sum(cores) <= node.cpus + 1e-9, "more than there is"

        placed = [live.start.placement for live in state.live.values()]
        assert self.session.stop_reason or list(self.demand.placed) == placed, "executors give back other places"

        for event in self.log[self.seen :]:
            if event["type"] == "request":
                self.unanswered.discard(event["request"])
        self.seen = len(self.log)
        assert not self.unanswered, "a request was not answered"

    def check_end(self) -> None:
        state, stopped = self.session.state, self.session.stop_reason is not None
        assert not self.processes and not state.live
        if not stopped:
            assert {member.state for member in state.run.members.values()} <= ENDED
            possible = [member for member in state.run.members.values() if member.reason != "impossible"]
            assert set(self.ended) == {member.number for member in possible}
            cancelled = {id for id, member in state.run.members.items() if member.state == "cancelled"}
            assert cancelled <= self.cancelled, "who was not cancelled ends by itself"
        assert not self.ended or max(self.ended.values()) == 1, "a trial ends once"
        self.perform(self.session.stop_feeders())
        while self.later:
            self.handle(self.later.pop())
        assert not self.feeders, "a feeder is left"
        assert fold(self.log) == state.run, "the log says what the session decided from"
        asked = [event["request"] for event in self.log if event["type"] == "request"]
        assert len(asked) == len(set(asked)), "a request is answered once"
        assert not NOWHERE.parent.exists(), "a session writes nothing"


def declare(kind: str, workers: int) -> Ensemble:
    # Of three ranks no node has room for all: they are on two.
    resources = replace(DECLARED, workers=workers, cpus_per_worker=1.0 if workers == 3 else 1 / workers)
    second = {"further_objectives": [kind]} if kind in COSTS else {}
    is_listed = kind in ("list", "alone")
    search = {} if is_listed else {"search": Search({"n": uniform(0, 1)}, trials=TRIALS, **second)}
    listed = {"members": [{"n": n} for n in range(7)]} if is_listed else {}
    keep = {"keep_checkpoints": "all" if is_listed else "selected"}
    sharing = "independent" if kind == "alone" else "node"
    return an_ensemble(sharing=sharing, retries=2, epochs=3, resources=resources, **search, **listed, **keep)


@pytest.mark.parametrize("kind", ["list", "alone", "search", "energy_j", "cpu_s"])
@given(
    random=st.randoms(use_true_random=False),
    workers=st.integers(1, 3),
    slow=st.booleans(),
    shared=st.booleans(),
    steps=st.integers(0, 300),
)
@examples(24)
def test_whatever_happens_no_member_is_lost_and_no_place_is_leaked(
    kind: str, random: Random, workers: int, slow: bool, shared: bool, steps: int
) -> None:
    world = World(declare(kind, workers), random, slow_feeders=slow, on_cluster=shared)
    world.live_through(steps)


def begin(kind: str, workers: int = 1) -> tuple[World, Process]:
    """A world in which nothing fails, and the process of its first member."""
    world = World(declare(kind, workers), Random(0), failing_launches=0.0)
    return world, next(iter(world.processes.values()))


def end(world: World, process: Process) -> None:
    """A member finishes, and its processes exit."""
    if not process.reports:
        process.end("finished", "finished", metrics={"accuracy": 0.5})
    while process.reports:
        world.report(process)
    world.reconcile()


def test_a_trial_has_its_cost_when_its_nodes_were_metered_after_its_end() -> None:
    world, process = begin("energy_j", 3)
    assert set(process.nodes) == {"a", "b"}

    def list_costs() -> list[str]:
        return [event["member"] for event in world.log if event["type"] == "cost"]

    def meter(node: str) -> None:
        world.handle({"type": "power", "origin": "estimated", "node": node, "watts": 1.0})
        world.reconcile()

    process.end("finished", "finished", metrics={"accuracy": 0.5})
    meter("a")
    end(world, process)
    meter("a")
    assert list_costs() == [] and not world.ended, "b was metered before the end only"
    meter("b")
    assert list_costs() == ["member-0"] and world.ended[0] == 1


def test_power_up_to_a_time_before_the_end_of_a_trial_is_not_its_cost() -> None:
    world, process = begin("energy_j")
    end(world, process)
    power = {"type": "power", "origin": "estimated", "node": process.nodes[0], "watts": 1.0}
    world.handle({**power, "until": world.session.state.t - 1.0})
    world.reconcile()
    assert not world.ended, "power of its last seconds comes later"
    world.handle({**power, "until": world.session.state.t})
    world.reconcile()
    assert world.ended[process.identity.number] == 1


def test_figures_that_were_held_back_are_logged_before_a_cost_is_measured() -> None:
    world, process = begin("energy_j")
    world.now += 5000.0
    world.report(process)  # it starts: the session does not take it for hung
    who = {"node": "a", "role": "train", "member": process.identity.member, "pid": 1, "origin": "measured"}
    power = {"type": "power", "origin": "estimated", "node": process.nodes[0], "energy_j": None, "interval_s": 1.0}

    def report(count: float) -> None:
        world.now += 1.0
        world.handle({"type": "usage", **who, "cpu_s": count})
        world.handle({**power, "watts": count})
        world.reconcile()

    report(1.0)
    report(2.0)
    process.end("finished", "finished", metrics={"accuracy": 0.5})
    world.report(process)
    report(3.0)
    world.report(process)
    report(4.0)
    before = world.log[: [event["type"] for event in world.log].index("cost")]
    assert [event["cpu_s"] for event in before if event["type"] == "usage"][-1] == 4.0
    assert [event["watts"] for event in before if event["type"] == "power"][-1] == 4.0


def test_progress_is_logged_the_more_seldom_the_older_the_run_is() -> None:
    world, process = begin("cpu_s")

    def count(seconds: int) -> int:
        before = len(world.log)
        for step in range(seconds):
            world.now += 1.0
            world.handle(process.event("progress", epoch=0, step=step, steps=9, samples_per_s=1.0))
        return sum(event["type"] == "progress" for event in world.log[before:])

    assert count(40) == 40, "all of a short run"
    world.now += 5000.0
    assert count(61) == 3, "each half a minute"


def test_a_session_opens_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(declare("list", 1), Random(0))

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"a session opens {args}")

    with monkeypatch.context() as patched:
        for module, name in ((os, "open"), (os, "replace"), (os, "unlink"), (os, "mkdir"), (Path, "open")):
            patched.setattr(module, name, refuse)
        patched.setattr("builtins.open", refuse)
        patched.setattr("time.monotonic", refuse)
        patched.setattr("time.time", refuse)
        world.finish()
    assert {member.state for member in world.session.state.run.members.values()} == {"finished"}


@pytest.mark.parametrize("lost", ["node_lost", "gpu_lost", None])
def test_a_rank_that_has_lost_another_waits_for_the_reason_before_a_retry_is_used_up(lost: str | None) -> None:
    world = World(replace(declare("list", 3), retries=0), Random(1))
    process = next(iter(world.processes.values()))
    assert set(process.nodes) == {"a", "b"}
    world.handle(process.event("failed", error="lost rank 2", reason="lost", retry=True, rank=0))
    assert not [event for event in world.log if event["type"] == "failed"], "perhaps a node was lost"
    away = {rank for rank in process.alive if process.nodes[rank] == "b"}
    for rank in (*sorted(away), *sorted(process.alive - away)):
        more = {lost: True} if lost and rank in away else {}
        exited = {"rank": rank, "detail": "gone", "note": None, "preparing": [], **more}
        world.handle(process.event("exited", outcome=None if rank in away else "failed", **exited))
    (failed,) = [event for event in world.log if event["type"] == "failed"]
    assert (failed["retry"], failed["reason"]) == (lost is not None, "lost")


def test_memory_that_a_rank_on_another_node_lacked_is_seen_whoever_reports_first() -> None:
    world = World(replace(declare("list", 3), retries=0), Random(1))
    process = next(iter(world.processes.values()))
    rank = process.nodes.index("b")
    world.handle(process.event("failed", error=f"lost rank {rank}", reason="lost", retry=True, rank=0))
    gone = {"rank": rank, "detail": "was killed", "note": None, "preparing": []}
    world.handle(process.event("exited", outcome=None, reason="oom", **gone))
    (failed,) = [event for event in world.log if event["type"] == "failed"]
    assert (failed["retry"], failed["reason"]) == (True, "oom")
    (room,) = [event for event in world.log if event["type"] == "memory_increase"]
    assert room["node"] == "b"


def test_a_report_of_a_lost_rank_prolongs_no_deadline() -> None:
    world = World(declare("list", 3), Random(1))
    process = next(iter(world.processes.values()))
    world.perform(world.session.stop("request", *world.time))
    live = world.session.state.live[process.identity.member]
    until = live.deadline
    world.handle(process.event("failed", error="lost rank 2", reason="lost", retry=True, rank=0))
    assert live.deadline == until


def test_a_quarantined_gpu_is_not_offered_again_by_whoever_describes_the_node() -> None:
    world = World(declare("list", 1), Random(0))
    with_gpus = {"type": "node", **Node("a", 2, ("A", "A"), 8.0, "a", gpu_ids=("g0", "g1")).as_event()}
    world.handle(with_gpus)
    broken = {"node": "a", "gpu": "g0", "devices": ["g0"], "detail": "XID 79"}
    world.handle({"type": "gpu_quarantined", **broken})
    assert [node.gpu_ids for node in world.session.state.nodes.held if node.name == "a"] == [("g1",)]
    world.handle(with_gpus)
    assert [node.gpu_ids for node in world.session.state.nodes.held if node.name == "a"] == [("g1",)]
    assert list(fold(world.log).quarantined) == ["g0"]


@pytest.mark.parametrize("is_lost", [False, True], ids=["in time", "too late"])
@examples(12)
@given(random=st.randoms(use_true_random=False), workers=st.integers(1, 2), steps=st.integers(0, 40))
def test_members_leave_a_node_that_is_drained_and_use_up_no_retry(
    is_lost: bool, random: Random, workers: int, steps: int
) -> None:
    world = World(replace(declare("list", workers), retries=0), random, on_cluster=True, failing_launches=0.0)
    for _ in range(steps):
        if world.processes:
            world.report(world.random.choice(list(world.processes.values())))
            world.reconcile()
    begins, there = len(world.log), [one for one in world.processes.values() if "a" in one.nodes]
    world.drain("a")
    if is_lost:
        world.lose_node("a")
    world.finish()
    later = world.log[begins:]
    assert not any(event["type"] == "failed" for event in world.log), "no retry is used, for there is none"
    assert "a" not in [event["node"] for event in later if event["type"] == "placed"]
    left = {event["member"] for event in world.log if event["type"] in ("paused", "finished")}
    assert {process.identity.member for process in there} <= left
    world.check_end()


def test_executors_know_at_once_which_places_are_taken_however_many_members_wait() -> None:
    many = replace(declare("list", 1), members=[{"n": n} for n in range(90)])
    world = World(many, Random(0), on_cluster=True, failing_launches=0.0)
    for process in list(world.processes.values()):
        end(world, process)
    placed = {each.member for each in world.demand.placed}
    assert len(placed) == 4 and len(world.demand.waiting) == 82
    assert not placed & {one.member for one in world.demand.waiting}
    world.finish()
    world.check_end()


def test_a_member_waits_for_a_gpu_when_its_node_is_lost_and_says_on_which_other_it_goes_on() -> None:
    nodes = [Node("gpu", 4.0, ("A100", "A100"), 16.0, "gpu"), Node("cpu", 8.0, (), 16.0, "cpu")]
    members = [Member({"n": n}, gpus_per_worker=share) for n, share in enumerate((0.5, 1.0, 0.0))]
    declared = an_ensemble(sharing="independent", resources=DECLARED, retries=2, epochs=3, members=members)
    world = World(declared, Random(0), failing_launches=0.0, on_cluster=True, nodes=nodes)

    def list_devices() -> dict[str, str]:
        run = world.session.state.run
        return {name: str(run.members[name].spans[-1].device) for name in sorted(world.processes)}

    assert list_devices() == {"member-0": "A100", "member-1": "A100", "member-2": "cpu"}
    world.lose_node("gpu")
    for process in list(world.processes.values()):
        while process.reports:
            world.report(process)
    world.reconcile()
    assert list_devices() == {"member-2": "cpu"}
    assert sorted(one.member for one in world.demand.waiting) == ["member-0", "member-1"]
    new = Node("new", 4.0, ("H100", "H100"), 16.0, "new")
    world.nodes.add("new")
    world.held.add("new")
    world.handle({"type": "node", **new.as_event()})
    world.reconcile()
    assert list_devices() == {"member-0": "H100", "member-1": "H100", "member-2": "cpu"}
    changed = [(e["member"], e["before"], e["device"]) for e in world.log if e["type"] == "device_changed"]
    assert changed == [("member-0", "A100", "H100"), ("member-1", "A100", "H100")]
    told = [notice.text for notice in collect_notices(world.log) if "another device" in notice.text]
    assert len(told) == 2 and told[0] == "member-0: trains on another device than before: H100, and not A100"
    world.finish()
    world.check_end()


def test_members_wait_for_memory_that_others_hold_and_none_that_runs_is_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free = Node("a", 4.0, (), 8.0, "a")
    declared = an_ensemble(
        sharing="independent", resources=replace(DECLARED, memory_gb=2.0), members=[{"n": n} for n in range(6)]
    )
    held = replace(free, memory_left_gb=5.0)
    world = World(declared, Random(0), failing_launches=0.0, nodes=[held])

    def others_leave(memory_left_gb: float | None) -> None:
        world.handle({"type": "node", **replace(free, memory_left_gb=memory_left_gb).as_event()})
        world.reconcile()

    def told() -> list[str]:
        return [event["detail"] for event in world.log if event["type"] == "memory_awaited"]

    assert sorted(world.processes) == ["member-0", "member-1"], "5 of 8 GiB are left"
    others_leave(1.0)
    assert sorted(world.processes) == ["member-0", "member-1"] and not told()
    for process in list(world.processes.values()):
        assert not process.commands, "it goes on"
        end(world, process)
    assert not world.processes and not world.session.is_over
    asked = "member-2 asks for 1 worker x 1 cpus, 2 GiB, and others hold 7.0 of 8.0 GiB on node a"
    assert told() == [asked] and caplog.text.count(asked) == 1
    assert fold(world.log).waits_for == f"memory: {asked}"
    others_leave(1.5)
    assert told() == [asked], "it is said once"
    others_leave(None)
    assert sorted(world.processes) == ["member-2", "member-3", "member-4", "member-5"]
    assert told() == [asked, ""] and fold(world.log).waits_for is None
    world.finish()
    world.check_end()


def test_a_search_of_which_the_only_member_has_ended_is_resumed() -> None:
    world = World(declare("search", 3), Random(0))
    process = next(iter(world.processes.values()))
    world.ask("pause all")
    for each in list(world.processes.values()):
        each.reports.clear()
        each.end("failed", "failed", error="it broke", reason="nan", retry=False)
    while world.processes:
        world.report(next(iter(world.processes.values())))
    world.reconcile()
    assert not world.session.is_over
    world.ask("resume all")
    world.reconcile()
    assert process.identity.member not in world.processes and world.processes
