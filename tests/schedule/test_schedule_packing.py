"""Packing matches a slow definition of first-fit decreasing; a `FreeCapacity` that is updated equals a new one."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from schedule_cases import identity, node

from ensemble.schedule.explain import explain_unplaceable
from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.packing import FreeCapacity, pack
from ensemble.schedule.placement import ClusterSnapshot, count_placeable, decide_starts
from ensemble.spec import Identity

KINDS = ("A", "B")


def has_labels(member: Identity, at: Node) -> bool:
    rack = (member.nodes or {}).get("rack")
    return rack is None or {"1": at.labels.get("rack") == "1", "!1": at.labels.get("rack") != "1"}[rack]


def asks_for_gpus(member: Identity) -> bool:
    return not {"gpu_memory_gb", "ray.io/accelerator-type"}.isdisjoint(member.nodes or {})


def is_asked_for(member: Identity, at: Node, which: int) -> bool:
    """Whether a GPU is of the type and memory that a member asks for; a B has 40 GB, an A 16."""
    asked = member.nodes or {}
    return at.gpus[which] in asked.get("ray.io/accelerator-type", "in(A,B)") and (
        at.gpus[which] == "B" or asked.get("gpu_memory_gb", 0) <= 16
    )


def slowly(
    waiting: Sequence[Identity],
    running: Sequence[Placement],
    nodes: Sequence[Node],
    devices: str,
    limits: Mapping[str, int],
) -> list[Placement]:
    """First-fit decreasing by its definition: each member, the largest first, on the first node with room.

    One that finds none is on several, those with room for most of its ranks first. One that is better on two nodes
    is on two where each has room for half of it. Several nodes' GPUs come before the CPU of a node that has some.
    """
    placed: list[Placement] = []
    in_order = sorted(nodes, key=lambda at: devices != "cpu" and not at.gpus)
    has_gpus = {at.name: bool(at.gpus) for at in nodes}

    def kinds(member: Identity) -> list[bool]:
        """Whether it may be on GPUs, in the order in which it tries."""
        guess = "gpus_per_worker" in member.auto
        if asks_for_gpus(member):
            return [True]
        if devices == "cpu" or (member.gpus_per_worker == 0 and not guess):
            return [False]
        return [True, False] if devices == "auto" and guess else [True]

    def total(member: Identity, at: Node) -> tuple[float, float]:
        cpus = member.cpus_per_worker * member.workers
        if "cpus_per_worker" in member.auto and at.cpus > 0 and member.workers <= max(1, at.cpus):
            cpus = min(cpus, at.cpus)
        return cpus, (member.memory_gb or 0.0) * member.workers

    def on(at: Node) -> list[Placement]:
        return [
            Placement(replace(p.identity, workers=len(ranks)), at.name, tuple(p.devices[rank] for rank in ranks))
            for p in [*running, *placed]
            if (ranks := p.ranks_by_node.get(at.name))
        ]

    def found(member: Identity, at: Node) -> Placement | None:
        if not has_labels(member, at):
            return None
        here = on(at)
        most = [n for n in (at.places, limits.get(at.name)) if n is not None]
        if most and len(here) >= min(most):
            return None
        used = [total(p.identity, at) for p in here]
        for which, has in enumerate((at.cpus, at.memory_gb)):
            if total(member, at)[which] > has - sum(each[which] for each in used) + 1e-9:
                return None
        if not kinds(member)[0] or member.workers > len(set(at.gpu_parents)):
            return Placement(member, at.name, (None,) * member.workers) if False in kinds(member) else None
        load = {
            d: (sum(p.identity.gpus_per_worker for p in here if d in p.devices), sum(d in p.devices for p in here))
            for d in at.gpu_ids
        }
        left = {d: round(free - load[d][0], 9) for d, free in zip(at.gpu_ids, at.gpu_free, strict=True)}
        by_load = sorted(load, key=lambda d: (-left[d], load[d][1], at.gpu_ids.index(d)))
        room: dict[str, str] = {}  # one a physical GPU
        for d in by_load:
            which = at.gpu_ids.index(d)
            fits = is_asked_for(member, at, which)
            fits &= 0 < at.gpu_free[which] >= load[d][0] + member.gpus_per_worker - 1e-9
            most_there = 1 if at.gpu_exclusive[which] else 10**9
            if fits and load[d][1] < most_there:
                room.setdefault(at.gpu_parents[which], d)
        chosen = tuple(room.values())[: member.workers]
        return Placement(member, at.name, chosen) if len(chosen) == member.workers else None

    def across(member: Identity, on_gpus: bool, spread: bool = False) -> Placement | None:
        room = []
        for at in in_order:
            ranks = 0
            if kinds(member) == [False] or bool(at.gpus) == on_gpus:
                for n in range(1, member.workers + 1):
                    one = found(replace(member, workers=n), at)
                    ranks = n if one and (one.devices[0] is not None) == on_gpus else ranks
            room.append(min(ranks, (member.workers + 1) // 2) if spread else ranks)
        best = sorted(range(len(room)), key=lambda i: -room[i])[: 2 if spread else None]
        if sum(room[i] for i in best) < member.workers:
            return None
        names, taken = list[str](), list[str | None]()
        for i in best:
            ranks = min(room[i], member.workers - len(names))
            if ranks:
                part = found(replace(member, workers=ranks), in_order[i])
                assert part is not None
                names += [part.node] * ranks
                taken += part.devices
        return Placement(member, names[0], tuple(taken), tuple(names))

    def choose(member: Identity) -> Placement | None:
        spans = member.workers > 1 and bool(member.span_nodes)
        insists = len(kinds(member)) > 1 and spans
        on_one = [one for at in in_order if (one := found(member, at)) is not None]
        if kinds(member) == [False] and devices != "cpu":  # the cores beside GPUs are for those that use them
            on_one.sort(key=lambda one: has_gpus[one.node])
        first = [one for one in on_one if not insists or one.devices[0] is not None or not has_gpus[one.node]]
        spread = spans and member.span_nodes == "spread"
        tries = [across(member, kind, spread=True) for kind in kinds(member) if spread]
        tries += first[:1]
        tries += [across(member, True)] if spans and True in kinds(member) else []
        tries += on_one[:1]
        tries += [across(member, False)] if spans and False in kinds(member) else []
        return next((one for one in tries if one is not None), None)

    def size(member: Identity) -> tuple[float, ...]:
        asked = (member.gpus_per_worker, member.cpus_per_worker, member.memory_gb or 0.0)
        return tuple(round(one * member.workers, 9) for one in asked)

    for member in sorted(waiting, key=size, reverse=True):
        placed += [one for one in [choose(member)] if one is not None]
    return [p for member in waiting for p in placed if p.identity is member]


#: As they are recorded.
SELECTIONS: list[dict[str, Any]] = [{"rack": "1"}, {"rack": "!1"}, {"gpu_memory_gb": 24.0}]
SELECTIONS += [{"ray.io/accelerator-type": "B"}]
SELECTIONS += [{"ray.io/accelerator-type": "in(A,B)", "gpu_memory_gb": 40.0, "rack": "1"}]


def allow(asked: dict[str, Any]) -> dict[str, Any]:
    """What may be declared: whoever takes no GPU selects none."""
    is_on_cpu = asked["gpus_per_worker"] == 0 and "gpus_per_worker" not in asked["auto"]
    return asked | ({"nodes": None} if is_on_cpu else {})


autos = st.lists(st.sampled_from(["cpus_per_worker", "gpus_per_worker", "memory_gb"]), unique=True)
members = st.lists(
    st.builds(
        dict,
        workers=st.sampled_from([1, 1, 1, 2, 3]),
        cpus_per_worker=st.sampled_from([0.1, 0.25, 1 / 3, 1.0, 2.0]),
        gpus_per_worker=st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]),
        memory_gb=st.sampled_from([None, None, 1.0, 5.0]),
        auto=autos,
        span_nodes=st.sampled_from([False, True, "spread"]),
        nodes=st.sampled_from([*[None] * 6, *SELECTIONS]),
    ),
    max_size=16,
).map(lambda many: [identity(i, **allow(asked)) for i, asked in enumerate(many)])
free_of_others, exclusive = st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.3, 0.0]), st.sampled_from([*[False] * 3, True])
instance_of = st.sampled_from([None, None, "x", "y"])
gpus = st.lists(st.tuples(st.sampled_from(KINDS), free_of_others, exclusive, instance_of), max_size=4)


def with_gpus(at: Node, offers: Sequence[tuple[str, float, bool, str | None]], rack: str | None = None) -> Node:
    """A node with GPUs, each with its model, the part that is free, its compute mode and its physical GPU."""
    models, free, exclusive, parents = (tuple(each) for each in zip(*offers, strict=True)) if offers else [()] * 4
    known = tuple(str(i) if parent is None else parent for i, parent in enumerate(parents))
    sizes = tuple({"A": 15.0, "B": 39.4}[model] for model in models)
    found = replace(at, gpus=models, gpu_ids=(), gpu_free=free, gpu_exclusive=exclusive, gpu_parents=known)
    return replace(found, gpu_memory_gb=sizes, labels={} if rack is None else {"rack": rack})


offered = st.tuples(
    st.sampled_from([0, 0.5, 1, 2, 8]), gpus, st.sampled_from([4, 16]), st.sampled_from([None, None, 1, 3])
)
racks = st.sampled_from([None, None, "1", "2"])


def make_node(i: int, offer: Any, rack: str | None) -> Node:
    cpus, offers, memory_gb, places = offer
    return with_gpus(node(f"n{i}", cpus, (), memory_gb, places), offers, rack)


clusters = st.lists(st.tuples(offered, racks), max_size=4).map(
    lambda many: [make_node(i, *each) for i, each in enumerate(many)]
)
modes = st.sampled_from(["auto", "auto", "cpu", "cuda"])
lesser = st.dictionaries(st.sampled_from(["n0", "n1"]), st.integers(1, 3))


@given(members, members, clusters, modes, lesser)
@examples(100)
def test_it_places_as_the_definition_does(
    first: list[Identity], second: list[Identity], nodes: list[Node], devices: str, limits: dict[str, int]
) -> None:
    running = slowly(first, [], nodes, devices, {})
    assert pack(first, [], nodes, devices) == running
    expected = slowly(second, running, nodes, devices, limits)
    assert pack(second, running, nodes, devices, limits) == expected


HALVES = [node(f"s{n}", cpus=8, gpus="A", memory_gb=64) for n in range(4)]
BIG, HALF = node("big", cpus=64, gpus="A" * 8, memory_gb=64), node("half", cpus=8, gpus="AAAA", memory_gb=64)
MIXED = [node("gpu", cpus=4, gpus="AA"), node("cpu", cpus=2)]
FOURS = [node(name, cpus=32, gpus="AAAA", memory_gb=64) for name in "ab"]
INSTANCES = replace(node(cpus=8, gpus="AAA"), gpu_ids=("m0", "m1", "g1"), gpu_parents=("g0", "g0", "g1"))
OTHERS_HOLD = replace(node(cpus=8, gpus="AA", memory_gb=64), gpu_free=(0.5, 0.0))
WIDE = {"workers": 8, "gpus_per_worker": 1.0}


SPREAD, GUESSED = WIDE | {"span_nodes": "spread"}, WIDE | {"auto": ["gpus_per_worker"]}
SELDOM: list[tuple[dict[str, Any], int, list[Node]]] = [({"workers": 6}, 1, MIXED)]
SELDOM += [({}, 7, nodes) for nodes in (MIXED, MIXED[::-1], [node(cpus=0.5)])]
SELDOM += [(SPREAD, 1, nodes) for nodes in ([BIG, *HALVES], [BIG, *HALVES, HALF], HALVES, [*HALVES, HALF])]
SELDOM += [(GUESSED, 1, nodes) for nodes in (FOURS, FOURS[:1], [*FOURS, node("c", cpus=32)])]
SELDOM += [({"workers": n, "gpus_per_worker": 1.0}, 4 - n, [INSTANCES]) for n in (1, 2, 3)]
SELDOM += [({"gpus_per_worker": share}, 9, [OTHERS_HOLD]) for share in (0.25, 0.6)]
SELDOM += [({"gpus_per_worker": 0.1, "auto": ["gpus_per_worker"]}, 9, [OTHERS_HOLD])]
SELDOM += [({"auto": ["cpus_per_worker"]}, 2, [node(cpus=cpus)]) for cpus in (0, 0.5)]


@pytest.mark.parametrize(("asked", "many", "nodes"), SELDOM)
@pytest.mark.parametrize("devices", ["auto", "cuda"])
def test_so_it_does_in_rare_cases(asked: dict[str, Any], many: int, nodes: list[Node], devices: str) -> None:
    waiting = [identity(i, **asked) for i in range(many)]
    assert pack(waiting, [], nodes, devices) == slowly(waiting, [], nodes, devices, {})


@given(members, clusters, modes, st.integers(0, 2**16))
@examples(60)
def test_one_kept_is_as_one_made_anew(waiting: list[Identity], nodes: list[Node], devices: str, seed: int) -> None:
    rng = random.Random(seed)
    kept, running = FreeCapacity(nodes, devices), list[Placement]()
    for _ in range(4):
        some = [one for one in waiting if one.member not in {p.member for p in running} and rng.random() < 0.7]
        options = {"nodes": nodes, "devices": devices, "waiting": some, "running": tuple(running)}
        for streaming in (False, True):
            cluster = ClusterSnapshot(**options, joins_late=streaming)  # type: ignore[arg-type]
            with_kept = ClusterSnapshot(**options, joins_late=streaming, free=kept)  # type: ignore[arg-type]
            assert decide_starts(with_kept) == decide_starts(cluster)
            assert count_placeable(identity(99), 5, with_kept) == count_placeable(identity(99), 5, cluster)
        new = FreeCapacity(nodes, devices, running).place(some)
        assert kept.place(some) == new
        running += new
        for gone in [p for p in running if rng.random() < 0.5]:
            running.remove(gone)
            kept.release(gone)
    kept.release(*running)
    assert kept.place(waiting) == pack(waiting, [], nodes, devices), "nothing is left behind"
    assert not +(kept.held_needs - FreeCapacity(nodes, devices, pack(waiting, [], nodes, devices)).held_needs)


@given(members, clusters, modes)
def test_a_refusal_is_for_those_that_fit_nowhere(waiting: list[Identity], nodes: list[Node], devices: str) -> None:
    for one in waiting:
        reason = explain_unplaceable(one, nodes, devices)
        assert (reason is None) == bool(slowly([one], [], nodes, devices, {}))
        assert reason is None or reason.startswith(one.member)


def test_ten_thousand_members_are_planned_on_eight_thousand_devices_and_one_event_is_answered() -> None:
    """A bound with room for a busy machine: 0.06 s and 3 ms of CPU time were measured, 31 s the slow way."""
    rng = random.Random(0)

    def some(first: int, count: int) -> list[Identity]:
        options = [{"gpus_per_worker": g, "cpus_per_worker": c} for g in (0.25, 0.5, 1.0) for c in (0.25, 1.0)]
        return [identity(first + i, memory_gb=rng.choice([1.0, 4.0]), **rng.choice(options)) for i in range(count)]

    nodes = [node(f"n{i}", 64, ("A",) * 8, 512) for i in range(1000)]
    waiting = some(0, 10_000)
    began = time.process_time()
    running = pack(waiting, [], nodes)
    assert time.process_time() - began < 1.0
    running += pack(some(10_000, 20_000), running, nodes)
    assert len(running) >= 8_000
    kept, waiting, took = FreeCapacity(nodes, "auto", running), some(30_000, 2_000), []
    for gone in rng.sample(running, 5):
        rest = tuple(each for each in running if each is not gone)
        began = time.process_time()
        kept.release(gone)
        starts = decide_starts(
            ClusterSnapshot(nodes=nodes, waiting=waiting, running=rest, joins_late=True, free=kept)
        )
        took.append(time.process_time() - began)
        assert starts
        kept.reserve(gone)
    assert sorted(took)[2] < 0.05


def test_a_gpu_keeps_its_members_when_others_of_its_node_come_and_go() -> None:
    before = replace(node(cpus=8, gpus="AAA"), gpu_ids=("GPU-a", "GPU-b", "GPU-c"))
    placed = pack([identity(i, gpus_per_worker=0.5, cpus_per_worker=0.1) for i in range(3)], [], [before])
    [last] = [placement for placement in placed if placement.devices == ("GPU-c",)]
    after = replace(before, gpus=("A", "A"), gpu_ids=("GPU-c", "GPU-d"))
    again = [identity(i, gpus_per_worker=0.5, cpus_per_worker=0.1) for i in range(9, 19)]
    devices = Counter(p.devices[0] for p in pack(again, [last], [after]))
    assert devices == {"GPU-c": 1, "GPU-d": 2}
