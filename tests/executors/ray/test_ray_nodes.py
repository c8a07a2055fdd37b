"""Members on two nodes read one stream: two real raylets on this machine, with token authentication."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kit.finished_runs import hashes, of_kind
from nodes_child import declared
from started_cluster import HERE, StartedCluster, make_cluster
from two_nodes import Event, Weights, drive, expect_weights

from ensemble.store import RunState

pytestmark = pytest.mark.ray

N = 96


@pytest.fixture(scope="module")
def cluster() -> Iterator[StartedCluster]:
    """A head and a second node, each with one core to offer."""
    with make_cluster() as made:
        made.start({})
        yield made


def run(
    cluster: StartedCluster,
    run_dir: Path,
    *arguments: object,
    meanwhile: Callable[[list[Event]], bool] | None = None,
) -> RunState:
    command = [sys.executable, str(HERE / "nodes_child.py"), str(run_dir), *map(str, arguments)]
    return drive(command, cluster.environment, run_dir, meanwhile)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Weights]:
    """The weights after so many epochs of members that each worked alone, in this process."""
    return expect_weights(tmp_path_factory, "inline", lambda epochs: declared(epochs=epochs))


@pytest.mark.more
@pytest.mark.parametrize("sharing", ["all", pytest.param("single", marks=pytest.mark.slow)])
def test_what_two_nodes_read_is_prepared_once_and_weights_are_those_of_one_node(
    cluster: StartedCluster, tmp_path: Path, expected: Callable[[int], Weights], sharing: str
) -> None:
    state = run(cluster, tmp_path / "run", sharing, 0.0, 4)
    assert hashes(tmp_path / "run") == expected(4)
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
    cluster: StartedCluster, tmp_path: Path, expected: Callable[[int], Weights]
) -> None:
    epochs = 20
    raylet = max(cluster.find("raylet/raylet"), key=psutil.Process.create_time)

    def lose_one(events: list[Event]) -> bool:
        if not any(e["type"] == "epoch" and e["epoch"] == 2 for e in events):
            return False
        raylet.kill()
        return True

    state = run(cluster, tmp_path / "run", "all", 0.03, epochs, meanwhile=lose_one)
    assert hashes(tmp_path / "run") == expected(epochs)
    first = {event["member"]: event["node"] for event in reversed(of_kind(tmp_path / "run", "placed"))}
    assert len(set(first.values())) == 2 and len({member.node for member in state.members.values()}) == 1
    times = [event["t"] for event in of_kind(tmp_path / "run", "feeder")]
    pause_s = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert pause_s < 8, "nobody waits until Ray knows that the node is lost, which takes it ten seconds"
    for member in state.members.values():
        # One may be placed once more on the node before it is known to be lost.
        assert (member.attempts == 1) == (first[member.id] == member.node)
