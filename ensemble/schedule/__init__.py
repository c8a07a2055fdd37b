"""Pure scheduling decisions: packing, placement, cohorts, flotillas and memory grants. No processes, no clock."""

from ensemble.schedule.explain import explain_memory_wait, explain_unplaceable
from ensemble.schedule.flotilla import (
    Allocation,
    Capacity,
    Cohort,
    CoreBudget,
    Flotilla,
    HeldSlots,
    RatedMember,
    RebalanceDecision,
    RunningMember,
    StreamGrouping,
    allocate,
    decide_rebalance,
    group_streams,
    revise,
)
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
    "Flotilla",
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
    "StreamGrouping",
    "allocate",
    "apply_profile",
    "count_placeable",
    "decide_rebalance",
    "explain_memory_wait",
    "explain_unplaceable",
    "group_streams",
    "pack",
    "decide_starts",
    "revise",
    "select_unmeasured",
    "is_spread_open",
    "list_candidate_widths",
]
