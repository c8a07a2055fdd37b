"""What nodes have left, as arrays: updated as members start and end instead of being rebuilt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ensemble.schedule.needs import UNITS, Need, Node, Placement
from ensemble.schedule.selection import find_gpus, is_selected
from ensemble.spec.nodes import Selection

UNLIMITED = int(np.iinfo(np.int64).max)


class NodeRoom:
    """What some nodes have left beside the members that hold a place there.

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
        self._most_tenants = np.full_like(self._offered, UNLIMITED)
        for i, node in enumerate(self.nodes):
            free = [round(part * UNITS) if part > 0 else -UNITS for part in node.gpu_free]
            self._offered[i, : len(free)] = free
            if any(node.gpu_exclusive):
                self._most_tenants[i, : len(free)] = [1 if one else UNLIMITED for one in node.gpu_exclusive]
        self._selected: dict[Selection, tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]] = {}
        self._with_instances = [i for i, node in enumerate(self.nodes) if node.physical_gpus < len(node.gpus)]
        self.reset()
        self._apply(running, 1)

    def reset(self) -> None:
        self._cpus, self._memory = self._total.copy()
        self._members = np.zeros(len(self.nodes), np.int64)
        self._shares = self._offered.copy()
        self._tenants = np.zeros_like(self._shares)

    def find_selected(self, selection: Selection) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
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
            for i, part, rank_devices in parts:
                sums = taken.get(i)
                if sums is None:
                    sums = taken[i] = [0, 0, 0]
                sums[0] += part.cpus_on(total[i]) if part.guessed_cpus else part.cpus
                sums[1] += part.memory
                sums[2] += 1
                for device in rank_devices:
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
