"""Assigns members that start together to streams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ensemble.schedule.flotilla.model import Capacity, CoreBudget, RatedMember
from ensemble.schedule.flotilla.timeline import FluidModel

GAIN = 0.02  # share of the run that a further stream must save
_PLACES = 24  # candidate positions at which the order by rate is cut: its largest gaps


@dataclass(frozen=True, kw_only=True)
class StreamGrouping:
    """Members by stream, the slowest first; expected seconds of the run, and with one stream for all."""

    groups: tuple[tuple[str, ...], ...]
    run_s: float
    shared_s: float


def group_streams(
    members: Sequence[RatedMember],
    capacity: Capacity,
    samples: int,
    *,
    cores: CoreBudget | None = None,
    waiting: Sequence[Sequence[RatedMember]] = (),
) -> StreamGrouping:
    """Divide members into streams: one for all, unless a further one saves `GAIN` of the run.

    Where no member waits and all have the same number of epochs, the slowest member determines the end of the run,
    so that one stream is best.

    Args:
        members: those that start together, with their widths.
        capacity: allows at most `capacity.streams` streams.
        cores: the cores that preparation and members share; None where preparation takes none from members.
        waiting: flotillas that follow, in this order, with their widths.
    """
    if not members:
        return StreamGrouping(groups=(), run_s=0.0, shared_s=0.0)
    fluid = FluidModel(
        [*members, *(member for flotilla in waiting for member in flotilla)], capacity, samples, cores
    )
    follow = [[member.member for member in flotilla] for flotilla in waiting]
    order = sorted(members, key=lambda m: (-fluid.epoch_s(m.member), len(m.member), m.member))
    names = [member.member for member in order]
    times = [fluid.epoch_s(name) for name in names]
    gaps = sorted(range(1, len(names)), key=lambda k: (times[k] / times[k - 1], k))
    places = [k for k in gaps[:_PLACES] if times[k] < times[k - 1]]
    cuts: list[int] = []

    def groups(at: list[int]) -> list[list[str]]:
        bounds = [0, *sorted(at), len(names)]
        return [names[a:b] for a, b in itertools.pairwise(bounds)]

    run_s = shared_s = fluid.estimate_run_s(groups([]), follow)
    while len(cuts) + 1 < capacity.streams:
        tried = [(fluid.estimate_run_s(groups([*cuts, k]), follow), k) for k in places if k not in cuts]
        if not tried or min(tried)[0] > run_s * (1 - GAIN):
            break
        run_s, cut = min(tried)
        cuts.append(cut)
    return StreamGrouping(groups=tuple(map(tuple, groups(cuts))), run_s=run_s, shared_s=shared_s)
