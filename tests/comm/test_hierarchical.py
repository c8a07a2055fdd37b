from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.launch.hosts import Hosts, unavailable
from benchmarks.launch.ranks import run_ranks
from ensemble.comm import SingleRank
from ensemble.comm.hierarchical import Hierarchical, choose_way
from ensemble.comm.hosts import gather_host_keys, group_by_host, host_key, machine_key, split_groups

REASON = unavailable()
UNEVEN = [[[0, 2, 4], [1], [3]], [[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]]]


def test_sums_are_right_and_the_same_on_all_ranks_whatever_the_groups() -> None:
    said = run_ranks("hierarchical_ranks:together", {"groups": UNEVEN}, placement=[0] * 5)
    assert said == [said[0]] * 5, "the bits too"


@pytest.mark.more
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_groups_follow_the_hosts_also_where_ranks_are_interleaved() -> None:
    with Hosts(2) as made:
        said = run_ranks("hierarchical_ranks:on_hosts", {}, placement=[0, 1, 0, 1, 0], hosts=made)
    assert said[0]["groups"] == [[0, 2, 4], [1, 3]] and said == [said[0]] * 5


def test_everything_but_all_reduce_is_the_base_s_and_the_way_that_of_the_first_limit_that_holds() -> None:
    alone = Hierarchical(SingleRank(), ((0,),))
    tensor = torch.arange(3.0)
    alone.all_reduce_(tensor, "max")
    alone.reduce_(tensor)
    alone.broadcast_(tensor)
    assert alone.all_gather(tensor) == [tensor] and alone.all_to_all(tensor) is tensor
    assert alone.reduce_scatter(tensor) is tensor and alone.group([0]) is not None
    alone.barrier(1.0)
    alone.start_all_reduce_(tensor).wait()
    assert (alone.rank, alone.world, alone.sent_bytes) == (0, 1, 0.0)
    alone.close()
    with pytest.raises(ValueError, match="each of the ranks 0 to 0 once"):
        Hierarchical(SingleRank(), ((0,), (0,)))
    assert host_key() == host_key() and machine_key() and gather_host_keys(SingleRank()) == [host_key()]
    ways = ((10, "flat"), (1000, "hierarchical"), (2000, "flat"))
    for size, way in ((0, "flat"), (10, "flat"), (11, "hierarchical"), (1000, "hierarchical"), (1001, "flat")):
        assert choose_way(ways, size) == way
    assert choose_way(ways[:2], 5000) == "hierarchical", "beyond all limits that of the last"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(1, 9))
def test_groups_hold_each_rank_once_and_never_span_hosts(keys: list[str], size: int) -> None:
    hosts = group_by_host(keys)
    groups = split_groups(hosts, size)
    assert sorted(rank for group in groups for rank in group) == list(range(len(keys)))
    for group in groups:
        assert len({keys[rank] for rank in group}) == 1 and list(group) == sorted(group) and len(group) <= size
    for host in hosts:
        lengths = [len(group) for group in groups if group[0] in host]
        assert max(lengths) - min(lengths) <= 1 and len(lengths) == -(-len(host) // size)
    assert split_groups(hosts, None) == hosts
    assert [host[0] for host in hosts] == sorted(host[0] for host in hosts)
