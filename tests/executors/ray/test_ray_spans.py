"""A member whose ranks are on two hosts: raylets in network namespaces, which see each other by a link only."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.finished_runs import hashes, of_kind
from spans_child import declared
from two_nodes import drive, expect_weights, wait_for_nodes

from benchmarks.launch.hosts import Hosts, unavailable
from ensemble.store import RunState

REASON = unavailable()
pytestmark = [pytest.mark.ray, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

HERE = Path(__file__).parent
N = 96
PORT = "6399"


@dataclass
class Cluster:
    """A head and a second node, on hosts of their own; `environment` is for their clients."""

    hosts: Hosts
    environment: dict[str, str]

    def run(
        self, run_dir: Path, *arguments: object, meanwhile: Callable[[list[dict[str, Any]]], bool] | None = None
    ) -> RunState:
        command = [sys.executable, str(HERE / "spans_child.py"), str(run_dir), *map(str, arguments)]
        return drive(self.hosts.command(0, command), self.environment, run_dir, meanwhile)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    short = Path("/tmp") / f"t{secrets.token_hex(4)}"  # Ray's sockets lie below
    short.mkdir(mode=0o700)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE.parent)]),
    }
    nodes: list[subprocess.Popen[bytes]] = []
    with Hosts(2, "1gbit") as hosts:
        head = f"{hosts.addresses[0]}:{PORT}"
        try:
            for number, own in enumerate((["--head", "--port", PORT], ["--address", head])):
                command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *own]
                command += ["--num-cpus", "1", "--node-ip-address", hosts.addresses[number]]
                command += ["--disable-usage-stats"]
                command += ["--object-store-memory", str(80 * 2**20)]
                command += ["--temp-dir", str(short / "ray"), "--include-dashboard", "false"] * (number == 0)
                with open(short / f"{number}.log", "wb") as log:
                    started = subprocess.Popen(
                        hosts.command(number, command), env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                nodes.append(started)
                on_host = functools.partial(hosts.command, 0)
                wait_for_nodes({**environment, "RAY_ADDRESS": head}, len(nodes), on_host)
            yield Cluster(hosts, {**environment, "RAY_ADDRESS": head})
        finally:
            mine = [each for node in nodes for each in psutil.Process(node.pid).children(recursive=True)]
            for each in [*mine, *nodes]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            for node in nodes:
                node.wait()
            psutil.wait_procs(mine, timeout=60)
            shutil.rmtree(short)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str | None]]:
    """The weights after so many epochs of members each of which had all its ranks on this machine."""
    return expect_weights(tmp_path_factory, "local", lambda epochs: declared(epochs=epochs, cpus=0.25))


@pytest.mark.more
def test_ranks_on_two_hosts_read_one_stream_and_have_the_weights_of_one_host(
    cluster: Cluster, tmp_path: Path, expected: Callable[[int], dict[str, str | None]]
) -> None:
    state = cluster.run(tmp_path / "run", 0.0, 3, "torch")
    assert hashes(tmp_path / "run") == expected(3)
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
    cluster: Cluster, tmp_path: Path, expected: Callable[[int], dict[str, str | None]]
) -> None:
    def kill_rank(events: list[dict[str, Any]]) -> bool:
        if not any(e["type"] == "epoch" and e["epoch"] == 2 and e["member"] == "member-0" for e in events):
            return False
        ranks = [e for e in events if e["type"] == "usage" and e["member"] == "member-0" and e["rank"] == 2]
        os.kill(ranks[-1]["pid"], signal.SIGKILL)
        return True

    cluster.run(tmp_path / "run", 0.03, 8, "torch", meanwhile=kill_rank)
    assert hashes(tmp_path / "run") == expected(8)
    (failed,) = of_kind(tmp_path / "run", "failed")
    assert failed["reason"] == "lost" and "rank 2" in failed["error"]
