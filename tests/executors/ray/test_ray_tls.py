"""A run on a cluster whose Ray encrypts what it sends, with certificates as the page on sharing a cluster says."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from driver_child import RATES
from started_cluster import HERE, StartedCluster, make_cluster
from two_nodes import drive

pytestmark = [pytest.mark.ray, pytest.mark.more]

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


def test_a_run_on_two_nodes_goes_over_rays_tls(
    cluster: StartedCluster, certificates: Path, tmp_path: Path
) -> None:
    encrypted: dict[str, set[bool]] = {}

    def look(events: list[dict[str, Any]]) -> bool:
        places = {event["member"]: event["node"] for event in events if event["type"] == "placed"}
        if len({places[event["member"]] for event in events if event["type"] == "epoch"}) < 2:
            return False
        for name in ("gcs_server", "raylet/raylet", "ray::NodeAgent"):
            encrypted[name] = {speaks_tls(certificates, *each) for each in listeners(cluster.find(name))}
        return True

    state = drive(cluster, "nodes", tmp_path / "run", "all", 0.1, 20, meanwhile=look)
    assert [member.state for member in state.members.values()] == ["finished"] * len(RATES)
    assert {member.attempts for member in state.members.values()} == {1}
    assert sum(event.sent_bytes or 0 for event in state.feeders.values()) > 0, "the nodes shared their samples"
    assert encrypted == {"gcs_server": {True}, "raylet/raylet": {True}, "ray::NodeAgent": {True}}
