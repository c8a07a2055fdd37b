"""The policies of a run: pure functions that the session asks. Each decides from its arguments alone, without a
clock, a file or a process, so that a test, a simulation and a run decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.controller.plain_planner import PlainPlanner

log = logging.getLogger(__name__)

#: The question -> the function that answers it, `module:name`.
POLICIES = {
    "which members start now, and where": "ensemble.schedule.placement:decide_starts",
    "how wide members are, and which start together": "ensemble.schedule.flotilla.allocate:revise",
    "how cores are divided": "ensemble.schedule.profiles:plan_core_shares",
    "which streams members share": "ensemble.schedule.flotilla.grouping:group_streams",
    "what is done about a member that others wait for": "ensemble.schedule.flotilla.straggler:decide_rebalance",
    "whether a member that failed is tried again": "ensemble.controller.failures:RetryPolicy.decide",
    "how much memory a member gets that ran out of it": "ensemble.schedule.memory_grants:increase_grant",
    "whether a search has used its budget": "ensemble.search.budget:explain_end",
    "what is kept of a member's checkpoints": "ensemble.controller.retention:plan_reduction",
    "whose weights are kept once the members are combined": "ensemble.controller.retention:list_unselected",
}


def load_planner() -> Callable[..., PlainPlanner] | None:
    """What measures members and plans with that; None, which is logged, where it is not installed."""
    module = "ensemble.controller.planner"
    try:
        planner: Callable[..., PlainPlanner] = import_object(f"{module}:Planner")
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is installed, and lacks what it imports
        log.warning("members are not measured, they start as they are declared: %s", error)
        return None
    return planner
