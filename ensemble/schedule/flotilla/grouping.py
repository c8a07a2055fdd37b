"""Which of the members that start together share which stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ensemble.schedule.flotilla.fluid import Fluid
from ensemble.schedule.flotilla.model import Cores, RatedMember, Room

GAIN = 0.02  # of the run, that a further stream has to save
_PLACES = 24  # where the order by rate is cut: its widest gaps


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Members by stream, the slowest first; the expected rest of the run so, and if all shared one."""

    groups: tuple[tuple[str, ...], ...]
    run_s: float
    shared_s: float


def streams(
    members: Sequence[RatedMember],
    room: Room,
    samples: int,
    *,
    cores: Cores | None = None,
    waiting: Sequence[Sequence[RatedMember]] = (),
) -> Streams:
    """One stream for all, unless more of them shorten the run by more than their preparation lengthens it.

    Where nobody waits and all have as many epochs, the slowest ends the run when it ends, whatever the others do:
    then it is one stream. A further one must save `GAIN` of the run.

    Args:
        members: that start at once, their widths known.
        room: at most `room.streams` streams.
        cores: what preparation takes from members; None where it takes nothing.
        waiting: flotillas that follow, in this order, their widths known.

    Raises:
        ValueError: a width is not known, or an id is given twice.
    """
    if not members:
        return Streams(groups=(), run_s=0.0, shared_s=0.0)
    fluid = Fluid([*members, *(each for flotilla in waiting for each in flotilla)], room, samples, cores)
    follow = [[each.member for each in flotilla] for flotilla in waiting]
    order = sorted(members, key=lambda m: (-fluid.time(m.member), len(m.member), m.member))
    names = [each.member for each in order]
    times = [fluid.time(name) for name in names]
    gaps = sorted(range(1, len(names)), key=lambda k: (times[k] / times[k - 1], k))
    places = [k for k in gaps[:_PLACES] if times[k] < times[k - 1]]
    cuts: list[int] = []

    def groups(at: list[int]) -> list[list[str]]:
        bounds = [0, *sorted(at), len(names)]
        return [names[a:b] for a, b in itertools.pairwise(bounds)]

    run_s = shared_s = fluid.run_s(groups([]), follow)
    while len(cuts) + 1 < room.streams:
        tried = [(fluid.run_s(groups([*cuts, k]), follow), k) for k in places if k not in cuts]
        if not tried or min(tried)[0] > run_s * (1 - GAIN):
            break
        run_s, cut = min(tried)
        cuts.append(cut)
    return Streams(groups=tuple(map(tuple, groups(cuts))), run_s=run_s, shared_s=shared_s)
