"""The private API of Ray that this package uses; no other module uses any.

Checked with the versions in `CHECKED_WITH`. With any other, `tests/test_compat.py` fails and lists the names to
look at; `tests/executors/ray/test_ray_compat.py` fails when one of them has changed or lost its effect.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CHECKED_WITH = ("2.60.0",)

# Ray reads it once, when it is imported. It is called after the systems where 0 is the default.
_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def expect_single_node() -> None:
    """Let a Ray that this process starts stay on the loopback address.

    Unless it expects no second node, Ray replaces a loopback address by the host's own, on which its daemons then
    listen (`ray._private.services.resolve_ip_for_localhost`). The environment variable is undocumented; where Ray
    has been imported before, only `ray._private.ray_constants.ENABLE_RAY_CLUSTER` (not yet in 2.0) does that.

    Unnecessary with: an argument of `ray.init` for the address to listen on.
    """
    os.environ.setdefault(_CLUSTER_VARIABLE, "0")
    if "ray" in sys.modules:
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False


def head_arguments(directory: Path, address: str) -> Mapping[str, Any]:
    """Arguments of `ray.init` for where a Ray of our own keeps its files and under which address it is reached.

    `_temp_dir` and `_node_ip_address` (in 2.0 already) are in the list of hidden and unstable options.
    RAY_TMPDIR would hold for every Ray in this process and its children, and sets no address.

    Unnecessary with: public arguments of `ray.init` for both.
    """
    return {"_temp_dir": str(directory), "_node_ip_address": address}


def reset_token() -> None:
    """Make Ray read the authentication token anew from the environment.

    Ray keeps the first token that it finds in the process for ever. `AuthenticationTokenLoader` exists since 2.52.

    Unnecessary with: an argument of `ray.init` for the token, or a cache that ends with `ray.shutdown`.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()


def list_free_resources() -> dict[str, dict[str, float]]:
    """What of each living node's resources Ray has not given away, by the node's id.

    `ray._private.state.available_resources_per_node` (in 2.0 with an underscore) is marked as one for developers,
    yet no public module has it: `ray.available_resources` adds the nodes up, `ray.nodes` has totals,
    `ray.util.state` needs the dashboard.

    Unnecessary with: the free resources in `ray.nodes`.
    """
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Within, Ray does not put handlers of its own for SIGTERM in place of the program's.

    All of Ray sets them by `ray._private.utils.set_sigterm_handler` (in 2.0 already). To put the program's handler
    back after `ray.init` would leave a SIGTERM during the start, which takes seconds, to Ray.

    Unnecessary with: an argument of `ray.init` that leaves signals alone.
    """
    from ray._private import utils

    usual = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = usual


@contextlib.contextmanager
def separate_process_groups() -> Iterator[None]:
    """Within, each daemon that Ray starts has a process group of its own.

    Else a SIGTERM to the program's group (timeout(1), systemd) would end them before the members have written
    their checkpoints. The kernel ends them with the program in any case (PR_SET_PDEATHSIG). Ray starts each by
    `ray._private.services.ConsolePopen` (in 2.0 already), a `subprocess.Popen`; once it runs its program, it
    refuses a setpgid(2) of its parent.

    Unnecessary with: an argument of `ray.init` for the daemons' process group or session.
    """
    from ray._private import services

    usual: Any = services.ConsolePopen
    services.ConsolePopen = functools.partial(usual, process_group=0)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        services.ConsolePopen = usual  # type: ignore[misc]


@contextlib.contextmanager
def disable_log_monitor() -> Iterator[None]:
    """Within, Ray starts no process that reads all log files to print them here, which nobody has asked for.

    It would look at them ten times a second, and take two thirds of a CPU-second to start. `ray.init` starts it by
    `ray._private.node.Node.start_log_monitor` (in 2.0 already) whatever `log_to_driver` says.

    Unnecessary with: an argument of `ray.init` like `include_log_monitor` of `ray start`.
    """
    from ray._private.node import Node

    usual: Any = Node.start_log_monitor
    Node.start_log_monitor = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Node.start_log_monitor = usual  # type: ignore[method-assign]
