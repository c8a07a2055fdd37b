"""Streams by rate, laggards, and plans revised while members run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples

from ensemble.schedule.flotilla.allocate import allocate, revise
from ensemble.schedule.flotilla.grouping import group_streams
from ensemble.schedule.flotilla.model import (
    Capacity,
    Cohort,
    CoreBudget,
    RatedMember,
    RunningMember,
    correct_rates,
)
from ensemble.schedule.flotilla.straggler import RebalanceDecision, decide_rebalance

SAMPLES = 1000
NODE = Capacity(slots=(8,), streams=3)


def rates(name: str, rate: float, epochs: int = 10, workers: int | None = 1) -> dict[str, Any]:
    by_width = {1: rate, 2: 1.9 * rate, 4: 3.5 * rate}
    return {"member": name, "samples_per_s": by_width, "epochs": epochs, "workers": workers}


def rated(*args: Any, **options: Any) -> RatedMember:
    return RatedMember(**rates(*args, **options))


def running(*args: Any, **options: Any) -> RunningMember:
    return RunningMember(**rates(*args, **options), node=0)


def paced(*members: RunningMember, epoch: int = 3, number: int = 0) -> Cohort:
    return Cohort(number=number, epoch=epoch, members=members)


SLOW, FAST, ALSO = running("slow", 10), running("fast", 100), running("also", 100)
TWELVES = [[rated("a", 12), rated("b", 12)]]


def test_a_second_stream_is_for_slow_members_with_few_epochs_or_those_that_wait_and_for_cores() -> None:
    listed = [rated("slow", 10, epochs=5), rated("fast", 100, epochs=50), rated("faster", 120, epochs=50)]
    found = group_streams(listed, NODE, SAMPLES)
    assert found.groups == (("slow",), ("fast", "faster")) and found.run_s == pytest.approx(500)
    assert found.shared_s == pytest.approx(5 * 100 + 45 * 10)
    listed, waiting = [rated("slow", 10), rated("fast", 100)], [[rated("next", 20)], [rated("last", 100)]]
    for streams, groups in ((3, (("slow",), ("fast",))), (1, (("slow", "fast"),))):
        capacity = Capacity(slots=(2,), streams=streams)
        assert group_streams(listed, capacity, SAMPLES, waiting=waiting).groups == groups
    listed = [rated("slow", 80, epochs=8), rated("fast", 100, epochs=12)]
    for total, streams in ((8, 2), (2, 1)):
        cores = CoreBudget(total=total, prepared_per_s=100, members={"slow": 1, "fast": 1})
        assert len(group_streams(listed, NODE, SAMPLES, cores=cores).groups) == streams


@given(st.lists(st.tuples(st.sampled_from([10.0, 11.0, 200.0]), st.sampled_from([5, 10])), max_size=7), st.data())
def test_streams_hold_each_member_once_and_lengthen_no_run(
    rates: list[tuple[float, int]], data: st.DataObject
) -> None:
    listed = [rated(f"m{i}", rate, epochs) for i, (rate, epochs) in enumerate(rates)]
    waiting = [[rated("w", 50)]] if data.draw(st.booleans()) else []
    found = group_streams(listed, NODE, SAMPLES, waiting=waiting)
    assert sorted(name for group in found.groups for name in group) == sorted(each.member for each in listed)
    assert len(found.groups) <= NODE.streams
    assert found.run_s <= found.shared_s
    shuffled = data.draw(st.permutations(listed))
    assert group_streams(shuffled, NODE, SAMPLES, waiting=waiting) == found
    if len({epochs for _, epochs in rates}) == 1 and not waiting:
        assert len(found.groups) == 1


def test_a_laggard_that_keeps_places_from_those_that_wait_leaves_with_all_others_of_its_pace() -> None:
    capacity, cohort = Capacity(slots=(3,), streams=2), paced(SLOW, FAST, ALSO)
    decision = decide_rebalance("slow", [cohort], capacity, SAMPLES, waiting=TWELVES)
    assert decision.kind == "alone" and decision.run_s == pytest.approx(1000)
    assert decision.pace_s == pytest.approx(1000 + 10 * 1000 / 12)
    less, waiting = paced(running("slow", 60), FAST, ALSO), [[rated("a", 100), rated("b", 100)]]
    for total, is_pace in ((8, False), (3, True)):  # a private pipeline takes cores
        cores = CoreBudget(total=total, prepared_per_s=50, members=dict.fromkeys(("slow", "fast", "also"), 1.0))
        decision = decide_rebalance("slow", [less], capacity, SAMPLES, waiting=waiting, cores=cores)
        assert (decision.kind == "pace") == is_pace
    for epoch, kind, number in ((3, "move", 1), (4, "alone", None)):  # the other has passed it
        slower, capacity = paced(running("other", 11), epoch=epoch, number=1), Capacity(slots=(4,), streams=2)
        decision = decide_rebalance("slow", [cohort, slower], capacity, SAMPLES, waiting=TWELVES)
        assert decision.kind == kind and number in (None, decision.cohort)
    cohort, capacity = paced(running("s1", 10), running("s2", 10.5), FAST, ALSO), Capacity(slots=(4,), streams=3)
    decision = decide_rebalance("s1", [cohort], capacity, SAMPLES, waiting=TWELVES)
    assert (decision.kind, decision.members) == ("apart", ("s1", "s2"))
    with pytest.raises(ValueError, match="gone is in no stream group that runs"):
        decide_rebalance("gone", [cohort], NODE, SAMPLES)


def test_a_laggard_by_milliseconds_stays_in_its_stream() -> None:
    """Rates and rest of a trial on a busy machine: it left for 5 ms, and prepared its last epochs for itself."""
    capacity = Capacity(slots=(3,), streams=2)
    members = (running("slow", 24_000, 2), running("fast", 37_000, 2), running("also", 37_000, 2))
    waiting = [[rated("a", 30_000, 3)], [rated("b", 30_000, 3)]]
    for samples, kind in ((96, "pace"), (96_000_000, "alone")):
        decision = decide_rebalance("slow", [paced(*members, epoch=6)], capacity, samples, waiting=waiting)
        assert decision.kind == kind


def test_only_an_elastic_run_widens_and_only_into_free_slots() -> None:
    cohort = paced(SLOW, running("fast", 30))
    wider = decide_rebalance("slow", [cohort], NODE, SAMPLES, elastic=True, free=[6])
    assert (wider.kind, wider.workers) == ("widen", 4)
    for other in ({"elastic": False}, {"free": [0]}, {"restart_s": 900}, {"settled_epochs": 1}):
        ask: dict[str, Any] = {"elastic": True, "free": [6]} | other
        assert decide_rebalance("slow", [cohort], NODE, SAMPLES, **ask).kind == "pace"


def applied(cohorts: Sequence[Cohort], decision: RebalanceDecision) -> list[Cohort]:
    home = next(c for c in cohorts for m in c.members if m.member in decision.members)
    after = []
    for each in cohorts:
        members = tuple(m for m in each.members if m.member not in decision.members)
        moving = [m for m in home.members if m.member in decision.members]
        if decision.kind == "widen" and each is home:
            members += (dataclasses.replace(moving[0], workers=decision.workers),)
        if decision.kind == "move" and each.number == decision.cohort:
            members += tuple(dataclasses.replace(m, epochs=m.epochs + home.epoch - each.epoch) for m in moving)
        after += [dataclasses.replace(each, members=members)] if members else []
    if decision.kind in ("alone", "apart"):
        after.append(Cohort(number=99, epoch=home.epoch, members=tuple(moving), private=decision.kind == "alone"))
    return after


def rated_members(fewest: int, most: int) -> Any:
    rates, epochs = st.sampled_from([10.0, 12.0, 25.0, 50.0, 100.0]), st.sampled_from([2, 5, 10])
    return st.lists(st.tuples(rates, epochs), min_size=fewest, max_size=most)


@examples(60)
@given(rated_members(2, 5), rated_members(0, 2), rated_members(0, 4), st.booleans(), st.booleans())
def test_what_is_decided_saves_what_it_must_and_is_not_turned_round(
    first: Any, second: Any, later: Any, elastic: bool, cores_are_scarce: bool
) -> None:
    cohorts = [paced(*(running(f"a{i}", r, e) for i, (r, e) in enumerate(first)), epoch=4)]
    if second:
        cohorts.append(paced(*(running(f"b{i}", r, e) for i, (r, e) in enumerate(second)), number=1))
    names = [m.member for each in cohorts for m in each.members]
    waiting = [[rated(f"w{i}", r, e)] for i, (r, e) in enumerate(later)]
    scarce = CoreBudget(total=4, prepared_per_s=100, members=dict.fromkeys(names, 0.5))
    capacity, free = Capacity(slots=(8,), streams=2), [8 - len(names)]
    slowest = min(cohorts[0].members, key=lambda m: m.samples_per_s[1]).member
    ask = {"waiting": waiting, "cores": scarce if cores_are_scarce else None, "elastic": elastic}
    decision = decide_rebalance(slowest, cohorts, capacity, SAMPLES, free=free, **ask)
    if decision.kind == "pace":
        assert decision.run_s == decision.pace_s
        return
    assert decision.run_s is not None and decision.pace_s is not None
    assert decision.run_s <= 0.95 * decision.pace_s
    assert elastic or decision.kind != "widen"
    after = applied(cohorts, decision)
    assert {m.member for each in after for m in each.members} == set(names)
    again = decide_rebalance(slowest, after, capacity, SAMPLES, settled_epochs=2, **ask)
    # what was expected of the change is what is expected after it, so the way back never looks like a saving
    assert again.pace_s is None or again.pace_s == pytest.approx(decision.run_s)
    assert decide_rebalance(slowest, after, capacity, SAMPLES, settled_epochs=1, **ask).kind == "pace"


def test_members_are_as_wide_as_it_helps_and_as_a_node_has_slots() -> None:
    from ensemble.schedule.flotilla.timeline import FluidModel

    listed = [rated("slow", 10, workers=None), rated("fast", 37, workers=None)]
    plan = allocate(listed, Capacity(slots=(5,)), SAMPLES)
    assert len(plan.flotillas) == 1 and plan.workers == {"slow": 4, "fast": 1}
    wide = RatedMember(member="wide", samples_per_s={1: 10.0, 2: 18.0}, epochs=1, workers=4)
    capacity = Capacity(slots=(2,), widest=2)
    assert FluidModel([wide], capacity, 90).estimate_run_s([["wide"]]) == pytest.approx(5.0, rel=1e-3)
    assert correct_rates({1: 100.0, 2: 180.0}, 2, 90.0) == {1: 50.0, 2: 90.0}, "what was observed, of all widths"


def test_a_plan_is_kept_until_another_is_worth_a_change() -> None:
    capacity = Capacity(slots=(4,), streams=2)
    waiting = [rated(f"w{i}", 20.0 + 15 * i, workers=None) for i in range(4)]
    cohort = paced(running("r", 40, epochs=4, workers=2), epoch=1)
    first = revise(waiting, [cohort], capacity, SAMPLES)
    assert revise(waiting, [cohort], capacity, SAMPLES, previous=first) == first
    slower = dataclasses.replace(cohort, members=(running("r", 39.5, epochs=4, workers=2),))
    kept = revise(waiting, [slower], capacity, SAMPLES, previous=first)
    assert [(f.members, f.workers) for f in kept.flotillas] == [(f.members, f.workers) for f in first.flotillas]
    fewer = revise(waiting[1:], [cohort], capacity, SAMPLES, previous=first)
    assert set(fewer.workers) == {"w1", "w2", "w3"}
    more = revise([*waiting, rated("new", 50)], [cohort], capacity, SAMPLES, previous=first)
    assert set(more.workers) == {"w0", "w1", "w2", "w3", "new"}


def test_a_flotilla_waits_for_slots_that_running_members_hold() -> None:
    cohort = paced(running("r", 10, epochs=5, workers=1), epoch=1)
    for workers, streams, start_s in ((2, 2, 500), (1, 2, 0), (1, 1, 500)):
        waiting, capacity = [rated("w", 10, workers=workers)], Capacity(slots=(2,), streams=streams)
        assert revise(waiting, [cohort], capacity, SAMPLES).flotillas[0].start_s == pytest.approx(start_s)
