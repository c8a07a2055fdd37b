"""Starts Horovod without `horovodrun`, and limits how long its calls take.

Horovod's ranks tell each other where they listen through a key-value server that speaks a little HTTP (`PUT`,
`GET` and `DELETE` of /scope/key: horovod/common/gloo/http_store.cc). Horovod's own listens on all addresses; here
rank 0 runs one that is bound to the chosen interface, and hands out its address in the store by which the ranks
meet. Its paths begin with a secret of that store. What gloo opens between the ranks is bound to the interface too.

One background thread a process carries out all that its rank calls, one after the other, in an order that rank 0
decides. A call is known by its *name*, which has to be the same on every rank; so threads may call at once. Some
ranks among all are a *process set*; Horovod refuses two sets of the same ranks. Every *cycle* the threads of all
ranks ask each other what there is to do, also where nothing is.

Horovod has no time limit for a call. A peer that dies, or is silent for longer than the limit (gloo's own), ends
the background thread of all others; a peer that lives and does not call is what `Watchdog` is for.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

from ensemble.comm import _horovod_compat as _compat
from pipelines.errors import PipelineError

INSTALL_HINT = "Horovod is not installed (make horovod, or deploy/build-horovod.sh, builds it)"
#: Milliseconds of a cycle, unless HOROVOD_CYCLE_TIME is set: a call waits for half of it until it is begun.
CYCLE_MS = 1.0
#: Elements that fit into one call: Horovod counts them in 32 bits.
MAX_ELEMENTS = 1 << 30
#: How long the others may take to make a process set, at least: it is a meeting, and no call.
MEET_S = 60.0
#: How long `stop` waits for the others to stop too.
STOP_S = 5.0
_MAX_VALUE_BYTES = 1 << 20


def import_horovod() -> Any:
    """The module `horovod.torch`.

    Raises:
        PipelineError: it is not installed, or was built against another torch.
    """
    try:
        import horovod.torch as hvd
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise PipelineError(f"horovod.torch cannot be imported: {error}") from error
        raise PipelineError(INSTALL_HINT) from None
    except (ImportError, OSError) as error:
        raise PipelineError(f"horovod.torch cannot be imported: {error}; build it again: make horovod") from error
    return hvd


class _RequestHandler(BaseHTTPRequestHandler):
    """Handles one request; each has a connection of its own."""

    timeout = 10.0
    server: KeyValueServer

    def do_GET(self) -> None:
        """The value of a key, or 404."""
        self._answer(self._is_authorized() and self.server.values.get(self.path))

    def do_PUT(self) -> None:
        """Set a key."""
        length = int(self.headers.get("Content-Length", 0))
        if not self._is_authorized() or not 0 <= length <= _MAX_VALUE_BYTES:
            self._answer(None)
            return
        self.server.values[self.path] = self.rfile.read(length)
        self._answer(b"")

    def do_DELETE(self) -> None:
        """Accept the message of a rank that it has connected to all others; nothing is deleted."""
        self._answer(b"" if self._is_authorized() else None)

    def _is_authorized(self) -> bool:
        secret = self.path.removeprefix("/").partition(":")[0]
        return secrets.compare_digest(secret.encode(), self.server.secret.encode())

    def _answer(self, value: bytes | bool | None) -> None:
        is_found = isinstance(value, bytes)
        body = value if isinstance(value, bytes) else b""
        self.send_response(200 if is_found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: ranks send many requests."""


class KeyValueServer(socketserver.ThreadingTCPServer):
    """The key-value server, in a thread of this process until `close`.

    Args:
        address: the IPv4 address to listen at.

    Attributes:
        location: `address:port/secret`.
        values: by path.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _RequestHandler)
        self.secret = secrets.token_hex(16)
        self.values: dict[str, bytes] = {}
        self.location = f"{address}:{self.server_address[1]}/{self.secret}"
        threading.Thread(target=self.serve_forever, daemon=True, name="horovod-rendezvous").start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a rank whose connection broke tries again."""

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()


def interface_address(interface: str | None) -> str:
    """The IPv4 address of an interface of this host; without one, that of the host's name, as gloo chooses."""
    import psutil

    if interface is None:
        return socket.gethostbyname(socket.gethostname())
    addresses = psutil.net_if_addrs().get(interface, [])
    for address in addresses:
        if address.family == socket.AF_INET:
            return str(address.address)
    raise PipelineError(f"Horovod needs an interface with an IPv4 address, {interface!r} has none on this host")


def build_environment(
    location: str, rank: int, world: int, interface: str | None, timeout_s: float
) -> dict[str, str]:
    """The environment variables that configure Horovod.

    Args:
        location: `KeyValueServer.location`. Horovod puts "http://" before the address and ":port/scope/key" behind
            it, so an address with a path gives /secret:port/scope/key, asked of the port before the path.
    """
    port = location.partition("/")[0].rpartition(":")[2]
    every_rank_a_host = {
        "HOROVOD_HOSTNAME": f"rank-{rank}",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(world),
    }
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": location,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, math.ceil(timeout_s))),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(world),
        **every_rank_a_host,
        **({} if interface is None else {"HOROVOD_GLOO_IFACE": interface}),
        **_ALWAYS,
    }


# Messages are never fused: which are ready together is a matter of time, and in which order a ring adds depends
# on where in a message a number lies. Sums would have other bits in each run.
_ALWAYS = {
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "HOROVOD_FUSION_THRESHOLD": "0",
    "HOROVOD_STALL_CHECK_DISABLE": "1",
}


class Watchdog:
    """Calls a function once when something exceeds its time limit.

    Args:
        late: the function, called in a thread of its own.

    Attributes:
        fired: whether it was called.
    """

    def __init__(self, late: Callable[[], object]) -> None:
        self.fired = False
        self._late = late
        self._deadlines: dict[object, float] = {}
        self._next = math.inf  # when the thread looks again
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="horovod-watch").start()

    @contextlib.contextmanager
    def limit(self, timeout_s: float) -> Iterator[None]:
        """Limit how long the body may take."""
        key, deadline = object(), time.monotonic() + timeout_s
        with self._changed:
            if deadline < self._next:
                self._changed.notify()
            self._deadlines[key] = deadline
        try:
            yield
        finally:
            with self._changed:
                del self._deadlines[key]

    def _run(self) -> None:
        with self._changed:
            while True:
                self._next = min(self._deadlines.values(), default=math.inf)
                left_s = self._next - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(None if left_s == math.inf else left_s)
            self.fired = True
        self._late()


# Horovod says it, as a ValueError, of a process set that it took down because it is shutting down; we remove none.
_SET_IS_GONE = "does not exist, or has not been registered"


class HorovodSession:
    """Horovod, initialized in this process by `start` or `start_under_mpi`.

    Args:
        hvd: the module.
        timeout_s: the longest time of a call.
        server: rank 0's server, for it ends with this.
    """

    def __init__(self, hvd: Any, timeout_s: float, server: KeyValueServer | None = None) -> None:
        self.hvd = hvd
        self.rank: int = hvd.rank()
        self.world: int = hvd.size()
        self.timeout_s = timeout_s
        self._server = server
        self._stopping = threading.Lock()
        self._stopped: threading.Thread | None = None
        self._sets: dict[tuple[int, ...], Any] = {tuple(range(self.world)): hvd.global_process_set}
        self._watch = Watchdog(self._stop)
        # `stop` does it, and does not wait for ever.
        _compat.leave_exit_to_us(hvd)
        atexit.register(self.stop)

    def process_set(self, ranks: Sequence[int]) -> Any:
        key = tuple(sorted(ranks))
        if key not in self._sets:
            with self.limit_time("the making of a process set", max(self.timeout_s, MEET_S)):
                try:
                    self._sets[key] = self.hvd.add_process_set(list(key))
                except ValueError as error:  # Horovod is shutting down
                    raise RuntimeError(str(error)) from error
        return self._sets[key]

    @contextlib.contextmanager
    def limit_time(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Around calls of Horovod and what waits for them.

        Args:
            what: they are, for the error.
            timeout_s: another limit than the usual one.

        Raises:
            TimeoutError: they took too long.
            ConnectionError: a rank is gone.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            with self._watch.limit(limit_s):
                yield
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is a RuntimeError
            if isinstance(error, ValueError) and _SET_IS_GONE not in str(error):
                raise
            if self._watch.fired:
                raise TimeoutError(f"{what} took longer than {limit_s:g} s") from error
            text = str(error).partition(" This was caused by")[0]  # a page of guesses follows
            raise ConnectionError(f"Connection closed by another rank during {what}: {text}") from error

    def stop(self) -> None:
        """Leave, which ends Horovod on all ranks; waits a while for the background thread. May be called twice."""
        self._stop()
        assert self._stopped is not None
        self._stopped.join(STOP_S)

    def _stop(self) -> None:
        with self._stopping:
            if self._stopped is None:
                self._stopped = threading.Thread(target=self._shut_down, daemon=True, name="horovod-stop")
                self._stopped.start()

    def _shut_down(self) -> None:
        _compat.shut_down(self.hvd)
        if self._server is not None:
            self._server.close()


def start(store: Any, *, rank: int, world: int, interface: str | None, timeout_s: float) -> HorovodSession:
    """Initialize Horovod, with its Gloo controller, in this process.

    Args:
        store: of torch.distributed, the same for all ranks, whose directory only the user may read.
        rank, world: this rank, and how many there are.
        interface: the network interface to bind to; None: that of the host's name.
        timeout_s: how long to wait for the others, and how long a call may take.

    Raises:
        PipelineError: Horovod is not installed, the interface has no address, or the others do not come.
    """
    hvd = import_horovod()
    server = KeyValueServer(interface_address(interface)) if rank == 0 else None
    try:
        if server is not None:
            store.set("horovod", server.location)
        store.wait(["horovod"], datetime.timedelta(seconds=timeout_s))
        location = store.get("horovod").decode()
        os.environ.update(build_environment(location, rank, world, interface, timeout_s))
        _set_defaults()
        hvd.init()
    except (RuntimeError, ValueError) as error:
        if server is not None:
            server.close()
        raise PipelineError(f"rank {rank} of {world} could not start Horovod: {error}") from error
    return HorovodSession(hvd, timeout_s, server)


def _set_defaults() -> None:
    os.environ.setdefault("HOROVOD_CYCLE_TIME", str(CYCLE_MS))
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # what it says is in the errors


def start_under_mpi(timeout_s: float) -> HorovodSession:
    """Initialize Horovod, with its MPI controller and ranks, in a process that `mpirun` started.

    A peer that hangs is noticed when a call takes too long; one that is stopped is not: MPI waits for it.

    Raises:
        PipelineError: `mpirun` did not start this process, or Horovod is not there or was built without MPI.
    """
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise PipelineError("Horovod over MPI needs processes that mpirun started")
    hvd = import_horovod()
    if not hvd.mpi_built():
        raise PipelineError("this Horovod was built without MPI: install libopenmpi-dev, then make horovod")
    os.environ.update({"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", **_ALWAYS})
    _set_defaults()
    try:
        hvd.init()
    except (RuntimeError, ValueError) as error:
        raise PipelineError(f"Horovod could not start over MPI: {error}") from error
    return HorovodSession(hvd, timeout_s)
