"""Packing in cases that can be worked out by hand: shares of nodes and GPUs, ranks on several nodes, refusals."""

from __future__ import annotations

import re
from typing import Any

from schedule_cases import identity, node

from ensemble.schedule.explain import explain_unplaceable
from ensemble.schedule.needs import Placement, resolve_devices
from ensemble.schedule.packing import pack


def test_a_declared_share_is_of_a_gpu_and_never_of_a_cpu_once_there_was_a_gpu() -> None:
    one = identity(gpus_per_worker=0.5)
    assert resolve_devices("auto", has_gpus=False) == "cpu" and resolve_devices("auto", has_gpus=True) == "auto"
    assert resolve_devices("cuda", has_gpus=False) == "cuda"
    assert pack([one], [], [node(gpus="GG")], "cpu")[0].devices == (None,)
    assert not pack([one], [], [node()]), "the GPUs were lost, and it waits"
    refused = explain_unplaceable(one, [node()]) or ""
    assert "0.5 GPU: no node has a GPU" in refused and refused.endswith(
        "with gpus_per_worker=0 it trains on the CPU"
    )
    guess = identity(gpus_per_worker=1.0, auto=["gpus_per_worker"])
    assert pack([guess], [], [node()])[0].devices == (None,)
    assert "devices='cuda' and no node has a GPU" in (explain_unplaceable(guess, [node()], "cuda") or "")


def test_a_refusal_names_the_largest_that_would_fit() -> None:
    nodes, one = [node("small", cpus=2), node("big", cpus=4)], [node("one", gpus="G")]
    asked: list[tuple[dict[str, Any], Any, str]] = [
        (
            {"workers": 9, "span_nodes": False},
            nodes,
            "on one node; .*workers=4 on node big .4 cpus, 0 GPUs",
        ),
        ({"workers": 9}, nodes, "9 workers x 1 cpus; all 2 nodes together hold workers=6"),
        (
            {"workers": 2, "gpus_per_worker": 0.1},
            one,
            "workers=1 on node one .*each worker .* takes a GPU",
        ),
        ({"cpus_per_worker": 5.0}, nodes, "cpus_per_worker=4 on node big"),
        ({"memory_gb": 17.0}, nodes, "memory_gb=16.0"),
    ]
    for options, there, words in asked:
        refused = explain_unplaceable(identity(**options), there)
        assert refused is not None and re.search(f"member-0 asks for .*{words}", refused), refused
    assert explain_unplaceable(identity(workers=6), nodes) is None


def test_members_of_a_lost_node_take_no_place() -> None:
    lost = Placement(identity(0), "gone", (None,))
    assert len(pack([identity(1)], [lost], [node(cpus=1)])) == 1
    part = Placement(identity(2, workers=2, gpus_per_worker=1.0), "gone", ("0", "0"), ("gone", "left"))
    beside = identity(3, gpus_per_worker=1.0)
    assert not pack([beside], [part], [node("left", gpus="G")]), "what is left of a member holds its GPU"
