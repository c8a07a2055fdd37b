"""The division of a cluster between runs: by itself, and over time with runs that come, end and die."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from ensemble.schedule.fairness import NOTHING, Amount, Holding, RunClaim, Want, divide, sum_amounts

STALE_S, SETTLE_S, STOP_S, MOST_AGE_S = 6.0, 3.0, 3.0, 3
Q_S = 30.0  # the quantum
# A change of hands: rows are old when it is owed and when it is taken, a debt and a return settle, a member writes
# its checkpoint, and each of these five ends at the next look, a second later.
P_S = 2 * MOST_AGE_S + 2 * SETTLE_S + STOP_S + 5.0


def gpus(count: float) -> Amount:
    return Amount(float(count), 4.0 * count, 8.0 * count)


def hold(run: str, *on: str, size: int = 1, **more: Any) -> tuple[Holding, ...]:
    return tuple(
        Holding(f"{run}{n}", {node: gpus(size)}, **{"held_s": 1000.0, **more}) for n, node in enumerate(on)
    )


def claim(run: str, *holdings: Holding, wants: Sequence[int] = (), waited_s: float = 1.0, **more: Any) -> RunClaim:
    asked = tuple(Want((gpus(size),)) for size in wants)
    return RunClaim(run=run, holdings=holdings, wants=asked, waited_s=waited_s, **more)


def owed(claims: Sequence[RunClaim], free: dict[str, int], quantum_s: float = Q_S) -> list[tuple[str, str, bool]]:
    found = divide(claims, {node: gpus(count) for node, count in free.items()}, quantum_s).debts
    return [(debt.run, debt.to, debt.is_pause_due) for debt in found]


def test_what_is_free_is_given_to_the_lowest_level_first_and_by_weight() -> None:
    a, b = claim("a", *hold("a", "x", "x"), wants=[1, 1]), claim("b", *hold("b", "x"), wants=[1, 1])
    grants = divide([a, b], {"x": gpus(1)}).grants
    assert [(grant.run, grant.nodes) for grant in grants] == [("b", ("x",))]
    heavy = claim("a", *hold("a", "x", "x"), wants=[1, 1], weight=3.0)
    assert [grant.run for grant in divide([heavy, b], {"x": gpus(1)}).grants] == ["a"]


def test_a_run_above_its_share_gives_back_when_a_member_ends_and_is_paused_for_it_after_a_quantum() -> None:
    a = claim("a", *hold("a", *"xxxxx"))
    assert owed([a, claim("b", wants=[1, 1, 1])], {"x": 0}) == [("a", "b", False)] * 2, "three and two is even"
    assert owed([a, claim("b", wants=[1], waited_s=Q_S)], {"x": 0}) == [("a", "b", True)]
    fresh = claim("a", *hold("a", *"xxxxx", held_s=Q_S / 2))
    assert owed([fresh, claim("b", wants=[1], waited_s=Q_S)], {"x": 0}) == [("a", "b", False)]
    resting = claim("a", *hold("a", *"xxxxx", is_pausable=False))
    assert owed([resting, claim("b", wants=[1], waited_s=Q_S)], {"x": 0}) == [("a", "b", False)]


def test_any_of_a_runs_leases_that_makes_room_will_do() -> None:
    found = divide([claim("a", *hold("a", *"xxy")), claim("b", wants=[1])], {"x": NOTHING, "y": NOTHING})
    (debt,) = found.debts
    assert {debt.holding, *debt.instead} == {"a0", "a1", "a2"}


def test_even_runs_leave_each_other_alone() -> None:
    a, b = claim("a", *hold("a", "x"), wants=[1], waited_s=900.0), claim("b", *hold("b", "x"), wants=[1])
    assert owed([a, b], {"x": 0}) == []


def test_of_an_odd_number_the_last_one_changes_hands_when_a_member_ends_after_a_quantum_and_for_no_pause() -> None:
    a = claim("a", *hold("a", "x", "x"), wants=[1])
    assert owed([a, claim("b", *hold("b", "x"), wants=[1])], {"x": 0}) == []
    assert owed([a, claim("b", *hold("b", "x"), wants=[1], waited_s=Q_S)], {"x": 0}) == [("a", "b", False)]


def test_a_run_that_is_given_small_ones_all_the_time_waits_for_a_large_one_as_long_as_it_does() -> None:
    a, large = claim("a", *hold("a", *"xxxxxx")), Want((gpus(2),), waited_s=Q_S)
    b = RunClaim(run="b", holdings=hold("b", "x"), wants=(large,), waited_s=1.0)
    assert owed([a, b], {"x": 0}) == [("a", "b", True)] * 2
    fresh = RunClaim(run="b", holdings=hold("b", "x"), wants=(Want((gpus(2),)),), waited_s=1.0)
    assert owed([a, fresh], {"x": 0}) == [("a", "b", False)] * 2


def test_a_gang_as_large_as_the_cluster_has_its_turn() -> None:
    small = [claim(name, *hold(name, "x"), wants=[1]) for name in "abcd"]
    assert owed([*small, claim("e", wants=[4])], {"x": 0}) == [(name, "e", False) for name in "abcd"]
    late = claim("e", wants=[4], waited_s=Q_S)
    assert owed([*small, late], {"x": 0}) == [(name, "e", True) for name in "abcd"]
    one_rests = [claim("a", *hold("a", "x", held_s=1.0)), *small[1:]]
    assert not any(due for _, _, due in owed([*one_rests, late], {"x": 0})), "nobody is paused before all may be"


def test_a_higher_priority_has_members_paused_at_once_and_gives_nothing_back() -> None:
    low, high = claim("a", *hold("a", "x", "x"), wants=[1]), claim("b", wants=[2], priority=1, waited_s=0.0)
    assert owed([low, high], {"x": 0}) == [("a", "b", True)] * 2
    served = claim("b", *hold("b", "x", size=2), priority=1, wants=[2], waited_s=900.0)
    assert owed([claim("a", wants=[1], waited_s=900.0), served], {"x": 0}) == []


def test_the_node_is_taken_on_which_least_is_given_back_and_nobody_is_pushed_below_the_one_that_waits() -> None:
    rich, poor = claim("a", *hold("a", *"xxxx")), claim("c", *hold("c", "y"))
    found = divide([rich, poor, claim("b", wants=[1])], {"x": NOTHING, "y": NOTHING})
    assert [(debt.run, debt.to) for debt in found.debts] == [("a", "b")]
    two = divide([rich, claim("b", wants=[2])], {"x": gpus(1), "z": gpus(1)})
    assert [debt.run for debt in two.debts] == ["a"] and two.grants[0].nodes == ("x",)


def test_parts_of_a_gang_are_granted_together_or_not_at_all() -> None:
    both = RunClaim(run="b", wants=(Want((gpus(1), gpus(1))),))
    assert divide([both], {"x": gpus(1)}).grants == []
    assert sorted(divide([both], {"x": gpus(1), "y": gpus(1)}).grants[0].nodes) == ["x", "y"]


def test_room_is_made_on_nodes_that_a_run_can_use_and_on_no_other() -> None:
    rich = claim("a", *hold("a", *"xxxy"))
    cases: list[tuple[tuple[str, ...], str | None]] = [(("y",), "a3"), (("x",), "a0"), ((), None)]
    for nodes, giver in cases:
        picky = RunClaim(run="b", wants=(Want((gpus(1),), nodes=nodes),), waited_s=1.0)
        found = divide([rich, picky], {"x": NOTHING, "y": NOTHING, "z": NOTHING})
        assert [debt.holding for debt in found.debts] == ([giver] if giver else [])
        assert [grant.nodes for grant in found.grants] == ([nodes] if giver else [])
        held = {holding.id for holding in rich.holdings if nodes and nodes[0] in holding.parts}
        assert all({debt.holding, *debt.instead} == held for debt in found.debts)
    picky = RunClaim(run="b", wants=(Want((gpus(1),), nodes=("y",)), Want((gpus(1),))))
    assert [each.nodes for each in divide([picky], {"x": gpus(1), "y": NOTHING}).grants] == [("x",)]


# -- over time ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Member:
    parts: tuple[int, ...]
    left_s: int
    paused_at: float = -1e9
    stops_at: float | None = None


@dataclasses.dataclass
class Lease:
    number: int
    parts: dict[str, Amount]
    since: float
    member: Member | None


@dataclasses.dataclass
class Run:
    name: str
    arrives: int
    priority: int
    dies: int | None
    waiting: list[Member]
    leases: list[Lease] = dataclasses.field(default_factory=list)
    gained: float = 0.0
    gained_by: dict[tuple[int, ...], float] = dataclasses.field(default_factory=dict)  # by size
    owed_since: dict[str, float] = dataclasses.field(default_factory=dict)
    gave_at: float = -1e9
    rows: list[tuple[float, RunClaim]] = dataclasses.field(default_factory=list)
    hungry_since: float | None = None

    def is_there(self, until: float) -> bool:
        """Whether it holds or waits for something, or its last row is not forgotten yet."""
        return bool(self.rows) and bool(self.waiting or self.leases or self.rows[-1][0] >= until)

    def make_claim(self, now: float) -> RunClaim:
        holdings = tuple(
            Holding(
                str(lease.number),
                lease.parts,
                now - lease.since,
                lease.member is not None,
                lease.member is None or now - lease.member.paused_at >= Q_S,
            )
            for lease in self.leases
        )
        sizes = [member.parts for member in self.waiting]
        self.gained_by = {size: self.gained_by.get(size, now) for size in sizes}
        wants = tuple(Want(tuple(map(gpus, size)), waited_s=now - self.gained_by[size]) for size in sizes)
        waited_s = now - self.gained if wants else 0.0
        return RunClaim(run=self.name, priority=self.priority, holdings=holdings, wants=wants, waited_s=waited_s)


class World:
    def __init__(self, nodes: Sequence[int], runs: list[Run]) -> None:
        self.total = {f"n{n}": gpus(count) for n, count in enumerate(nodes)}
        self.runs, self.now, self.number = runs, 0.0, 0
        self.pauses: list[tuple[Member, float]] = []

    def free(self) -> dict[str, Amount]:
        held = [lease.parts for run in self.runs for lease in run.leases]
        return {n: t.minus(sum_amounts(parts[n] for parts in held if n in parts)) for n, t in self.total.items()}

    def step(self, age: int, turn: int) -> None:
        self.now += 1.0
        there = [run for run in self.runs if run.arrives <= self.now and (run.dies is None or self.now < run.dies)]
        for run in self.runs:
            if run not in there:
                run.leases, run.waiting = [], run.waiting if run.arrives > self.now else []
        for run in there:
            if run.rows == []:
                run.gained = self.now
            run.rows.append((self.now, run.make_claim(self.now)))
            self.work(run)
        first = turn % max(1, len(there))
        for run in [*there[first:], *there[:first]]:
            self.decide(run, age)
        for run in self.runs:
            is_hungry = run in there and bool(run.waiting) and not run.leases
            run.hungry_since = (run.hungry_since or self.now) if is_hungry else None

    def work(self, run: Run) -> None:
        for lease in run.leases:
            member = lease.member
            if member is None:
                continue
            member.left_s -= member.stops_at is None
            if member.left_s <= 0 or (member.stops_at is not None and self.now >= member.stops_at):
                lease.member = None
                if member.left_s > 0:
                    member.stops_at = None
                    run.waiting.append(member)

    def decide(self, run: Run, age: int) -> None:
        """As `ensemble.executors.ray.sharing` does, with the rows of others of some seconds ago."""
        others = []
        for other in self.runs:
            known = [row for at, row in other.rows if at <= max(self.now - age, other.rows[0][0])]
            if other is not run and known and self.now - other.rows[-1][0] < STALE_S:
                others.append(known[-1])
        mine = run.make_claim(self.now)
        is_contended = any(other.wants for other in others)
        found = divide(sorted([mine, *others], key=lambda each: each.run), self.free(), Q_S)
        debts = [debt for debt in found.debts if debt.run == run.name] if is_contended else []
        run.owed_since = {debt.to: run.owed_since.get(debt.to, self.now) for debt in debts}
        debts = [debt for debt in debts if self.now - run.owed_since[debt.to] >= SETTLE_S]
        withheld = {int(id) for debt in debts for id in (debt.holding, *debt.instead)}
        by_number = {lease.number: lease for lease in run.leases}
        if self.now - run.gave_at >= SETTLE_S:
            for debt in debts:
                idle = [
                    i
                    for i in map(int, (debt.holding, *debt.instead))
                    if i in by_number and by_number[i].member is None
                ]
                if idle:
                    run.leases.remove(by_number.pop(idle[0]))
                    run.gave_at = self.now
        for debt in debts:
            member = by_number[int(debt.holding)].member if int(debt.holding) in by_number else None
            if debt.is_pause_due and member is not None and member.stops_at is None:
                self.pauses.append((member, self.now - member.paused_at))
                member.paused_at, member.stops_at = self.now, self.now + STOP_S
        for lease in [lease for lease in run.leases if lease.member is None and lease.number not in withheld]:
            sizes = tuple(int(part.gpus) for part in lease.parts.values())
            lease.member = next((each for each in run.waiting if each.parts == sizes), None)
            run.waiting = [each for each in run.waiting if each is not lease.member]
            if lease.member is None:
                run.leases.remove(lease)
        grants = [grant for grant in found.grants if grant.run == run.name]
        for grant in grants:
            free = self.free()
            sizes = tuple(int(part.gpus) for part in grant.parts)
            member = next((each for each in run.waiting if each.parts == sizes), None)
            parts: dict[str, Amount] = {}
            for node, part in zip(grant.nodes, grant.parts, strict=True):
                parts[node] = parts.get(node, NOTHING).plus(part)
            if (
                member is not None
                and len(parts) == len(sizes)
                and all(p.fits_in(free[n]) for n, p in parts.items())
            ):
                run.waiting.remove(member)
                self.number += 1
                run.leases.append(Lease(self.number, parts, self.now, member))
                run.gained = self.now
                run.gained_by.pop(sizes, None)

    @property
    def is_over(self) -> bool:
        return all(not run.waiting and not run.leases for run in self.runs)


@st.composite
def worlds(draw: st.DrawFn, priorities: int = 1) -> World:
    nodes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    largest = max(nodes)

    def make(number: int) -> Run:
        sizes = st.integers(1, largest).map(lambda size: (size,))
        members = draw(st.lists(st.tuples(sizes, st.integers(1, 100)), min_size=1, max_size=4))
        dies = draw(st.none() | st.integers(20, 200))
        priority = draw(st.integers(0, priorities - 1))
        asked = sorted((Member(parts, left) for parts, left in members), key=lambda each: -sum(each.parts))
        return Run(f"r{number}", draw(st.integers(0, 50)), priority, dies, asked)

    return World(nodes, [make(number) for number in range(draw(st.integers(2, 5)))])


def play(world: World, ages: Sequence[int], bound_s: float) -> None:
    work_s = sum(member.left_s for run in world.runs for member in run.waiting)
    longest = 3 * work_s + len(world.runs) * bound_s + 300
    while not world.is_over:
        world.step(ages[int(world.now) % len(ages)], int(world.now) * 7)
        free = world.free()
        assert all(NOTHING.fits_in(left) for left in free.values())
        top = max((run.priority for run in world.runs if run.is_there(world.now - STALE_S)), default=0)
        for run in world.runs:
            if run.hungry_since is not None and run.priority < top:
                run.hungry_since = world.now  # a higher one keeps it out
            if run.hungry_since is not None:
                assert world.now - run.hungry_since <= bound_s, f"{run.name} waits since {run.hungry_since}"
        assert world.now < longest, "no progress"
    assert all(since >= Q_S for _, since in world.pauses)


@examples(25)
@given(worlds(), st.lists(st.integers(0, MOST_AGE_S), min_size=1, max_size=5))
def test_no_run_starves_and_no_member_is_paused_twice_in_a_quantum(world: World, ages: Sequence[int]) -> None:
    play(world, ages, len(world.runs) * (Q_S + P_S))


@examples(25)
@given(worlds(priorities=3), st.lists(st.integers(0, MOST_AGE_S), min_size=1, max_size=5))
def test_with_priorities_the_highest_does_not_starve_and_all_end(world: World, ages: Sequence[int]) -> None:
    play(world, ages, len(world.runs) * (Q_S + P_S))
