"""Executors start the workers of members: `inline` in this process, `local` on this host, `ray` on a cluster.

A **worker** is one data-parallel rank of one member; an **attempt** is one start of all ranks of a member; a
**feeder** is the process that prepares the shared pipeline of one cohort on one node.
"""

from __future__ import annotations

from ensemble.executors.base import ClusterLostError, EventHandler, Executor
from ensemble.spec import SpecError
from pipelines.errors import PipelineError
from pipelines.providers import Providers

__all__ = ["EXECUTORS", "ClusterLostError", "EventHandler", "Executor", "make_executor"]

EXECUTORS = Providers(
    "executors",
    {
        "inline": "ensemble.executors.inline:InlineExecutor",
        "local": "ensemble.executors.local:LocalExecutor",
        "ray": "ensemble.executors.ray:RayExecutor",
    },
)


def make_executor(name: str) -> Executor:
    """Import and make the executor of that name.

    Raises:
        SpecError: there is none of that name; the message lists the valid names.
    """
    try:
        executor: Executor = EXECUTORS.load(name, "there is no executor")()
    except PipelineError as error:
        raise SpecError(str(error)) from None
    return executor
