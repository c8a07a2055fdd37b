"""What the policies make of failures: any sequence of them, on a clock of numbers; what memory is granted then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.controller.failures import (
    FINAL_REASONS,
    REASONS,
    Decision,
    Failure,
    FailureTracker,
    RetryPolicy,
    explain_alike,
)
from ensemble.schedule.needs import Node
from ensemble.schedule.packing import pack
from ensemble.spec import Identity

FAILURES = st.builds(
    lambda reached, **fields: Failure(reached=(reached, 0), **fields),
    reached=st.integers(0, 2),
    reason=st.sampled_from(REASONS),
    member=st.sampled_from([f"member-{n}" for n in range(5)]),
    node=st.sampled_from("abc"),
    **dict.fromkeys(("is_retry_useful", "node_lost", "has_more_memory"), st.booleans()),
)


def decisions(policy: RetryPolicy, *failures: Failure) -> list[Decision]:
    return [policy.decide(failure, failures[:n]) for n, failure in enumerate(failures)]


def failed(reason: str = "lost", epoch: int = 0, **fields: object) -> Failure:
    return Failure(**{"reason": reason, "member": "m", "node": "a", "reached": (epoch, 0), **fields})  # type: ignore[arg-type]


def test_a_failure_is_tried_again_until_its_retries_are_used_and_nan_never() -> None:
    policy = RetryPolicy(retries=2)
    assert [d.retry for d in decisions(policy, *(failed(epoch=n) for n in range(3)))] == [True, True, False]
    assert not policy.decide(failed("nan"), []).retry
    assert not policy.decide(failed("disk", is_retry_useful=False), []).retry, "it may not be written to"
    assert not policy.decide(failed("error", is_retry_useful=False), []).retry
    assert not RetryPolicy(retries=0).decide(failed("error"), []).retry
    assert RetryPolicy(retries=0).decide(failed("sharing"), []).retry, "it shares nothing from then on"
    assert not RetryPolicy(retries=0).decide(failed("sharing", is_retry_useful=False), []).retry


def test_a_member_waits_for_room_on_a_full_disk_for_as_long_as_it_takes() -> None:
    full = decisions(RetryPolicy(retries=0), *(failed("disk") for _ in range(9)))
    assert [d.retry for d in full] == [True] * 9
    assert [d.wait_s for d in full] == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0]
    assert RetryPolicy(retries=0).decide(failed("disk", epoch=1), [failed("disk")]).wait_s == 4.0
    assert RetryPolicy(retries=1).decide(failed("lost"), [failed("disk")] * 5).retry, "it has cost no retry"


def test_an_exception_that_came_again_at_the_same_step_is_not_tried_a_third_time() -> None:
    policy = RetryPolicy(retries=9)
    again = [failed("error", error=f"TypeError: <object at 0x7f{n}>", position=(2, 5)) for n in range(2)]
    assert [d.retry for d in decisions(policy, *again)] == [True, False]
    for other in ({"position": (2, 6)}, {"error": "OSError: no route"}, {"position": None}, {"reason": "lost"}):
        assert policy.decide(dataclasses.replace(again[1], **other), again[:1]).retry, other  # type: ignore[arg-type]
    assert policy.decide(dataclasses.replace(again[1], member="another"), again[:1]).retry
    outages = [dataclasses.replace(each, reason="unreachable") for each in again]
    assert [d.retry for d in decisions(RetryPolicy(retries=2), *outages, outages[0])] == [True, True, False]


def test_a_lost_node_and_a_lack_of_room_that_can_be_given_are_not_counted() -> None:
    none, policy = RetryPolicy(retries=0), RetryPolicy(retries=1)
    assert none.decide(failed(node_lost=True), []).retry
    broken = [failed(gpu_lost=True) for _ in range(3)]
    assert all(decision == Decision(True) for decision in decisions(none, *broken)), "each GPU breaks once"
    memory_increases = [failed("oom", has_more_memory=True) for _ in range(5)]
    assert all(d == Decision(True) for d in decisions(none, *memory_increases)), "tried at once: it has more room"
    assert not none.decide(failed("oom"), memory_increases).retry, "none can be given any more"
    nodes = [failed(node_lost=True, node=node) for node in "abc"]
    assert [d.retry for d in decisions(policy, *nodes)] == [True, True, False], "it ends one after the other"
    moved = [failed(epoch=n, node_lost=True, node=node) for n, node in enumerate("abc")]
    assert all(d.retry for d in decisions(policy, *moved)), "one that gets on has only bad luck"


def test_only_who_comes_no_further_waits_and_ever_longer() -> None:
    policy = RetryPolicy(retries=100)
    stuck = [d.wait_s for d in decisions(policy, *(failed() for _ in range(9)))]
    assert stuck == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    moving = [d.wait_s for d in decisions(policy, *(failed(epoch=n) for n in range(5)))]
    assert moving == [0] * 5
    both = [failed(), failed(), failed(epoch=1), failed(epoch=1)]
    assert [d.wait_s for d in decisions(policy, *both)] == [0, 1, 0, 1]
    many = [failed() for _ in range(3000)]
    assert RetryPolicy(retries=5000).decide(failed(), many).wait_s == 60


@given(st.lists(FAILURES, max_size=25), st.integers(0, 3))
def test_a_member_is_retried_as_often_as_was_asked_and_others_do_not_count(
    failures: list[Failure], retries: int
) -> None:
    policy = RetryPolicy(retries)
    made = decisions(policy, *failures)
    for n, (failure, decision) in enumerate(zip(failures, made, strict=True)):
        mine = [known for known in failures[: n + 1] if known.member == failure.member]
        final = failure.reason in FINAL_REASONS or not failure.is_retry_useful
        assert decision == policy.decide(failure, mine[:-1]), "what befalls others changes nothing"
        assert not (final and decision.retry) and 0 <= decision.wait_s <= policy.longest_s
        if not final and len(mine) <= retries:
            assert decision.retry, "never fewer than what was asked for"
        shared = next((known for known in mine if known.reason == "sharing"), None)
        own = [
            k for k in mine if not k.has_more_memory and not k.node_lost and k is not shared and k.reason != "disk"
        ]
        if len(own) > retries and any(known is failure for known in own):
            assert not decision.retry, "never more for what is its own"
        if decision.wait_s and failure.reason != "disk":
            assert len(mine) > 1 and mine[-2].reached == failure.reached


PLAIN: dict[str, Any] = {"params": {}, "seed": 0, "threads": 1, "precision": "fp32", "epochs": 1, "batch_size": 8}


def test_a_member_on_several_nodes_is_granted_what_all_of_them_have() -> None:
    nodes = [Node("a", 1, (), 64.0, "a"), Node("b", 2, (), 32.0, "b")]
    asked: dict[str, Any] = {"workers": 3, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "memory_gb": 15.0}
    member = Identity(member="wide", number=0, **PLAIN, **asked)
    memory_gb = {node.name: node.memory_gb for node in nodes}
    for rank_on in ("a", "b"):
        tracker = FailureTracker(RetryPolicy(1), lambda kind, **fields: None)
        (placed,) = pack([member], [], nodes, "cpu")
        rank = placed.ranks_by_node[rank_on][0]
        assert tracker.relieve(placed, "MemoryError", 1, memory_gb, rank)
        more = tracker.grants.apply(member)
        assert more.memory_gb == 16.0, "two ranks share 32 GiB"
        assert tracker.limits == {}, "it exceeded its own limit"
        (again,) = pack([more], [], nodes, "cpu")
        assert not tracker.relieve(again, "MemoryError", 1, memory_gb, rank), "it had all there is"


def test_fewer_members_run_on_a_node_where_one_ran_out_of_memory() -> None:
    nodes = [Node("a", 8, (), 64.0, "a")]
    asked: dict[str, Any] = {"workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "memory_gb": None}
    (placed,) = pack([Identity(member="one", number=0, **PLAIN, **asked)], [], nodes, "cpu")
    tracker = FailureTracker(RetryPolicy(1), lambda kind, **fields: None)
    for together, limit in ((4, 3), (2, 1), (3, 1), (1, 1)):
        tracker.relieve(placed, "MemoryError", together, {"a": 64.0}, may_grow=together < 4)
        assert tracker.limits == {"a": limit}


def test_members_fail_alike_at_one_step_with_one_text_whatever_their_names_and_addresses() -> None:
    texts = ("KeyError: members/m0/x of <a at 0x1f>", "KeyError: members/m1/x of <a at 0x2f>")
    first, second = (failed("error", member=f"m{n}", error=text, position=(1, 2)) for n, text in enumerate(texts))
    said = explain_alike([first, second], (1, 2))
    assert said is not None and said.startswith("m0 and m1 failed alike in epoch 2, step 2") and "KeyError" in said
    assert explain_alike([first, second], (1, 3)) is None, "a third has got beyond"
    assert explain_alike([first, first], (0, 0)) is None, "one member, before and after a request"
    assert explain_alike([first], (0, 0)) is None
    between = failed("error", member="m2", error="another", position=(1, 2))
    assert explain_alike([first, between, second], (1, 2)) == said


@pytest.mark.parametrize("was_killed", [False, True])
@pytest.mark.parametrize("asked_gb", [None, 0.5])
def test_a_member_that_never_gets_what_its_node_offers_ends(asked_gb: float | None, was_killed: bool) -> None:
    """Others hold a part of the node, such as Ray's own processes: it is granted 3 GiB, and gets 2.2."""
    node, held_gb, logged = Node("a", 8, (), 3.0, "a"), 2.2, []
    asked: dict[str, Any] = {"workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "memory_gb": asked_gb}
    member = Identity(member="one", number=0, **PLAIN, **asked)
    tracker = FailureTracker(RetryPolicy(2), lambda kind, **fields: logged.append(fields["memory_gb"]))
    together, attempts, decision = 2, 0, Decision(True)
    while decision.retry and attempts < 50:
        (placed,) = pack([tracker.grants.apply(member, 3.0, held_gb)], [], [node], "cpu")
        has_more = tracker.relieve(placed, "MemoryError", together, {"a": 3.0}, was_killed=was_killed)
        together, attempts = min(together, tracker.limits.get("a", together)), attempts + 1
        decision = tracker.decide(failed("oom", has_more_memory=has_more))
    assert attempts <= 3 + len(logged) and logged == sorted(set(logged)), "each grant exceeds the one before"
