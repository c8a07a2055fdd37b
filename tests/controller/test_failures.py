"""What a member is granted after it ran out of memory never leaves it without a place."""

from __future__ import annotations

from typing import Any

from ensemble.controller.failures import FailureTracker, RetryPolicy
from ensemble.schedule.needs import Node
from ensemble.schedule.packing import pack
from ensemble.spec import Identity

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
