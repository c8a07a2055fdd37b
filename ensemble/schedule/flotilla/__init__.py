"""Which members run together, how wide, and in which order (FLEET).

Members differ in speed. Those that share one stream of batches move at the pace of the slowest of them, so a fast
member that shares with a slow one holds its devices for longer than it needs. FLEET (Guan, Mokadam, Shen, Lim and
Patton, MLSys 2020) gives slow members more data-parallel workers, so that those that train together have like
rates, and lets the others follow when devices are free: a group that starts together and shares one stream is a
**flotilla**.

**The model.** Member i takes in r_i(w) samples a second with w workers (`rate` says what is assumed for widths
that were not measured) and has E_i epochs of S samples left. Each worker takes one slot; the workers of a member
are on one node. A flotilla starts as a whole when there are slots for all its members and one of the
`Room.streams` streams is free. Where its members are in epoch e, its pace is the least of r_i(w_i) over its
members with E_i > e, and at most what the feeders of a stream can prepare. A member's slots are free for others
when it ends. What is to be least is the time until the last member of all has ended. To find the least is NP-hard
(with one stream and one node it already is partitioning), so the plans are greedy with a bounded search around
them; the tests hold them against the exact optimum of this very model on small instances.
"""

from ensemble.schedule.flotilla.allocate import allocate, follow
from ensemble.schedule.flotilla.laggard import Remedy, laggard
from ensemble.schedule.flotilla.model import (
    Allocation,
    Busy,
    Cohort,
    Cores,
    Flotilla,
    RatedMember,
    Room,
    RunningMember,
    corrected,
    rate,
)
from ensemble.schedule.flotilla.revise import revise
from ensemble.schedule.flotilla.streams import Streams, streams

__all__ = [
    "Allocation",
    "Busy",
    "Cohort",
    "Cores",
    "Remedy",
    "Flotilla",
    "RatedMember",
    "Room",
    "RunningMember",
    "Streams",
    "allocate",
    "follow",
    "laggard",
    "corrected",
    "rate",
    "revise",
    "streams",
]
