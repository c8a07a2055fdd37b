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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ensemble.schedule.gpu_choice import choose_gpus
from ensemble.schedule.needs import SLACK, UNITS, Need, Node, Placement, compute_need, needs_gpu
from ensemble.schedule.selection import find_gpus, is_selected
from ensemble.spec import Identity
from ensemble.spec.nodes import Selection, selects_gpus

_UNLIMITED = int(np.iinfo(np.int64).max)

Int64Array = npt.NDArray[np.int64]
Spot = tuple[tuple[int, ...], tuple[str | None, ...]]  # of each rank: its node's index, its device


class FreeCapacity:
    """The free capacity of some nodes, and the packing of members into it.

    Args:
        nodes: tried in order, those with GPUs first unless `devices` is "cpu".
        devices: "auto", "cpu" or "cuda".
        running: members that hold a place; those on other nodes (that were lost) are ignored.

    Attributes:
        held_needs: the needs of the members that hold a place, with their counts.
    """

    def __init__(self, nodes: Sequence[Node], devices: str = "auto", running: Iterable[Placement] = ()) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda node: devices != "cpu" and not node.gpus))
        self.devices = devices
        self.held_needs: Counter[Need] = Counter()
        self._index = {node.name: i for i, node in enumerate(self.nodes)}
        self._position = {
            (i, device): (i, d) for i, node in enumerate(self.nodes) for d, device in enumerate(node.gpu_ids)
        }
        self._total = np.array(
            [[round(n.cpus * UNITS), round(n.free_memory_gb * UNITS)] for n in self.nodes], np.int64
        )
        self._total = self._total.reshape(-1, 2).T.copy()
        self._gpus = np.array([node.physical_gpus for node in self.nodes], np.int64)
        self._offered = np.full((len(self.nodes), max((len(n.gpus) for n in self.nodes), default=0)), -UNITS)
        self._most_tenants = np.full_like(self._offered, _UNLIMITED)
        for i, node in enumerate(self.nodes):
            free = [round(part * UNITS) if part > 0 else -UNITS for part in node.gpu_free]
            self._offered[i, : len(free)] = free
            if any(node.gpu_exclusive):
                self._most_tenants[i, : len(free)] = [1 if one else _UNLIMITED for one in node.gpu_exclusive]
        self._selected: dict[Selection, tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]] = {}
        self._with_instances = [i for i, node in enumerate(self.nodes) if node.physical_gpus < len(node.gpus)]
        self._reset()
        self._apply(running, 1)

    def _reset(self) -> None:
        self._cpus, self._memory = self._total.copy()
        self._members = np.zeros(len(self.nodes), np.int64)
        self._shares = self._offered.copy()
        self._tenants = np.zeros_like(self._shares)

    def _find_selected(self, selection: Selection) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Masks of the nodes that fit a selection, and of their GPUs, bool [nodes, GPUs]."""
        if selection not in self._selected:
            gpus = np.zeros(self._offered.shape, np.bool_)
            for i, node in enumerate(self.nodes):
                gpus[i, : len(node.gpus)] = find_gpus(selection, node)
            nodes = np.array([is_selected(selection, node) for node in self.nodes], np.bool_)
            self._selected[selection] = nodes, gpus
        return self._selected[selection]

    def reserve(self, *placements: Placement) -> None:
        """Take places of members that start."""
        self._apply(placements, 1)

    def release(self, *placements: Placement) -> None:
        """Give back places of members that have ended."""
        self._apply(placements, -1)

    def _apply(self, placements: Iterable[Placement], sign: int) -> None:
        # summed in lists: one step with an array's element costs as much as ten with a list's
        taken: dict[int, list[int]] = {}
        devices: dict[tuple[int, int], list[int]] = {}
        needs: list[Need] = []
        index, position, total = self._index, self._position, self._total[0].tolist()
        for placement in placements:
            i, need = index.get(placement.node), placement.need
            parts = [] if i is None else [(i, need, placement.devices)]
            if placement.nodes:
                parts = [
                    (index[name], need.take_ranks(len(ranks)), tuple(placement.devices[rank] for rank in ranks))
                    for name, ranks in placement.ranks_by_node.items()
                    if name in index
                ]
            if parts:
                needs.append(need)
            for i, part, there in parts:
                sums = taken.get(i)
                if sums is None:
                    sums = taken[i] = [0, 0, 0]
                sums[0] += part.cpus_on(total[i]) if part.guessed_cpus else part.cpus
                sums[1] += part.memory
                sums[2] += 1
                for device in there:
                    if device is not None and (at := position.get((i, device))) is not None:
                        held = devices.setdefault(at, [0, 0])
                        held[0] += need.share
                        held[1] += 1
        for i, (cpus, memory, members) in taken.items():
            self._cpus[i] -= sign * cpus
            self._memory[i] -= sign * memory
            self._members[i] += sign * members
        for at, (share, tenants) in devices.items():
            self._shares[at] -= sign * share
            self._tenants[at] += sign * tenants
        (self.held_needs.update if sign > 0 else self.held_needs.subtract)(needs)

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
        needs = [compute_need(identity) for identity in waiting]
        for number, need in enumerate(needs):
            group = known.get(need)
            if group is None:
                group = known[need] = sizes.setdefault(need.size, [])
            group.append(number)
        room = _PlaceFinder(self, known, limits or {}, tenants or {})
        placed: dict[int, Placement] = {}
        for size in sorted(sizes, reverse=True):
            for need, run in itertools.groupby(sizes[size], key=needs.__getitem__):
                numbers = list(run)
                for number, (nodes, devices) in zip(numbers, room.reserve(need, len(numbers)), strict=False):
                    names = tuple(self.nodes[i].name for i in nodes) if nodes[0] != nodes[-1] else ()
                    placed[number] = Placement(waiting[number], self.nodes[nodes[0]].name, devices, names)
        found = [placed[number] for number in sorted(placed)]
        self.held_needs.update(placement.need for placement in found)
        return found

    def count_ranks(self, need: Need) -> int:
        """How many ranks of a member all nodes together have room for."""
        room = _PlaceFinder(self, [need], {}, {})
        return max(int(room.count_ranks(need, on_gpus=on_gpus).sum()) for on_gpus in room.list_kinds(need))

    def count_if_empty(
        self, needs: Mapping[Need, int], limits: Mapping[str, int], tenants: Mapping[str, int], most: int
    ) -> int:
        """How many members with these needs the empty nodes would hold, counted up to `most`."""
        empty = copy.copy(self)
        empty._reset()
        room, count = _PlaceFinder(empty, needs, limits, tenants), 0
        for need in sorted(needs, key=lambda need: need.size, reverse=True):
            if count < most:
                count += len(room.reserve(need, min(needs[need], most - count)))
        return count


class _PlaceFinder:
    """Finds places for members, under the limits of one decision."""

    def __init__(
        self, free: FreeCapacity, needs: Iterable[Need], limits: Mapping[str, int], tenants: Mapping[str, int]
    ) -> None:
        self._free = free
        self._places = np.full(len(free.nodes), _UNLIMITED, np.int64)
        self._most = free._most_tenants.copy() if tenants else free._most_tenants
        for i, node in enumerate(free.nodes):
            if node.places is not None or node.name in limits:
                self._places[i] = min(n for n in (node.places, limits.get(node.name)) if n is not None)
            for device, kind in enumerate(node.gpus if tenants else ()):
                self._most[i, device] = min(tenants.get(kind, _UNLIMITED), self._most[i, device])
        # [w, i]: what the (w + 1)th of the node's physical GPUs has left, by share: what w + 1 ranks may each take
        left = np.where(free._tenants < self._most, free._shares, -UNITS)
        needs = list(needs)
        selections = {need.selection for need in needs if need.selection}
        self._open_to = {key: free._find_selected(key)[0] for key in selections}
        self._gpus_for = {key: free._find_selected(key)[1] for key in selections if selects_gpus(key)}
        self._by_rank_for = {
            key: self._sort_by_rank(np.where(mask, left, -UNITS)) for key, mask in self._gpus_for.items()
        }
        self._by_rank = self._sort_by_rank(left)
        # a member of at most so many ranks that declared no share is nowhere placed on the CPU
        self._gpu_only_workers = int(free._gpus.min(initial=_UNLIMITED))
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
        """Update upper bounds on what any node has left, which reject most members once the nodes are full.

        Only nodes with enough for the smallest need of each resource count. Until the next update capacity can
        only shrink.
        """
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
        found: list[Spot] = []
        kinds = self.list_kinds(need)
        if need.spreads:
            for on_gpus in kinds:
                found += self._reserve_across(need, count - len(found), on_gpus=on_gpus, is_spread=True)
        # several nodes' GPUs come before the CPU of a node that has some
        may_fall_back = need.spans_nodes and len(kinds) > 1
        found += self._reserve_on_nodes(need, count - len(found), beside_gpus=not may_fall_back)
        for on_gpus in kinds if need.spans_nodes else ():
            found += self._reserve_across(need, count - len(found), on_gpus=on_gpus)
            if on_gpus and may_fall_back:
                found += self._reserve_on_nodes(need, count - len(found))
        self._bounds_are_stale |= bool(found)
        if len(found) < count:
            self._unplaceable.add(need)
            if self._bounds_are_stale:
                self._update_bounds()
        return found

    def _reserve_on_nodes(self, need: Need, count: int, *, beside_gpus: bool = True) -> list[Spot]:
        """Take up to `count` places of one node each, node after node.

        Args:
            beside_gpus: whether one that declared no share may be on the CPU of a node that has GPUs.
        """
        if not count or self._cpus_left < 0 or need.memory > self._memory_left:
            return []
        if need.cpus > self._cpus_left and not need.guessed_cpus:
            return []
        if need.share > self._share_left and self._is_never_on_cpu(need):
            return []
        found: list[Spot] = []
        numbers = np.flatnonzero(self._find_open_nodes(need, beside_gpus=beside_gpus))
        if need.cpu_only and self._free.devices != "cpu":
            numbers = numbers[np.argsort(self._free._gpus[numbers] > 0, kind="stable")]
        for i in numbers.tolist():
            found += self._reserve_on(i, need, count - len(found))
            if len(found) == count:
                break
        return found

    def _reserve_across(self, need: Need, count: int, *, on_gpus: bool, is_spread: bool = False) -> list[Spot]:
        """Take up to `count` places of several nodes each; of one that is spread, half on each of two."""
        found: list[Spot] = []
        while len(found) < count:
            spot = self._find_across(need, on_gpus=on_gpus, is_spread=is_spread)
            if spot is None:
                break
            found.append(spot)
        return found

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
            ((_, there),) = self._reserve_on(i, need.take_ranks(ranks), 1)
            nodes += [i] * ranks
            devices += there
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
        return [((i,) * need.workers, each) for each in devices]

    def _take_gpus(self, i: int, need: Need, count: int) -> list[tuple[str | None, ...]]:
        """Take GPUs of node number `i` for up to `count` members."""
        free = self._free
        shares, tenants = free._shares[i].tolist(), free._tenants[i].tolist()
        node, most = free.nodes[i], self._most[i].tolist()
        allowed = self._gpus_for.get(need.selection)
        limits = most if allowed is None else [n if fits else 0 for n, fits in zip(most, allowed[i], strict=True)]
        chosen = choose_gpus(node, need, count, shares, tenants, limits)
        free._shares[i], free._tenants[i] = shares, tenants
        left = [share if tenants[d] < most[d] else -UNITS for d, share in enumerate(shares)]
        self._by_rank[:, i] = node.sort_by_gpu(left, -UNITS)
        for key, mask in self._gpus_for.items():
            some = [share if fits else -UNITS for share, fits in zip(left, mask[i], strict=True)]
            self._by_rank_for[key][:, i] = node.sort_by_gpu(some, -UNITS)
        return chosen


def pack(
    waiting: Sequence[Identity],
    running: Iterable[Placement],
    nodes: Sequence[Node],
    devices: str = "auto",
    limits: Mapping[str, int] | None = None,
    tenants: Mapping[str, int] | None = None,
) -> list[Placement]:
    """Place as many of the waiting members as first-fit decreasing finds room for beside the running ones.

    For repeated decisions keep a `FreeCapacity` instead.

    Args:
        waiting, limits, tenants: as in `FreeCapacity.place`.
        running, nodes, devices: as in `FreeCapacity`.

    Returns:
        Placements in the order of `waiting`; those that found no room are left out.
    """
    return FreeCapacity(nodes, devices, running).place(waiting, limits, tenants)
