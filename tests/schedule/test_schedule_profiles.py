"""What follows from a profile, and which members need one: pure."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import identity as plain_identity

from ensemble.schedule.memory_grants import add_margin
from ensemble.schedule.needs import Node
from ensemble.schedule.packing import pack
from ensemble.schedule.profiles import MemoryCap, Profile, apply_profile, list_candidate_widths, select_unmeasured
from ensemble.spec.identity import compute_cost_key

AUTO = ["cpus_per_worker", "gpus_per_worker", "memory_gb"]
identity = functools.partial(
    plain_identity, params={"width": 8, "lr": 0.1}, batch_size=32, gpus_per_worker=1.0, auto=AUTO
)
names = st.text("abcdef0123456789-", min_size=1, max_size=8)
figures = st.floats(1e-6, 1e6)
by_width = st.dictionaries(st.integers(1, 64), figures, min_size=1, max_size=5)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    several = st.lists(names, max_size=4, unique=True).map(tuple)
    gpus = st.one_of(st.just({}), st.dictionaries(st.integers(1, 8), st.floats(0.0, 1.0), min_size=1))
    drawn = {"shape": names, "device": st.sampled_from(["cpu", "NVIDIA H200"]), "members": several, "gpus": gpus}
    drawn |= {"outlines": several, **dict.fromkeys(("step_s", "samples_per_s", "cpus"), by_width)}
    drawn |= {"memory_gb": figures, "gpu_memory_gb": st.floats(0, 100)}
    return Profile(**{name: draw(strategy) for name, strategy in drawn.items()})  # type: ignore[arg-type]


def node(cpus: float = 2.0, gpus: int = 0, **given_: int) -> Node:
    return Node(name="here", cpus=cpus, gpus=("G",) * gpus, memory_gb=8.0, host="here", **given_)


@given(profiles(), profiles())
def test_a_profile_survives_the_log_and_two_together_hold_for_the_members_of_both(
    one: Profile, other: Profile
) -> None:
    event = json.loads(json.dumps({"v": 2, "t": 0.0, "type": "profile", **one.as_dict()}))
    assert Profile.from_dict(event) == one
    both = one.merge(other)
    assert set(both.members) == {*one.members, *other.members}
    assert both.step_s == {**one.step_s, **other.step_s}
    assert both.memory_gb == max(one.memory_gb, other.memory_gb)
    assert one.merge(one) == one


@given(profiles(), st.lists(st.sampled_from([*AUTO, "workers"]), unique=True), st.integers(1, 64))
def test_what_was_declared_is_never_measured_over(profile: Profile, auto: list[str], workers: int) -> None:
    declared = identity(cpus_per_worker=0.33, gpus_per_worker=0.44, memory_gb=0.55, workers=3, auto=auto)
    found = apply_profile(declared, profile, workers)
    for name in ("workers", *AUTO):
        if name not in auto:
            assert getattr(found, name) == getattr(declared, name)
    assert found.workers == (workers if "workers" in auto else 3)
    assert found.cpus_per_worker > 0 and 0 < found.gpus_per_worker <= 1
    assert found.compared_fields() == declared.compared_fields() or "workers" in auto
    if "memory_gb" in auto:
        assert found.memory_gb == add_margin(profile.memory_gb)
    assert apply_profile(declared, None) == declared


def measured(cpus: float) -> Profile:
    return Profile(shape="s", device="cpu", members=(), step_s={}, samples_per_s={}, cpus={1: cpus}, memory_gb=0.1)


def test_shares_are_asked_for_in_steps() -> None:
    asked = [apply_profile(identity(), measured(cpus)).cpus_per_worker for cpus in (0.0004, 0.33, 1.004, 1.97)]
    assert asked == [0.05, 0.35, 1.0, 1.95]


def test_measured_memory_leaves_a_member_a_place() -> None:
    needs = dataclasses.replace(measured(1.0), memory_gb=8.0)
    spans = [([16.0] * 4, 10.25), ([8.0] * 4, 8.0), ([16.0] * 2, 8.0), ([16.0, 8.0], 5.333), ([16.0], 4.0)]
    for memory_gb, granted, span_nodes in (*((*case, True) for case in spans), ([16.0] * 4, 4.0, False)):
        asked = dataclasses.replace(identity(workers=4, auto=["memory_gb"]), span_nodes=span_nodes)
        nodes = [Node(str(i), 8.0, (), size, str(i)) for i, size in enumerate(memory_gb)]
        found = apply_profile(asked, needs, None, MemoryCap(nodes, "cpu"))
        assert found.memory_gb == granted and pack([found], [], nodes, "cpu")


def test_an_outline_tells_members_apart_that_may_differ_in_cost() -> None:
    one = identity(0)
    alike: list[dict[str, Any]] = [{"seed": 7, "epochs": 9}, {"nodes": {"rack": "1"}}]
    alike += [{"params": {"width": 8, "lr": lr}} for lr in (0.7, 1)]
    assert {compute_cost_key(identity(1, **options)) for options in alike} == {compute_cost_key(one)}
    unlike: list[dict[str, Any]] = [{"batch_size": 64}, {"threads": 2}, {"workers": 2}, {"accumulate": 2}]
    unlike += [{"precision": "bf16"}, {"optimizer": {"name": "adam", "lr": 0.1}}]
    unlike += [{"params": {"width": 16, "lr": 0.1}}, {"params": {"width": 8, "lr": 0.1, "momentum": 0.9}}]
    unlike += [{"nodes": {"ray.io/accelerator-type": gpu}} for gpu in ("T4", "H100")]
    assert len({compute_cost_key(each) for each in [one, *(identity(1, **options) for options in unlike)]}) == 11
    auto = identity(1, auto=["workers"])
    assert compute_cost_key(auto) == compute_cost_key(dataclasses.replace(auto, workers=3))


def test_only_members_are_measured_where_that_decides_something() -> None:
    two, four = [identity(n) for n in range(2)], [identity(n) for n in range(4)]
    here = [node()]
    assert select_unmeasured(four, here, "auto", {}) == four
    assert select_unmeasured(two, here, "auto", {}) == [], "all fit at once"
    assert select_unmeasured(two, here, "auto", {}, coming=5) == two, "more will come"
    assert select_unmeasured(four, [node(places=1)], "auto", {}) == [], "one after the other whatever they take"
    declared = [dataclasses.replace(one, auto=["gpus_per_worker"]) for one in four]
    assert select_unmeasured(declared, here, "auto", {}) == [], "no GPU here"
    assert select_unmeasured(declared, [node(gpus=1)], "auto", {}) == declared
    assert select_unmeasured(declared, [node(gpus=1)], "cpu", {}) == []
    widths_open = [dataclasses.replace(one, auto=["workers"]) for one in two]
    assert select_unmeasured(widths_open, here, "auto", {}) == widths_open
    known = dataclasses.replace(measured(1.0), members=("member-9",), outlines=(compute_cost_key(four[0]),))
    assert select_unmeasured(four, here, "auto", {"member-9": known}) == [], "one of their outline was measured"
    # Of others: measuring takes half a second, at most a thirtieth of the training of an epoch.
    for rate, memory_gb, samples, gpus, wanted in (
        *((100.0, 1.0, 1600, 0, []), (100.0, 1.0, 1700, 0, four), (100.0, 1.1, 1600, 0, four)),
        *((100.0, 1.0, 0, 0, four), (100.0, 1.0, 1600, 1, four), (0.0, 1.0, 1600, 0, four)),
    ):
        other = dataclasses.replace(known, outlines=("other",), samples_per_s={1: rate}, memory_gb=memory_gb)
        assert select_unmeasured(four, [node(gpus=gpus)], "auto", {"member-9": other}, samples=samples) == wanted


def test_widths_go_as_far_as_a_node_has_room() -> None:
    open_ = identity(auto=["workers", *AUTO], batch_size=64)
    for member, here, widths in (
        *((open_, node(cpus=13), [1, 2, 3, 4, 6, 8, 12]), (open_, node(cpus=64, gpus=4), [1, 2, 3, 4])),
        (dataclasses.replace(open_, threads=4), node(cpus=13), [1, 2, 3]),
        (dataclasses.replace(open_, batch_size=2), node(cpus=64), [1, 2]),
        (identity(workers=5), node(), [5]),
    ):
        assert list_candidate_widths(member, here, "auto") == widths
    assert list_candidate_widths(open_, node(cpus=64, gpus=4), "cpu")[-1] == 64
