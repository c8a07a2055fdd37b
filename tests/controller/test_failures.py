"""What a member is granted after it ran out of memory never leaves it without a place."""

from __future__ import annotations

from typing import Any

from ensemble.controller.failure_policy import RetryPolicy
from ensemble.controller.failures import FailureTracker
from ensemble.schedule import Node, pack
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
        assert tracker.grant_memory(placed, "MemoryError", 1, memory_gb, rank)
        more = tracker.grants.apply(member)
        assert more.memory_gb == 16.0, "two ranks share 32 GiB"
        (again,) = pack([more], [], nodes, "cpu")
        assert not tracker.grant_memory(again, "MemoryError", 1, memory_gb, rank), "it had all there is"
