"""How many may share a device follows from how they have been seen to slow each other down."""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import identity

from ensemble.schedule import Node, pack
from ensemble.schedule.interference import Interference, device_kind


def seen(done: dict[int, float], times: int = 3, kind: str = "A") -> Interference:
    """Observations of so many tenants that get so much done together."""
    found = Interference()
    for tenants, together in done.items():
        for _ in range(times):
            found = found.with_observation(kind, tenants, 100.0, 100.0 * together / tenants)
    return found


def test_without_observations_nothing_is_limited() -> None:
    assert Interference().max_tenants("A") is None
    assert Interference().tenant_limits([Node("a", 4, ("A",), 16, "a"), Node("b", 4, (), 16, "b")]) == ({}, {})
    assert seen({2: 0.5}, times=2).max_tenants("A") is None, "twice may be chance"
    assert Interference().with_observation("A", 3, 0.0, 1.0) == Interference(), "nothing is known of it alone"


def test_most_tenants_are_those_that_still_raise_what_they_get_done() -> None:
    assert seen({2: 1.6, 3: 1.9, 4: 1.8}).max_tenants("A") == 3
    assert seen({2: 1.6, 3: 1.9, 4: 2.4}).max_tenants("A") is None, "more may be tried"
    assert seen({2: 0.9}).max_tenants("A") == 1
    assert seen({2: 1.9, 8: 1.9}).max_tenants("A") == 2
    assert seen({2: 1.6, 3: 1.9, 4: 1.8}).max_tenants("B") is None, "another kind of device"


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_limit_is_where_throughput_is_best_whatever_the_order(parts: list[float], rng: random.Random) -> None:
    observations = [(n, part) for n, part in enumerate(parts, start=2) for _ in range(3)]
    rng.shuffle(observations)
    found = Interference()
    for tenants, part in observations:
        found = found.with_observation("A", tenants, 50.0, 50.0 * part)
    done = found.combined_throughput("A")
    limit = found.max_tenants("A")
    assert done[1] == 1.0 and all(value <= n + 1e-9 for n, value in done.items())
    chosen = limit if limit is not None else max(done)
    assert done[chosen] * 1.02**8 >= max(done.values()) - 1e-9, "nothing much better was seen"
    assert all(done[fewer] < done[chosen] for fewer in done if fewer < chosen)
    again = Interference.from_dict(json.loads(json.dumps(found.as_dict())))
    assert again == found and again.max_tenants("A") == limit


def test_members_that_change_are_believed_in_the_end() -> None:
    found = seen({2: 0.5}, times=64)
    assert found.max_tenants("A") == 1
    for _ in range(64):
        found = found.with_observation("A", 2, 10.0, 9.0)
    assert found.max_tenants("A") is None


def test_packing_respects_it() -> None:
    gpu, cpu = Node("gpu", 8, ("A", "B"), 16, "gpu"), Node("cpu", 8, (), 16, "cpu")
    assert (device_kind(gpu, "1"), device_kind(cpu)) == ("B", "cpu x 8")
    found = seen({2: 0.9})
    for _ in range(3):
        found = found.with_observation("cpu x 8", 4, 1.0, 0.6).with_observation("cpu x 8", 6, 1.0, 0.3)
    limits, tenants = found.tenant_limits([gpu, cpu])
    assert (limits, tenants) == ({"cpu": 4}, {"A": 1})
    guess = {"gpus_per_worker": 0.25, "auto": ["gpus_per_worker"]}
    waiting = [identity(n, cpus_per_worker=0.1, **guess) for n in range(16)]
    placed = [(p.node, p.devices[0]) for p in pack(waiting, [], [gpu, cpu], limits=limits, tenants=tenants)]
    assert [placed.count(where) for where in (("gpu", "0"), ("gpu", "1"), ("cpu", None))] == [1, 4, 4]
