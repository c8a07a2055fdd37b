"""Connects to Ray: to the cluster that the environment names, or to one that is started for this run.

A Ray that is started here listens on loopback only, requires a token that no other process knows, and keeps its
files in a private directory. A process has one connection; its uses are counted, and the last one closes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ensemble.executors.private_directory import PrivateDirectory
from ensemble.executors.ray import _compat
from ensemble.executors.ray.calls import Calls, identify_connection
from ensemble.interrupts import Interrupted, defer_signals, raise_if_deferred
from ensemble.spec import SpecError
from pipelines.environment.machine_limits import free_pinned_thread, usable_cpus

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_ANSWER_S = 2.0
_MOST_ASKED = 64  # nodes at once
_CONNECT_S = 15.0
_INIT_S = 120.0  # for ray.init, which would try for a quarter of an hour
LOOK_S = 0.1  # how often it is looked whether a signal has been received meanwhile
_ABANDONED_S = 1.0  # in which a start that is given up may start further processes, which are ended, too
_STARTS = 3
_TOO_SLOW = "timed out during startup"  # Ray's error if the raylet takes longer than 30 s
_TEMPORARY = "r"  # Ray's part of our directory
# The longest path of a socket that Ray puts into our directory; a session is named after the time and its process.
_LONGEST_NAME = len(f"/{_TEMPORARY}/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")  # in Ray's error: of the cluster, then of this process
_TOKEN = "RAY_AUTH_TOKEN"  # Ray reads it before RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token
_OWN_TOKEN = secrets.token_hex(32)  # of every Ray that this process starts: a Ray may keep the first that it reads
_OFF = ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
_ENVIRONMENT = dict.fromkeys(_OFF, "0")
_OWN_ENVIRONMENT = {**_ENVIRONMENT, "RAY_AUTH_MODE": "token"}


class _Connector(threading.Thread):
    """Connects to Ray while another thread waits, which neither a signal nor a time limit could end otherwise.

    It lives as long as the connection: the kernel kills the daemons of a Ray of our own when the thread that
    started them ends (PR_SET_PDEATHSIG).

    Args:
        where: of the Ray, for messages.
        connect: connects to it, and raises where it cannot.
    """

    _latest: _Connector | None = None  # of this process, which has at most one connection to Ray
    where: str
    _ended: threading.Event

    def __init__(self, where: str, connect: Callable[[], None]) -> None:
        super().__init__(name="ray", daemon=True)
        latest = _Connector._latest
        if latest is not None and not latest._ended.is_set():  # two in one process would disturb each other
            raise SpecError(
                f"an earlier start of Ray, which timed out, still hangs {latest.where} and cannot be ended: "
                "start a new process"
            )
        self.where, self._connect = where, connect
        self._lock = threading.Lock()  # `connect` ends either in time or after it was given up
        self.has_tried = self._is_given_up = False
        self._ended, self.over = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        _Connector._latest = self
        self.start()

    def run(self) -> None:
        """Connect, then wait for the end of the connection; one that comes too late is ended at once."""
        try:
            self._connect()
        except BaseException as error:
            self._error = error
        with self._lock:
            self.has_tried = not self._is_given_up
        if self._is_given_up and self._error is None:
            import ray

            ray.shutdown()
        self._ended.set()
        self.over.wait()

    def wait(self, limit_s: float) -> None:
        """Wait until `connect` has ended and raise what it raised; TimeoutError, Interrupted: it has not."""
        until = time.monotonic() + limit_s
        while not self._ended.wait(LOOK_S):
            raise_if_deferred()
            if time.monotonic() > until:
                raise TimeoutError(f"ray.init has not returned within {limit_s:g} s")
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Leave `connect` alone, which cannot be ended, unless it has just ended."""
        with self._lock:
            self._is_given_up = not self.has_tried


class RayConnection:
    """A use of the process's connection to Ray, which is opened where there is none.

    Attributes:
        connection: what all uses have in common.
        directory: of a Ray that was started for this use, mode 0700; None on another one, which others use, too.
        calling: see `Calls`.

    Args:
        limit_s: how long `ray.init` may take.

    Raises:
        SpecError: there is no connection, with the reason.
    """

    _lock = threading.Lock()  # while the connection of the process is opened, closed or counted
    _latest: _Connection | None = None

    def __init__(self, limit_s: float = _INIT_S) -> None:
        while not self._lock.acquire(timeout=LOOK_S):
            raise_if_deferred()
        try:
            latest = RayConnection._latest
            if latest is not None and latest.is_lost:
                latest.close(is_again=True)
                latest = None
            self.connection = latest or _Connection(limit_s)
            RayConnection._latest = self.connection
            self.connection.users += 1
            self.directory = self.connection.directory if latest is None else None
            self.calling = self.connection.calls.calling
        finally:
            self._lock.release()

    @property
    def is_lost(self) -> bool:
        return self.connection.is_lost

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
    """

    def __init__(self, limit_s: float) -> None:
        self.users = 0
        self.calls = Calls()
        self._id: tuple[str, str] | None = None
        self._limit_s = limit_s
        self._connector: _Connector | None = None
        address = os.environ.get("RAY_ADDRESS")
        module = sys.modules.get("ray")
        self._private: PrivateDirectory | None = None
        self._token_before: str | None = None
        self._settings = contextlib.ExitStack()  # of Ray in this process, while it is connected
        self._connected_here = module is None or not module.is_initialized()
        own = self._connected_here and not address
        # Ray reads its environment when it is imported. If the user's program has imported Ray, its choice of
        # authentication stays. Whether a cluster that is joined asks for a token is its users' choice.
        if module is None:
            for name, value in (_OWN_ENVIRONMENT if own else _ENVIRONMENT).items():
                os.environ.setdefault(name, value)

        if own:
            self._start()
        elif self._connected_here:
            self._join(str(address))
        self._settings.enter_context(_compat.start_no_ray())
        self._settings.enter_context(_compat.call_before_shutdown(self.calls.end))
        self._id = identify_connection()

    @property
    def directory(self) -> Path | None:
        """The directory of a Ray of our own, mode 0700; None on another cluster."""
        return self._private.path if self._private is not None else None

    @property
    def is_lost(self) -> bool:
        """Whether somebody has closed it meanwhile, and perhaps opened another one."""
        return self.calls.are_over or (self._id is not None and self._id != identify_connection())

    def _join(self, address: str) -> None:
        import ray

        def connect() -> None:
            _check_address(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

        self._connector = _Connector(f"at RAY_ADDRESS={address}", connect)
        try:
            self._connector.wait(self._limit_s)
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.AuthenticationError):
                raise SpecError(f"Ray at RAY_ADDRESS={address}: {error}") from None
            if not isinstance(error, (OSError, RuntimeError, ValueError)):
                raise
            reason = str(error)
            if versions := _VERSIONS.findall(reason):
                raise SpecError(_explain_versions(address, *versions)) from None
            if isinstance(error, TimeoutError):
                reason = f"it accepts connections, but {error}; is that the port of Ray's control store (GCS)?"
            raise SpecError(f"no Ray answers at RAY_ADDRESS={address}: {reason}") from None

    def _start(self) -> None:
        """Start a Ray for this run; try again if the machine is so busy that Ray's own time limit passes."""
        for more_starts in reversed(range(_STARTS)):
            try:
                self._start_once()
                return
            except SpecError as error:
                if not more_starts or _TOO_SLOW not in str(error):
                    raise
                log.warning("Ray did not start within its 30 seconds on this busy machine; it is started again")

    def _start_once(self) -> None:
        self._connected_here = True
        self._settings.enter_context(_compat.expect_single_node())
        # Ray's agents outlive a killed raylet by a minute, in which they try to report its end.
        self._private = PrivateDirectory(
            "ray-", _LONGEST_NAME, lambda stale: _terminate(_find_processes(stale), 0.0)
        )
        self._token_before = os.environ.get(_TOKEN)
        _set_token(_OWN_TOKEN)
        self._connector = _Connector("on this machine", self._start_head)
        try:
            self._connector.wait(self._limit_s)
        except BaseException as error:  # Ctrl-C as well may arrive when half of it runs
            self.close()
            if isinstance(error, Interrupted) or not isinstance(error, Exception):
                raise
            raise SpecError(f"Ray does not start on this machine: {error}; --executor local needs none") from error

    def _start_head(self) -> None:
        """Start a Ray of our own, with its files in our directory, and connect to it."""
        assert self._private is not None
        free_pinned_thread()  # Ray's processes inherit the cores
        _compat.start_head(
            self._private.path / _TEMPORARY,
            LOOPBACK,
            num_cpus=max(1, round(usable_cpus())),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=80 * 2**20,
        )

    def close(self, *, is_again: bool = False) -> None:
        """Disconnect; end a Ray of our own, wait for its processes, remove its directory.

        The token of one that was lost is restored when it `is_again` closed, unless somebody else has a Ray then.
        """
        import ray

        if not self._connected_here:
            self._settings.close()
            if is_again and self._private is not None and not ray.is_initialized():
                _set_token(self._token_before)
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
            self._settings.close()
            if self._connector is not None:
                self._connector.over.set()
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


def _explain_versions(address: str, cluster: Sequence[str], own: Sequence[str]) -> str:
    return (
        f"the cluster at RAY_ADDRESS={address} has Ray {cluster[0]} and Python {cluster[1]}, this program "
        f"Ray {own[0]} and Python {own[1]}; both must have the same: with Python {cluster[1]}, "
        f"pip install 'ray[default]=={cluster[0]}'"
    )


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

    processes = []
    psutil.process_iter.cache_clear()  # else one whose number was another's cannot be ended through what it yields
    for process in psutil.process_iter(["cmdline"]):
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            words = [*(process.info["cmdline"] or ()), *(file.path for file in process.open_files())]
            if any(str(directory) in word for word in words):
                processes.append(process)
    return processes


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
