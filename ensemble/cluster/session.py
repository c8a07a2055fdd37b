"""A connection to Ray: to the cluster that the environment names, or to one that is started for this run.

A Ray of our own listens on loopback only, asks every caller for a token, lives in a directory of ours and is
removed without a trace.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ensemble.execute.host import usable_cpus
from ensemble.spec import SpecError

LOOPBACK = "127.0.0.1"
_ANSWER_S = 2.0
_LONGEST_ROOT = 40  # Ray puts sockets with names of 65 characters below; the kernel takes 107
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
# Ray turns loopback into the host's own address, and then listens on all of them, unless it is told that
# there will be no second node. The variable is called after the systems where that is the default.
_SINGLE_NODE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class Session:
    """Ray, connected. `close` ends what was started here, and nothing else.

    Attributes:
        own: whether Ray was started for this run.
        directory: of a Ray of our own; None on a cluster of others.
    """

    def __init__(self, run_dir: Path) -> None:
        address = os.environ.get("RAY_ADDRESS")
        known = sys.modules.get("ray")
        self.directory: Path | None = None
        self._connected_here = known is None or not known.is_initialized()
        self.own = self._connected_here and not address
        # Ray reads its environment when it is imported; where the user's program has done that, token
        # authentication stays as that program chose it (on, unless it was switched off).
        for name, value in _SINGLE_NODE.items() if self.own else ():
            os.environ.setdefault(name, value)
        for name, value in _ENVIRONMENT.items() if known is None else ():
            os.environ.setdefault(name, value)
        import ray

        if self.own and known is not None:
            ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        if self.own:
            self._start(run_dir)
        elif self._connected_here:
            try:
                with _signals_left_alone():
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise SpecError(f"no Ray answers at RAY_ADDRESS={address}: {error}") from None

    def _start(self, run_dir: Path) -> None:
        import ray

        root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_ROOT else "/tmp"
        name = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]
        # The same for a run each time, so that a resume removes what a killed controller left: Ray's agents
        # outlive a raylet that was killed by a minute, in which they try to tell of it.
        self.directory = Path(root) / f"ray-{os.geteuid()}-{name}"
        if self.directory.exists():
            _end(_processes_below(self.directory), patience_s=0.0)
            shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(mode=0o700)
        try:
            with _signals_left_alone(), _groups_of_their_own():
                ray.init(
                    num_cpus=max(1, round(usable_cpus())),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=80 * 2**20,
                    _temp_dir=str(self.directory),
                    _node_ip_address=LOOPBACK,
                )
            # It looks at all log files ten times a second to print them here, which nobody has asked for.
            own: Any = ray._private.worker._global_node
            own.kill_log_monitor(check_alive=False)
        except BaseException as error:  # Ctrl-C, too, may come when half of it runs
            self.close()
            if not isinstance(error, Exception):
                raise
            raise SpecError(f"Ray does not start on this machine: {error}; --executor local needs none") from error

    def nodes(self) -> list[dict[str, Any]]:
        """Ray's record of each living node: NodeID, NodeManagerHostname, Resources ...

        Ray itself takes about ten seconds to know of a node's end.
        """
        import ray

        records: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return [node for node in records if node["Alive"] and answers(node)]

    def close(self) -> None:
        """Disconnect; end a Ray of our own, wait for its processes, remove its directory."""
        import ray

        if not self._connected_here:
            return
        mine = _processes_below(self.directory) if self.directory is not None else []
        ray.shutdown()
        self._connected_here = False
        if self.directory is not None:
            _end(mine, patience_s=5.0)
            _end(_processes_below(self.directory), patience_s=0.0)  # what was only being started a moment ago
            shutil.rmtree(self.directory, ignore_errors=True)


def answers(node: dict[str, Any]) -> bool:
    """Whether a node's raylet still takes connections."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Within, Ray does not put handlers of its own for SIGTERM in place of the program's."""
    from ray._private import utils

    usual = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = usual


@contextlib.contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Within, each daemon that Ray starts has a process group of its own.

    Else a SIGTERM to the program's group (timeout(1), systemd) would end them before the members have written
    their checkpoints. The kernel ends them with the program in any case (PR_SET_PDEATHSIG).
    """
    from ray._private import services

    usual: Any = services.ConsolePopen
    services.ConsolePopen = functools.partial(usual, process_group=0)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        services.ConsolePopen = usual  # type: ignore[misc]


def _processes_below(directory: Path) -> list[Any]:
    """Ray's processes of the session in a directory: those that name it, or hold a file below it open."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            words = [*(process.info["cmdline"] or ()), *(file.path for file in process.open_files())]
            if any(str(directory) in word for word in words):
                found.append(process)
    return found


def _end(processes: list[Any], patience_s: float) -> None:
    """Wait for processes to end, and kill those that do not."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)
