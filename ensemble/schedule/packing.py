"""What is left of the nodes while members come and go, and who finds room there: first-fit decreasing, fast.

Ten thousand members are to be planned on a thousand nodes within a second, and one that ends is to be answered
within milliseconds. So members that need the same are placed together; one look over arrays of all nodes says
where one of them would fit; the most that any node has left answers for the rest when all are full; and a `Free`
can be kept and told of each member that comes or goes, instead of being made anew.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ensemble.schedule.needs import UNITS, Need, Node, Placement, need_of
from ensemble.spec import Identity

_SLACK = 1000  # units: what rounding may add up to, a billionth of a core
_ROUND = 1000  # units: GPUs whose free shares differ by less are equally free

Numbers = npt.NDArray[np.int64]
Found = tuple[int, tuple[int | None, ...]]  # a node's index, a device a rank


class Free:
    """What is left of some nodes, and the packing of members into it.

    Args:
        nodes: tried in order, those with GPUs first unless `devices` is "cpu".
        devices: "auto", "cpu" or "cuda".
        running: what holds a place already; what is on other nodes (one that was lost) is ignored.

    Attributes:
        held: what the members that hold a place need, each need with their number.
    """

    def __init__(self, nodes: Sequence[Node], devices: str = "auto", running: Iterable[Placement] = ()) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda node: devices != "cpu" and not node.gpus))
        self.devices = devices
        self.held: Counter[Need] = Counter()
        self._index = {node.name: i for i, node in enumerate(self.nodes)}
        self._total = np.array([[round(n.cpus * UNITS), round(n.memory_gb * UNITS)] for n in self.nodes], np.int64)
        self._total = self._total.reshape(-1, 2).T.copy()
        self._gpus = np.array([len(node.gpus) for node in self.nodes], np.int64)
        self._empty()
        self._change(running, 1)

    def _empty(self) -> None:
        self._cpus, self._memory = self._total.copy()
        self._members = np.zeros(len(self.nodes), np.int64)
        exists = np.arange(self._gpus.max(initial=0)) < self._gpus[:, None]
        self._shares = np.where(exists, UNITS, -UNITS)
        self._tenants = np.zeros_like(self._shares)

    def take(self, *placements: Placement) -> None:
        """Members have come to hold these places."""
        self._change(placements, 1)

    def give(self, *placements: Placement) -> None:
        """Members that held these places have left."""
        self._change(placements, -1)

    def _change(self, placements: Iterable[Placement], sign: int) -> None:
        # summed in lists: one step with an array's element costs as much as ten with a list's
        taken: dict[int, list[int]] = {}
        devices: dict[tuple[int, int], list[int]] = {}
        needs: list[Need] = []
        index, total = self._index, self._total[0].tolist()
        for placement in placements:
            i = index.get(placement.node)
            if i is None:
                continue
            need = placement.need
            needs.append(need)
            sums = taken.get(i)
            if sums is None:
                sums = taken[i] = [0, 0, 0]
            sums[0] += need.cpus_on(total[i]) if need.guessed_cpus else need.cpus
            sums[1] += need.memory
            sums[2] += 1
            for device in placement.devices:
                if device is not None:
                    held = devices.setdefault((i, device), [0, 0])
                    held[0] += need.share
                    held[1] += 1
        for i, (cpus, memory, members) in taken.items():
            self._cpus[i] -= sign * cpus
            self._memory[i] -= sign * memory
            self._members[i] += sign * members
        for at, (share, tenants) in devices.items():
            self._shares[at] -= sign * share
            self._tenants[at] += sign * tenants
        (self.held.update if sign > 0 else self.held.subtract)(needs)

    def place(
        self,
        waiting: Sequence[Identity],
        limits: Mapping[str, int] | None = None,
        tenants: Mapping[str, int] | None = None,
    ) -> list[Placement]:
        """Place members by first-fit decreasing; their places are taken.

        Args:
            waiting: the largest (by GPUs, then cores, then memory) is placed first; among equals the order given
                decides.
            limits: most members at one time, by node's name.
            tenants: most members at one time on one GPU, by its model's name.

        Returns:
            Placements in the order of `waiting`; those that found no room are left out.
        """
        sizes: dict[tuple[int, int, int], list[int]] = {}
        known: dict[Need, list[int]] = {}
        needs = [need_of(identity) for identity in waiting]
        for number, need in enumerate(needs):
            group = known.get(need)
            if group is None:
                group = known[need] = sizes.setdefault(need.size, [])
            group.append(number)
        room = _Room(self, known, limits or {}, tenants or {})
        placed: dict[int, Placement] = {}
        for size in sorted(sizes, reverse=True):
            for need, run in itertools.groupby(sizes[size], key=needs.__getitem__):
                numbers = list(run)
                for number, (i, devices) in zip(numbers, room.find(need, len(numbers)), strict=False):
                    placed[number] = Placement(waiting[number], self.nodes[i].name, devices)
        found = [placed[number] for number in sorted(placed)]
        self.held.update(placement.need for placement in found)
        return found

    def would_hold(
        self, needs: Mapping[Need, int], limits: Mapping[str, int], tenants: Mapping[str, int], most: int
    ) -> int:
        """How many members of these needs the nodes would hold if they were empty, counted to at most `most`."""
        empty = copy.copy(self)
        empty._empty()
        room, count = _Room(empty, needs, limits, tenants), 0
        for need in sorted(needs, key=lambda need: need.size, reverse=True):
            if count < most:
                count += len(room.find(need, min(needs[need], most - count)))
        return count


class _Room:
    """Where members find room, under limits that hold for one decision."""

    def __init__(
        self, free: Free, needs: Iterable[Need], limits: Mapping[str, int], tenants: Mapping[str, int]
    ) -> None:
        self._free = free
        unlimited = int(np.iinfo(np.int64).max)
        self._places = np.full(len(free.nodes), unlimited, np.int64)
        self._most = np.full_like(free._shares, unlimited)
        for i, node in enumerate(free.nodes):
            if node.places is not None or node.name in limits:
                self._places[i] = min(n for n in (node.places, limits.get(node.name)) if n is not None)
            for device, kind in enumerate(node.gpus if tenants else ()):
                self._most[i, device] = tenants.get(kind, unlimited)
        # [w, i]: what the (w + 1)th of the node's GPUs has left, by share: what w + 1 ranks may each take
        self._by_rank = -np.sort(-np.where(free._tenants < self._most, free._shares, -UNITS)).T.copy()
        # a member of at most so many ranks is nowhere placed on the CPU
        self._narrow = unlimited if free.devices == "cuda" else 0
        if free.devices == "auto":
            self._narrow = int(free._gpus.min(initial=unlimited))
        self._hopeless: set[Need] = set()
        needs = list(needs)
        # of each, the least that anybody needs: cores, memory, a GPU's share
        self._least = (
            min((0 if need.guessed_cpus else need.cpus for need in needs), default=0),
            min((need.memory for need in needs), default=0),
            min((need.share if need.workers <= self._narrow else -UNITS for need in needs), default=0),
        )
        self._look()

    def _look(self) -> None:
        """Note the most that any node has left: where nodes are full it answers for nearly all who wait.

        Only nodes count that have of each what somebody needs. Until the next look there can only be less.
        """
        free, (cpus, memory, share) = self._free, self._least
        open_nodes = (free._members < self._places) & (free._cpus + _SLACK >= cpus)
        open_nodes &= free._memory + _SLACK >= memory
        if len(self._by_rank):
            open_nodes &= self._by_rank[0] + _SLACK >= share
        self._cpus_left = int(free._cpus.max(initial=-UNITS, where=open_nodes)) + _SLACK
        self._memory_left = int(free._memory.max(initial=-UNITS, where=open_nodes)) + _SLACK
        self._share_left = int(self._by_rank[:1].max(initial=-UNITS, where=open_nodes)) + _SLACK
        self._news = False

    def find(self, need: Need, count: int) -> list[Found]:
        """Take places for so many members of one need, or for as many as there are, node after node."""
        if self._cpus_left < 0 or need.memory > self._memory_left or need in self._hopeless:
            return []
        if need.cpus > self._cpus_left and not need.guessed_cpus:
            return []
        if need.share > self._share_left and need.workers <= self._narrow:
            return []
        found: list[Found] = []
        for i in np.flatnonzero(self._fits(need)).tolist():
            found += self._on(i, need, count - len(found))
            if len(found) == count:
                break
        self._news |= bool(found)
        if len(found) < count:
            self._hopeless.add(need)
            if self._news:
                self._look()
        return found

    def _fits(self, need: Need) -> npt.NDArray[np.bool_]:
        """Nodes that hold one more."""
        free = self._free
        cpus: Numbers | int = need.cpus
        if need.guessed_cpus:
            total = free._total[0]
            content = (total > 0) & (need.workers * UNITS <= np.maximum(total, UNITS))  # as `Need.cpus_on`
            cpus = np.where(content, np.minimum(total, need.cpus), need.cpus)
        fits: npt.NDArray[np.bool_] = (free._cpus + _SLACK >= cpus) & (free._members < self._places)
        if need.memory:
            fits &= free._memory + _SLACK >= need.memory
        if free.devices == "cpu":
            return fits
        elsewhere = free._gpus < (1 if need.insists else need.workers)
        if free.devices == "cuda":
            elsewhere[:] = False
        if need.workers <= len(self._by_rank):
            elsewhere |= self._by_rank[need.workers - 1] + _SLACK >= need.share
        fits &= elsewhere
        return fits

    def _on(self, i: int, need: Need, count: int) -> list[Found]:
        """Take places on one node for at most so many."""
        free = self._free
        cpus = need.cpus_on(int(free._total[0, i]))
        count = min(count, int(self._places[i] - free._members[i]))
        if cpus:
            count = min(count, (int(free._cpus[i]) + _SLACK) // cpus)
        if need.memory:
            count = min(count, (int(free._memory[i]) + _SLACK) // need.memory)
        if free.devices != "cpu" and free._gpus[i] >= need.workers:
            devices = self._choose(i, need, count)
        else:
            devices = [(None,) * need.workers] * count
        free._cpus[i] -= cpus * len(devices)
        free._memory[i] -= need.memory * len(devices)
        free._members[i] += len(devices)
        return [(i, each) for each in devices]

    def _choose(self, i: int, need: Need, count: int) -> list[tuple[int | None, ...]]:
        """GPUs of one node for at most so many: the emptiest first, for members that share one slow each other."""
        free = self._free
        shares, tenants = free._shares[i].tolist(), free._tenants[i].tolist()
        most, devices = self._most[i].tolist(), range(int(free._gpus[i]))
        chosen: list[tuple[int | None, ...]] = []
        while len(chosen) < count:
            open_gpus = [d for d in devices if shares[d] + _SLACK >= need.share and tenants[d] < most[d]]
            if len(open_gpus) < need.workers:
                break
            open_gpus.sort(key=lambda d: (-((shares[d] + _ROUND // 2) // _ROUND), tenants[d], d))
            taken = open_gpus[: need.workers]
            for device in taken:
                shares[device] -= need.share
                tenants[device] += 1
            chosen.append(tuple(taken))
        free._shares[i], free._tenants[i] = shares, tenants
        left = [share if tenants[d] < most[d] else -UNITS for d, share in enumerate(shares)]
        self._by_rank[:, i] = sorted(left, reverse=True)
        return chosen
