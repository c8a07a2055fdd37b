"""Packing, cohorts and retries: pure functions of numbers, tested without any process."""

from ensemble.controller.failure_policy import (
    REASONS,
    Decision,
    Failure,
    FailurePolicy,
    NodePolicy,
    RetryPolicy,
    lowered,
    spared,
)
from ensemble.schedule.flotilla import (
    Allocation,
    Busy,
    Cohort,
    Cores,
    Flotilla,
    RatedMember,
    Remedy,
    Room,
    RunningMember,
    Streams,
    allocate,
    laggard,
    revise,
    streams,
)
from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.packing import Free
from ensemble.schedule.placement import Board, Start, place, ring_capacity, room_for
from ensemble.schedule.places import fits, pack
from ensemble.schedule.profiles import Profile, settled, to_measure, widths

__all__ = [
    "Allocation",
    "Board",
    "Busy",
    "Cohort",
    "Cores",
    "Decision",
    "Failure",
    "FailurePolicy",
    "Flotilla",
    "Free",
    "Node",
    "NodePolicy",
    "Placement",
    "Profile",
    "REASONS",
    "RatedMember",
    "Remedy",
    "RetryPolicy",
    "Room",
    "RunningMember",
    "Start",
    "Streams",
    "allocate",
    "fits",
    "laggard",
    "lowered",
    "pack",
    "place",
    "revise",
    "ring_capacity",
    "room_for",
    "settled",
    "spared",
    "streams",
    "to_measure",
    "widths",
]
