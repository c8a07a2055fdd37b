"""All members at once on the cores of a node: the pace is what slowest member and cores allow, and no slower."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.schedule.cpu_sharing import LEAST_SHARE, MemberRate, share_cores


def one(name: str, *epoch_s: float, cpus: float = 1.0, is_open: bool = False) -> MemberRate:
    by_width = dict(enumerate(epoch_s, start=1))
    return MemberRate(member=name, epoch_s=by_width, cpus=dict.fromkeys(by_width, cpus), has_open_width=is_open)


@st.composite
def some(draw: st.DrawFn) -> list[MemberRate]:
    members = []
    for number in range(draw(st.integers(1, 6))):
        first = draw(st.floats(0.01, 100))
        widths = draw(st.integers(1, 4))
        times = [first]
        for width in range(2, widths + 1):  # between no gain and a linear one
            times.append(draw(st.floats(first / width, times[-1])))
        members.append(one(f"m{number}", *times, cpus=draw(st.floats(0.05, 1)), is_open=draw(st.booleans())))
    return members


def test_the_pace_is_what_the_cores_allow_or_that_of_the_slowest_member() -> None:
    found = share_cores([one("a", 4.0), one("b", 2.0), one("c", 2.0)], cores=2, widest=2, prepare_s=4.0)
    assert found.pace_s == pytest.approx((4 + 2 + 2 + 4) / 2)
    assert found.cpus == pytest.approx({"a": 4 / 6, "b": 2 / 6, "c": 2 / 6}), "all get slower alike"
    found = share_cores([one("slow", 10.0), one("fast", 2.0)], cores=2, widest=2)
    assert found.pace_s == 10.0 and found.cpus == pytest.approx({"slow": 1.0, "fast": 0.2})
    members = [one("sleeper", 10.0, cpus=0.1), *(one(f"m{n}", 5.0) for n in range(3))]
    found = share_cores(members, cores=2, widest=2)
    assert found.pace_s == pytest.approx(10.0) and found.cpus["sleeper"] == LEAST_SHARE


def test_the_slowest_are_widened_if_their_width_was_left_open_and_that_helps_all() -> None:
    fast, slow = one("fast", 2.0), one("slow", 10.0, 6.0, is_open=True)
    assert share_cores([slow, fast], cores=4, widest=4).workers == {"slow": 2, "fast": 1}
    assert share_cores([slow, fast], cores=1, widest=4).workers["slow"] == 1, "the cores are the limit"
    assert share_cores([slow, fast], cores=4, widest=1).workers["slow"] == 1, "no node is as wide"
    assert share_cores([one("slow", 10.0, 6.0), fast], cores=4, widest=4).workers["slow"] == 1, "fixed"
    found = share_cores([*(one(name, 10.0, 6.0, is_open=True) for name in "ab"), fast], cores=8, widest=4)
    assert found.workers == {"a": 2, "b": 2, "fast": 1} and found.pace_s == 6.0


@given(some(), st.floats(0.5, 64), st.integers(1, 4), st.floats(0, 50))
def test_the_pace_is_never_faster_than_what_is_possible_and_one_of_its_bounds(
    members: list[MemberRate], cores: float, widest: int, prepare_s: float
) -> None:
    found = share_cores(members, cores, widest, prepare_s)
    times = [each.epoch_s[found.workers[each.member]] for each in members]
    work = sum(w * m.cpus[w] * m.epoch_s[w] for m in members for w in [found.workers[m.member]])
    assert found.pace_s == pytest.approx(max(*times, (work + prepare_s) / cores))
    for each in members:
        assert found.workers[each.member] == 1 or (each.has_open_width and found.workers[each.member] <= widest)
        assert found.cpus[each.member] >= LEAST_SHARE
    alone = [MemberRate(member=m.member, epoch_s={1: m.epoch_s[1]}, cpus={1: m.cpus[1]}) for m in members]
    assert found.pace_s <= share_cores(alone, cores, 1, prepare_s).pace_s * (1 + 1e-9), "than one worker each"
    booked = sum(found.workers[each.member] * found.cpus[each.member] for each in members)
    least = LEAST_SHARE * sum(found.workers.values())
    assert booked + prepare_s / found.pace_s <= max(cores, least + prepare_s / found.pace_s) * (1 + 1e-9)
