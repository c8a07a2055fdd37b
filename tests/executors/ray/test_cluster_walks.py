"""Random histories of a cluster: nodes come, go, freeze and answer late, agents die, leases are late, two runs.

Whatever happens, no place is leaked and none is given twice, each rank that was launched ends exactly once, and
when the faults are over every member starts, also those on several nodes.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from kit.execute_members import make_job
from kit.property_examples import examples
from lent_cluster import LOST, Actor, Event, Lender, Run
from ray_model import Group, Piece, World

from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.packing import pack

HOSTS = [(2.0, 8.0, 0)] * 3
STEP_S = 1.0
FAULTS = ("die", "go", "come back", "freeze", "thaw", "drain", "fill", "never answer", "others", "late")
FULL = "no private directory can be made: [Errno 28] No space left on device"


class Walker(Run):
    """A run on the cluster: its executor, and what a controller does with what that reports."""

    def __init__(self, lender: Lender, path: Path, name: str, members: int, workers: int) -> None:
        super().__init__(lender, path, members, workers, name)
        self.name, self.waiting, self.attempts = name, list(self.identities), Counter[str]()
        self.held: dict[str, Placement] = {}
        self.ranks: dict[str, set[int]] = {}  # that have not ended, by member
        self.failed, self.finished, self.seen = set[str](), set[str](), list[Event]()

    def start(self) -> None:
        nodes = self.executor.open(self.run_dir, self.declared, lambda events: None)
        self.nodes = {node.name: node for node in nodes}
        self.place()

    @property
    def actors(self) -> list[Actor]:
        own = ([a for a in made if a.run == str(self.run_dir.path)] for made in self.lender.actors.values())
        return [made[-1] for made in own if made]

    def place(self) -> None:
        found = pack(self.waiting, list(self.held.values()), list(self.nodes.values()))
        for placement in found:
            attempt, who = self.attempts[placement.member], placement.identity
            where = enumerate(map(placement.find_node, range(who.workers)))
            jobs = [make_job(who, self.run_dir, attempt=attempt, rank=n, node=node) for n, node in where]
            try:
                self.executor.launch(jobs, [None] * len(jobs))
            except OSError:  # its node has just been lost, which is about to be reported
                continue
            self.waiting.remove(placement.identity)
            self.held[placement.member] = placement
            self.ranks[placement.member] = set(range(len(jobs)))
        self.executor.request(self.waiting, list(self.held.values()))

    def step(self) -> None:
        self.seen += (events := self.executor.events(STEP_S))
        for event in events:
            kind = event["type"]
            if kind == "node":
                self.nodes[event["node"]] = Node.from_event(event)
            elif kind in ("node_lost", "node_draining"):
                self.nodes.pop(event["node"], None)
            elif kind == "exited":
                self.end_rank(event)
        if any(event["type"] in ("node", "node_lost", "node_draining", "exited") for event in events):
            self.place()
        self.check()

    def end_rank(self, event: Event) -> None:
        member = event["member"]
        assert event["attempt"] == self.attempts[member], "a rank of an earlier attempt ended again"
        assert event["rank"] in self.ranks[member], "a rank ended twice, or was never launched"
        self.ranks[member].discard(event["rank"])
        if event["outcome"] != "finished":
            self.failed.add(member)
            self.executor.kill(member)
        if not self.ranks[member]:
            placement = self.held.pop(member)
            if member in self.failed:  # it is tried again
                self.failed.discard(member)
                self.attempts[member] += 1
                self.waiting.append(placement.identity)
            else:
                self.finished.add(member)

    def act(self, chance: random.Random, frozen: set[str]) -> None:
        """Agents report, carry out commands, and end as they are told to; ranks that were killed exit."""
        for actor in self.actors:
            node = actor.name
            if node in frozen or node not in self.lender.reachable or actor.stream.news or actor.answer.news:
                continue
            events: list[Event] = [{"type": "power", "node": node}]
            commands, actor.commands = actor.commands, []
            for name, *arguments in commands:
                if name == "launch":
                    jobs = [json.loads(job) for job in arguments[0]]
                    actor.running |= {(job["identity"]["member"], job["attempt"], job["rank"]) for job in jobs}
                elif name == "kill":
                    gone = {key for key in actor.running if key[0] == arguments[0]}
                    events += [self.make_exit(*key, outcome=None) for key in sorted(gone)]
                    actor.running -= gone
                elif name == "close":
                    assert not actor.running, "the node of a member that trains was given back"
                    actor.is_closing = True
            for key in sorted(actor.running):
                if chance.random() < 0.05:
                    events.append(self.make_exit(*key, outcome="finished"))
                    actor.running.discard(key)
            actor.stream.news += [events, *([StopIteration()] if actor.is_closing else [])]

    def make_exit(self, member: str, attempt: int, rank: int, outcome: str | None) -> Event:
        return {"type": "exited", "member": member, "attempt": attempt, "rank": rank, "outcome": outcome}

    def check(self) -> None:
        """What runs on a node fits in what the run holds there."""
        taken = Counter[str]()
        for member, placement in self.held.items():
            taken.update(placement.find_node(rank) for rank in self.ranks[member])
        for name, cores in taken.items():
            groups = [g for g in self.lender.cluster.groups if g.owner == self.name]
            held = sum(piece.cpus for group in groups for piece in group.pieces if piece.node == name) / 1e4
            is_there = name in self.lender.reachable and name in self.executor._model.agents
            assert cores <= held + 1e-3 or not is_there, f"{cores} ranks on {held} cores of {name}"


class Faults:
    def __init__(self, lender: Lender, walkers: list[Walker], chance: random.Random) -> None:
        self.lender, self.cluster, self.walkers, self.chance = lender, lender.cluster, walkers, chance
        self.frozen: set[str] = set()

    def befall(self, fault: str) -> None:
        node = self.chance.choice(sorted(self.cluster.total))
        if fault == "die":
            self.kill(node, self.chance.sample(self.walkers, 1))
        elif fault == "go":
            self.lender.reachable.discard(node)
            self.kill(node, self.walkers)
        elif fault == "come back":
            self.lender.reachable = set(self.cluster.total)
        elif fault == "freeze":
            self.frozen.add(node)
        elif fault == "thaw":
            self.frozen.clear()
        elif fault == "drain" and not self.cluster.draining:
            self.cluster.draining[node] = 1e9
        elif fault == "fill":
            self.lender.answers[node] = [ray.exceptions.RayError(FULL)]
        elif fault == "never answer":
            self.lender.answers[node] = [None]
        elif fault == "others":
            self.give_back()
            self.cluster.give(Group("others", [Piece(10_000, 2**30, 0, node)]))
        elif fault == "late":
            self.lender.is_late = not self.lender.is_late

    def give_back(self) -> None:
        for group in [group for group in self.cluster.groups if group.owner == "others"]:
            self.cluster.remove(group)

    def kill(self, node: str, walkers: list[Walker]) -> None:
        for actor in (actor for walker in walkers for actor in walker.actors if actor.name == node):
            actor.running.clear()
            is_starting = bool(actor.answer.news)
            actor.answer.news, actor.stream.news = [], []
            (actor.answer if is_starting else actor.stream).news = [ray.exceptions.RayError(LOST)]

    def end(self) -> None:
        """Nothing more befalls it; what others hold is given back, a node that is drained goes."""
        self.give_back()
        for node in self.cluster.draining:
            self.kill(node, self.walkers)
        self.lender.reachable = set(self.cluster.total) - set(self.cluster.draining)
        self.lender.answers.clear()
        self.frozen.clear()
        self.lender.is_late = False


@examples(4)
@given(seed=st.integers(0, 2**32))
def test_whatever_befalls_a_cluster_no_place_is_lost_or_given_twice_and_every_member_starts(
    world: World, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance, path = random.Random(seed), tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        lender = Lender(world, patch, HOSTS)
        walkers = [Walker(lender, path, "single", 4, 1), Walker(lender, path, "gang", 2, 3)]
        faults = Faults(lender, walkers, chance)
        for walker in walkers:
            walker.start()
        for _ in range(chance.randrange(300)):
            if chance.random() < 0.1:
                faults.befall(chance.choice(FAULTS))
            for walker in walkers:
                walker.act(chance, faults.frozen)
                walker.step()
        faults.end()
        until = lender.cluster.clock + 4000.0  # a node that was tried in vain rests for a quarter of an hour
        while lender.cluster.clock < until and any(walker.waiting or walker.held for walker in walkers):
            for walker in walkers:
                walker.act(chance, set())
                walker.step()
        for walker in walkers:
            assert not walker.waiting and not walker.held, f"{walker.name} waits for ever: {walker.seen[-5:]}"
            assert len(walker.finished) == len(walker.declared.members or ())
            walker.executor.close()
        assert [group.owner for group in lender.cluster.groups] == [], "something was not given back"
