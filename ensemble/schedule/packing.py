"""Packs members onto nodes: first-fit decreasing over GPUs, cores and memory.

All ranks of a member run on one node; where none has room for all, and the member allows it, on as few nodes as
possible. A physical GPU holds at most one rank of a member: NCCL refuses two ranks of a communicator on one GPU,
also on two instances of it in MIG mode. Several members may share a GPU, as far as processes of others leave it
free, unless its compute mode admits one process at a time. So is a node's memory (`Node.free_memory_gb`).

| devices | `gpus_per_worker` | node without GPUs | node with GPUs |
|---|---|---|---|
| cpu | any | CPU | CPU |
| auto, cuda | 0 | CPU | CPU |
| auto | above 0 | refused | one GPU a rank |
| auto | not declared | CPU | one GPU a rank; a member with more ranks than there are GPUs: CPU |
| cuda | above 0, or not declared | refused | one GPU a rank |

A member that selects nodes, or GPUs of some type or memory, is placed there alone (`Identity.nodes`); one that
selects GPUs is refused on the CPU, whatever else is declared.

Where there was never a GPU, "auto" is "cpu" (`resolve_devices`). A member on several nodes has GPUs for all of its
ranks or for none. One that declared no share, with "auto", tries in turn: one node's GPUs or one without GPUs,
several nodes' GPUs, the CPU of a node that has GPUs, several nodes without GPUs. One that declared 0 is placed on
nodes without GPUs first, so that the cores beside GPUs stay with those that use them.

Values that are left to measurement (`Identity.auto`) exclude no node: a member with no more workers than a node
has cores asks for at most all of these cores, and a guessed share of a GPU does not keep it off the CPU.

`FreeCapacity` is made for 10,000 members on 1,000 nodes: members with equal needs are placed together, one
vectorized comparison finds all nodes with room for one of them, and upper bounds on what any node has left reject
the rest once all nodes are full. It is updated as members start and end instead of being rebuilt.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ensemble.schedule.gpu_choice import choose_gpus
from ensemble.schedule.needs import SLACK, UNITS, Need, Node, Placement, compute_need, needs_gpu
from ensemble.schedule.node_room import UNLIMITED, NodeRoom
from ensemble.spec import Identity
from ensemble.spec.nodes import selects_gpus

Int64Array = npt.NDArray[np.int64]
Spot = tuple[tuple[int, ...], tuple[str | None, ...]]  # of each rank: its node's index, its device


class FreeCapacity(NodeRoom):
    """The free capacity of some nodes, and the packing of members into it."""

    def place(
        self,
        waiting: Sequence[Identity],
        limits: Mapping[str, int] | None = None,
    ) -> list[Placement]:
        """Place members by first-fit decreasing; their places are taken.

        Args:
            waiting: the largest (by GPUs, then cores, then memory) is placed first; among equals the order given
                decides.
            limits: most members at one time, by node's name.

        Returns:
            Placements in the order of `waiting`; those that found no room are left out.
        """
        sizes: dict[tuple[int, int, int], list[int]] = {}
        groups: dict[Need, list[int]] = {}
        needs = [compute_need(identity) for identity in waiting]
        for number, need in enumerate(needs):
            group = groups.get(need)
            if group is None:
                group = groups[need] = sizes.setdefault(need.size, [])
            group.append(number)
        room = _PlaceFinder(self, groups, limits or {})
        placed: dict[int, Placement] = {}
        for size in sorted(sizes, reverse=True):
            for need, run in itertools.groupby(sizes[size], key=needs.__getitem__):
                numbers = list(run)
                for number, (nodes, devices) in zip(numbers, room.reserve(need, len(numbers)), strict=False):
                    names = tuple(self.nodes[i].name for i in nodes) if nodes[0] != nodes[-1] else ()
                    placed[number] = Placement(waiting[number], self.nodes[nodes[0]].name, devices, names)
        placements = [placed[number] for number in sorted(placed)]
        self.held_needs.update(placement.need for placement in placements)
        return placements

    def count_ranks(self, need: Need) -> int:
        """How many ranks of a member all nodes together have room for."""
        room = _PlaceFinder(self, [need], {})
        return max(int(room.count_ranks(need, on_gpus=on_gpus).sum()) for on_gpus in room.list_kinds(need))

    def count_if_empty(self, needs: Mapping[Need, int], limits: Mapping[str, int], most: int) -> int:
        """How many members with these needs the empty nodes would hold, counted up to `most`."""
        empty = copy.copy(self)
        empty.reset()
        room, count = _PlaceFinder(empty, needs, limits), 0
        for need in sorted(needs, key=lambda need: need.size, reverse=True):
            if count < most:
                count += len(room.reserve(need, min(needs[need], most - count)))
        return count


class _PlaceFinder:
    """Finds places for members, under the limits of one decision."""

    def __init__(self, free: FreeCapacity, needs: Iterable[Need], limits: Mapping[str, int]) -> None:
        self._free = free
        self._places = np.full(len(free.nodes), UNLIMITED, np.int64)
        self._most = free._most_tenants
        for i, node in enumerate(free.nodes):
            if node.places is not None or node.name in limits:
                self._places[i] = min(n for n in (node.places, limits.get(node.name)) if n is not None)
        # [w, i]: what the (w + 1)th of the node's physical GPUs has left, by share: what w + 1 ranks may each take
        free_shares = np.where(free._tenants < self._most, free._shares, -UNITS)
        needs = list(needs)
        selections = {need.selection for need in needs if need.selection}
        self._open_to = {key: free.find_selected(key)[0] for key in selections}
        self._gpus_for = {key: free.find_selected(key)[1] for key in selections if selects_gpus(key)}
        self._by_rank_for = {
            key: self._sort_by_rank(np.where(mask, free_shares, -UNITS)) for key, mask in self._gpus_for.items()
        }
        self._by_rank = self._sort_by_rank(free_shares)
        # a member of at most so many ranks that declared no share is nowhere placed on the CPU
        self._gpu_only_workers = int(free._gpus.min(initial=UNLIMITED))
        self._unplaceable: set[Need] = set()
        # of each, the least that anybody needs: cores, memory, a GPU's share
        self._least = (
            min((0 if need.guessed_cpus else need.cpus for need in needs), default=0),
            min((need.memory for need in needs), default=0),
            min((need.share if self._is_never_on_cpu(need) else -UNITS for need in needs), default=0),
        )
        self._update_bounds()

    def _sort_by_rank(self, left: Int64Array) -> Int64Array:
        by_rank: Int64Array = -np.sort(-left).T.copy()
        for i in self._free._with_instances:
            by_rank[:, i] = self._free.nodes[i].sort_by_gpu(left[i].tolist(), -UNITS)
        return by_rank

    def list_kinds(self, need: Need) -> list[bool]:
        """Whether a member may have GPUs, in the order in which it is tried."""
        if needs_gpu(need, self._free.devices):
            return [True]
        return [False] if self._free.devices == "cpu" or need.cpu_only else [True, False]

    def _is_never_on_cpu(self, need: Need) -> bool:
        kinds = self.list_kinds(need)
        return kinds == [True] or (True in kinds and need.workers <= self._gpu_only_workers)

    def _update_bounds(self) -> None:
        """Update upper bounds on what any node has left: they reject most members on full nodes."""
        free, (cpus, memory, share) = self._free, self._least
        open_nodes = (free._members < self._places) & (free._cpus + SLACK >= cpus)
        open_nodes &= free._memory + SLACK >= memory
        if len(self._by_rank):
            open_nodes &= self._by_rank[0] + SLACK >= share
        self._cpus_left = int(free._cpus.max(initial=-UNITS, where=open_nodes)) + SLACK
        self._memory_left = int(free._memory.max(initial=-UNITS, where=open_nodes)) + SLACK
        self._share_left = int(self._by_rank[:1].max(initial=-UNITS, where=open_nodes)) + SLACK
        self._bounds_are_stale = False

    def reserve(self, need: Need, count: int) -> list[Spot]:
        """Take up to `count` places for members of one need: on one node each, then on several."""
        if need in self._unplaceable:
            return []
        spots: list[Spot] = []
        kinds = self.list_kinds(need)
        if need.spreads:
            for on_gpus in kinds:
                spots += self._reserve_across(need, count - len(spots), on_gpus=on_gpus, is_spread=True)
        # several nodes' GPUs come before the CPU of a node that has some
        may_fall_back = need.spans_nodes and len(kinds) > 1
        spots += self._reserve_on_nodes(need, count - len(spots), beside_gpus=not may_fall_back)
        for on_gpus in kinds if need.spans_nodes else ():
            spots += self._reserve_across(need, count - len(spots), on_gpus=on_gpus)
            if on_gpus and may_fall_back:
                spots += self._reserve_on_nodes(need, count - len(spots))
        self._bounds_are_stale |= bool(spots)
        if len(spots) < count:
            self._unplaceable.add(need)
            if self._bounds_are_stale:
                self._update_bounds()
        return spots

    def _reserve_on_nodes(self, need: Need, count: int, *, beside_gpus: bool = True) -> list[Spot]:
        """Take up to `count` places of a node each; `beside_gpus`: also on the CPU of nodes with GPUs."""
        if not count or self._cpus_left < 0 or need.memory > self._memory_left:
            return []
        if need.cpus > self._cpus_left and not need.guessed_cpus:
            return []
        if need.share > self._share_left and self._is_never_on_cpu(need):
            return []
        spots: list[Spot] = []
        numbers = np.flatnonzero(self._find_open_nodes(need, beside_gpus=beside_gpus))
        if need.cpu_only and self._free.devices != "cpu":
            numbers = numbers[np.argsort(self._free._gpus[numbers] > 0, kind="stable")]
        for i in numbers.tolist():
            spots += self._reserve_on(i, need, count - len(spots))
            if len(spots) == count:
                break
        return spots

    def _reserve_across(self, need: Need, count: int, *, on_gpus: bool, is_spread: bool = False) -> list[Spot]:
        """Take up to `count` places of several nodes each; of one that is spread, half on each of two."""
        spots: list[Spot] = []
        while len(spots) < count:
            spot = self._find_across(need, on_gpus=on_gpus, is_spread=is_spread)
            if spot is None:
                break
            spots.append(spot)
        return spots

    def _find_across(self, need: Need, *, on_gpus: bool, is_spread: bool) -> Spot | None:
        """Take a place on several nodes, as few as possible: those with room for the most ranks first."""
        room = self.count_ranks(need, on_gpus=on_gpus)
        if is_spread:
            room = np.minimum(room, (need.workers + 1) // 2)
        order = np.argsort(-room, kind="stable")[: 2 if is_spread else None]
        if room[order].sum() < need.workers:
            return None
        nodes: list[int] = []
        devices: list[str | None] = []
        for i in order.tolist():
            ranks = min(int(room[i]), need.workers - len(nodes))
            if not ranks:  # all have a place: nodes without room come last
                break
            ((_, gpus),) = self._reserve_on(i, need.take_ranks(ranks), 1)
            nodes += [i] * ranks
            devices += gpus
        return tuple(nodes), tuple(devices)

    def count_ranks(self, need: Need, *, on_gpus: bool) -> Int64Array:
        """How many ranks of one member each node has room for, int64 [nodes]."""
        free, rank = self._free, need.take_ranks(1)
        most = np.full(len(free.nodes), need.workers, np.int64)
        if rank.cpus:
            by_cpus = np.maximum(free._cpus + SLACK, 0) // rank.cpus
            if need.guessed_cpus:  # as `Need.cpus_on`: so many take at most all cores of a node
                total = free._total[0]
                is_empty = (total > 0) & (free._cpus + SLACK >= total)
                by_cpus = np.where(is_empty, np.maximum(by_cpus, np.maximum(total // UNITS, 1)), by_cpus)
            most = np.minimum(most, by_cpus)
        if rank.memory:
            most = np.minimum(most, np.maximum(free._memory + SLACK, 0) // rank.memory)
        if need.selection:
            most = np.where(self._open_to[need.selection], most, 0)
        if on_gpus:
            by_rank = self._by_rank_for.get(need.selection, self._by_rank)
            most = np.minimum(most, (by_rank + SLACK >= need.share).sum(axis=0, dtype=np.int64))
        elif free.devices != "cpu" and not need.cpu_only:  # on the CPU only where there is no GPU
            most = np.where(free._gpus > 0, 0, most)
        return np.where(free._members < self._places, most, 0)

    def _find_open_nodes(self, need: Need, *, beside_gpus: bool) -> npt.NDArray[np.bool_]:
        """A mask of the nodes with room for one more member of this need."""
        free = self._free
        cpus: Int64Array | int = need.cpus
        if need.guessed_cpus:
            total = free._total[0]
            is_capped = (total > 0) & (need.workers * UNITS <= np.maximum(total, UNITS))  # as `Need.cpus_on`
            cpus = np.where(is_capped, np.minimum(total, need.cpus), need.cpus)
        open_nodes: npt.NDArray[np.bool_] = (free._cpus + SLACK >= cpus) & (free._members < self._places)
        if need.memory:
            open_nodes &= free._memory + SLACK >= need.memory
        if need.selection:
            open_nodes &= self._open_to[need.selection]
        kinds = self.list_kinds(need)
        if kinds == [False]:
            return open_nodes
        elsewhere = free._gpus < (need.workers if beside_gpus else 1)
        if kinds == [True]:
            elsewhere[:] = False
        by_rank = self._by_rank_for.get(need.selection, self._by_rank)
        if need.workers <= len(by_rank):
            elsewhere |= by_rank[need.workers - 1] + SLACK >= need.share
        open_nodes &= elsewhere
        return open_nodes

    def _reserve_on(self, i: int, need: Need, count: int) -> list[Spot]:
        """Take up to `count` places on node number `i`."""
        free = self._free
        cpus = need.cpus_on(int(free._total[0, i]))
        count = min(count, int(self._places[i] - free._members[i]))
        if cpus:
            count = min(count, (int(free._cpus[i]) + SLACK) // cpus)
        if need.memory:
            count = min(count, (int(free._memory[i]) + SLACK) // need.memory)
        if True in self.list_kinds(need) and free._gpus[i] >= need.workers:
            devices = self._take_gpus(i, need, count)
        else:
            devices = [(None,) * need.workers] * count
        free._cpus[i] -= cpus * len(devices)
        free._memory[i] -= need.memory * len(devices)
        free._members[i] += len(devices)
        return [((i,) * need.workers, gpus) for gpus in devices]

    def _take_gpus(self, i: int, need: Need, count: int) -> list[tuple[str | None, ...]]:
        """Take GPUs of node number `i` for up to `count` members."""
        free = self._free
        shares, tenants = free._shares[i].tolist(), free._tenants[i].tolist()
        node, most = free.nodes[i], self._most[i].tolist()
        allowed = self._gpus_for.get(need.selection)
        limits = most if allowed is None else [n if fits else 0 for n, fits in zip(most, allowed[i], strict=True)]
        chosen = choose_gpus(node, need, count, shares, tenants, limits)
        free._shares[i], free._tenants[i] = shares, tenants
        free_shares = [share if tenants[d] < most[d] else -UNITS for d, share in enumerate(shares)]
        self._by_rank[:, i] = node.sort_by_gpu(free_shares, -UNITS)
        for key, mask in self._gpus_for.items():
            some = [share if fits else -UNITS for share, fits in zip(free_shares, mask[i], strict=True)]
            self._by_rank_for[key][:, i] = node.sort_by_gpu(some, -UNITS)
        return chosen


def pack(
    waiting: Sequence[Identity],
    running: Iterable[Placement],
    nodes: Sequence[Node],
    devices: str = "auto",
    limits: Mapping[str, int] | None = None,
) -> list[Placement]:
    """Place as many of the waiting members as first-fit decreasing finds room for beside the running ones.

    For repeated decisions keep a `FreeCapacity` instead.

    Args:
        waiting, limits: as in `FreeCapacity.place`.
        running, nodes, devices: as in `FreeCapacity`.

    Returns:
        Placements in the order of `waiting`; those that found no room are left out.
    """
    return FreeCapacity(nodes, devices, running).place(waiting, limits)
