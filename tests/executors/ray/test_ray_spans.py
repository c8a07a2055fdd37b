"""A member whose ranks are on two hosts: raylets in network namespaces, which see each other by a link only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from driver_child import spans
from kit.finished_runs import hashes, of_kind
from started_cluster import StartedCluster, make_cluster
from two_nodes import Event, drive

import ensemble
from benchmarks.launch.hosts import Hosts, unavailable

REASON = unavailable()
pytestmark = [pytest.mark.ray, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

N = 96


@pytest.fixture(scope="module")
def cluster() -> Iterator[StartedCluster]:
    """A head and a second node with a core each, on hosts of their own."""
    with Hosts(2, "1gbit") as hosts, make_cluster(hosts) as made:
        made.start({})
        yield made


@pytest.mark.more
def test_ranks_on_two_hosts_read_one_stream_and_have_the_weights_of_one_host(
    cluster: StartedCluster, tmp_path: Path
) -> None:
    ensemble.submit(spans(cpus=0.25), tmp_path / "local", executor="local").wait()
    state = drive(cluster, "spans", tmp_path / "run", 0.0, 3)
    assert hashes(tmp_path / "run") == hashes(tmp_path / "local")
    wide = next(each for each in of_kind(tmp_path / "run", "placed") if each["member"] == "member-0")
    assert len(wide["nodes"]) == 3 and len(set(wide["nodes"])) == 2 and wide["node"] == wide["nodes"][0]
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
    feeders = list(state.feeders.values())
    assert len(feeders) == 2
    assert sum(event.prepared or 0 for event in feeders) == 3 * N, "each sample once for both nodes"
    assert sum(event.consumed or 0 for event in feeders) == 3 * 3 * N, "the wide member reads on both nodes"
    assert sum(event.sent_bytes or 0 for event in feeders) > 0, "over the link"
    used = {(event["member"], event["rank"], event["node"]) for event in of_kind(tmp_path / "run", "usage")}
    assert {("member-0", rank, node) for rank, node in enumerate(wide["nodes"])} <= used


@pytest.mark.slow
def test_a_rank_that_is_killed_on_the_other_host_is_named_and_its_member_goes_on(
    cluster: StartedCluster, tmp_path: Path
) -> None:
    def kill_rank(events: list[Event]) -> bool:
        if not any(e["type"] == "epoch" and e["epoch"] == 2 and e["member"] == "member-0" for e in events):
            return False
        ranks = [e for e in events if e["type"] == "usage" and e["member"] == "member-0" and e["rank"] == 2]
        psutil.Process(ranks[-1]["pid"]).kill()
        return True

    ensemble.submit(spans(epochs=8, cpus=0.25), tmp_path / "local", executor="local").wait()
    drive(cluster, "spans", tmp_path / "run", 0.03, 8, meanwhile=kill_rank)
    assert hashes(tmp_path / "run") == hashes(tmp_path / "local")
    (failed,) = of_kind(tmp_path / "run", "failed")
    assert failed["reason"] == "lost" and "rank 2" in failed["error"]
