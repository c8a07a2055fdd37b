from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.launch.ranks import run_ranks
from ensemble.comm import SingleRank
from ensemble.comm.exchange_plan import CommunicatorPlan, ExchangePlan, Timing, open_communicator
from ensemble.comm.hierarchical import choose_way
from ensemble.comm.hybrid import SIZES, choose_ways, measure_ways
from ensemble.spec.options import COMMUNICATORS, resolve

SECONDS = st.floats(1e-4, 10.0)


def test_all_ranks_choose_alike_and_a_resume_opens_what_was_chosen() -> None:
    words: list[Any] = ["torch", {"name": "hierarchical", "group_size": 2}, {"name": "hierarchical"}, "hybrid"]
    resolved = [resolve("communicator", word, COMMUNICATORS) for word in words]
    said = run_ranks("hierarchical_ranks:tuned", {"words": resolved}, placement=[0] * 4)
    assert said == [said[0]] * 4, "the same choice, and the same bits"
    chosen = [each for each in said[0] if isinstance(each, dict)]
    assert [each["name"] for each in chosen] == ["flat", "hierarchical", "hierarchical", "hybrid"]
    flat, fixed, whole, hybrid = chosen
    assert not flat["measured"] and not fixed["measured"] and not whole["measured"]
    assert fixed["groups"] == [[0, 1], [2, 3]] and whole["groups"] == hybrid["groups"] == [[0, 1, 2, 3]]
    assert {each["what"] for each in hybrid["measured"]} == {"flat", "hierarchical"} and hybrid["ways"]
    sums = [each for each in said[0] if not isinstance(each, dict)]
    assert sums[::2] == sums[1::2], "opened again, the same bits"


def test_one_worker_has_nothing_to_choose_a_choice_survives_json_and_measuring_ends_with_its_time() -> None:
    alone = SingleRank()
    for name in COMMUNICATORS:
        comm, tuned = open_communicator(alone, {"name": name, "bucket_bytes": 2**22}, 40)
        assert comm is alone and tuned == CommunicatorPlan()
    ways = ((4096, "hierarchical"), (2**24, "flat"))
    plan = ExchangePlan(CommunicatorPlan("hybrid", ((0, 2), (1,)), ways, 2**20, (Timing("flat", 1, 0.5),)))
    assert ExchangePlan.from_dict(json.loads(json.dumps(asdict(plan)))) == plan
    seconds = iter(range(10_000))
    pair = [("flat", SingleRank()), ("other", SingleRank())]
    timed = measure_ways(SingleRank(), pair, budget_s=40.0, now=lambda: next(seconds))  # which ends it
    assert [each.what for each in timed[:2]] == ["flat", "other"] and 2 <= len(timed) < 2 * len(SIZES)
    assert {each.seconds for each in timed} == {1.0}


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=len(SIZES)))
def test_at_each_measured_size_the_quicker_way_is_chosen(seconds: list[tuple[float, float]]) -> None:
    flat, hierarchical = ({size: pair[i] for size, pair in zip(SIZES, seconds, strict=False)} for i in (0, 1))
    ways = choose_ways(flat, hierarchical)
    for size in flat:
        assert choose_way(ways, size) == ("hierarchical" if hierarchical[size] < flat[size] else "flat")
    limits = [up_to for up_to, _ in ways]
    assert limits == sorted(set(limits)), "each of them is used"
    assert all(a[1] != b[1] for a, b in itertools.pairwise(ways))
