"""Members on two nodes read one stream: two real raylets on this machine, with token authentication."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from driver_child import nodes
from kit.finished_runs import hashes, of_kind
from started_cluster import StartedCluster, make_cluster
from two_nodes import Event, drive

import ensemble

pytestmark = pytest.mark.ray

N = 96


@pytest.fixture(scope="module")
def cluster() -> Iterator[StartedCluster]:
    """A head and a second node, each with one core to offer."""
    with make_cluster() as made:
        made.start({})
        yield made


def expect(epochs: int, run_dir: Path) -> dict[str, str | None]:
    """The weights after so many epochs of members that each worked alone, in this process."""
    ensemble.submit(nodes(epochs=epochs), run_dir, executor="inline").wait()
    return hashes(run_dir)


@pytest.mark.more
@pytest.mark.parametrize("sharing", ["all", pytest.param("single", marks=pytest.mark.slow)])
def test_what_two_nodes_read_is_prepared_once_and_weights_are_those_of_one_node(
    cluster: StartedCluster, tmp_path: Path, sharing: str
) -> None:
    state = drive(cluster, "nodes", tmp_path / "run", sharing, 0.0, 4)
    assert hashes(tmp_path / "run") == expect(4, tmp_path / "alone")
    assert len({member.node for member in state.members.values()}) == 2
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
    feeders = state.feeders.values()
    assert len(feeders) == 2
    assert sum(event.prepared or 0 for event in feeders) == 4 * N, "each sample once for both nodes"
    assert sum(event.consumed or 0 for event in feeders) == 4 * 4 * N
    for event in feeders:
        assert event.group["design"] == sharing and event.group["nodes"] == [0, 1]
        assert "link" in event.fullness
    assert sum(event.sent_bytes or 0 for event in feeders) > 0
    assert not any((tmp_path / "run" / "feeders").iterdir()), "nobody meets there any more"


@pytest.mark.slow
def test_a_lost_node_leaves_the_members_of_the_other_to_their_stream(
    cluster: StartedCluster, tmp_path: Path
) -> None:
    epochs = 20
    raylet = max(cluster.find("raylet/raylet"), key=psutil.Process.create_time)

    def lose_one(events: list[Event]) -> bool:
        if not any(e["type"] == "epoch" and e["epoch"] == 2 for e in events):
            return False
        raylet.kill()
        return True

    state = drive(cluster, "nodes", tmp_path / "run", "all", 0.03, epochs, meanwhile=lose_one)
    assert hashes(tmp_path / "run") == expect(epochs, tmp_path / "alone")
    first = {event["member"]: event["node"] for event in reversed(of_kind(tmp_path / "run", "placed"))}
    assert len(set(first.values())) == 2 and len({member.node for member in state.members.values()}) == 1
    times = [event["t"] for event in of_kind(tmp_path / "run", "feeder")]
    pause_s = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert pause_s < 8, "nobody waits until Ray knows that the node is lost, which takes it ten seconds"
    for member in state.members.values():
        # One may be placed once more on the node before it is known to be lost.
        assert (member.attempts == 1) == (first[member.id] == member.node)
