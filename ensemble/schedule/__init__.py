"""Packing, cohorts and retries: pure functions of numbers, tested without any process."""

from ensemble.schedule.flotilla import Allocation, Busy, Flotilla, RatedMember, Room, allocate
from ensemble.schedule.places import Node, Placement, fits, pack
from ensemble.schedule.plan import Board, Start, place, ring_capacity, room_for
from ensemble.schedule.profile import Profile, observed, settled, to_measure, widths
from ensemble.schedule.retry import (
    REASONS,
    Decision,
    Failure,
    FailurePolicy,
    NodePolicy,
    RetryPolicy,
    lowered,
    spared,
)

__all__ = [
    "Allocation",
    "Board",
    "Busy",
    "Decision",
    "Failure",
    "FailurePolicy",
    "Flotilla",
    "Node",
    "NodePolicy",
    "Placement",
    "Profile",
    "REASONS",
    "RatedMember",
    "RetryPolicy",
    "Room",
    "Start",
    "allocate",
    "fits",
    "lowered",
    "observed",
    "pack",
    "place",
    "ring_capacity",
    "room_for",
    "settled",
    "spared",
    "to_measure",
    "widths",
]
