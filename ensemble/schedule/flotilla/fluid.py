"""How long a run takes if members that run now are grouped like this, and those that wait follow.

A fluid model: nodes are one heap of slots, and cores are shared evenly. A stream at a pace of x samples/s keeps
x / `Cores.prepared_per_s` cores busy, a member at that pace its share of the cores that it would use unpaced.
Where all these together want more than there are, everything is slower by that ratio; it is taken for the rest of
the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ensemble.schedule.flotilla.model import Busy, Cohort, Cores, RatedMember, Room
from ensemble.schedule.flotilla.problem import make_problem
from ensemble.schedule.flotilla.timeline import Clock

Groups = Sequence[Sequence[str]]


class Fluid:
    """Lengths of the rest of a run, for members that are known once.

    Args:
        members: that run or start now, and that wait; all widths are known.
        room, samples: as for `allocate`; nodes are one heap.
        cores: None where preparation costs members nothing.
    """

    def __init__(
        self, members: Sequence[RatedMember], room: Room, samples: int, cores: Cores | None = None
    ) -> None:
        unknown = next((each.member for each in members if each.workers is None), None)
        if unknown is not None:
            raise ValueError(f"{unknown}: its width is not yet chosen; allocate first")
        heap = dataclasses.replace(room, slots=(sum(room.slots),), widest=room.most_workers)
        free = [RatedMember(member=m.member, samples_per_s=m.samples_per_s, epochs=m.epochs) for m in members]
        self._problem = make_problem(free, heap, samples)  # widths stay free, for those that may be widened
        self._number = {name: i for i, name in enumerate(self._problem.names)}
        # One wider than what a node has slots for trains all the same, with more ranks than there are GPUs.
        self._widths = {each.member: min(each.workers or 1, room.most_workers) for each in members}
        self._samples, self._cores = samples, cores

    @property
    def second(self) -> float:
        """Seconds of a unit of time."""
        return self._problem.second

    def time(self, member: str, workers: int | None = None) -> float:
        """Seconds of an epoch of a member that waits for nobody but the feeder."""
        width = self._widths[member] if workers is None else workers
        return float(self._problem.times[self._number[member], width]) * self.second

    def run_s(
        self,
        groups: Groups,
        waiting: Groups = (),
        *,
        alone: Sequence[str] = (),
        extra: Mapping[str, int] | None = None,
        workers: Mapping[str, int] | None = None,
        late_s: float = 0.0,
    ) -> float:
        """Seconds until all have ended.

        Args:
            groups: members that read one stream each, now.
            waiting: flotillas that follow in this order.
            alone: members that run now and prepare for themselves.
            extra: epochs that a member stays in its group's stream beyond its own.
            workers: widths other than those known.
            late_s: that members with such a width lose.
        """
        widths = [self._widths[name] for name in self._problem.names]
        times, epochs = self._problem.times, self._problem.epochs
        for name, more in (extra or {}).items():
            epochs = epochs.copy()
            epochs[self._number[name]] += more
        for name, wider in (workers or {}).items():
            i = self._number[name]
            widths[i] = wider
            times = times.copy()
            times[i, wider] += late_s / self.second / int(epochs[i])
        busy = []
        for name in alone:
            i = self._number[name]
            busy.append(Busy(0, widths[i], float(times[i, widths[i]] * epochs[i]), None))
        streams = max(self._problem.room.streams, len(groups))
        room = dataclasses.replace(self._problem.room, streams=streams)
        problem = dataclasses.replace(self._problem, times=times, epochs=epochs, busy=tuple(busy), room=room)
        order = [[self._number[name] for name in group] for group in (*groups, *waiting)]
        makespan = Clock(problem).timeline(order, widths).makespan * self.second
        return makespan * self._slower([*groups, *([name] for name in alone)], widths)

    def _slower(self, groups: Groups, widths: Sequence[int]) -> float:
        """How much longer all takes because cores are short."""
        if self._cores is None:
            return 1.0
        wanted = 0.0
        for group in groups:
            times = {name: self.time(name, widths[self._number[name]]) for name in group}
            pace = max(times.values())
            wanted += self._samples / pace / self._cores.prepared_per_s
            wanted += sum(self._cores.members.get(name, 0.0) * time / pace for name, time in times.items())
        return max(1.0, wanted / self._cores.total)


def ends(cohorts: Sequence[Cohort], room: Room, samples: int) -> dict[str, float]:
    """Seconds until each running member ends, at the pace of its cohort."""
    out: dict[str, float] = {}
    for cohort in cohorts:
        problem = make_problem(cohort.members, room, samples)
        by_name = {each.member: each.workers or 1 for each in cohort.members}
        widths = [by_name[name] for name in problem.names]
        for members, length in Clock(problem).lengths(range(len(widths)), widths):
            out |= {problem.names[i]: length * problem.second for i in members}
    return out
