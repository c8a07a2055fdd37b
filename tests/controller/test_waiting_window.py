"""The first of each kind among many waiting members: decisions with them are those with all."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples
from test_controller import an_ensemble

from ensemble.controller.waiting_window import WaitingWindow
from ensemble.schedule.needs import Node, compute_need
from ensemble.schedule.placement import ClusterSnapshot, decide_starts

MANY = an_ensemble(members=[{"n": n} for n in range(120)])


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=120),
    st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@examples(100)
def test_a_run_that_places_by_the_window_places_the_same_members_in_the_same_order(
    cpus: list[float], nodes: list[float], seed: int
) -> None:
    random, most = Random(seed), 32
    cluster = [Node(f"node-{n}", cores, (), 64.0, f"node-{n}") for n, cores in enumerate(nodes)]
    waiting = [replace(MANY.identify(number), cpus_per_worker=each) for number, each in enumerate(cpus)]
    window, running, last = WaitingWindow(waiting, compute_need), [], -1
    while waiting and last != len(waiting):
        last = len(waiting)
        of_all = decide_starts(ClusterSnapshot(nodes=cluster, waiting=waiting, running=running))
        head = window.head(most)
        of_some = decide_starts(ClusterSnapshot(nodes=cluster, waiting=head, running=running))
        if 2 * len(of_some) < most:
            assert of_some == of_all
        placed = {start.placement.member for start in of_all}
        window.remove(placed, most)
        waiting = [one for one in waiting if one.member not in placed]
        running += [start.placement for start in of_all]
        random.shuffle(running)
        del running[: 1 + len(running) // 2]
    assert window.head(10**6) == waiting and not window.hides(10**6)
