"""Members on two nodes read one stream: two real raylets on this machine, with token authentication."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from nodes_child import declared
from two_nodes import expect_weights, wait_for_nodes, weights

from ensemble.store import RunState, fold, read_events

pytestmark = pytest.mark.ray

HERE = Path(__file__).parent
N = 96


@dataclass
class Cluster:
    """A head and a second node, each with one core to offer; `environment` is for their clients."""

    environment: dict[str, str]
    nodes: list[subprocess.Popen[bytes]]

    def run(
        self, run_dir: Path, *arguments: object, meanwhile: Callable[[list[dict[str, Any]]], bool] | None = None
    ) -> RunState:
        """Run `nodes_child` to its end; `meanwhile` is shown the events until it says that it has seen enough."""
        command = [sys.executable, str(HERE / "nodes_child.py"), str(run_dir), *map(str, arguments)]
        driver = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        try:
            while meanwhile is not None and driver.poll() is None:
                if (run_dir / "events.jsonl").exists() and meanwhile(read_events(run_dir / "events.jsonl")):
                    meanwhile = None
                time.sleep(0.05)
            _, said = driver.communicate(timeout=280)
        finally:
            driver.kill()
        assert driver.returncode == 0, said
        assert meanwhile is None or meanwhile(read_events(run_dir / "events.jsonl")), "the run was over before"
        return fold(read_events(run_dir / "events.jsonl"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    short = Path("/tmp") / f"t{secrets.token_hex(4)}"  # Ray's sockets lie below
    short.mkdir(mode=0o700)
    (short / "token").write_text(secrets.token_hex(32))
    (short / "token").chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(short / "token"),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(HERE.parent)]),
    }
    usual = ["--block", "--num-cpus", "1", "--node-ip-address", "127.0.0.1", "--disable-usage-stats"]
    usual += ["--object-store-memory", str(80 * 2**20)]
    head = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", str(short / "ray")]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for own in (head, ["--address", f"127.0.0.1:{port}"]):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *usual]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            nodes.append(subprocess.Popen(command, env={**environment, "RAY_ADDRESS": ""}, **quiet))  # type: ignore[call-overload]
            wait_for_head(port)
        wait_for_nodes(environment, len(nodes))
        yield Cluster(environment, nodes)
    finally:
        mine = [each for node in nodes for each in psutil.Process(node.pid).children(recursive=True)]
        for each in [*mine, *nodes]:
            if isinstance(each, subprocess.Popen) or each.is_running():
                each.kill()
        for node in nodes:
            node.wait()
        psutil.wait_procs(mine, timeout=10)
        shutil.rmtree(short)


def wait_for_head(port: int) -> None:
    until = time.monotonic() + 90
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < until, "the head does not listen"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str | None]]:
    """The weights after so many epochs of members that each worked alone, in this process."""
    return expect_weights(tmp_path_factory, "inline", lambda epochs: declared(epochs=epochs))


def of_kind(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["type"] == kind]


@pytest.mark.parametrize("sharing", ["all", pytest.param("single", marks=pytest.mark.slow)])
def test_what_two_nodes_read_is_prepared_once_and_weights_are_those_of_one_node(
    cluster: Cluster, tmp_path: Path, expected: Callable[[int], dict[str, str | None]], sharing: str
) -> None:
    state = cluster.run(tmp_path / "run", sharing, 0.0, 4)
    assert weights(state) == expected(4)
    assert len({member.node for member in state.members.values()}) == 2
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
    feeders = state.feeders.values()
    assert len(feeders) == 2
    assert sum(event["prepared"] for event in feeders) == 4 * N, "each sample once for both nodes"
    assert sum(event["consumed"] for event in feeders) == 4 * 4 * N
    for event in feeders:
        assert event["group"]["design"] == sharing and event["group"]["nodes"] == [0, 1]
        assert "link" in event["fullness"]
    assert sum(event["sent_bytes"] for event in feeders) > 0
    assert not any((tmp_path / "run" / "feeders").iterdir()), "nobody meets there any more"


@pytest.mark.slow  # tests/pipelines/test_peers.py kills a feeder among peers, too
def test_a_feeder_killed_in_mid_run_leaves_the_other_node_running_and_comes_back(
    cluster: Cluster, tmp_path: Path, expected: Callable[[int], dict[str, str | None]]
) -> None:
    killed: list[dict[str, Any]] = []
    epochs = 100

    def kill_one(events: list[dict[str, Any]]) -> bool:
        feeders = [e for e in events if e["type"] == "feeder"]
        if not killed and any(e["type"] == "epoch" and e["epoch"] == 2 for e in events):
            killed.append(feeders[-1])
            os.kill(feeders[-1]["pid"], signal.SIGKILL)
        return bool(killed)

    # Nodes share again if they are no farther apart than the ring, here seven seconds: as long as a busy machine
    # may take to start a feeder, for which members may wait. They meet before the rings hold the stream's end.
    state = cluster.run(tmp_path / "run", "all", 0.1, epochs, 2048, meanwhile=kill_one)
    assert weights(state) == expected(epochs)
    assert {member.attempts for member in state.members.values()} == {1}
    where = killed[0]["node"]
    elsewhere = {member.id for member in state.members.values() if member.node != where}
    alone = {event["member"] for event in of_kind(tmp_path / "run", "epoch") if event["private_batches"]}
    assert not alone & elsewhere, "only who lost its feeder may go on alone, and need not at the end of an epoch"
    later = [event for event in of_kind(tmp_path / "run", "feeder") if event["pid"] != killed[0]["pid"]]
    groups = [event["group"] for event in later if event["node"] == where]
    assert max(group["generation"] or 0 for group in groups) > 1, "the nodes have met again"
    assert max(group["received"] for group in groups) > 0, "and share the stream"


@pytest.mark.slow
def test_a_lost_node_leaves_the_members_of_the_other_to_their_stream(
    cluster: Cluster, tmp_path: Path, expected: Callable[[int], dict[str, str | None]]
) -> None:
    epochs = 20
    raylets = [p for p in psutil.Process(cluster.nodes[1].pid).children(recursive=True) if p.name() == "raylet"]

    def lose_one(events: list[dict[str, Any]]) -> bool:
        if not any(e["type"] == "epoch" and e["epoch"] == 2 for e in events):
            return False
        for raylet in raylets:
            raylet.kill()
        return True

    state = cluster.run(tmp_path / "run", "all", 0.03, epochs, meanwhile=lose_one)
    assert weights(state) == expected(epochs)
    first = {event["member"]: event["node"] for event in reversed(of_kind(tmp_path / "run", "placed"))}
    assert len(set(first.values())) == 2 and len({member.node for member in state.members.values()}) == 1
    times = [event["t"] for event in of_kind(tmp_path / "run", "feeder")]
    pause_s = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert pause_s < 8, "nobody waits until Ray knows that the node is lost, which takes it ten seconds"
    for member in state.members.values():
        # One may be placed once more on the node before it is known to be lost.
        assert (member.attempts == 1) == (first[member.id] == member.node)
