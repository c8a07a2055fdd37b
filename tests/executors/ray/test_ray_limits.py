"""What a run takes of a cluster at most, and what it leaves to others: its leases, on a model of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray_model import Run, World, make_member, replace_ray

from ensemble.executors.ray.sharing import Shared


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield from replace_ray(monkeypatch)


def count(run: Run) -> tuple[int, float]:
    leases = [lease for held in run.list_held().values() for lease in held]
    return sum(lease.bundle.gpus for lease in leases), sum(lease.cpus for lease in leases)


def turn(world: World, runs: Sequence[Run], seconds: int, *, pauses: bool = False) -> None:
    for _ in range(seconds):
        world.cluster.schedule()
        for run in runs:
            run.renew()
            if pauses:
                run.make_way()
            run.place()
        world.cluster.clock += 1.0


@pytest.mark.parametrize(
    ("options", "limits", "most"),
    [
        ({}, {"gpus": 2}, (2, 2.0)),
        ({}, {"cpus": 3.0}, (3, 3.0)),
        ({"gpus_per_worker": 0.5}, {"gpus": 1}, (1, 2.0)),
        ({"gpus_per_worker": 0.0, "cpus_per_worker": 2.0}, {"cpus": 5.0}, (0, 4.0)),
        ({"workers": 2}, {"gpus": 3}, (2, 2.0)),
        ({"auto": ["cpus_per_worker", "workers"], "gpus_per_worker": 0.0}, {"cpus": 3.0}, (0, 3.0)),
        ({"auto": ["cpus_per_worker"], "gpus_per_worker": 0.0}, {"cpus": 0.5}, (0, 0.5)),
        ({"auto": ["cpus_per_worker"], "cpus_per_worker": 3.0}, {"cpus": 2.0}, (1, 2.0)),
    ],
)
def test_a_run_holds_no_more_than_its_limits_and_all_its_members_have_their_turn(
    world: World, options: dict[str, Any], limits: dict[str, float], most: tuple[int, float]
) -> None:
    cluster = world.make([(8.0, 64.0, 4), (8.0, 64.0, 4)])
    members = [make_member(number, **options) for number in range(6)]
    run = Run(cluster, "limited", "auto", members, Shared(limits=limits))
    seen = set()
    for _ in range(60):
        turn(world, [run], 1)
        seen.add(count(run))
        if run.running and count(run) == most:
            run.end(run.running[0])
    assert max(seen) == most and all(gpus <= most[0] and cpus <= most[1] for gpus, cpus in seen), seen
    while not run.is_done and run.running:
        run.end(run.running[0])
        turn(world, [run], 12)
    assert run.is_done


def share(world: World, hosts: Sequence[tuple[float, float, int]], *shared: Shared, **options: Any) -> list[Run]:
    """Two runs of eight members each; the second one comes when the first has all of the cluster."""
    cluster = world.make(hosts)
    runs = [
        Run(cluster, each.run, "auto", [make_member(number, **options) for number in range(8)], each)
        for each in shared
    ]
    turn(world, runs[:1], 20)
    runs[0].others, runs[1].others = [runs[1]], [runs[0]]
    turn(world, runs, 10)
    return runs


@pytest.mark.parametrize(("weight", "even"), [(1.0, (2, 2)), (3.0, (1, 3))])
def test_a_run_gives_back_when_members_end_until_shares_are_as_their_weights(
    world: World, weight: float, even: tuple[int, int]
) -> None:
    first, second = share(world, [(8.0, 64.0, 4)], Shared("a"), Shared("b", weight=weight))
    assert (count(first)[0], count(second)[0]) == (4, 0), "no member has ended yet"
    for _ in range(even[1]):
        first.end(first.running[0])
        turn(world, [first, second], 8)
    assert (count(first)[0], count(second)[0]) == even
    assert (len(first.running), len(second.running)) == even
    first.end(first.running[0])
    turn(world, [first, second], 8)
    assert (len(first.running), len(second.running)) == even, "what it may keep goes to its next member"


def test_cores_of_one_node_are_shared(world: World) -> None:
    cores = {"gpus_per_worker": 0.0}
    first, second = share(world, [(4.0, 64.0, 0)], Shared("a"), Shared("b"), **cores)
    for _ in range(2):
        first.end(first.running[-1])
        turn(world, [first, second], 8)
    assert (len(first.running), len(second.running)) == (2, 2)


def test_what_a_waiting_member_fits_in_and_none_uses_is_given_back_and_nobody_is_paused_for_it(
    world: World,
) -> None:
    cluster = world.make([(8.0, 64.0, 2)])
    first, second = (
        Run(cluster, name, "auto", [make_member(number) for number in range(count)], Shared(name, priority=n))
        for n, (name, count) in enumerate((("a", 2), ("b", 1)))
    )
    turn(world, [first], 5)
    assert len(first.running) == 2
    first.waiting.append(first.running[1].identity)  # which its run does not start now
    first.end(first.running[1])
    for _ in range(30):
        cluster.schedule()
        first.renew()
        cluster.clock += 1.0
    assert count(first)[0] == 2, "it can still use both"
    first.others, second.others = [second], [first]
    for _ in range(8):
        cluster.schedule()
        first.renew()
        assert first.manager.choose_pauses(first.list_nodes().items()) == []
        assert count(first)[0] == 1 or not first.manager.do_others_wait, "else its member would be started now"
        turn(world, [second], 1)
    assert (count(first)[0], len(second.running)) == (1, 1)
    second.waiting.append(make_member(7))
    second.say_demand()
    turn(world, [second, first], 8)
    assert first.manager.do_others_wait


def test_members_are_paused_at_once_for_a_higher_priority_and_once_only(world: World) -> None:
    first, second = share(world, [(8.0, 64.0, 2)], Shared("a"), Shared("b", priority=1), workers=2)
    by_name = first.list_nodes()
    pauses = first.manager.choose_pauses(by_name.items())
    assert [(pause.members, pause.to) for pause in pauses] == [([first.running[0].member], "b")]
    turn(world, [first, second], 3)
    assert first.manager.choose_pauses(by_name.items()) == []
    paused = first.running[0]
    first.waiting.append(paused.identity)
    first.end(paused)
    turn(world, [first, second], 8)
    assert not first.running and len(second.running) == 1


def test_room_is_made_on_nodes_that_the_run_can_use_and_it_is_asked_for_nowhere_else(world: World) -> None:
    cluster = world.make([(4.0, 64.0, 2), (4.0, 64.0, 2)])
    first, second = (
        Run(cluster, name, "auto", [make_member(number) for number in range(count)], Shared(name, quantum_s=20.0))
        for name, count in (("a", 8), ("b", 4))
    )
    second.unusable = {"node-0"}
    turn(world, [first], 20)
    assert len(first.running) == 4
    first.others, second.others = [second], [first]
    turn(world, [first, second], 60, pauses=True)
    held = [{name: len(leases) for name, leases in run.list_held().items()} for run in (first, second)]
    assert held == [{"node-0": 2}, {"node-1": 2}]
    assert (len(first.running), len(second.running), second.lost) == (2, 2, 0)


def test_no_second_member_is_paused_while_the_place_of_the_first_changes_hands(world: World) -> None:
    cluster = world.make([(8.0, 64.0, 4)])
    first = Run(cluster, "a", "auto", [make_member(number) for number in range(4)], Shared("a"))
    second = Run(cluster, "b", "auto", [make_member()], Shared("b", priority=1))
    turn(world, [first], 20)
    first.others, second.others = [second], [first]
    while sum(map(len, first.list_held().values())) == 4:
        row = second.manager.make_claim()
        turn(world, [first, second], 1, pauses=True)
    assert row.wants and len(first.running) == 3
    turn(world, [second], 1)
    assert len(second.running) == 1
    known = SimpleNamespace(make_claim=lambda: row)  # which was sent before
    first.others = [SimpleNamespace(manager=known)]  # type: ignore[list-item]
    turn(world, [first], 1, pauses=True)
    assert len(first.running) == 3


def test_a_node_with_a_feeder_is_given_back_to_a_run_that_waits_for_it(world: World) -> None:
    first, second = share(world, [(8.0, 64.0, 2)], Shared("a"), Shared("b", priority=1))
    first.waiting, first.running = first.waiting[:1], []
    first.say_demand()
    for _ in range(5):
        world.cluster.clock += 5.0
        first.manager.share(first.manager.make_claim(), [second.manager.make_claim()], {})
        first.manager.release_unused(list(first.list_nodes().items()), feeding=["node-0"])
    assert count(first)[0] == 0, "its feeder goes on while members are paused"


def test_small_members_that_come_and_go_do_not_put_off_what_a_large_one_waits_for(world: World) -> None:
    cluster = world.make([(16.0, 64.0, 8)])
    first = Run(cluster, "a", "auto", [make_member(number) for number in range(8)], Shared("a", quantum_s=60.0))
    second = Run(cluster, "b", "auto", [], Shared("b", quantum_s=60.0))
    turn(world, [first], 20)
    first.end(first.running[-1])
    first.others, second.others = [second], [first]
    second.waiting = [make_member(8, workers=3)]
    for number in range(10, 18):
        second.waiting.append(make_member(number))
        second.say_demand()
        turn(world, [first, second], 8, pauses=True)
        for placement in [each for each in second.running if each.identity.workers == 1]:
            second.end(placement)
        turn(world, [first, second], 14, pauses=True)
    assert any(each.identity.workers == 3 for each in second.running)
