from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from benchmarks.launch.ranks import run_ranks  # noqa: E402
from ensemble.comm import SingleRank  # noqa: E402
from ensemble.comm.autotune.decide import (  # noqa: E402
    Rates,
    Timing,
    choose_bucket_bytes,
    choose_groups,
    choose_ways,
    drop_losers,
    next_trial,
    sample_sizes,
)
from ensemble.comm.autotune.measure import BUCKETS, SIZES, Clock, measure_buckets, measure_ways  # noqa: E402
from ensemble.comm.autotune.plan import CommunicatorPlan, ExchangePlan, open_communicator  # noqa: E402
from ensemble.comm.gradients import GradientExchange  # noqa: E402
from ensemble.comm.hierarchical import choose_way  # noqa: E402
from ensemble.spec.options import COMMUNICATORS, resolve  # noqa: E402

SECONDS = st.floats(1e-4, 10.0)


def test_all_ranks_choose_alike_and_a_resume_opens_what_was_chosen() -> None:
    words: list[Any] = [
        "torch",
        {"name": "torch", "bucket_bytes": "auto"},
        {"name": "hierarchical", "group_size": 2},
        {"name": "hierarchical"},
        {"name": "hybrid", "bucket_bytes": "auto"},
    ]
    resolved = [resolve("communicator", word, COMMUNICATORS) for word in words]
    said = run_ranks("hierarchical_ranks:tuned", {"words": resolved}, placement=[0] * 4)
    assert said == [said[0]] * 4, "the same choice, and the same bits"
    chosen = [each for each in said[0] if isinstance(each, dict)]
    assert [each["name"] for each in chosen] == ["flat", "flat", "hierarchical", "hierarchical", "hybrid"]
    flat, fused, fixed, grouped, hybrid = chosen
    assert flat["measured"] == () or flat["measured"] == []
    assert {each["what"] for each in fused["measured"]} == {"buckets"}
    assert fixed["groups"] == [[0, 1], [2, 3]] and fixed["measured"] == []
    assert grouped["groups"] in ([[0, 1, 2, 3]], [[0, 1], [2, 3]])
    assert {each["what"] for each in grouped["measured"]} == {"flat", "groups of 4", "groups of 2"}
    assert hybrid["ways"] and hybrid["bucket_bytes"] in BUCKETS
    sums = [each for each in said[0] if not isinstance(each, dict)]
    assert sums[::2] == sums[1::2], "opened again, the same bits"


def test_one_worker_has_nothing_to_choose() -> None:
    alone = SingleRank()
    for name in COMMUNICATORS:
        comm, tuned = open_communicator(alone, {"name": name, "bucket_bytes": "auto"}, [10])
        assert comm is alone and tuned == CommunicatorPlan()


def test_a_choice_survives_json() -> None:
    tuned = CommunicatorPlan(
        "hybrid", ((0, 2), (1,)), ((4096, "hierarchical"), (2**24, "flat")), 2**20, (Timing("flat", 1, 0.5),)
    )
    plan = ExchangePlan(tuned, Rates(1e-3, 1e9, {"bf16": (1e9, 2e9)}))
    assert ExchangePlan.from_dict(json.loads(json.dumps(asdict(plan)))) == plan


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=len(SIZES)))
def test_at_each_measured_size_the_quicker_way_is_chosen_unless_one_stands_out(
    seconds: list[tuple[float, float]],
) -> None:
    flat, hierarchical = ({size: pair[i] for size, pair in zip(SIZES, seconds, strict=False)} for i in (0, 1))
    ways = choose_ways(flat, hierarchical)
    quicker = [h < f for f, h in zip(flat.values(), hierarchical.values(), strict=True)]
    for i, size in enumerate(flat):
        near = quicker[max(0, i - 1) : i + 2]
        extrapolate_s = quicker[i] if len(near) < 3 else sum(near) > 1
        if all(flat[each] != hierarchical[each] for each in flat):
            assert choose_way(ways, size) == ("hierarchical" if extrapolate_s else "flat")
    limits = [up_to for up_to, _ in ways]
    assert limits == sorted(set(limits)), "each of them is used"
    assert all(a[1] != b[1] for a, b in itertools.pairwise(ways))


def test_the_change_lies_where_both_ways_take_the_same() -> None:
    sizes = (1024, 65536)
    latency, rate = {"flat": 8e-3, "hierarchical": 1e-3}, {"flat": 1e8, "hierarchical": 1e7}

    def taken(way: str, size: int) -> float:
        return latency[way] * (size / 1024) ** (math.log(rate[way]) / 40)  # straight on logarithmic axes

    flat, hierarchical = ({size: taken(way, size) for size in sizes} for way in ("flat", "hierarchical"))
    flat[65536], hierarchical[65536] = 1e-3, 8e-3
    assert choose_ways(flat, hierarchical) == ((8192, "hierarchical"), (65536, "flat"))


@given(st.lists(st.lists(SECONDS, min_size=3, max_size=3), min_size=2, max_size=5), st.booleans())
def test_the_groups_are_those_of_the_least_time_or_hosts_where_others_are_hardly_better(
    seconds: list[list[float]], hybrid: bool
) -> None:
    flat, *candidates = [dict(zip(SIZES, each, strict=False)) for each in seconds]
    best = choose_groups(flat, candidates, hybrid)

    def product(candidate: dict[int, float]) -> float:
        return math.prod(min(s, flat[size]) if hybrid else s for size, s in candidate.items())

    least = min(map(product, candidates))
    assert product(candidates[best]) <= least * (1 + 1e-9) or (
        best == 0 and product(candidates[0]) <= 1.34 * least
    )
    dropped = dict(list(candidates[0].items())[:1])
    assert choose_groups(flat, [*candidates, dropped], hybrid) == best


def test_parts_of_hosts_that_turn_out_worse_are_dropped_hosts_and_the_flat_way_never() -> None:
    flat, hosts, better, near, bad = ({1024: s, 4096: 2 * s} for s in (9.0, 1.0, 0.5, 1.05, 1.2))
    assert drop_losers([flat, hosts, better, near, bad]) == [0, 1, 2, 3]
    assert drop_losers([flat, hosts]) == [0, 1]


def test_one_disturbed_measurement_does_not_put_the_usual_setting_out() -> None:
    samples: list[list[float]] = [[0.1], [0.1], [0.5], [0.1]]
    assert next_trial(samples, 9.0, first=2) == 0
    samples = [[0.1, 0.1], [0.1, 0.1], [0.5], [0.1, 0.1]]
    assert next_trial(samples, 9.0, first=2) == 2
    assert next_trial([[0.1] * 7, [0.1] * 7, [0.5] * 3, [0.1] * 7], 9.0, first=2) is None


def test_hardly_better_than_the_usual_bucket_is_not_better() -> None:
    assert choose_bucket_bytes({2**20: 1.0, 2**22: 1.05, 2**24: 0.99}, 2**22) == 2**22
    assert choose_bucket_bytes({2**20: 0.7, 2**22: 1.05, 2**24: 0.99}, 2**22) == 2**20
    assert choose_bucket_bytes({2**16: 1.0, 2**20: 1.0, 2**24: 1.02}, 2**22) in (2**20, 2**24)


def run_trials(true_s: list[float], budget_s: float) -> tuple[list[list[float]], float]:
    samples: list[list[float]] = [[] for _ in true_s]
    left = budget_s
    while (number := next_trial(samples, left, len(true_s) // 2)) is not None:
        samples[number].append(true_s[number])
        left -= true_s[number]
    return samples, left


@given(st.integers(0, 5), st.lists(st.floats(1.05, 3.0), min_size=6, max_size=6))
def test_the_bottom_of_any_u_is_found(bottom: int, factors: list[float]) -> None:
    true = [math.prod(factors[min(i, bottom) : max(i, bottom)]) for i in range(6)]
    samples, _ = run_trials(true, 1000.0)
    typical = {i: each[0] for i, each in enumerate(samples) if each}
    assert min(typical, key=lambda i: typical[i]) == bottom
    assert len(samples[bottom]) == 7, "what may be the best is measured again"


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.floats(0.0, 3.0))
def test_the_time_is_kept_but_for_the_last_measurement(true: list[float], budget_s: float) -> None:
    samples, left = run_trials(true, budget_s)
    assert any(samples), "one at least"
    assert left >= -max(true)


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 5000))
def test_a_sample_of_a_model_is_no_more_than_is_asked_for(sizes: list[int], most: int) -> None:
    taken = sample_sizes(sizes, most)
    assert 0 < sum(taken) <= most
    if sum(sizes) <= most:
        assert taken == sizes


@given(st.integers(1, 6), st.integers(100, 300), st.floats(0.1, 0.9))
def test_a_sample_has_as_many_small_tensors_for_a_large_one_as_the_model(
    period: int, layers: int, share: float
) -> None:
    sizes = [10_000, *[10] * (period - 1)] * layers
    taken = sample_sizes(sizes, int(sum(sizes) * share))
    for size, number in ((10_000, layers), (10, layers * (period - 1))):
        assert abs(taken.count(size) - share * number) <= 3 + 0.05 * number


def test_measuring_ends_with_the_time_and_says_what_it_measured() -> None:
    seconds = iter(range(10_000))
    clock = Clock(SingleRank(), budget_s=40.0, now=lambda: next(seconds))
    timed = measure_ways(clock, [("flat", SingleRank()), ("other", SingleRank())])
    assert [each.what for each in timed[:2]] == ["flat", "other"] and 2 <= len(timed) < 2 * len(SIZES)
    assert {each.seconds for each in timed} == {1.0}
    make = partial(GradientExchange, comm=SingleRank())
    buckets = measure_buckets(Clock(SingleRank(), budget_s=0.05), [70_000, 10], make)
    assert buckets and {each.size for each in buckets} <= {2**16, 2**18, 2**20}, "no larger than the model"
