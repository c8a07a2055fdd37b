"""Packing, cohorts and retries: pure functions of numbers, tested without any process."""

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
    "Flotilla",
    "Free",
    "Node",
    "Placement",
    "Profile",
    "RatedMember",
    "Remedy",
    "Room",
    "RunningMember",
    "Start",
    "Streams",
    "allocate",
    "fits",
    "laggard",
    "pack",
    "place",
    "revise",
    "ring_capacity",
    "room_for",
    "settled",
    "streams",
    "to_measure",
    "widths",
]
