"""Executors start the workers of members: `inline` in this process, `local` on this host, `ray` on a cluster.

An executor is a thin shell: it starts, sends commands, kills and reports. *What* to start and when is decided by
the controller from the pure functions in `ensemble.schedule`. A **worker** is one data-parallel rank of one
member; an **attempt** is one start of all ranks of a member; a **feeder** is the process that prepares the shared
pipeline of one cohort on one node.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ensemble.executors.base import ClusterLostError, EventHandler, Executor
from ensemble.spec import SpecError, unknown_name

__all__ = ["EXECUTORS", "ClusterLostError", "EventHandler", "Executor", "make_executor"]

EXECUTORS: dict[str, str] = {
    "inline": "ensemble.executors.inline:InlineExecutor",
    "local": "ensemble.executors.local:LocalExecutor",
    "ray": "ensemble.executors.ray:RayExecutor",
}


def make_executor(name: str) -> Executor:
    """Import and make the executor of that name.

    Raises:
        SpecError: there is none of that name; the message lists the valid names.
    """
    if name not in EXECUTORS:
        raise SpecError(unknown_name("there is no executor", name, list(EXECUTORS)))
    module, attribute = EXECUTORS[name].split(":")
    made: Callable[[], Executor] = getattr(importlib.import_module(module), attribute)
    return made()
