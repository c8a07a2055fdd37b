"""Connects to Ray: to the cluster that the environment names, or to one that is started for this run.

A Ray that is started here listens on loopback only, requires a token that no other process knows, keeps its files
in a private directory and is removed completely. By default Ray writes a token to `~/.ray`, readable by all, and
lets every user write to its temporary directory; here that directory lies inside the private one.

A process has one connection to Ray. What uses it is counted, and the last user closes it, unless somebody else,
such as the user's program, has opened it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ensemble.executors.private_directory import PrivateDirectory
from ensemble.executors.ray import _compat
from ensemble.executors.ray.connector import LOOK_S, Connector, await_earlier_start, connect_to
from ensemble.interrupts import Interrupted, defer_signals, raise_if_deferred
from ensemble.spec import SpecError
from pipelines.environment.machine_limits import free_pinned_thread, usable_cpus

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
#: Set to 1: a Ray that is started for a run has its dashboard on.
RAY_DASHBOARD = "ENSEMBLE_RAY_DASHBOARD"
_ANSWER_S = 2.0
_MOST_ASKED = 64  # nodes at once
_CONNECT_S = 15.0
_INIT_S = 120.0  # for ray.init, which would try for a quarter of an hour
_ABANDONED_S = 1.0  # in which a start that is given up may start further processes, which are ended, too
_STARTS = 3
_TOO_SLOW = "timed out during startup"  # Ray's error if the raylet takes longer than 30 s
_TEMPORARY = "r"  # Ray's part of our directory
# The longest path of a socket that Ray puts into our directory; a session is named after the time and its process.
_LONGEST_NAME = len(f"/{_TEMPORARY}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_TOKEN = "RAY_AUTH_TOKEN"  # Ray reads it before RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
_OWN_ENVIRONMENT = {**_ENVIRONMENT, "RAY_AUTH_MODE": "token"}


class RayConnection:
    """A use of the process's connection to Ray, which is opened where there is none.

    Attributes:
        connection: what all uses have in common.
        directory: of a Ray that was started for this use, mode 0700; None on another one, which others use, too.

    Args:
        limit_s: how long `ray.init` may take, and one of an earlier `RayConnection` that was given up.

    Raises:
        SpecError: there is no connection, with the reason.
        Interrupted: a signal that is deferred was received before there was one.
    """

    _lock = threading.Lock()  # while the connection of the process is opened, closed or counted
    _latest: _Connection | None = None

    def __init__(self, limit_s: float = _INIT_S) -> None:
        while not self._lock.acquire(timeout=LOOK_S):
            raise_if_deferred()
        try:
            found = RayConnection._latest
            if found is not None and found.is_lost:
                found.close()
                found.restore_token()
                found = None
            self.connection = found or _Connection(limit_s)
            RayConnection._latest = self.connection
            self.connection.users += 1
            self.directory = self.connection.directory if found is None else None
        finally:
            self._lock.release()

    @property
    def is_lost(self) -> bool:
        """Whether somebody has closed the connection meanwhile."""
        return self.connection.is_lost

    @property
    def ray_directory(self) -> Path:
        """The directory of the session of a Ray of our own, as Ray names it."""
        assert self.directory is not None
        return self.directory / _TEMPORARY / "session_latest"

    def nodes(self) -> list[dict[str, Any]]:
        """Ray's record of each node that is reachable: NodeID, NodeManagerHostname, Resources ...

        Ray itself takes about ten seconds to notice the end of a node.
        """
        import ray

        records: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return find_reachable([node for node in records if node["Alive"]])

    def close(self) -> None:
        """End this use, to be called once; the last one ends the connection, and what was started for it."""
        with self._lock:
            self.connection.users -= 1
            if not self.connection.users:
                is_lost = self.connection.is_lost
                self.connection.close()
                if RayConnection._latest is self.connection and not is_lost:
                    RayConnection._latest = None


class _Connection:
    """The connection of this process. `close` ends what was started here, and nothing else.

    Attributes:
        users: how many `RayConnection` there are of it.
        dashboard_url: of Ray's dashboard; empty where it is off.
        token_file: with the token that the dashboard of a Ray of our own asks for; None where it has none.
    """

    def __init__(self, limit_s: float) -> None:
        self.users = 0
        self._id: tuple[str, str] | None = None
        self._limit_s, self._dashboard = limit_s, os.environ.get(RAY_DASHBOARD) == "1"
        self.dashboard_url = ""
        self.token_file: Path | None = None
        self._connector: Connector | None = None
        await_earlier_start(limit_s)
        address = os.environ.get("RAY_ADDRESS")
        known = sys.modules.get("ray")
        self._private: PrivateDirectory | None = None
        self._token_before: str | None = None
        self._single_node = contextlib.ExitStack()
        self._connected_here = known is None or not known.is_initialized()
        own = self._connected_here and not address
        # Ray reads its environment when it is imported. If the user's program has imported Ray, its choice of
        # authentication stays. Whether a cluster that is joined asks for a token is its users' choice.
        if known is None:
            for name, value in (_OWN_ENVIRONMENT if own else _ENVIRONMENT).items():
                os.environ.setdefault(name, value)

        if own:
            self._start()
        elif self._connected_here:
            self._join(str(address))
        self._id = _identify()

    @property
    def directory(self) -> Path | None:
        """The directory of a Ray of our own, mode 0700; None on another cluster."""
        return self._private.path if self._private is not None else None

    @property
    def is_lost(self) -> bool:
        """Whether somebody has closed it meanwhile, and perhaps opened another one."""
        return self._id is not None and self._id != _identify()

    def _join(self, address: str) -> None:
        import ray

        def connect() -> None:
            _check_address(address)
            with _compat.keep_signal_handlers():
                context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            self.dashboard_url = context.dashboard_url or ""

        self._connector = connect_to(f"at RAY_ADDRESS={address}", connect)
        try:
            self._connector.wait(self._limit_s)
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.AuthenticationError):
                raise SpecError(f"Ray at RAY_ADDRESS={address}: {error}") from None
            if not isinstance(error, (OSError, RuntimeError, ValueError)):
                raise
            reason = str(error)
            if isinstance(error, TimeoutError):
                reason = f"it accepts connections, but {error}; is that the port of Ray's control store (GCS)?"
            raise SpecError(f"no Ray answers at RAY_ADDRESS={address}: {reason}") from None

    def _start(self) -> None:
        """Start a Ray for this run; try again if the machine is so busy that Ray's own time limit passes."""
        for left in reversed(range(_STARTS)):
            try:
                self._start_once()
                return
            except SpecError as error:
                if not left or _TOO_SLOW not in str(error):
                    raise
                log.warning("Ray did not start within its 30 seconds on this busy machine; it is started again")

    def _start_once(self) -> None:
        self._connected_here = True
        self._single_node.enter_context(_compat.expect_single_node())
        # Ray's agents outlive a killed raylet by a minute, in which they try to report its end.
        self._private = PrivateDirectory(
            "ray-", _LONGEST_NAME, lambda stale: _terminate(_find_processes(stale), 0.0)
        )
        self._token_before = os.environ.get(_TOKEN)
        token = secrets.token_hex(32)
        _set_token(token)
        if self._dashboard:
            self.token_file = self._private.path / "token"
            self.token_file.touch(0o600)
            self.token_file.write_text(token + "\n", encoding="utf-8")
        self._connector = connect_to("on this machine", self._start_head)
        try:
            self._connector.wait(self._limit_s)
        except BaseException as error:  # Ctrl-C as well may arrive when half of it runs
            self.close()
            if isinstance(error, Interrupted) or not isinstance(error, Exception):
                raise
            raise SpecError(f"Ray does not start on this machine: {error}; --executor local needs none") from error

    def _start_head(self) -> None:
        """Start a Ray of our own, with its files in our directory, and connect to it."""
        import ray

        assert self._private is not None
        free_pinned_thread()  # Ray's processes inherit the cores
        with (
            _compat.keep_signal_handlers(),
            _compat.separate_process_groups(),
            _compat.start_core_daemons_only(dashboard=self._private.path if self._dashboard else None),
            _compat.release_lock_while_waiting(),
        ):
            context = ray.init(
                num_cpus=max(1, round(usable_cpus())),
                include_dashboard=self._dashboard,
                dashboard_host=LOOPBACK,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=80 * 2**20,
                **_compat.make_head_arguments(self._private.path / _TEMPORARY, LOOPBACK),
            )
        self.dashboard_url = context.dashboard_url or ""

    def describe_dashboard(self) -> str:
        """Returns where Ray's dashboard is, and how it is opened."""
        if self._private is None:
            where = f" at http://{self.dashboard_url}" if self.dashboard_url else ""
            return f"--ray-dashboard has no effect: this cluster has a dashboard of its own{where}, or none"
        if not self.dashboard_url or self.token_file is None:
            return "Ray's dashboard could not be started; see ray.log in the run directory"
        return f"Ray's dashboard: http://{self.dashboard_url} (it asks for the token in {self.token_file})"

    def close(self) -> None:
        """Disconnect; end a Ray of our own, wait for its processes, remove its directory."""
        import ray

        if not self._connected_here:
            return
        with defer_signals() as received:  # one that arrives now would leave the directory
            is_lost = self.is_lost
            if self._connector is not None:
                self._connector.give_up()
            if self._private is not None:
                self._end_own(self._private, is_lost=is_lost)
            elif not is_lost and self._connector is not None and self._connector.has_tried:
                ray.shutdown()
            self._connected_here = False
            self._single_node.close()
            if self._connector is not None:
                self._connector.end()
        for number in received:
            signal.raise_signal(number)

    def _end_own(self, private: PrivateDirectory, *, is_lost: bool) -> None:
        """End a Ray of our own, also one of which the start was given up, and remove its directory."""
        import ray

        started = self._connector is not None and self._connector.has_tried
        mine = _find_processes(private.path)
        if started and not is_lost:
            ray.shutdown()
        _terminate(mine, patience_s=5.0 if started else 0.0)
        until = time.monotonic() + (0.0 if started else _ABANDONED_S)
        _terminate(_find_processes(private.path), patience_s=0.0)  # those that have just been started
        while time.monotonic() < until:
            time.sleep(LOOK_S)
            _terminate(_find_processes(private.path), patience_s=0.0)
        private.close()
        if not is_lost:
            _set_token(self._token_before)

    def restore_token(self) -> None:
        """Set the token that was there before; where somebody else has taken Ray over, it may be in use."""
        import ray

        if self._private is not None and not ray.is_initialized():
            _set_token(self._token_before)


def _identify() -> tuple[str, str] | None:
    """What tells the present connection of this process from any other; None: there is none."""
    import ray

    try:
        with _compat.start_no_ray():
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_worker_id()
    except Exception:  # of several kinds, while it is closed
        return None


def _set_token(token: str | None) -> None:
    """Set the token of this process and of those that it starts; None: the one that Ray finds."""
    if token is None:
        os.environ.pop(_TOKEN, None)
    else:
        os.environ[_TOKEN] = token
    _compat.reset_token()


def _check_address(address: str) -> None:
    """Connect once to `HOST:PORT`, else raise OSError: Ray tries for many minutes, in which no signal ends it."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # else "auto", which Ray looks up
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def find_reachable(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of Ray's records of nodes that are reachable; all are asked at once, for each may take `_ANSWER_S`."""
    with ThreadPoolExecutor(max(1, min(len(nodes), _MOST_ASKED))) as pool:
        return [node for node, answers in zip(nodes, pool.map(is_reachable, nodes), strict=True) if answers]


def is_reachable(node: dict[str, Any]) -> bool:
    """Whether a node's raylet still accepts connections."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _find_processes(directory: Path) -> list[Any]:
    """Ray's processes of the session in a directory: its path is in their command line or their open files."""
    import psutil

    found = []
    psutil.process_iter.cache_clear()  # else one whose number was another's cannot be ended through what it yields
    for process in psutil.process_iter(["cmdline"]):
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            words = [*(process.info["cmdline"] or ()), *(file.path for file in process.open_files())]
            if any(str(directory) in word for word in words):
                found.append(process)
    return found


def bind_replica() -> None:
    """Let the present replica of Ray Serve listen on its node's address alone; called in its constructor."""
    _compat.bind_replica_to_node()


def _terminate(processes: list[Any], patience_s: float) -> None:
    """Wait for processes to end, and kill those that do not."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)
