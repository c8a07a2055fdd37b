"""What members are granted: measured with a margin, twice as much after running out, at most what there is."""

from __future__ import annotations

import functools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import identity as plain_identity

from ensemble.events import MemoryIncrease
from ensemble.schedule.memory_grants import Grant, Grants, add_margin, as_event, compute_gpu_share, increase_grant

GPU = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
HOST = "MemoryError: Unable to allocate 300. MiB"
identity = functools.partial(plain_identity, gpus_per_worker=0.25)


@given(st.none() | st.floats(0.1, 60), st.integers(1, 4), st.integers(1, 8), st.floats(1, 64), st.booleans())
def test_grants_grow_until_a_member_has_its_whole_node_and_no_further(
    memory_gb: float | None, workers: int, together: int, node_gb: float, on_gpu: bool
) -> None:
    member, grants, steps = identity(memory_gb=memory_gb, workers=workers), Grants(), 0
    where: Any = {"on_gpu": on_gpu, "together": together, "node_memory_gb": node_gb, "ranks": workers}
    while (grant := increase_grant(member, HOST, **where)) is not None:
        grants.add(MemoryIncrease(**as_event(member, "a", grant)))
        more = grants.apply(member)
        assert more.memory_gb is not None and more.memory_gb > (member.memory_gb or 0)
        assert more.memory_gb * workers <= node_gb + 0.001 * workers
        member, steps = more, steps + 1
        assert steps < 20
    assert memory_gb is not None or (steps >= 1) == (together > 1), "alone, it had the node to itself"


def test_a_gpus_memory_is_granted_by_its_share() -> None:
    where: Any = {"on_gpu": True, "together": 4, "node_memory_gb": 64, "ranks": 1}
    for asked, share in ((0.25, 0.5), (0.7, 1.0), (1.0, None), (0.0, 0.5)):  # of no share: an equal part, twice
        grant = increase_grant(identity(gpus_per_worker=asked), GPU, **where)
        assert (grant and grant.gpus_per_worker) == share
    assert increase_grant(identity(memory_gb=1.0), HOST, **where) is not None


def test_those_like_it_get_as_much_and_others_do_not() -> None:
    asking = identity(0, params={"width": 8, "lr": 0.1}, memory_gb=1.0)
    alike = identity(1, params={"width": 8, "lr": 0.7}, memory_gb=3.0)  # it has more already
    other = identity(2, params={"width": 64, "lr": 0.1}, memory_gb=1.0)
    grant = increase_grant(asking, HOST, on_gpu=False, together=2, node_memory_gb=16, ranks=asking.workers)
    assert grant is not None
    events = json.loads(json.dumps([as_event(asking, "a", grant)]))
    smaller = {**events[0], "memory_gb": 0.5}
    for told in (events, [*events, smaller]):
        grants = Grants(MemoryIncrease(**each) for each in told)
        assert grants.apply(asking).memory_gb == 2.0
        assert (grants.apply(alike), grants.apply(other)) == (alike, other)


sizes = st.one_of(st.just(0.0), st.floats(0.01, 80))


@given(st.floats(0, 1), sizes, sizes)
def test_a_share_of_a_gpu_holds_its_time_and_its_memory(busy: float, memory_gb: float, size_gb: float) -> None:
    share = compute_gpu_share(busy, memory_gb, size_gb)
    assert busy <= share <= 1
    assert size_gb == 0 or share * size_gb >= min(memory_gb, size_gb) * (1 - 1e-9)
    assert add_margin(memory_gb) > memory_gb


def test_a_grant_is_no_more_than_a_node_has_and_decides_nothing_of_what_is_learnt() -> None:
    asking = identity(0, threads=3, memory_gb=1.0, auto=["cpus_per_worker", "memory_gb"])
    grant = increase_grant(asking, HOST, on_gpu=False, together=2, node_memory_gb=16, ranks=asking.workers)
    assert grant is not None and grant.apply(asking) != asking
    assert grant.apply(asking).threads == 3 and grant.apply(asking).compared_fields() == asking.compared_fields()
    narrow, wide = (identity(n, workers=n, auto=["workers"], params={}) for n in (1, 2))
    grants = Grants([MemoryIncrease(**as_event(narrow, "a", Grant(memory_gb=48.0)))])
    assert grants.apply(narrow, 64.0).memory_gb == 48.0 and grants.apply(wide, 64.0).memory_gb == 32.0


def test_a_margin_is_given_up_where_others_leave_no_memory_for_it_and_a_declared_amount_is_not() -> None:
    measured = identity(memory_gb=add_margin(4.0), auto=["memory_gb"])
    assert Grants().apply(measured, 16.0, left_gb=16.0) == measured
    assert Grants().apply(measured, 16.0, left_gb=4.5).memory_gb == 4.5
    assert Grants().apply(measured, 16.0, left_gb=1.0).memory_gb == 4.0, "what it was measured to need"
    declared = identity(memory_gb=5.25)
    assert Grants().apply(declared, 16.0, left_gb=4.5) == declared
