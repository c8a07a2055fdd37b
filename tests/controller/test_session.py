"""Whole runs without a process: a session against a world in which anything may happen at any time.

The world performs actions on a model of processes, feeders and trials, and reports in a random order what they
do, what befalls them and what users ask. After each step it is checked that no member is lost, none is placed
twice, no place is leaked, and that the log says what the session decides from.
"""

from __future__ import annotations

import itertools
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
REQUESTS = "pause,resume,cancel,add,add clone,add warm,pause all,resume all,cancel all,stop,stop at once,no"


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
        self.reports.append(self.event(kind, epoch=self.epoch, step=0, **fields))
        self.exit(outcome)

    def exit(self, outcome: str | None, ranks: set[int] | None = None, **fields: Any) -> None:
        gone = {event["rank"] for event in self.reports if event["type"] == "exited"}
        fields = {"outcome": outcome, "detail": "killed", "note": None, "preparing": [], **fields}
        leaving = self.alive if ranks is None else ranks
        self.reports += [self.event("exited", rank=rank, **fields) for rank in sorted(leaving - gone)]


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
        self.offered, self.failing_launches = nodes, failing_launches
        self.ensemble, self.random, self.slow_feeders = ensemble, random, slow_feeders
        self.on_cluster, self.demand = on_cluster, Demand([], [])
        self.processes, self.past = dict[str, Process](), list[Process]()
        self.nodes = {node.name for node in nodes}
        self.held, self.draining = set(self.nodes), set[str]()  # the nodes of which the run holds something
        self.feeders = set[tuple[str, int]]()
        self.log = list[dict[str, Any]]()
        self.later = list[dict[str, Any]]()  # answers that take their time
        self.ended = Counter[int]()
        self.asked, self.unanswered = itertools.count(), set[str]()
        self.cancelled = set[str]()  # of which a user asked it
        self.now, self.declared, self.seen = 100.0, 0, 0  # `seen`: in so many events answers were looked for
        stream = SharedStream(ensemble)
        stream.check()
        self.streaming = ensemble.search is not None
        self.minimizes = ensemble.search is not None and bool(ensemble.search.further_objectives)
        given: Any = {"ensemble": ensemble, "run_dir": RunDir(NOWHERE), "run": RunState(), "nodes": nodes}
        given["list_cluster"] = lambda: [n for n in nodes if n.name in self.nodes] if on_cluster else None
        trials = TRIALS if self.streaming else len(ensemble.members or ())
        kind = {"awaits_pruner": self.streaming, "streaming": self.streaming, "trials_left": trials}
        self.session = Session(stream=stream, **given, **kind)
        started = {"type": "run_started", "name": ensemble.name, "members": 0, "epochs": ensemble.epochs}
        offered = [{"type": "node", **node.as_event()} for node in nodes]
        self.perform(self.session.start([started, *offered], *self.time))
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
        for _ in range(100):
            self.perform(self.session.reconcile(*self.time))
            if not self.session.is_placement_due:
                return self.check()
        raise AssertionError("members are placed for ever")

    def perform(self, actions: Sequence[Action]) -> None:
        self.log += [as_dict(action.event) for action in actions if isinstance(action, Log)]
        for answer in [answer for action in actions if (answer := self._perform(action)) is not None]:
            self.handle(answer)

    def _perform(self, action: Action) -> dict[str, Any] | None:
        match action:
            case Launch(jobs, _):
                return self._launch(jobs)
            case Send(member, _, _) if member in self.processes:
                self.processes[member].commands.append(action)
            case Kill(member) if member in self.processes:
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
                self.declared += 1
                given = {"n": self.random.random()} if self.streaming else None
                identity = self.ensemble.identify(self.declared - 1, given)
                if self.streaming and self.random.random() < 0.1:
                    return {"type": "impossible", "identity": identity, "error": "it cannot be"}
                return {"type": "proposed", "identity": identity}
            case Add(request, declared, lineage):
                self.declared += 1
                params = {"n": 0.5} if self.streaming else declared.params
                identity = self.ensemble.identify(self.declared - 1, Member(params))
                assert (action.checkpoint is not None) == bool(request.get("warm"))
                if lineage is not None and lineage["warm"]:
                    lineage = {**lineage, **{name: getattr(action.logged, name) for name in ("epoch", "step")}}
                return {"type": "added", "request": request, "identity": replace(identity, lineage=lineage)}
            case MeasureCost(member, attempt):
                assert member not in self.processes, "its processes still use energy"
                used = {"energy_j": self.random.choice([None, 2.5]), "energy_origin": "estimated", "cpu_s": 1.0}
                return {"type": "cost", "member": member, "attempt": attempt, **used}
            case ReduceCheckpoint(member, name, _, keeps_weights):
                assert member not in self.processes, "it may go on from its checkpoint"
                path = f"/nowhere/{member}/{name}-weights" if keeps_weights else None
                return {"type": "checkpoint_reduced", "member": member, "removed": name, "path": path}
            case EndTrial(number, state, _):
                assert state in ("finished", "pruned", "failed", "cancelled")
                costs = [e["member"] for e in self.log if e["type"] == "cost"].count(f"member-{number}")
                assert costs == (self.minimizes and state == "finished"), "its one cost is logged first"
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
                self.past.append(self.processes.pop(process.identity.member))
        self.handle(event)

    def _go_on(self, process: Process) -> None:
        if process.commands:
            self._obey(process, process.commands.pop(0))
        elif not process.has_started:
            process.has_started = True
            joins = {"first_epoch": 3} if process.identity.first_epoch is None else {}
            process.reports.append(process.event("started", pid=1, epoch=process.epoch, step=0, **joins))
        elif process.epoch == process.identity.epochs and not process.awaits_decision:
            process.end("finished", "finished", metrics={"accuracy": 0.5})
        elif not process.awaits_decision:
            process.reports.append(process.event("epoch", epoch=process.epoch, metrics={"accuracy": 0.5}))
            process.epoch += 1
            process.awaits_decision = self.streaming
            if self.random.random() < 0.7:
                path = f"checkpoint-{process.attempt}-{process.epoch}-0.safetensors"
                process.reports.append(process.event("checkpoint", epoch=process.epoch, step=0, path=path))

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
            elif fault in ("oom", "died"):
                process.exit(None, **({"reason": "oom"} if fault == "oom" else {}))
            elif fault == "rank died":
                process.exit(None, {max(process.alive)})

    def hold(self, node: Node, *, is_held: bool = True) -> None:
        """The run is given a node, or gives it back."""
        (self.held.add if is_held else self.held.discard)(node.name)
        self.handle({"type": "node", **(node if is_held else Node(node.name, 0, (), 0.0, node.name)).as_event()})

    def _give_back(self) -> None:
        """As the executor does: only where no member is placed and nothing is fed, while nobody waits."""
        used = {node for placement in self.demand.placed for node in placement.ranks_by_node}
        used |= self.draining | {node for node, _ in self.feeders}
        idle = [node for node in self.offered if node.name in self.held - used]
        if idle and not self.demand.waiting and not self.later:
            self.hold(idle[0], is_held=False)

    def lend(self) -> None:
        """The cluster gives a node that the run has given back, as soon as somebody waits for it."""
        free = [node for node in self.offered if node.name in self.nodes - self.held]
        if free and self.demand.waiting:
            self.hold(free[0])

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
        for node in [node for node in self.offered if node.name in self.draining]:
            used = {name for process in self.processes.values() for name in process.nodes}
            if node.name in self.held - used - {name for name, _ in self.feeders}:
                self.nodes.discard(node.name)
                self.hold(node, is_held=False)

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
            process.exit(None, lost, node_lost=True)
            if 0 in process.alive - lost and self.random.random() < 0.7:  # some notice before it is known why
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
            request |= {"from": self.random.choice([*members, "nobody"]), "warm": how == "warm"} if how else {}
        elif verb == "stop":
            request["at_once"] = how != ""
        elif how != "all":
            request["member"] = self.random.choice([*members, "nobody"])
        self.unanswered.add(request["id"])
        if verb == "cancel":
            to_come = (f"member-{number}" for number in range(len(members) + TRIALS))  # trials are cancelled, too
            self.cancelled.update([request["member"]] if "member" in request else [*members, *to_come])
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
            self.ask(self.random.choice(REQUESTS.split(",")))
        elif what < 0.2 and self.past:
            kind = self.random.choice(("progress", "epoch", "failed", "finished"))
            late = {"epoch": 0, "step": 1, "error": "late", "metrics": {}, "detail": "late"}
            self.handle(self.random.choice(self.past).event(kind, **late))
        elif what < 0.25:
            self.meter(self.random.choice(sorted(self.nodes)))
        elif self.processes:
            self.report(self.random.choice(list(self.processes.values())))
        self.reconcile()
        self.leave_drained()

    def meter(self, node: str, **fields: Any) -> None:
        self.handle({"type": "power", "origin": "estimated", "node": node, "watts": 1.0, **fields})

    def finish(self) -> None:
        """Nothing fails any more, and whoever is paused goes on: the run comes to its end, and is checked."""
        for _ in range(3000):
            if self.session.is_over:
                return self.check_end()
            self.now += 1.0
            self.leave_drained()
            self.lend()
            while self.later:
                self.handle(self.later.pop())
            waits = self.session.state.waitlist.paused or self.session.state.waitlist.trials_left
            if not self.processes and waits and self.session.stop_reason is None:
                self.ask("resume all")
            for process in list(self.processes.values()):
                self.report(process)
            self.reconcile()
        raise AssertionError("the run does not end")

    def check(self) -> None:
        state = self.session.state
        resting = [item for _, item in state.waitlist.deferred]
        others = [identity for identity, _ in (*state.waitlist.returning, *state.waitlist.paused, *resting)]
        places = Counter([*state.live, *(one.member for one in (*state.waitlist.waiting, *others))])
        assert not places or max(places.values()) == 1, f"in two places: {places}"
        open_members = {id for id, member in state.run.members.items() if member.state not in ENDED}
        assert self.session.stop_reason is not None or open_members <= set(places), "a member is lost"
        assert all(state.live[id].is_exiting for id in set(places) - open_members), "it has ended"
        launched = {id: (live.number, live.ranks) for id, live in state.live.items() if live.is_launched}
        processes = {id: (process.attempt, process.alive) for id, process in self.processes.items()}
        assert launched == processes, "a place is held by nobody, or a process has none"
        placed = [live.start.placement for live in state.live.values()]
        for node in state.nodes.held:
            cores = [one.count_ranks(node.name) * one.identity.cpus_per_worker for one in placed]
            assert sum(cores) <= node.cpus + 1e-9, "more than there is"
        assert self.session.stop_reason or list(self.demand.placed) == placed, "executors give back other places"
        self.unanswered -= {event["request"] for event in self.log[self.seen :] if event["type"] == "request"}
        self.seen = len(self.log)
        assert not self.unanswered, "a request was not answered"

    def check_end(self) -> None:
        state = self.session.state
        assert not self.processes and not state.live
        if self.session.stop_reason is None:
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
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 300))
@examples(24)
def test_whatever_happens_no_member_is_lost_and_no_place_is_leaked(
    kind: str, random: Random, workers: int, slow: bool, shared: bool, steps: int
) -> None:
    world = World(declare(kind, workers), random, slow_feeders=slow, on_cluster=shared)
    for _ in range(steps):
        world.step()
        if world.session.is_over and not world.later:
            break
    world.finish()


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
    process.end("finished", "finished", metrics={"accuracy": 0.5})
    world.meter("a")
    end(world, process)
    now = world.session.state.t
    for node, until in (("a", now), ("b", now - 1.0)):
        world.meter(node, until=until)
        world.reconcile()
        assert not world.ended, "of b, power of its last seconds comes later"
    world.meter("b", until=now)
    world.reconcile()
    assert [event["member"] for event in world.log if event["type"] == "cost"] == ["member-0"]
    assert world.ended[0] == 1


def test_figures_that_were_held_back_are_logged_before_a_cost_is_measured() -> None:
    world, process = begin("energy_j")
    world.now += 5000.0
    world.report(process)  # it starts: the session does not take it for hung
    who = {"node": "a", "role": "train", "member": process.identity.member, "pid": 1, "origin": "measured"}

    def report(count: float) -> None:
        world.now += 1.0
        world.handle({"type": "usage", **who, "cpu_s": count})
        world.meter(process.nodes[0], energy_j=None, interval_s=1.0, watts=count)
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


LOST: dict[str, Any] = {"reason": "lost", "retry": True, "rank": 0, "error": "lost rank 2"}
GONE: dict[str, Any] = {"detail": "gone", "note": None, "preparing": []}


def begin_on_two_nodes() -> tuple[World, Process, list[int]]:
    """A world, its first process, and those of its ranks that are on node b."""
    world = World(replace(declare("list", 3), retries=0), Random(1))
    process = next(iter(world.processes.values()))
    assert set(process.nodes) == {"a", "b"}
    return world, process, [rank for rank in sorted(process.alive) if process.nodes[rank] == "b"]


@pytest.mark.parametrize("lost", ["node_lost", "gpu_lost", "oom", None])
def test_a_rank_that_has_lost_another_waits_for_the_reason_before_a_retry_is_used_up(lost: str | None) -> None:
    world, process, away = begin_on_two_nodes()
    world.handle(process.event("failed", **LOST))
    assert not [event for event in world.log if event["type"] == "failed"], "perhaps a node was lost"
    for rank in (*away, *sorted(process.alive - {*away})):
        more = {"reason": "oom"} if lost == "oom" else {lost: True} if lost else {}
        outcome = None if rank in away else "failed"
        world.handle(process.event("exited", outcome=outcome, rank=rank, **GONE, **(more if rank in away else {})))
    (failed,) = [event for event in world.log if event["type"] == "failed"]
    assert (failed["retry"], failed["reason"]) == (lost is not None, "oom" if lost == "oom" else "lost")
    assert [event["node"] for event in world.log if event["type"] == "memory_increase"] == ["b"] * (lost == "oom")


def test_a_report_of_a_lost_rank_prolongs_no_deadline() -> None:
    world, process, _ = begin_on_two_nodes()
    world.perform(world.session.stop("request", *world.time))
    live = world.session.state.live[process.identity.member]
    until = live.deadline
    world.handle(process.event("failed", **LOST))
    assert live.deadline == until


def test_a_quarantined_gpu_is_not_offered_again_by_whoever_describes_the_node() -> None:
    world = World(declare("list", 1), Random(0))
    with_gpus = {"type": "node", **Node("a", 2, ("A", "A"), 8.0, "a", gpu_ids=("g0", "g1")).as_event()}
    world.handle(with_gpus)
    broken = {"node": "a", "gpu": "g0", "devices": ["g0"], "detail": "XID 79"}
    for event in ({"type": "gpu_quarantined", **broken}, with_gpus):
        world.handle(event)
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


def test_executors_know_at_once_which_places_are_taken_however_many_members_wait() -> None:
    many = replace(declare("list", 1), members=[{"n": n} for n in range(90)])
    world = World(many, Random(0), on_cluster=True, failing_launches=0.0)
    for process in list(world.processes.values()):
        end(world, process)
    placed = {each.member for each in world.demand.placed}
    assert len(placed) == 4 and len(world.demand.waiting) == 82
    assert not placed & {one.member for one in world.demand.waiting}
    world.finish()


def test_a_member_waits_for_a_gpu_when_its_node_is_lost_and_says_on_which_other_it_goes_on() -> None:
    nodes = [Node("gpu", 4.0, ("A100", "A100"), 16.0, "gpu"), Node("cpu", 8.0, (), 16.0, "cpu")]
    members = [Member({"n": n}, gpus_per_worker=share) for n, share in enumerate((0.5, 1.0, 0.0))]
    declared = an_ensemble(sharing="independent", resources=DECLARED, retries=2, epochs=3, members=members)
    world = World(declared, Random(0), failing_launches=0.0, on_cluster=True, nodes=nodes)

    def list_devices() -> list[str]:
        members = world.session.state.run.members
        return [f"{name[-1]} {members[name].spans[-1].device}" for name in sorted(world.processes)]

    assert list_devices() == ["0 A100", "1 A100", "2 cpu"]
    world.lose_node("gpu")
    for process in list(world.processes.values()):
        while process.reports:
            world.report(process)
    world.reconcile()
    assert list_devices() == ["2 cpu"]
    assert sorted(one.member for one in world.demand.waiting) == ["member-0", "member-1"]
    world.nodes.add("new")
    world.hold(Node("new", 4.0, ("H100", "H100"), 16.0, "new"))
    world.reconcile()
    assert list_devices() == ["0 H100", "1 H100", "2 cpu"]
    changed = [(e["member"], e["before"], e["device"]) for e in world.log if e["type"] == "device_changed"]
    assert changed == [("member-0", "A100", "H100"), ("member-1", "A100", "H100")]
    notices = [notice.text for notice in collect_notices(world.log) if "another device" in notice.text]
    assert (
        len(notices) == 2 and notices[0] == "member-0: trains on another device than before: H100 instead of A100"
    )
    world.finish()


def test_members_wait_for_memory_that_others_hold_and_none_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    free, six = Node("a", 4.0, (), 8.0, "a"), [{"n": n} for n in range(6)]
    declared = an_ensemble(sharing="independent", resources=replace(DECLARED, memory_gb=2.0), members=six)
    world = World(declared, Random(0), failing_launches=0.0, nodes=[replace(free, memory_left_gb=5.0)])

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


ALIKE = {"epoch": 0, "step": 2, "reason": "error", "retry": False}


def fail(world: World, name: str, error: str = "TypeError: <Net at 0x7f01>", **fields: Any) -> None:
    """A member fails for good, and its processes exit."""
    process = world.processes[name]
    process.reports = [process.event("failed", **{**ALIKE, "error": error, **fields})]
    process.exit("failed")
    while process.reports:
        world.report(process)
    world.reconcile()


def test_two_members_that_fail_alike_stop_the_run_and_the_others_wait_for_a_resume() -> None:
    world, _ = begin("alone")
    reasons = []
    for name, error in (("member-0", "TypeError: <Net at 0x7f01>"), ("member-1", "TypeError: <Net at 0x7f02>")):
        fail(world, name, error)
        reasons.append(world.session.stop_reason)
    first, reason = reasons
    assert (
        first is None
        and reason is not None
        and reason.startswith("member-0 and member-1 failed alike in epoch 1, step 2, and the others would, too")
    )
    launched = {process.identity.member for process in (*world.past, *world.processes.values())}
    members = world.session.state.run.members
    assert {name: members[name].state for name in set(members) - launched} == dict.fromkeys(
        set(members) - launched, "waiting"
    )
    assert len(launched) < len(members) == 7


@pytest.mark.parametrize(
    "other",
    [
        {"error": "TypeError: another"},
        {"step": 3},
        {"reason": "oom"},
        {"reason": "nan"},
        {"reason": "lost"},
        {"retry": True},
    ],
    ids=str,
)
def test_members_that_fail_otherwise_do_not_stop_the_run(other: dict[str, Any]) -> None:
    world, _ = begin("alone")
    fail(world, "member-0", **other)
    fail(world, "member-1")
    assert world.session.stop_reason is None


@pytest.mark.parametrize("further", ["beyond", "finished"])
def test_trials_that_fail_alike_do_not_stop_a_search_of_which_another_has_got_further(further: str) -> None:
    world, first = begin("search")
    while not first.has_started or (further == "beyond" and first.epoch < 1):
        world.report(first)
    if further == "finished":
        end(world, first)
    others = [name for name in world.processes if name != first.identity.member]
    for name in others[:2]:
        fail(world, name)
    assert len(others) >= 2 and world.session.stop_reason is None
