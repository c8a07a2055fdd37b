"""Several Ray nodes on this machine, to be killed whole: with its processes, its temporary files, its sockets.

Every process of a node carries `FAULTS_NODE` in its environment, which is how it is found, and `TMPDIR` below a
directory of its node, which goes when the node is killed, as the disk of a machine that is gone does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from kit.event_dicts import fold, read_events
from kit.free_ports import find_free_ports

from ensemble.store import RunState, StoreError

LIMIT_S = 600.0  # of what hangs
ROOT = Path(__file__).parents[2]
CHILD_PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)])


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Processes, not this one, that have a variable in their environment; of a zombie nobody can tell."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each, and wait until they are gone."""
    known = list(processes)
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(known, timeout=300)


class Nodes:
    """A Ray head (node 0) and more nodes, each with `cpus` cores to offer; with token authentication.

    Attributes:
        environment: for drivers.
        alive: number -> the process that started the node.
    """

    def __init__(self, count: int, cpus: int = 1) -> None:
        self.directory = Path("/tmp") / f"t{secrets.token_hex(4)}"  # Ray's sockets lie below: a short name
        self.directory.mkdir(mode=0o700)
        token = self.directory / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self._port, self._client_port = find_free_ports(2)
        self._cpus = cpus
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": f"127.0.0.1:{self._port}",
            "PYTHONPATH": CHILD_PATH,
        }
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self._next = 0
        try:
            self.have(count)
        except BaseException:
            self.close()
            raise

    def have(self, count: int) -> None:
        """Start nodes until there are so many."""
        if len(self.alive) >= count:
            return
        while len(self.alive) < count:
            self._start()
        self._wait_for_nodes()

    def _start(self) -> None:
        number, self._next = self._next, self._next + 1
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", str(self._cpus)]
        command += ["--node-ip-address", "127.0.0.1", "--disable-usage-stats"]
        command += ["--object-store-memory", str(80 * 2**20)]
        if number == 0:
            command += ["--head", "--port", str(self._port), "--include-dashboard", "false"]
            command += [
                "--ray-client-server-port",
                str(self._client_port),
                "--temp-dir",
                str(self.directory / "ray"),
            ]
        else:
            command += ["--address", f"127.0.0.1:{self._port}"]
        own = self.tmp(number)
        own.mkdir(mode=0o700)
        environment = {
            **self.environment,
            "RAY_ADDRESS": "",
            "FAULTS_NODE": self._mark(number),
            "TMPDIR": str(own),
        }
        self.alive[number] = self._launch(command, environment)
        until, starts = time.monotonic() + 300, 1
        while not any(
            process.name() == "raylet" for process in self.of(number)
        ):  # two at a time take each other's ports
            if self.alive[number].poll() is not None and starts < 3:  # as another program has taken its ports
                self.alive[number], starts = self._launch(command, environment), starts + 1
            said = (own / "start.txt").read_text()
            assert time.monotonic() < until, f"node {number} does not come up after {starts} starts: {said}"
            time.sleep(0.1)

    @staticmethod
    def _launch(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(Path(environment["TMPDIR"]) / "start.txt", "w") as said:
            return subprocess.Popen(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )

    def tmp(self, number: int) -> Path:
        """Temporary files of a node."""
        return self.directory / f"n{number}"

    def _mark(self, number: int) -> str:
        return f"{self.directory.name}-{number}"

    def _wait_for_nodes(self) -> None:
        asks = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        until = time.monotonic() + 300
        while True:
            done = subprocess.run(
                [sys.executable, "-c", asks], env=self.environment, capture_output=True, text=True
            )
            if done.stdout.strip() == str(len(self.alive)):
                return
            assert time.monotonic() < until, done.stdout + done.stderr[-2000:]

    def of(self, number: int) -> list[psutil.Process]:
        """All processes of a node, Ray's and ours."""
        return processes_with("FAULTS_NODE", self._mark(number))

    def ours(self) -> list[psutil.Process]:
        """What runs on the nodes for our runs: agents, workers, feeders, fork servers and what they started."""
        words = ("ray::NodeAgent", "ensemble.", "pipelines.", "multiprocessing")
        found = []
        for number in self.alive:
            for process in self.of(number):
                with contextlib.suppress(psutil.Error):
                    if any(word in " ".join(process.cmdline()) for word in words):
                        found.append(process)
        return found

    def kill(self, number: int) -> None:
        """End a node as a power cut does: all its processes at once, its temporary files gone."""
        starter = self.alive.pop(number)
        known = self.of(number)
        for process in known:  # first stopped, so that none sees another's end before its own
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        kill_all([*known, *self.of(number)])
        starter.wait()
        kill_all(self.of(number))
        shutil.rmtree(self.tmp(number), ignore_errors=True)

    def close(self) -> None:
        """End all nodes; nothing of them is left."""
        for number in sorted(self.alive, reverse=True):
            self.kill(number)
        shutil.rmtree(self.directory, ignore_errors=True)


class Driver:
    """A driver (`faults_driver.py`) in a process group of its own, and what its run has logged."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str], **told: Any) -> None:
        self._log = run_dir / "events.jsonl"
        command = [
            sys.executable,
            str(Path(__file__).with_name("faults_driver.py")),
            str(run_dir),
            json.dumps(told),
        ]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads fills up
        self.process = subprocess.Popen(command, env=environment, stderr=self._said, start_new_session=True)

    def list_events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Events so far; none while the log is being written anew."""
        with contextlib.suppress(StoreError):
            events = read_events(self._log) if self._log.exists() else []
            return [event for event in events if kind in (None, event["type"])]
        return []

    @property
    def state(self) -> RunState:
        return fold(self.list_events())

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Wait while the driver lives."""
        until = time.monotonic() + LIMIT_S
        while not holds():
            is_late = time.monotonic() >= until
            if is_late:
                self.process.kill()
            assert self.process.poll() is None and not is_late, self.end()
            time.sleep(0.005)

    def end(self) -> tuple[int, str]:
        """Wait for its end; its exit code, and what it said."""
        try:
            code = self.process.wait(timeout=LIMIT_S)
        finally:
            self.process.kill()
        with self._said:
            self._said.seek(0)
            return code, self._said.read()
