"""Who starts now and in which cohort, what a failure changes."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import identity

from ensemble.schedule.explain import explain_unplaceable
from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.placement import ClusterSnapshot, count_placeable, decide_starts

FOUR = (Node("a", 4, (), 16, "a"),)


def busy_with(*numbers: int) -> list[Placement]:
    return [Placement(identity(n), "a", (None,)) for n in numbers]


def list_started(waiting: Any, running: Any, *nodes: Node, **more: Any) -> list[tuple[str, Any]]:
    cluster = ClusterSnapshot(nodes=(*FOUR, *nodes), waiting=waiting, running=running, next_cohort=1, **more)
    return [(start.placement.member, start.cohort) for start in decide_starts(cluster)]


def test_a_later_cohort_waits_until_it_is_worth_a_feeder() -> None:
    waiting = [identity(i) for i in range(4, 8)]
    for busy, starts in (((0, 1, 2), 0), ((0, 1), 2), ((), 4)):  # half of the places are free, or nothing runs
        assert len(list_started(waiting, busy_with(*busy))) == starts
    assert list_started([identity(9)], busy_with(0, 1, 2)) == [("member-9", 1)], "all that wait fit at once"


def test_nobody_waits_for_company_where_there_is_no_feeder_or_others_wait_for_the_place() -> None:
    waiting, busy = [identity(i) for i in range(12)], list[Placement]()
    for cohort, cpus in enumerate(range(1, 9)):  # leases come one at a time
        here = [Node("a", cpus, (), 16, "a")]
        cluster = ClusterSnapshot(nodes=here, waiting=waiting, running=busy, next_cohort=cohort, is_gated=False)
        busy += [start.placement for start in decide_starts(cluster)]
        waiting = [one for one in waiting if one.member not in {placement.member for placement in busy}]
        assert len(busy) == cpus


def test_members_that_select_other_nodes_wait_for_other_places_and_those_tried_again_come_first() -> None:
    there, rack = Node("b", 1, (), 16, "b", labels={"rack": "1"}), {"rack": "1"}
    waiting, busy = [identity(n, nodes=rack) for n in (7, 8)], busy_with(0, 1, 2)
    assert list_started(waiting, busy, there) == [("member-7", 1)], "the place there is for nobody else"
    assert list_started(waiting, [*busy, Placement(identity(6, nodes=rack), "b", (None,))], there) == []
    returning = [(identity(1), 0)]
    assert list_started([identity(8)], busy_with(0, 2, 3), returning=returning) == [("member-1", 0)]


def test_room_counts_only_what_nobody_waits_for() -> None:
    def count(most: int = 10, **state: Any) -> int:
        return count_placeable(identity(9), most, ClusterSnapshot(nodes=FOUR, **state))

    assert count(waiting=[identity(1, nodes={"rack": "9"})]) == 4, "it waits for another node"
    assert (count(), count(3)) == (4, 3)
    assert count(running=busy_with(0), waiting=[identity(1)]) == 2
    assert count(waiting=[identity(1, cpus_per_worker=8.0)]) == 0


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), max_size=14), st.integers(0, 2**16), st.booleans())
def test_everything_that_fits_is_placed_in_the_end(sizes: list[float], seed: int, joins_late: bool) -> None:
    rng = random.Random(seed)
    waiting = [identity(i, cpus_per_worker=cpus) for i, cpus in enumerate(sizes)]
    assert all(explain_unplaceable(i, FOUR) is None for i in waiting)
    busy, done, cohort = list[Placement](), set[str](), 0
    for _ in range(200):
        state = {"waiting": waiting, "running": busy, "next_cohort": cohort, "joins_late": joins_late}
        starts = decide_starts(ClusterSnapshot(nodes=FOUR, **state))  # type: ignore[arg-type]
        busy += [s.placement for s in starts]
        cohort += bool(starts)
        assert sum(p.identity.cpus_per_worker for p in busy) <= 4
        waiting = [i for i in waiting if i.member not in {p.member for p in busy}]
        if not busy:
            break
        done.add(busy.pop(rng.randrange(len(busy))).member)
    assert not waiting and not busy and len(done) == len(sizes)
