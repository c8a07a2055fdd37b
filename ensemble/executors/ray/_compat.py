"""The private API of Ray that this package uses; no other module uses any.

Each use improves a run that works without it, too. Where a version of Ray lacks a name, or takes other arguments,
the improvement is off, and a line at level DEBUG says which. `docs/reference/versions.md` lists what was tried.
With a version that is not in `CHECKED_WITH`, `tests/test_compat.py` fails and lists the names to look at;
`tests/executors/ray/test_ray_compat.py` fails when one of them has lost its effect.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

log = logging.getLogger(__name__)

CHECKED_WITH = ("2.52.1", "2.60.0")

_SPARE_WORKERS = "RAY_prestart_worker_first_driver"  # a setting of Ray's daemons; a Ray without it ignores it
_CHANGED = (AttributeError, ImportError, TypeError)  # raised where a name or its arguments are others
_Use = TypeVar("_Use", bound=Callable[..., Any])


def _unless_changed(off: Callable[[], Any]) -> Callable[[_Use], _Use]:
    """Decorate a use of private API: it returns `off()` where this Ray has changed it."""

    def decorate(use: _Use) -> _Use:
        @wraps(use)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return use(*args, **kwargs)
            except _CHANGED as error:
                _log_off(use.__name__, str(error))
                return off()

        return cast(_Use, call)

    return decorate


@cache  # a use that is tried again is logged once
def _log_off(use: str, reason: str) -> None:
    log.debug("%s is off with this version of Ray: %s", use, reason)


def _find(path: str) -> Any:
    """Import the object of Ray at a dotted path."""
    return pkgutil.resolve_name(path)


@_unless_changed(nullcontext)
def _replace(path: str, make: Callable[[Any], Any]) -> AbstractContextManager[object]:
    """Replace what is at a dotted path by what `make` makes of it, until the end of the context."""
    usual, (module, _, name), replaced = _find(path), path.rpartition("."), contextlib.ExitStack()
    replaced.callback(setattr, _find(module), name, usual)
    setattr(_find(module), name, make(usual))
    return replaced


def expect_single_node() -> AbstractContextManager[object]:
    """Within, a Ray that this process starts stays on the loopback address.

    Unless it expects no second node, Ray replaces a loopback address by the host's own, on which its daemons then
    listen, and only the token keeps others out.

    Unnecessary with: an argument of `ray.init` for the address to listen on.
    """
    return _replace("ray._private.ray_constants.ENABLE_RAY_CLUSTER", lambda _: False)


def start_head(directory: Path, address: str, **options: Any) -> None:
    """Start a Ray of our own by `ray.init`, with its files in a directory, on an address, and with daemons that

    - have process groups of their own: otherwise a SIGTERM to the program's group (timeout(1), systemd) ends them
      before the members have written their checkpoints. The kernel ends them with the program in any case
      (PR_SET_PDEATHSIG);
    - are no log monitor, which reads all log files ten times a second, no autoscaler and no API server, which take
      three CPU-seconds to start, and no spare workers, nearly a CPU-second each: one a core, of which we use one.

    RAY_TMPDIR instead of `_temp_dir` would apply to every Ray in this process and its children. A Ray that refuses
    any of this is started without: its files are then in /tmp/ray, and it listens where Ray chooses.

    Unnecessary with: public arguments of `ray.init` for these.
    """
    import ray

    with contextlib.ExitStack() as start:
        if _SPARE_WORKERS not in os.environ:
            start.callback(os.environ.pop, _SPARE_WORKERS, None)
            os.environ[_SPARE_WORKERS] = "0"
        own_group = _replace("ray._private.services.ConsolePopen", lambda popen: partial(popen, process_group=0))
        start.enter_context(own_group)
        for name in ("start_log_monitor", "start_monitor", "start_api_server"):
            start.enter_context(_replace(f"ray._private.node.Node.{name}", lambda _: lambda *_, **__: None))
        try:
            ray.init(**options, _temp_dir=str(directory), _node_ip_address=address)
            return
        except (*_CHANGED, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "nknown keyword" not in str(error):
                raise
            log.warning("Ray chooses its own folder and address, as this version refuses ours: %s", error)
    ray.init(**options)


def bind_replica_to_node() -> None:
    """Let the server that this replica of Ray Serve is about to open listen on its node's address alone.

    Replicas take pickled requests over gRPC without a token, on all interfaces: `ray.serve._private.replica` gives
    "[::]:0" to `add_port_to_grpc_server` after the constructor of the user's class has ended. Ray 2.59 is the
    first with that function; the extra `serve` requires it.

    Unnecessary with: an option of Serve for the address, or authentication of these requests.
    """
    import ray

    node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def make_binding(add_port: Callable[[Any, str], int]) -> Callable[[Any, str], int]:
        return lambda server, address: add_port(server, f"{node}:{address.rpartition(':')[2]}")

    _replace("ray.serve._private.replica.add_port_to_grpc_server", make_binding)


@_unless_changed(lambda: None)
def reset_token() -> None:
    """Make Ray read the authentication token anew from the environment.

    Ray caches the first token that it finds in the process. Without this, a program can use either a Ray of ours
    or a cluster with a token of its own.

    Unnecessary with: an argument of `ray.init` for the token, or a cache that ends with `ray.shutdown`.
    """
    _find("ray._raylet.AuthenticationTokenLoader").instance().reset_cache()


def _list_all_resources() -> dict[str, dict[str, float]]:
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes()}  # type: ignore[no-untyped-call]


@_unless_changed(_list_all_resources)
def list_free_resources() -> dict[str, dict[str, float]]:
    """The free resources of each living node, by the node's id.

    No public module has it: `ray.available_resources` is the sum over nodes, `ray.nodes` has totals, and
    `ray.util.state` needs the dashboard. With totals, members wait in Ray's queue on nodes that others fill.

    Unnecessary with: the free resources in `ray.nodes`.
    """
    return dict(_find("ray._private.state.available_resources_per_node")())


@_unless_changed(lambda: True)
def is_head_answering(timeout_s: float) -> bool:
    """Whether the head's GCS answers in time; False also where there is no connection.

    All public calls wait for the head without a limit, until Ray ends the process after
    `gcs_rpc_server_reconnect_timeout_s`, by default 60 s; the members then write no checkpoint.

    Unnecessary with: a time limit for `ray.nodes`.
    """
    import ray

    if not ray.is_initialized():
        return False
    exists = _find("ray._private.worker.global_worker.gcs_client.internal_kv_exists")
    try:
        exists(b"ensemble", timeout=timeout_s)
    except TypeError:
        raise
    except Exception:
        return False
    return True


@_unless_changed(dict)
def list_draining_nodes(timeout_s: float) -> dict[str, float | None]:
    """The nodes that are being drained, by their ids: the time of their end in Unix seconds, None: it is not set.

    Ray drains a node that it, or its provider, is about to end, as after a notice of preemption. `ray.nodes` and
    `ray.util.state` show such a node as any other. Before Ray 2.60 there is no such function: members on such a
    node lose what they did since their last checkpoint.

    Returns:
        Nothing where Ray does not answer in time.

    Unnecessary with: the state of a node in `ray.nodes`.
    """
    import ray

    get_draining_nodes = _find("ray._private.worker.global_worker.gcs_client.get_draining_nodes")
    try:
        deadlines: dict[str, int] = get_draining_nodes(timeout=timeout_s)
    except ray.exceptions.RpcError:
        return {}
    return {ray_id: milliseconds / 1000 or None for ray_id, milliseconds in deadlines.items()}


@_unless_changed(bool)
def is_autoscaler_growing() -> bool:
    """Whether an autoscaler, of version 1 or 2, is adding nodes.

    Otherwise a run that no node can hold fails before the autoscaler has added one.

    Unnecessary with: a public function that says so, or which types of nodes the cluster can add.
    """
    import ray

    status_text = _find("ray.experimental.internal_kv._internal_kv_get")("__autoscaling_status")
    report = json.loads(status_text or b"{}").get("autoscaler_report", {})
    try:
        status = _find("ray.autoscaler.v2.sdk.get_cluster_status")(ray.get_runtime_context().gcs_address)
    except ray.exceptions.RpcError:  # a head that is busy; whether it is lost is found out elsewhere
        return False
    kinds = ("pending_launches", "pending_nodes")
    return any(getattr(status, kind) or report.get(kind) for kind in kinds)


def start_no_ray() -> AbstractContextManager[object]:
    """Within, calls of this process raise where there is no connection; by default they would start a Ray.

    Unnecessary with: the effect of RAY_ENABLE_AUTO_CONNECT=0 after Ray has been imported.
    """
    return _replace("ray._private.auto_init_hook.enable_auto_connect", lambda _: False)


@contextlib.contextmanager
def call_before_shutdown(callback: Callable[[], None]) -> Iterator[None]:
    """Within, `ray.shutdown` and the end of this process first call `callback`.

    Ray destroys what another thread's call uses: `ray.wait` then raises, never returns, or ends the process by
    SIGSEGV. Neither function is private, so this is never off.

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
