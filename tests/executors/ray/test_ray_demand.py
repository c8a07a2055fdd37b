"""What runs ask of a shared cluster, on a model of Ray's rules: members get places, nothing is held in vain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.property_examples import examples
from ray_model import Cluster, Group, Piece, Run, World, fits_alone, list_pending, make_member, resolve

from ensemble.executors.ray.demand import MOST_PENDING, plan_requests
from ensemble.executors.ray.lease_manager import KEPT_S, REST_S
from ensemble.schedule.needs import Placement
from ensemble.schedule.packing import pack
from ensemble.spec import Identity

Hosts = list[tuple[float, float, int]]  # cores, GiB, GPUs

KINDS = st.tuples(
    st.sampled_from([1, 1, 1, 2, 3, 4]),  # workers
    st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 1.0, 1.5, 3.2]),  # cores of each
    st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]),  # of a GPU
    st.sampled_from([None, None, 0.1, 1.7, 10.0]),  # GiB
    st.sets(st.sampled_from(["cpus_per_worker", "gpus_per_worker"])),  # guessed
    st.booleans(),  # whether its ranks may be on several nodes
)
CORES, GIBS, GPUS = ([0.5, 1.0, 2.0, 4.0, 7.0, 16.0], [3.9, 16.0, 64.0], [0, 0, 1, 2, 3, 4, 8])
HOSTS = st.lists(st.tuples(*map(st.sampled_from, (CORES, GIBS, GPUS))), min_size=1, max_size=4)
DEVICES = st.sampled_from(["auto", "cpu", "cuda"])
MEMBERS = st.lists(st.tuples(KINDS, st.integers(1, 6)), min_size=1, max_size=4)


def make_members(kinds: Sequence[tuple[Any, int]], first: int = 0) -> list[Identity]:
    found: list[Identity] = []
    for (workers, cpus, share, memory, guessed, spans), count in kinds:
        asked = {"workers": workers, "cpus_per_worker": cpus, "gpus_per_worker": share, "memory_gb": memory}
        asked["span_nodes"] = spans
        auto = sorted(guessed)
        found += [make_member(first + len(found) + n, **asked, auto=auto) for n in range(count)]
    return found


def choose(members: Sequence[Identity], cluster: Cluster, devices: str) -> list[Identity]:
    """Those that some node could hold; the controller gives up the others."""
    return [one for one in members if fits_alone(one, cluster, devices)]


@examples(30)
@given(hosts=HOSTS, kinds=MEMBERS, devices=DEVICES)
def test_on_an_empty_cluster_all_members_get_places_at_once_if_it_can_hold_them(
    world: World, hosts: Hosts, kinds: Any, devices: str
) -> None:
    cluster = world.make(hosts)
    members = choose(make_members(kinds), cluster, devices)
    nodes = [offer.node for offer in cluster.list_offers(on_gpus=devices != "cpu")]
    places = pack(members, [], nodes, resolve(devices, nodes))
    assume(members and len(places) == len(members))
    assume(not any(place.nodes for place in places))  # such members take whole GPUs
    on_cpu = [place.identity for place in places if place.devices[0] is None and devices != "cpu"]
    assume(len(on_cpu) in (0, len(places)))
    assume(not any(pack([one], [], nodes, "cuda") for one in on_cpu))  # such members wait for GPUs
    # Amounts are exact for one order of nodes: cores beside GPUs are asked for last, and packed into as they come.
    kinds = {bool(node.gpus) for node in nodes for place in places if place.count_ranks(node.name)}
    assume(not on_cpu or len(kinds) == 1)
    run = Run(cluster, "run", devices, members)
    run.renew()
    cluster.schedule()
    run.renew()
    run.place()
    assert not run.waiting
    run.close()
    assert not cluster.groups


@examples(60)
@given(hosts=HOSTS, kinds=MEMBERS, devices=DEVICES, taken=st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_each_request_fits_on_some_node_when_nobody_else_uses_it(
    world: World, hosts: Hosts, kinds: Any, devices: str, taken: list[int]
) -> None:
    total = world.make(hosts).total.items()
    jobs = [
        Piece(h.cpus * part // 4, h.memory * part // 4, len(h.gpus) * part // 4, name)
        for (name, h), part in zip(total, taken, strict=False)
    ]
    cluster, _ = share(world, hosts, *jobs)
    members = choose(make_members(kinds), cluster, devices)
    assume(members)
    run = Run(cluster, "run", devices, members)
    run.renew()
    assert all(cluster.could_ever_place(group) for group in cluster.groups)
    assert list_pending(run)


def turn(cluster: Cluster, runs: Sequence[Run], chance: random.Random) -> None:
    """A second passes."""
    cluster.clock += 1.0
    cluster.schedule(chance.choice)
    for run in chance.sample(runs, len(runs)):
        run.renew()
        run.place()


@examples(5)
@given(
    hosts=HOSTS, kinds=st.tuples(MEMBERS, MEMBERS), devices=st.tuples(DEVICES, DEVICES), seed=st.integers(0, 2**32)
)
def test_all_members_of_two_runs_train_on_a_cluster_that_others_use_too(
    world: World, hosts: Hosts, kinds: Any, devices: tuple[str, str], seed: int
) -> None:
    cluster, chance = world.make(hosts), random.Random(seed)
    members = [choose(make_members(kinds[n], first=100 * n), cluster, devices[n]) for n in range(2)]
    runs = [Run(cluster, f"run-{n}", devices[n], members[n]) for n in range(2)]
    for time in range(500 + 100 * sum(map(len, members))):
        others = [group for group in cluster.groups if group.owner == "other"]
        if others and (time >= 30 or chance.random() < 0.2):
            cluster.groups.remove(chance.choice(others))
        elif time < 30 and chance.random() < 0.2:  # what runs do in a second may have been done in part
            free = cluster.free(name := chance.choice(list(cluster.total)))
            piece = Piece(free.cpus // 2, free.memory // 3, chance.randint(0, len(free.gpus)), name)
            cluster.groups.append(Group("other", [piece]))
            chance.choice([run.renew for run in runs] + [run.place for run in runs])()
        turn(cluster, runs, chance)
        running = [run for run in runs if run.running]
        if running and chance.random() < (0.3 if time < 30 else 0.05):
            run = chance.choice(running)
            run.end(chance.choice(run.running))
    assert all(run.is_done for run in runs), "everybody has trained"
    for _ in range(round(KEPT_S) + 40):
        turn(cluster, runs, chance)
    assert not cluster.groups, "what nobody uses is given back"


def share(world: World, hosts: Hosts, *taken: Piece) -> tuple[Cluster, list[Group]]:
    """A cluster of which others hold these pieces."""
    cluster, others = world.make(hosts), [Group("other", [piece]) for piece in taken]
    cluster.groups += others
    cluster.schedule()
    return cluster, others


def begin(
    world: World, hosts: Hosts, members: Sequence[Identity], devices: str = "auto", others: Sequence[Piece] = ()
) -> tuple[Run, list[Group]]:
    """A run that has got what a cluster gives it, and the jobs of others that hold these pieces there."""
    cluster, jobs = share(world, hosts, *others)
    run = Run(cluster, "run", devices, members)
    settle(run)
    return run, jobs


def start(world: World, hosts: Hosts, members: Sequence[Identity], devices: str = "auto") -> Run:
    return begin(world, hosts, members, devices)[0]


def settle(run: Run) -> None:
    for _ in range(3):
        run.renew()
        run.cluster.schedule()
        run.renew()
        run.place()


def pass_seconds(run: Run, seconds: float, *, places: bool = True) -> None:
    for _ in range(round(seconds)):
        run.cluster.clock += 1.0
        if places:
            settle(run)
        else:
            run.renew()
            run.cluster.schedule()


def wait(run: Run, *members: Identity) -> None:
    run.waiting += members
    run.say_demand()


def list_asked(run: Run) -> list[tuple[int, int, str | None]]:
    return [(piece.gpus, piece.cpus, piece.pinned) for group in list_pending(run) for piece in group.pieces]


def add_node(world: World, run: Run, name: str, host: tuple[float, float, int]) -> None:
    run.cluster.total[name] = world.make([host]).total["node-0"]
    world.cluster = run.cluster


def test_thirds_of_a_core_and_of_a_gpu_fit_on_one(world: World) -> None:
    third = {"cpus_per_worker": 1 / 3}
    assert not start(
        world, [(1.0, 4.0, 1)], [make_member(n, gpus_per_worker=1 / 3, **third) for n in range(3)]
    ).waiting
    assert not start(world, [(1.0, 4.0, 3)], [make_member(n, memory_gb=4 / 3, **third) for n in range(3)]).waiting
    assert not start(world, [(1.0, 4.0, 3)], [make_member(workers=3, **third)]).waiting


def test_members_that_declared_no_share_are_not_planned_on_a_gpu_that_others_hold(world: World) -> None:
    guessed = make_member(gpus_per_worker=0.1, auto=["gpus_per_worker"])
    run, _ = begin(world, [(4.0, 16.0, 1), (4.0, 16.0, 1)], [guessed], others=[Piece(0, 0, 1, "node-0")])
    assert [placement.devices for placement in run.running] == [("GPU-1-0",)]


def make_shares(shares: Sequence[float], cpus: float = 0.5) -> list[Identity]:
    return [make_member(n, gpus_per_worker=share, cpus_per_worker=cpus) for n, share in enumerate(shares)]


def test_members_of_all_shares_get_cores_and_gpus_beside_each_other(world: World) -> None:
    run = start(world, [(4.0, 16.0, 2), (4.0, 16.0, 2)], make_shares([0.0, 0.25, 0.5, 1.0] * 3))
    pass_seconds(run, 5)
    kinds = [(one.identity.gpus_per_worker, one.devices[0] is None) for one in run.running]
    assert sorted(kinds) == [(0.0, True)] * 3 + [(0.5, False)] * 2 + [(1.0, False)] * 3
    assert list_asked(run) and all(gpus for gpus, *_ in list_asked(run)), "only GPUs are waited for"
    while run.running:
        run.end(run.running[0])
        pass_seconds(run, 1)
    assert run.is_done


def test_a_share_of_none_asks_for_cores_although_all_gpus_are_held(world: World) -> None:
    members = make_shares([0.0] * 4 + [1.0])
    run, _ = begin(world, [(12.0, 16.0, 1)], members, others=[Piece(10_000, 0, 1, "node-0")])
    assert [one.devices for one in run.running] == [(None,)] * 4
    assert [one.member for one in run.waiting] == ["member-4"]


def test_a_declared_share_waits_for_a_gpu_after_the_last_one_is_lost_and_asks_for_one(world: World) -> None:
    run = start(world, [(4.0, 16.0, 2), (8.0, 16.0, 0)], make_shares([0.5] * 4 + [0.0] * 2))
    assert {one.devices[0] is None for one in run.running if one.identity.gpus_per_worker} == {False}
    lost = [one.identity for one in run.running if one.node == "node-0"]
    del run.cluster.total["node-0"]
    run.manager.lose("node-0")
    run.running = [one for one in run.running if one.node != "node-0"]
    wait(run, *lost)
    pass_seconds(run, 2 * KEPT_S)
    assert sorted(one.member for one in run.waiting) == [f"member-{n}" for n in range(4)]
    assert {one.identity.gpus_per_worker for one in run.running} == {0.0}
    assert list_asked(run) == [(1, 10_000, None)] * 2, "as was lost"
    add_node(world, run, "node-2", (4.0, 16.0, 2))
    pass_seconds(run, 10)
    assert not run.waiting and {one.node for one in run.running if one.identity.gpus_per_worker} == {"node-2"}


def test_a_cluster_without_gpus_is_asked_for_one_and_for_as_many_as_are_shared_when_it_has_come(
    world: World,
) -> None:
    run = start(world, [(4.0, 16.0, 0)], make_shares([0.25] * 8), "cuda")
    assert [(gpus, pinned) for gpus, _, pinned in list_asked(run)] == [(1, None)]
    add_node(world, run, "node-1", (16.0, 64.0, 2))
    pass_seconds(run, 10)
    used = {one.devices for one in run.running}
    assert len(used) == 2 and len(run.running) == 5 and {one.node for one in run.running} == {"node-1"}
    assert [gpus for gpus, *_ in list_asked(run)] == [1], "for the other three"


def test_a_node_where_nothing_starts_keeps_no_gpu_and_is_tried_again(world: World) -> None:
    cluster = world.make([(4.0, 16.0, 2), (4.0, 16.0, 1)])
    cluster.full = {"node-0"}
    run = Run(cluster, "run", "auto", make_shares([1.0] * 3))
    pass_seconds(run, 20)
    assert [one.node for one in run.running] == ["node-1"]
    assert len(cluster.free("node-0").gpus) == 2, "they are given back"
    assert {group.selector["ray.io/node-id"] for group in list_pending(run)} == {"!in(node-0)"}
    cluster.full = set()
    pass_seconds(run, REST_S)
    assert sorted(one.node for one in run.running) == ["node-0", "node-0", "node-1"]


def test_a_node_that_works_again_or_is_gone_is_not_held_to_be_bad(world: World) -> None:
    cluster = world.make([(4.0, 16.0, 1)])
    manager, offers = Run(cluster, "run", "auto", [make_member(0)]).manager, cluster.list_offers(on_gpus=True)
    manager.rest("node-0", REST_S)
    assert manager.is_resting("node-0")
    cluster.clock += REST_S
    assert not manager.is_resting("node-0")
    manager.rest("node-0", None)
    cluster.clock += 1000 * REST_S
    manager.set_offers(offers)
    assert manager.is_resting("node-0")
    manager.set_offers([])  # it is gone
    assert not manager.is_resting("node-0")


def test_a_run_gives_back_half_of_what_its_next_member_needs(world: World) -> None:
    run = start(world, [(4.0, 16.0, 2)], [make_member(0)])
    wait(run, make_member(1, workers=2))
    pass_seconds(run, 3)
    (held,) = run.manager.on_node("node-0")
    run.end(run.running[0])
    pass_seconds(run, 2 * KEPT_S)
    assert held not in run.manager.on_node("node-0")
    assert [placement.member for placement in run.running] == ["member-1"]


def test_what_nobody_uses_is_kept_for_a_while_and_what_a_member_uses_for_ever(world: World) -> None:
    run = start(world, [(4.0, 16.0, 2)], [make_member(0), make_member(1)])
    run.end(run.running[1])
    pass_seconds(run, KEPT_S - 1)
    assert len(run.manager.on_node("node-0")) == 2
    pass_seconds(run, 3)
    assert [lease.gpus for lease in run.manager.on_node("node-0")] == [run.running[0].devices]


def test_a_lease_of_a_broken_gpu_is_kept_while_members_wait_so_that_another_is_lent(world: World) -> None:
    run = start(world, [(4.0, 16.0, 2)], [make_member(0)], "cuda")
    other = run.cluster.submit("other", ([{"GPU": 1.0}], "node-0"))
    run.cluster.schedule()
    (held,) = run.manager.on_node("node-0")
    run.broken = set(held.gpus)
    run.waiting.append(make_member(1))
    run.end(run.running[0])
    pass_seconds(run, 2 * KEPT_S)
    assert run.waiting and held in run.manager.on_node("node-0")
    run.cluster.remove(other)
    pass_seconds(run, KEPT_S)
    assert [placement.devices for placement in run.running] == [("GPU-0-1",)]
    pass_seconds(run, 2 * KEPT_S)
    assert held not in run.manager.on_node("node-0"), "nobody waits"


def test_gpus_that_a_node_does_not_offer_are_held_for_no_member_once_its_agent_has_answered(world: World) -> None:
    run = start(world, [(4.0, 16.0, 1)], [make_member(0)], "cuda")
    (held,), (offer,) = run.manager.on_node("node-0"), run.cluster.list_offers(on_gpus=True)
    held.devices = ()
    assert run.manager._describe_held(offer).gpu_ids == held.gpus
    held.is_unusable = True
    assert run.manager._describe_held(offer).gpu_ids == ()


def test_what_became_ready_is_not_requested_again_before_members_are_placed(world: World) -> None:
    run = Run(world.make([(8.0, 32.0, 4)]), "run", "auto", [make_member(0), make_member(1)])
    pass_seconds(run, 30, places=False)  # agents take their time to start
    assert len(run.cluster.groups) == 2


def test_a_member_whose_width_is_to_be_chosen_gets_all_that_a_node_has_free(world: World) -> None:
    member = make_member(auto=["workers", "cpus_per_worker", "gpus_per_worker", "memory_gb"])
    run = start(world, [(2.0, 8.0, 1), (8.0, 32.0, 4), (2.0, 8.0, 0)], [])
    wait(run, member)
    pass_seconds(run, 30, places=False)  # it is measured, and not placed yet
    nodes = run.list_nodes()
    assert (nodes["node-1"].cpus, len(nodes["node-1"].gpus)) == (8.0, 4)
    run.place()
    pass_seconds(run, 2 * KEPT_S)
    assert sum(len(node.gpus) for node in run.list_nodes().values()) == 1, "the rest is given back"
    run = start(world, [(8.0, 32.0, 0)], [])
    wait(run, member)
    pass_seconds(run, 2, places=False)
    assert run.list_nodes()["node-0"].cpus == 8.0


TWICE = [(4.0, 16.0, 2), (4.0, 16.0, 2)]
WIDE = {"workers": 4, "cpus_per_worker": 0.5}


def test_ranks_get_gpus_of_several_nodes_together_or_none(world: World) -> None:
    run = start(world, TWICE, [make_member(**WIDE)])
    (placement,) = run.running
    assert placement.nodes == ("node-0", "node-0", "node-1", "node-1")
    (group,) = run.cluster.groups
    asked = [(piece.gpus, piece.cpus, piece.pinned) for piece in group.pieces]
    assert asked == [(2, 10_000, "node-0"), (2, 10_000, "node-1")]
    run.end(placement)
    pass_seconds(run, 2 * KEPT_S)
    assert not run.cluster.groups, "it is given back whole"

    run, [other] = begin(world, TWICE, [make_member(**WIDE)], others=[Piece(0, 0, 1, "node-1")])
    assert len(list_pending(run)) == 1
    assert [pinned for *_, pinned in list_asked(run)] == [None] * 4, "any nodes may meet it, also new ones"
    assert run.cluster.free("node-0").gpus == ("GPU-0-0", "GPU-0-1"), "nothing is held meanwhile"
    run.cluster.remove(other)
    pass_seconds(run, 10)
    assert len(run.running) == 1


def place_on_two(world: World, hosts: Hosts, member: Identity, devices: str) -> Placement:
    """Where a member is placed for which nodes were asked while others held all of them."""
    total = world.make(hosts).total
    others = [Piece(h.cpus, 0, len(h.gpus), name) for name, h in total.items()]
    run, jobs = begin(world, hosts, [member], devices, others)
    assert list_pending(run) and all(run.cluster.could_ever_place(group) for group in list_pending(run))
    for job in jobs:
        run.cluster.remove(job)
    pass_seconds(run, 5)
    (placement,) = run.running
    return placement


def test_ranks_whose_cores_are_guessed_ask_for_what_nodes_have_and_use_it(world: World) -> None:
    small = make_member(workers=2, cpus_per_worker=1.0, auto=["cpus_per_worker", "gpus_per_worker"])
    hosts = [(0.5, 3.9, 0), (0.5, 3.9, 0), (0.5, 3.9, 1)]
    assert all(fits_alone(small, world.make(hosts), devices) for devices in ("auto", "cpu"))
    assert place_on_two(world, hosts, small, "cpu")
    (placed,) = start(world, hosts, [small]).running
    assert placed.devices == (None, None), "there is one GPU, and both nodes without one hold a rank"
    guess = make_member(workers=8, cpus_per_worker=1.05, gpus_per_worker=0.0, auto=["cpus_per_worker"])
    placed = place_on_two(world, [(4.0, 16.0, 0), (4.0, 16.0, 0)], guess, "auto")
    assert sorted(map(len, placed.ranks_by_node.values())) == [4, 4]
    on_gpus = make_member(workers=8, cpus_per_worker=1.05, auto=["cpus_per_worker", "gpus_per_worker"])
    placed = place_on_two(world, [(32.0, 64.0, 4), (32.0, 64.0, 4)], on_gpus, "auto")
    assert None not in placed.devices and len(placed.ranks_by_node) == 2


def test_what_is_left_of_a_gang_is_held_while_members_use_it_and_then_given_back(world: World) -> None:
    run = start(world, TWICE, [make_member(**WIDE)])
    run.waiting = [make_member(n, cpus_per_worker=0.5) for n in range(1, 5)]
    run.end(run.running[0])
    run.place()
    assert [placement.node for placement in run.running] == ["node-0", "node-0", "node-1", "node-1"]
    run.manager.lose("node-0")
    run.running = run.running[2:]
    run.say_demand()
    other = run.cluster.submit("other", ([{"GPU": 1.0}], "node-1"))
    pass_seconds(run, 3 * KEPT_S)
    assert list(run.list_held()) == ["node-1"] and not other.is_placed, "members train there"
    for placement in list(run.running):
        run.end(placement)
    pass_seconds(run, KEPT_S + 2)
    assert not run.list_held() and run.cluster.groups == [other] and other.is_placed


def test_a_gang_is_kept_until_the_agents_of_all_its_nodes_have_answered(world: World) -> None:
    run = start(world, TWICE, [make_member(**WIDE)])
    run.end(run.running[0])
    nodes = list(run.list_nodes().items())
    run.cluster.clock += 5 * KEPT_S
    assert run.manager.release_unused(nodes[:1]) == [] and run.cluster.groups
    assert run.manager.release_unused(nodes) == [], "a member is placed there once all is known"
    run.cluster.clock += KEPT_S
    assert set(run.manager.release_unused(nodes)) == {"node-0", "node-1"} and not run.cluster.groups


def test_many_wide_members_that_wait_do_not_hide_narrow_ones(world: World) -> None:
    taken = Piece(0, 0, 4, "node-0"), Piece(0, 0, 2, "node-1")
    run, _ = begin(world, [(64.0, 256.0, 4), (8.0, 32.0, 2)], [], others=taken)
    members = [make_member(n, workers=4 if n < 100 else 1) for n in range(200)]
    planned = plan_requests(members, run.cluster.list_offers(on_gpus=True), "auto")
    assert {request.bundle.gpus for request in planned} == {1, 4} and sum(planned.values()) == MOST_PENDING


def count(run: Run) -> tuple[int, float]:
    leases = [lease for held in run.list_held().values() for lease in held]
    return sum(lease.bundle.gpus for lease in leases), sum(lease.cpus for lease in leases)


LIMITS: list[tuple[dict[str, Any], dict[str, float], tuple[int, float]]] = [
    ({}, {"gpus": 2}, (2, 2.0)), ({}, {"cpus": 3.0}, (3, 3.0)), ({"workers": 2}, {"gpus": 3}, (2, 2.0)),
    ({"gpus_per_worker": 0.5}, {"gpus": 1}, (1, 2.0)),
    ({"gpus_per_worker": 0.0, "cpus_per_worker": 2.0}, {"cpus": 5.0}, (0, 4.0)),
    ({"auto": ["cpus_per_worker", "workers"], "gpus_per_worker": 0.0}, {"cpus": 3.0}, (0, 3.0)),
    ({"auto": ["cpus_per_worker"], "gpus_per_worker": 0.0}, {"cpus": 0.5}, (0, 0.5)),
    ({"auto": ["cpus_per_worker"], "cpus_per_worker": 3.0}, {"cpus": 2.0}, (1, 2.0)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "limits", "most"), LIMITS)
def test_a_run_holds_no_more_than_its_limits_and_all_its_members_have_their_turn(
    world: World, options: dict[str, Any], limits: dict[str, float], most: tuple[int, float]
) -> None:
    cluster = world.make([(8.0, 64.0, 4), (8.0, 64.0, 4)])
    members = [make_member(number, **options) for number in range(6)]
    run = Run(cluster, "limited", "auto", members, limits)
    seen, chance = set(), random.Random(0)
    for _ in range(60):
        turn(cluster, [run], chance)
        seen.add(count(run))
        if run.running and count(run) == most:
            run.end(run.running[0])
    assert max(seen) == most and all(gpus <= most[0] and cpus <= most[1] for gpus, cpus in seen), seen
    while not run.is_done and run.running:
        run.end(run.running[0])
        for _ in range(12):
            turn(cluster, [run], chance)
    assert run.is_done
