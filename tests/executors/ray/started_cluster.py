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

    def start(
        self,
        *nodes: Mapping[str, str],
        cpus: int = 1,
        variables: Mapping[str, str] = MappingProxyType({}),
        **head: object,
    ) -> None:
        """Start a head, and further nodes with these variables in their environment.

        Args:
            variables: in the head's environment.
            head: further options of its `ray start`.
        """
        (client_port,) = find_free_ports(1)
        options = ["--head", "--port", str(self.port), "--include-dashboard", "false"]
        options += ["--ray-client-server-port", str(client_port)]
        options += ["--temp-dir", str(self.directory / "ray"), "--num-cpus", str(cpus)]
        self.start_node(
            variables, *options, *(f"--{name.replace('_', '-')}={value}" for name, value in head.items())
        )
        for each in nodes:  # one after the other: those that start at once on one host disturb each other
            self.join(each)

    def join(self, variables: Mapping[str, str], cpus: int = 1) -> None:
        self.start_node(variables, "--address", f"127.0.0.1:{self.port}", "--num-cpus", str(cpus))

    def start_node(self, variables: Mapping[str, str], *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--disable-usage-stats"]
        command += ["--node-ip-address", "127.0.0.1", "--object-store-memory", str(80 * 2**20)]
        command += ["--min-worker-port", "0", "--max-worker-port", "0"]  # else all use the same ports
        environment = {**self.environment, "RAY_ADDRESS": "", **variables}
        for _ in range(3):  # a raylet has 30 seconds, and another program may have taken its ports
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

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
def make_cluster(**variables: str) -> Iterator[StartedCluster]:
    """A cluster that is yet to be started; all of it is gone afterwards."""
    short = Path("/tmp") / f"t{secrets.token_hex(4)}"  # Ray's sockets lie below
    short.mkdir(mode=0o700)
    (short / "token").write_text(secrets.token_hex(32))
    (short / "token").chmod(0o600)
    (port,) = find_free_ports(1)
    paths = map(str, (HERE.parents[2], HERE.parents[1] / "support", HERE, HERE.parent))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(short / "token"), MARK: short.name}
    own |= {"RAY_ADDRESS": f"127.0.0.1:{port}", "PYTHONPATH": os.pathsep.join(paths)}
    environment = {**os.environ, **own, **variables}
    cluster = StartedCluster(short, port, environment)
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(short)
