"""Packing: never more than a node has, everything that fits is placed in the end, the same every time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble.schedule import FreeCapacity, Node, Placement, explain_unplaceable, pack
from ensemble.spec import Identity


def identity(number: int = 0, **options: object) -> Identity:
    asked = {"workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "memory_gb": None, **options}
    return Identity(
        member=f"member-{number}",
        number=number,
        params={},
        seed=0,
        threads=1,
        precision="fp32",
        epochs=1,
        batch_size=8,
        **asked,  # type: ignore[arg-type]
    )


def node(
    name: str = "a", cpus: float = 4, gpus: int = 0, memory_gb: float = 16, places: int | None = None
) -> Node:
    return Node(name, cpus, ("gpu",) * gpus, memory_gb, name, places)


members = st.lists(
    st.builds(
        dict,
        workers=st.integers(1, 3),
        cpus_per_worker=st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0]),
        gpus_per_worker=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
        memory_gb=st.sampled_from([None, 1.0, 5.0]),
    ),
    max_size=12,
).map(lambda many: [identity(i, **asked) for i, asked in enumerate(many)])
clusters = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 8]),
        st.integers(0, 3),
        st.sampled_from([4, 16]),
        st.sampled_from([None, None, 1, 3]),
    ),
    min_size=1,
    max_size=3,
).map(lambda many: [node(f"n{i}", *offer) for i, offer in enumerate(many)])
modes = st.sampled_from(["auto", "cpu", "cuda"])


def check_fair(placements: list[Placement], nodes: list[Node], devices: str) -> None:
    for at in nodes:
        here = [p for p in placements if p.count_ranks(at.name)]
        ranks = [p.count_ranks(at.name) for p in here]
        assert sum(p.identity.cpus_per_worker * n for p, n in zip(here, ranks, strict=True)) <= at.cpus + 1e-6
        assert (
            sum((p.identity.memory_gb or 0) * n for p, n in zip(here, ranks, strict=True)) <= at.memory_gb + 1e-6
        )
        assert at.places is None or len(here) <= at.places
        load: Counter[str] = Counter()
        for p in here:
            used = [p.devices[rank] for rank in p.ranks_by_node[at.name] if p.devices[rank] is not None]
            assert len(p.devices) == p.identity.workers == sum(map(len, p.ranks_by_node.values()))
            assert len({device is None for device in p.devices}) == 1, "on GPUs or on the CPU, not on both"
            assert len(set(used)) == len(used), "two ranks of a member on one GPU"
            assert set(used) <= set(at.gpu_ids)
            for device in used:
                load[device] += p.identity.gpus_per_worker
            if devices == "cpu":
                assert not used
            if devices == "cuda":
                assert len(used) == p.count_ranks(at.name)
        assert all(share <= 1 + 1e-6 for share in load.values())


@given(members, clusters, modes)
@settings(max_examples=200)
def test_a_node_is_never_oversubscribed_and_packing_repeats(
    waiting: list[Identity], nodes: list[Node], devices: str
) -> None:
    first = pack(waiting, [], nodes, devices)
    check_fair(first, nodes, devices)
    assert pack(waiting, [], nodes, devices) == first
    rest = [i for i in waiting if i.member not in {p.member for p in first}]
    check_fair(first + pack(rest, first, nodes, devices), nodes, devices)


@given(members, clusters, modes)
@settings(max_examples=200)
def test_what_fits_is_placed_alone_and_what_does_not_is_refused_with_a_reason(
    waiting: list[Identity], nodes: list[Node], devices: str
) -> None:
    for one in waiting:
        reason = explain_unplaceable(one, nodes, devices)
        assert (reason is None) == bool(pack([one], [], nodes, devices))
        assert reason is None or reason.startswith(one.member)


def test_large_members_are_placed_before_small_ones() -> None:
    waiting = [identity(0), identity(1), identity(2, cpus_per_worker=3.0)]
    assert [p.member for p in pack(waiting, [], [node(cpus=4)])] == ["member-0", "member-2"]


def test_ten_tenths_of_a_core_are_one_core() -> None:
    waiting = [identity(i, cpus_per_worker=0.1) for i in range(11)]
    assert len(pack(waiting, [], [node(cpus=1)])) == 10


def test_members_that_share_gpus_are_spread_and_gpu_nodes_come_first() -> None:
    nodes = [node("cpu", cpus=8), node("gpu", cpus=8, gpus=2)]
    placed = pack([identity(i, gpus_per_worker=0.5) for i in range(4)], [], nodes)
    assert [p.node for p in placed] == ["gpu"] * 4
    assert sorted(p.devices[0] for p in placed) == ["0", "0", "1", "1"]  # type: ignore[type-var]


def test_gpu_shares_count_only_where_there_are_gpus() -> None:
    assert pack([identity(gpus_per_worker=1.0)], [], [node()])[0].devices == (None,)
    assert "no node has a GPU" in (explain_unplaceable(identity(), [node()], "cuda") or "")
    assert pack([identity(gpus_per_worker=1.0)], [], [node(gpus=2)], "cpu")[0].devices == (None,)


def test_two_ranks_never_share_a_gpu() -> None:
    wide = identity(workers=2, gpus_per_worker=0.25)
    assert "workers=1" in (explain_unplaceable(wide, [node(gpus=1)]) or "")
    assert pack([wide], [], [node(gpus=2)])[0].devices == ("0", "1")
    # a member that asked for no GPU falls back to the CPU
    assert pack([identity(workers=2)], [], [node(gpus=1)])[0].devices == (None, None)


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


def test_ranks_on_several_nodes_have_gpus_all_of_them_or_none() -> None:
    nodes = [node("a", cpus=8, gpus=2), node("b", cpus=8, gpus=1), node("c", cpus=1)]
    (across,) = pack([identity(workers=3, gpus_per_worker=1.0)], [], nodes)
    assert across.nodes == ("a", "a", "b") and across.devices == ("0", "1", "0")
    assert pack([identity(workers=4, gpus_per_worker=1.0)], [], nodes) == []
    lost = FreeCapacity(nodes[1:2], running=[across])
    assert lost.place([identity(1, gpus_per_worker=1.0)]) == [], "what is left of a member holds its GPU"


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


def test_one_that_is_better_on_two_nodes_is_on_two_or_on_one() -> None:
    small = [node(f"s{n}", cpus=8, gpus=1, memory_gb=64) for n in range(4)]
    big = node("big", cpus=64, gpus=8, memory_gb=64)
    spread = identity(workers=8, gpus_per_worker=1.0, span_nodes="spread")
    assert pack([spread], [], [big, *small])[0].ranks_by_node == {"big": list(range(8))}
    halves = pack([spread], [], [big, *small, node("half", cpus=8, gpus=4)])[0].ranks_by_node
    assert {name: len(ranks) for name, ranks in halves.items()} == {"big": 4, "half": 4}
    fallback = pack([spread], [], [*small, node("half", cpus=8, gpus=4)])[0]
    assert len(fallback.ranks_by_node) == 5, "no two nodes hold its halves, and no node all of it"


def test_several_nodes_gpus_come_before_the_cpu_of_one_that_has_some() -> None:
    nodes = [node(name, cpus=32, gpus=4, memory_gb=64) for name in "ab"]
    wide = identity(workers=8, gpus_per_worker=1.0, auto=["gpus_per_worker"])
    (placed,) = pack([wide], [], nodes)
    assert placed.nodes == ("a",) * 4 + ("b",) * 4 and placed.devices == ("0", "1", "2", "3") * 2
    (placed,) = pack([wide], [], nodes[:1])
    assert placed.node == "a" and placed.devices == (None,) * 8
    (placed,) = pack([wide], [], [*nodes, node("c", cpus=32)])
    assert placed.node == "c", "one node without GPUs comes first"


def test_members_of_a_lost_node_take_no_place() -> None:
    lost = Placement(identity(0), "gone", (None,))
    assert len(pack([identity(1)], [lost], [node(cpus=1)])) == 1


def test_a_learnt_limit_holds() -> None:
    waiting = [identity(i) for i in range(4)]
    assert len(pack(waiting, [], [node()], limits={"a": 2})) == 2
