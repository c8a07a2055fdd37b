"""What is asked of all nodes is asked at once, then waited for: one node's second is not fifty nodes' minute."""

from __future__ import annotations

import os
from typing import Any

from ensemble.executors.ray.gpus import SEES_ALL
from ensemble.store.trust import TRUST_GROUP

_CALL_S = 60.0


class StartingFeeders:
    """Calls that start feeders, and have not been answered."""

    def __init__(self) -> None:
        self._calls: dict[Any, tuple[str, int]] = {}

    def add(self, call: Any, node: str, cohort: int) -> None:
        """This one starts the feeder of a cohort on a node."""
        self._calls[call] = node, cohort

    def settle(self) -> list[dict[str, Any]]:
        """Return when all listen; the `feeder_exited` events of those that cannot."""
        import ray

        calls, self._calls = self._calls, {}
        if calls:
            ray.wait(list(calls), num_returns=len(calls), timeout=_CALL_S)
        news = []
        for call, (node, cohort) in calls.items():
            try:
                ray.get(call, timeout=0)
            except ray.exceptions.RayActorError:  # its agent has gone, which is heard of
                continue
            except ray.exceptions.RayError as error:
                told = {"started": False, "detail": reason_of(error)}
                news.append({"type": "feeder_exited", "node": node, "cohort": cohort, **told})
        return news


def on_node(ray_id: str) -> Any:
    """The node of that id, and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)


def surroundings(*, sees_all: bool) -> dict[str, Any]:
    """Options of an actor for what its process has in its environment: a cluster's has nothing of this one's.

    Args:
        sees_all: whether it is to see all GPUs that its raylet sees.
    """
    variables: dict[str, str] = dict(SEES_ALL["env_vars"]) if sees_all else {}
    if TRUST_GROUP in os.environ:
        variables[TRUST_GROUP] = os.environ[TRUST_GROUP]
    return {"runtime_env": {"env_vars": variables}} if variables else {}


def reason_of(error: Exception) -> str:
    """The cause of one of Ray's errors in one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if getattr(error, "cause", None) is None and lines else (lines[0] if lines else repr(cause))
