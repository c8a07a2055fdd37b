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

FAULTS = ("die", "go", "come back", "freeze", "thaw", "drain", "fill", "never answer", "others", "late")
FULL = "no private directory can be made: [Errno 28] No space left on device"


class Walker(Run):
    """A run on the cluster: its executor, and what a controller does with what that reports."""

    def __init__(self, lender: Lender, path: Path, name: str, members: int, workers: int) -> None:
        super().__init__(lender, path, members, workers, name)
        self.name, self.waiting, self.attempts = name, list(self.identities), Counter[str]()
        self.held, self.ranks = dict[str, Placement](), dict[str, set[int]]()  # those that have not ended
        self.failed, self.finished, self.seen = set[str](), set[str](), list[Event]()
        nodes = self.executor.open(self.run_dir, self.declared, lambda events: None)
        self.nodes = {node.name: node for node in nodes}
        self.place()

    @property
    def actors(self) -> list[Actor]:
        own = ([a for a in made if a.run == str(self.run_dir.path)] for made in self.lender.actors.values())
        return [made[-1] for made in own if made]

    def place(self) -> None:
        for placement in pack(self.waiting, list(self.held.values()), list(self.nodes.values())):
            member, who = placement.member, placement.identity
            where = enumerate(map(placement.find_node, range(who.workers)))
            attempt = self.attempts[member]
            jobs = [make_job(who, self.run_dir, attempt=attempt, rank=n, node=node) for n, node in where]
            try:
                self.executor.launch(jobs, [None] * len(jobs))
            except OSError:  # its node has just been lost, which is about to be reported
                continue
            self.waiting.remove(who)
            self.held[member], self.ranks[member] = placement, set(range(len(jobs)))
        self.executor.request(self.waiting, list(self.held.values()))

    def step(self) -> None:
        self.seen += (events := self.executor.events(1.0))
        for event in events:
            if event["type"] == "node":
                self.nodes[event["node"]] = Node.from_event(event)
            elif event["type"] in ("node_lost", "node_draining"):
                self.nodes.pop(event["node"], None)
            elif event["type"] == "exited":
                self.end_rank(event["member"], event)
        if any(event["type"] in ("node", "node_lost", "node_draining", "exited") for event in events):
            self.place()
        taken = Counter(self.held[m].find_node(rank) for m, ranks in self.ranks.items() for rank in ranks)
        for name in taken.keys() & self.lender.reachable & self.executor._model.agents.keys():
            groups = [group for group in self.lender.cluster.groups if group.owner == self.name]
            held = sum(piece.cpus for group in groups for piece in group.pieces if piece.node == name) / 1e4
            assert taken[name] <= held + 1e-3, f"{taken[name]} ranks on {held} cores of {name}"

    def end_rank(self, member: str, event: Event) -> None:
        assert event["attempt"] == self.attempts[member], "a rank of an earlier attempt ended again"
        assert event["rank"] in self.ranks[member], "a rank ended twice, or was never launched"
        self.ranks[member].discard(event["rank"])
        if event["outcome"] != "finished":
            self.failed.add(member)
            self.executor.kill(member)
        if self.ranks[member]:
            return
        placement, _ = self.held.pop(member), self.ranks.pop(member)
        if member in self.failed:  # it is tried again
            self.failed.discard(member)
            self.attempts[member] += 1
            self.waiting.append(placement.identity)
        else:
            self.finished.add(member)

    def act(self, chance: random.Random, frozen: set[str]) -> None:
        """Agents report, carry out commands, and end as they are told to; ranks that were killed exit."""
        for actor in self.actors:
            is_away = actor.name in frozen or actor.name not in self.lender.reachable
            if is_away or actor.stream.news or actor.answer.news:
                continue
            events: list[Event] = [{"type": "power", "node": actor.name}]
            ended: dict[tuple[str, int, int], str | None] = {}
            commands, actor.commands = actor.commands, []
            for name, *arguments in commands:
                if name == "launch":
                    jobs = [json.loads(job) for job in arguments[0]]
                    actor.running |= {(job["identity"]["member"], job["attempt"], job["rank"]) for job in jobs}
                elif name == "kill":
                    ended |= dict.fromkeys(key for key in actor.running if key[0] == arguments[0])
                elif name == "close":
                    assert not actor.running - ended.keys(), "the node of a member that trains was given back"
                    actor.is_closing = True
            rest = sorted(actor.running - ended.keys())
            ended |= dict.fromkeys([key for key in rest if chance.random() < 0.05], "finished")
            actor.running -= ended.keys()
            for (member, attempt, rank), outcome in sorted(ended.items()):
                who = {"member": member, "attempt": attempt, "rank": rank}
                events.append({"type": "exited", **who, "outcome": outcome})
            actor.stream.news += [events, *([StopIteration()] if actor.is_closing else [])]

    def lose(self, node: str) -> None:
        """Its agent there dies, with all that it runs."""
        for actor in (actor for actor in self.actors if actor.name == node):
            actor.running.clear()
            is_starting = bool(actor.answer.news)
            actor.answer.news, actor.stream.news = [], []
            (actor.answer if is_starting else actor.stream).news = [ray.exceptions.RayError(LOST)]


def befall(fault: str, lender: Lender, walkers: list[Walker], chance: random.Random, frozen: set[str]) -> None:
    cluster, node = lender.cluster, chance.choice(sorted(lender.cluster.total))
    if fault == "die":
        chance.choice(walkers).lose(node)
    elif fault == "go":
        lender.reachable.discard(node)
        for walker in walkers:
            walker.lose(node)
    elif fault == "come back":
        lender.reachable = set(cluster.total)
    elif fault == "freeze":
        frozen.add(node)
    elif fault == "thaw":
        frozen.clear()
    elif fault == "drain" and not cluster.draining:
        cluster.draining[node] = 1e9
    elif fault in ("fill", "never answer"):
        lender.answers[node] = [ray.exceptions.RayError(FULL) if fault == "fill" else None]
    elif fault == "others":
        give_back(lender)
        cluster.give(Group("others", [Piece(10_000, 2**30, 0, node)]))
    elif fault == "late":
        lender.is_late = not lender.is_late


def give_back(lender: Lender) -> None:
    for group in [group for group in lender.cluster.groups if group.owner == "others"]:
        lender.cluster.remove(group)


@examples(4)
@given(seed=st.integers(0, 2**32))
def test_whatever_befalls_a_cluster_no_place_is_lost_or_given_twice_and_every_member_starts(
    world: World, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance, path, frozen = random.Random(seed), tmp_path_factory.mktemp("runs"), set[str]()
    with pytest.MonkeyPatch.context() as patch:
        lender = Lender(world, patch, [(2.0, 8.0, 0)] * 3)
        walkers = [Walker(lender, path, "single", 4, 1), Walker(lender, path, "gang", 2, 3)]
        for _ in range(chance.randrange(300)):
            if chance.random() < 0.1:
                befall(chance.choice(FAULTS), lender, walkers, chance, frozen)
            for walker in walkers:
                walker.act(chance, frozen)
                walker.step()
        give_back(lender)  # nothing more befalls it; a node that is drained goes
        for walker in walkers:
            for node in lender.cluster.draining:
                walker.lose(node)
        lender.reachable = set(lender.cluster.total) - set(lender.cluster.draining)
        lender.answers.clear()
        lender.is_late = False
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
