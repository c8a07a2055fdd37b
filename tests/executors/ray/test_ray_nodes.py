"""Members on two nodes read one stream: two real raylets on this machine, with token authentication.

Ray encrypts what it sends, with certificates as the page on sharing a cluster says. Ranks of one member are on two
hosts: raylets in network namespaces, which see each other by a link only.
"""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from driver_child import nodes, spans
from kit.finished_runs import hashes, of_kind
from started_cluster import HERE, StartedCluster, make_cluster
from two_nodes import Event, drive

import ensemble
from benchmarks.launch.hosts import Hosts, unavailable

pytestmark = pytest.mark.ray

N = 96
PAGE = HERE.parents[2] / "docs" / "how-to" / "users-of-a-cluster.md"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's commands write, for the addresses of this machine."""
    folder = tmp_path_factory.mktemp("tls")
    [commands] = re.findall(r"```sh\n(openssl .*?)```", PAGE.read_text(), re.DOTALL)
    known = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    addresses = ",".join(f"IP:{address}" for address in ["127.0.0.1", *known])
    commands, count = re.subn(r"IP:10\.0\.0\.1,IP:10\.0\.0\.2", addresses, commands)
    assert count == 1
    done = subprocess.run(["sh", "-ec", commands], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def cluster(certificates: Path) -> Iterator[StartedCluster]:
    """A head and a second node, each with one core to offer."""
    files = {"SERVER_CERT": "node.crt", "SERVER_KEY": "node.key", "CA_CERT": "ca.crt"}
    variables = {f"RAY_TLS_{name}": str(certificates / file) for name, file in files.items()}
    with make_cluster(RAY_USE_TLS="1", **variables) as made:
        made.start({})
        yield made


def speaks_tls(certificates: Path, host: str, port: int) -> bool:
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    context.check_hostname = False
    context.load_cert_chain(certificates / "node.crt", certificates / "node.key")
    try:
        with socket.create_connection((host, port), 60) as raw, context.wrap_socket(raw):
            return True
    except OSError:
        return False


def listeners(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    found = set[tuple[str, int]]()
    for process in processes:
        try:
            found |= {tuple(c.laddr) for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
        except (psutil.Error, FileNotFoundError):  # it has ended
            continue
    return found


def expect(epochs: int, run_dir: Path) -> dict[str, str | None]:
    """The weights after so many epochs of members that each worked alone, in this process."""
    ensemble.submit(nodes(epochs=epochs), run_dir, executor="inline").wait()
    return hashes(run_dir)


@pytest.mark.more
@pytest.mark.parametrize("sharing", ["all", pytest.param("single", marks=pytest.mark.slow)])
def test_what_two_nodes_read_is_prepared_once_and_weights_are_those_of_one_node(
    cluster: StartedCluster, certificates: Path, tmp_path: Path, sharing: str
) -> None:
    epochs, encrypted = 12, dict[str, set[bool]]()

    def look(events: list[Event]) -> bool:
        places = {event["member"]: event["node"] for event in events if event["type"] == "placed"}
        if len({places[event["member"]] for event in events if event["type"] == "epoch"}) < 2:
            return False
        for name in ("gcs_server", "raylet/raylet", "ray::NodeAgent"):
            encrypted[name] = {speaks_tls(certificates, *each) for each in listeners(cluster.find(name))}
        return True

    state = drive(cluster, "nodes", tmp_path / "run", sharing, 0.1, epochs, meanwhile=look)
    assert encrypted == {"gcs_server": {True}, "raylet/raylet": {True}, "ray::NodeAgent": {True}}
    assert hashes(tmp_path / "run") == expect(epochs, tmp_path / "alone")
    assert len({member.node for member in state.members.values()}) == 2
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
    feeders = state.feeders.values()
    assert len(feeders) == 2
    assert sum(event.prepared or 0 for event in feeders) == epochs * N, "each sample once for both nodes"
    assert sum(event.consumed or 0 for event in feeders) == 4 * epochs * N
    for event in feeders:
        assert event.group["design"] == sharing and event.group["nodes"] == [0, 1]
        assert "link" in event.fullness
    assert sum(event.sent_bytes or 0 for event in feeders) > 0
    assert not any((tmp_path / "run" / "feeders").iterdir()), "nobody meets there any more"


REASON = unavailable()
on_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def hosts() -> Iterator[StartedCluster]:
    """A head and a second node with a core each, on hosts of their own."""
    with Hosts(2, "1gbit") as links, make_cluster(links) as made:
        made.start({})
        yield made


@on_hosts
@pytest.mark.more
def test_ranks_on_two_hosts_read_one_stream_and_have_the_weights_of_one_host(
    hosts: StartedCluster, tmp_path: Path
) -> None:
    ensemble.submit(spans(cpus=0.25), tmp_path / "local", executor="local").wait()
    state = drive(hosts, "spans", tmp_path / "run", 0.0, 3)
    assert hashes(tmp_path / "run") == hashes(tmp_path / "local")
    wide = next(each for each in of_kind(tmp_path / "run", "placed") if each["member"] == "member-0")
    assert len(wide["nodes"]) == 3 and len(set(wide["nodes"])) == 2 and wide["node"] == wide["nodes"][0]
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
    feeders = list(state.feeders.values())
    assert len(feeders) == 2
    assert sum(event.prepared or 0 for event in feeders) == N, "each sample once for both nodes and all epochs"
    assert sum(event.consumed or 0 for event in feeders) == 3 * 3 * N, "the wide member reads on both nodes"
    assert sum(event.sent_bytes or 0 for event in feeders) > 0, "over the link"
    used = {(event["member"], event["rank"], event["node"]) for event in of_kind(tmp_path / "run", "usage")}
    assert {("member-0", rank, node) for rank, node in enumerate(wide["nodes"])} <= used


@on_hosts
@pytest.mark.slow
def test_a_rank_that_is_killed_on_the_other_host_is_named_and_its_member_goes_on(
    hosts: StartedCluster, tmp_path: Path
) -> None:
    def kill_rank(events: list[Event]) -> bool:
        if not any(e["type"] == "epoch" and e["epoch"] == 2 and e["member"] == "member-0" for e in events):
            return False
        ranks = [e for e in events if e["type"] == "usage" and e["member"] == "member-0" and e["rank"] == 2]
        psutil.Process(ranks[-1]["pid"]).kill()
        return True

    ensemble.submit(spans(epochs=8, cpus=0.25), tmp_path / "local", executor="local").wait()
    drive(hosts, "spans", tmp_path / "run", 0.03, 8, meanwhile=kill_rank)
    assert hashes(tmp_path / "run") == hashes(tmp_path / "local")
    (failed,) = of_kind(tmp_path / "run", "failed")
    assert failed["reason"] == "lost" and "rank 2" in failed["error"]
