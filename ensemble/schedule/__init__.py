"""Pure scheduling decisions: packing, placement, cohorts, flotillas and memory grants. No processes, no clock."""

from ensemble.schedule.explain import explain_beyond_limits, explain_memory_wait, explain_unplaceable
from ensemble.schedule.flotilla.allocate import allocate, revise
from ensemble.schedule.flotilla.grouping import group_streams
from ensemble.schedule.flotilla.model import (
    Allocation,
    Capacity,
    Cohort,
    CoreBudget,
    HeldSlots,
    RatedMember,
    RunningMember,
    correct_rates,
    interpolate_rate,
)
from ensemble.schedule.flotilla.straggler import RebalanceDecision, decide_rebalance
from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.packing import FreeCapacity, pack
from ensemble.schedule.placement import ClusterSnapshot, Start, count_placeable, decide_starts
from ensemble.schedule.profiles import (
    Profile,
    apply_profile,
    is_spread_open,
    list_candidate_widths,
    select_unmeasured,
)

__all__ = [
    "Allocation",
    "Capacity",
    "Cohort",
    "CoreBudget",
    "FreeCapacity",
    "HeldSlots",
    "Node",
    "Placement",
    "ClusterSnapshot",
    "Profile",
    "RatedMember",
    "RebalanceDecision",
    "RunningMember",
    "Start",
    "allocate",
    "apply_profile",
    "correct_rates",
    "count_placeable",
    "decide_rebalance",
    "explain_beyond_limits",
    "explain_memory_wait",
    "explain_unplaceable",
    "group_streams",
    "interpolate_rate",
    "pack",
    "decide_starts",
    "revise",
    "select_unmeasured",
    "is_spread_open",
    "list_candidate_widths",
]
