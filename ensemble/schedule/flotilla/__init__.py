"""Which members run together, how wide, and in which order (FLEET).

Members differ in speed. Those that share one stream of batches move at the pace of the slowest of them, so a fast
member that shares with a slow one holds its devices for longer than it needs. FLEET (Guan, Mokadam, Shen, Lim and
Patton, MLSys 2020) gives slow members more data-parallel workers, so that those that train together have like
rates, and lets the others follow when devices are free: a group that starts together and shares one stream is a
**flotilla**.

**The model.** Member i takes in r_i(w) samples a second with w workers (`rate` says what is assumed for widths
that were not measured) and has E_i epochs of S samples left. Each worker takes one slot (a GPU, a share of one, or
a share of the cores); the workers of a member are on one node. A flotilla starts as a whole when there are slots
for all its members and one of the `Room.streams` streams is free. Where its members are in epoch e, its pace is
the least of r_i(w_i) over its members with E_i > e, and at most what the feeders of a stream can prepare. A
member's slots are free for others when it ends. What is to be least is the time until the last member of all has
ended.

To find the least is NP-hard (with one node, two slots and a stream for each member it is partitioning), so
`allocate` begins with greedy plans (`plans`), keeps the best on the model's own clock (`timeline`), and searches
around it where members are few (`improve`). The tests solve the same model exactly, as a mixed-integer program. On
200 seeded instances of 3 to 6 members and 3 to 6 slots the plans are 0.00 % from the optimum in the median, 0.05 %
in the mean and 3.4 % at worst. For many there is a lower bound, which knows nothing of paces: 10,000 members whose
rates spread over a factor of 16 on 1,000 nodes of 8 slots come to 1.32, 1.25, 1.12 and 1.05 times it with 1, 2, 8
and any number of streams. Their plan takes 0.4 CPU-seconds, and 1.1 with a stream for each.

While a run goes on: `streams` says which of the members that start together share which stream, `laggard` what to
do about a member that others wait for, and `revise` plans again for those that wait. All three weigh the rest of
the run on the same clock (`fluid`), with what a further stream takes from the cores. The search is seeded, and
nothing hangs on the order in which members are given, on names (but for ties between equal members) or on the unit
of rates.
"""

from ensemble.schedule.flotilla.allocate import allocate, follow
from ensemble.schedule.flotilla.grouping import Streams, streams
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
from ensemble.schedule.flotilla.straggler import Remedy, laggard

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
