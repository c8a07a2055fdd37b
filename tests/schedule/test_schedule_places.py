"""Packing in cases that can be worked out by hand: shares of nodes and GPUs, ranks on several nodes, refusals."""

from __future__ import annotations

from schedule_cases import identity, node

from ensemble.schedule.explain import explain_unplaceable
from ensemble.schedule.needs import Placement, resolve_devices
from ensemble.schedule.packing import FreeCapacity, pack


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
    nodes = [node("small", cpus=2), node("big", cpus=4)]
    assert explain_unplaceable(identity(workers=9, span_nodes=False), nodes) == (
        "member-0 asks for 9 workers x 1 cpus on one node; the largest that would fit is workers=4 "
        "on node big (4 cpus, 0 GPUs, 16.0 GiB)"
    )
    assert explain_unplaceable(identity(workers=9), nodes) == (
        "member-0 asks for 9 workers x 1 cpus; all 2 nodes together hold workers=6"
    )
    assert explain_unplaceable(identity(workers=6), nodes) is None
    assert explain_unplaceable(identity(workers=2, gpus_per_worker=0.1), [node("one", gpus="G")]) == (
        "member-0 asks for 2 workers x 1 cpus, 0.1 GPU on one node; the largest that would fit is workers=1 "
        "on node one (4 cpus, 1 GPUs, 16.0 GiB); each worker of a member takes a GPU of its own"
    )
    assert "cpus_per_worker=4 on node big" in (explain_unplaceable(identity(cpus_per_worker=5.0), nodes) or "")
    assert "memory_gb=16.0" in (explain_unplaceable(identity(memory_gb=17.0), nodes) or "")


def test_ranks_are_on_several_nodes_only_where_no_node_has_room_for_all() -> None:
    nodes = [node("a", cpus=2), node("b", cpus=4), node("c", cpus=3)]
    wide = identity(0, workers=3)
    assert pack([wide], [], nodes) == [Placement(wide, "b", (None,) * 3)]
    (across,) = pack([identity(1, workers=6)], [], nodes)
    assert across.node == "b" and across.nodes == ("b", "b", "b", "b", "c", "c"), "as few nodes as possible"
    free = FreeCapacity(nodes, running=[across])
    assert [p.node for p in free.place([identity(2), identity(3), identity(4), identity(5)])] == ["a", "a", "c"]
    free.release(across)
    assert len(free.place([identity(6, workers=4)])) == 1, "its places are free again, on all of its nodes"
    assert pack([identity(7, workers=10)], [], nodes) == [], "all of its ranks or none"
    assert pack([identity(8, workers=6, span_nodes=False)], [], nodes) == []
    assert pack([identity(9, workers=6, auto=["workers"])], [], nodes) == [], "its width was measured on one node"


def test_guessed_cores_exclude_no_nodes_whose_cores_are_as_many_as_ranks() -> None:
    wide, nodes = {"workers": 8, "cpus_per_worker": 1.05}, [node("a"), node("b"), node("c", cpus=1)]
    guessed = identity(0, **wide, auto=["cpus_per_worker"])
    (across,) = pack([guessed], [], nodes)
    assert across.nodes == ("a",) * 4 + ("b",) * 4 and explain_unplaceable(guessed, nodes) is None
    free = FreeCapacity(nodes, running=[across])
    assert [p.node for p in free.place([identity(n) for n in range(1, 4)])] == ["c"], "it takes all of their cores"
    assert not pack([identity(1, **wide)], [], nodes), "what was declared is not reduced"
    wider = identity(2, workers=10, cpus_per_worker=1.05, auto=["cpus_per_worker"])
    assert "all 3 nodes together hold workers=9" in (explain_unplaceable(wider, nodes) or "")
    lent = [node("a", cpus=2), node("b", cpus=2)]  # parts of two nodes
    assert pack([identity(workers=4, cpus_per_worker=1.7, auto=["cpus_per_worker"])], [], lent)


def test_members_of_a_lost_node_take_no_place() -> None:
    lost = Placement(identity(0), "gone", (None,))
    assert len(pack([identity(1)], [lost], [node(cpus=1)])) == 1
    part = Placement(identity(2, workers=2, gpus_per_worker=1.0), "gone", ("0", "0"), ("gone", "left"))
    beside = identity(3, gpus_per_worker=1.0)
    assert not pack([beside], [part], [node("left", gpus="G")]), "what is left of a member holds its GPU"
