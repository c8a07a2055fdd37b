"""A Ray cluster on this machine, started by `ray start`, with a token of its own, for tests that break it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from kit.free_ports import find_free_ports

HERE = Path(__file__).parent
MARK = "ENSEMBLE_TEST_CLUSTER"  # in the environment of all that a cluster starts


@dataclass
class StartedCluster:
    """A head and nodes of one core each; `environment` is for their clients."""

    directory: Path
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    url: str = ""  # of its job server
    python: str = sys.executable
    hosts: Any = None  # `benchmarks.launch.hosts.Hosts`, a node on each; else all are on this machine

    def start(
        self,
        *nodes: Mapping[str, str],
        cpus: int = 1,
        variables: Mapping[str, str] = MappingProxyType({}),
        **head: object,
    ) -> None:
        """Start a head with options of `ray start`, and further nodes with these variables in theirs."""
        (client_port,) = find_free_ports(1)
        options = ["--head", "--port", str(self.port), "--include-dashboard", "false", "--num-cpus", str(cpus)]
        options += ["--ray-client-server-port", str(client_port), "--temp-dir", str(self.directory / "ray")]
        options += [f"--{name.replace('_', '-')}={value}" for name, value in head.items()]
        self.start_node(variables, *options)
        for host, each in enumerate(nodes, 1):  # not at once: those that start on one host disturb each other
            self.join(each, host=host)

    def join(self, variables: Mapping[str, str], cpus: int = 1, host: int = 0) -> None:
        options = ["--address", self.environment["RAY_ADDRESS"], "--num-cpus", str(cpus)]
        self.start_node(variables, *options, host=host)

    def start_node(self, variables: Mapping[str, str], *options: str, host: int = 0) -> None:
        command = [self.python, "-m", "ray.scripts.scripts", "start", *options, "--disable-usage-stats"]
        address = self.hosts.addresses[host] if self.hosts else "127.0.0.1"
        command += ["--node-ip-address", address, "--object-store-memory", str(80 * 2**20)]
        command += ["--min-worker-port", "0", "--max-worker-port", "0"]  # else all use the same ports
        if self.hosts:
            command = self.hosts.command(host, command)
        environment = {**self.environment, "RAY_ADDRESS": "", **variables}
        for _ in range(3):  # a raylet has 30 seconds, and another program may have taken its ports
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

    def find_variables(self) -> dict[str, str]:
        """What clients with an environment of their own need."""
        return {name: value for name, value in self.environment.items() if name.startswith("RAY_")}

    def find(self, *names: str, **variables: str) -> list[psutil.Process]:
        """The processes of the cluster and of its actors that have one of these words in their command."""
        wanted, found = {MARK: self.environment[MARK], **variables}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended
                command, environment = " ".join(process.cmdline()), process.environ()
                is_ours = all(environment.get(key) == value for key, value in wanted.items())
                if is_ours and process.pid != os.getpid() and any(name in command for name in names or [""]):
                    found.append(process)
        return found

    def find_members(self) -> list[psutil.Process]:
        """Agents, feeders, ranks and what else they have started, while the raylets live."""
        found: list[psutil.Process] = []
        for raylet in self.find("raylet/raylet"):
            for process in raylet.children():
                if "ray::NodeAgent" in " ".join(process.cmdline()):
                    found += [process, *process.children(recursive=True)]
        return found

    def stop(self) -> None:
        mine = self.find("ray", "gcs_server")
        for each in mine:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(mine, timeout=60)

    def run(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "ensemble.cli", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.environment, **pipes)  # type: ignore[call-overload,no-any-return]


@contextlib.contextmanager
def make_cluster(hosts: Any = None, **variables: str) -> Iterator[StartedCluster]:
    """A cluster that is yet to be started; all of it is gone afterwards."""
    short = Path("/tmp") / f"t{secrets.token_hex(4)}"  # Ray's sockets lie below
    short.mkdir(mode=0o700)
    (short / "token").write_text(secrets.token_hex(32))
    (short / "token").chmod(0o600)
    (port,) = find_free_ports(1)
    paths = map(str, (HERE.parents[2], HERE.parents[1] / "support", HERE, HERE.parent))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(short / "token"), MARK: short.name}
    head = hosts.addresses[0] if hosts else "127.0.0.1"
    own |= {"RAY_ADDRESS": f"{head}:{port}", "PYTHONPATH": os.pathsep.join(paths)}
    cluster = StartedCluster(short, port, {**os.environ, **own, **variables}, hosts=hosts)
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(short)


@contextlib.contextmanager
def start_head(environment: Mapping[str, str], cpus: int) -> Iterator[dict[str, str]]:
    """A head alone, for clients in an environment of their own: yields what that needs."""
    with make_cluster() as cluster:
        cluster.start(variables=environment, cpus=cpus)
        yield cluster.find_variables()
