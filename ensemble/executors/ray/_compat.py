"""The private API of Ray that this package uses; no other module uses any.

Checked with the versions in `CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to
look at; `tests/executors/ray/test_ray_compat.py` fails when one of them has changed or lost its effect.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

CHECKED_WITH = ("2.60.0",)

# Ray reads it once, when it is imported. It is named after the systems where 0 is the default.
_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@contextlib.contextmanager
def expect_single_node() -> Iterator[None]:
    """Within, a Ray that this process starts stays on the loopback address.

    Unless it expects no second node, Ray replaces a loopback address by the host's own, on which its daemons then
    listen. The environment variable is undocumented; where Ray has been imported before, only
    `ray._private.ray_constants.ENABLE_RAY_CLUSTER` does that.

    Unnecessary with: an argument of `ray.init` for the address to listen on.
    """
    before = os.environ.get(_CLUSTER_VARIABLE)
    os.environ.setdefault(_CLUSTER_VARIABLE, "0")
    _expect_nodes(False)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CLUSTER_VARIABLE, None)
        _expect_nodes(before is None or before.lower() in ("1", "true"))


def _expect_nodes(several: bool) -> None:
    if "ray" in sys.modules:
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = several


def make_head_arguments(directory: Path, address: str) -> Mapping[str, Any]:
    """Arguments of `ray.init` for directory and address of a Ray of our own, which starts no spare workers.

    These are hidden options; RAY_TMPDIR would apply to every Ray in this process and its children. By default Ray
    starts a worker a core, nearly a CPU-second each; we use one.

    Unnecessary with: public arguments of `ray.init` for these.
    """
    config = {"prestart_worker_first_driver": False}
    return {"_temp_dir": str(directory), "_node_ip_address": address, "_system_config": config}


def bind_replica_to_node() -> None:
    """Let the server that this replica of Ray Serve is about to open listen on its node's address alone.

    Replicas take pickled requests over gRPC without a token, on all interfaces: `ray.serve._private.replica` gives
    "[::]:0" to `add_port_to_grpc_server` after the constructor of the user's class has ended.

    Unnecessary with: an option of Serve for the address, or authentication of these requests.
    """
    import ray
    from ray.serve._private import replica

    serving: Any = replica
    add_port, node = serving.add_port_to_grpc_server, ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def add_port_of_node(server: Any, address: str) -> int:
        port: int = add_port(server, f"{node}:{address.rpartition(':')[2]}")
        return port

    serving.add_port_to_grpc_server = add_port_of_node


def reset_token() -> None:
    """Make Ray read the authentication token anew from the environment.

    Ray caches the first token that it finds in the process.

    Unnecessary with: an argument of `ray.init` for the token, or a cache that ends with `ray.shutdown`.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()


def list_free_resources() -> dict[str, dict[str, float]]:
    """The free resources of each living node, by the node's id.

    No public module has it: `ray.available_resources` is the sum over nodes, `ray.nodes` has totals, and
    `ray.util.state` needs the dashboard.

    Unnecessary with: the free resources in `ray.nodes`.
    """
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def is_head_answering(timeout_s: float) -> bool:
    """Whether the head's GCS answers in time; False also where there is no connection.

    All public calls wait for the head without a limit, until Ray ends the process after
    `gcs_rpc_server_reconnect_timeout_s`, by default 60 s.

    Unnecessary with: a time limit for `ray.nodes`.
    """
    from ray._private import worker

    connected: Any = worker.global_worker
    try:
        connected.gcs_client.internal_kv_exists(b"ensemble", timeout=timeout_s)
    except Exception:
        return False
    return True


def list_draining_nodes(timeout_s: float) -> dict[str, float | None]:
    """The nodes that are being drained, by their ids: the time of their end in Unix seconds, None: it is not set.

    Ray drains a node that it, or its provider, is about to end, as after a notice of preemption. `ray.nodes` and
    `ray.util.state` show such a node as any other.

    Returns:
        Nothing where Ray does not answer in time.

    Unnecessary with: the state of a node in `ray.nodes`.
    """
    import ray
    from ray._private.worker import global_worker

    client: Any = global_worker.gcs_client  # type: ignore[attr-defined]
    try:
        deadlines: dict[str, int] = client.get_draining_nodes(timeout=timeout_s)
    except ray.exceptions.RpcError:
        return {}
    return {ray_id: milliseconds / 1000 or None for ray_id, milliseconds in deadlines.items()}


def is_autoscaler_growing() -> bool:
    """Whether an autoscaler, of version 1 or 2, is adding nodes.

    Unnecessary with: a public function that says so, or which types of nodes the cluster can add.
    """
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    report = json.loads(_internal_kv_get("__autoscaling_status") or b"{}").get("autoscaler_report", {})
    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
    except ray.exceptions.RpcError:  # a head that is busy; whether it is lost is found out elsewhere
        return False
    kinds = ("pending_launches", "pending_nodes")
    return any(getattr(status, kind) or report.get(kind) for kind in kinds)


@contextlib.contextmanager
def _replace(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, this thread calls `value` instead of a function or class of Ray; the others call what was there."""
    usual, here = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (value if threading.get_ident() == here else usual)(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, usual)


@contextlib.contextmanager
def start_no_ray() -> Iterator[None]:
    """Within, calls of this process raise where there is no connection; by default they would start a Ray.

    Unnecessary with: the effect of RAY_ENABLE_AUTO_CONNECT=0 after Ray has been imported.
    """
    from ray._private import auto_init_hook

    before, auto_init_hook.enable_auto_connect = auto_init_hook.enable_auto_connect, False
    try:
        yield
    finally:
        auto_init_hook.enable_auto_connect = before


@contextlib.contextmanager
def call_before_shutdown(callback: Callable[[], None]) -> Iterator[None]:
    """Within, `ray.shutdown` and the end of this process first call `callback`.

    Ray destroys what another thread's call uses: `ray.wait` then raises, never returns, or ends the process by
    SIGSEGV.

    Unnecessary with: a `ray.shutdown` that waits for the calls of other threads.
    """
    import ray

    usual = ray.shutdown

    def shutdown(*args: Any, **kwargs: Any) -> None:
        callback()
        usual(*args, **kwargs)

    ray.shutdown = shutdown
    atexit.register(callback)  # before Ray's own, which was registered when it was imported
    try:
        yield
    finally:
        atexit.unregister(callback)
        ray.shutdown = usual


def keep_signal_handlers() -> AbstractContextManager[None]:
    """Within, Ray does not replace the program's handler of SIGTERM by its own.

    If the program's handler were put back after `ray.init`, Ray would handle a SIGTERM during the start.

    Unnecessary with: an argument of `ray.init` that leaves signals alone.
    """
    from ray._private import utils

    return _replace(utils, "set_sigterm_handler", lambda handler: None)


def separate_process_groups() -> AbstractContextManager[None]:
    """Within, each daemon that Ray starts has a process group of its own.

    Otherwise a SIGTERM to the program's group (timeout(1), systemd) ends them before the members have written
    their checkpoints. The kernel ends them with the program in any case (PR_SET_PDEATHSIG).

    Unnecessary with: an argument of `ray.init` for the daemons' process group or session.
    """
    from ray._private import services

    return _replace(services, "ConsolePopen", functools.partial(services.ConsolePopen, process_group=0))


@contextlib.contextmanager
def start_core_daemons_only() -> Iterator[None]:
    """Within, Ray starts no log monitor, no autoscaler and no API server.

    The first reads all log files ten times a second; the others take three CPU-seconds to start. `ray.init` starts
    them whatever `log_to_driver` and `include_dashboard` say.

    Unnecessary with: arguments of `ray.init` like `include_log_monitor` of `ray start`.
    """
    from ray._private.node import Node

    with contextlib.ExitStack() as replaced:
        for name in ("start_log_monitor", "start_monitor", "start_api_server"):
            replaced.enter_context(_replace(Node, name, lambda self, **_: None))
        yield
