"""Estimates how much members on one device slow each other down, and how many should share it.

A member with a GPU, or the cores of a node, to itself trains at its full rate; beside others at a fraction of it.
The combined throughput of *n* tenants, in units of one alone, is n times the median of these fractions. While that
increases with n, a further tenant is worth its place; where it was observed not to, fewer members share the
device.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.schedule.needs import Node

_KEPT = 64  # latest observations for each number of tenants
_ENOUGH = 3  # observations needed for a number of tenants: fewer may be noise
_GAIN = 0.02  # relative gain in throughput that a further tenant must bring


@dataclass(frozen=True)
class Interference:
    """Observations of how members slow each other down.

    Attributes:
        seen: kind of device -> number of tenants -> rate beside them as a fraction of the rate alone, latest last.
    """

    seen: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)

    def with_observation(self, kind: str, tenants: int, alone: float, beside: float) -> Interference:
        """Add one observation of one member; returns a new object.

        Args:
            kind: of device, from `device_kind`.
            tenants: members that shared the device, itself included.
            alone: samples/s of the member alone, as measured.
            beside: observed samples/s, without the time in which it waited for its stream.
        """
        if tenants < 1 or not (alone > 0 and beside > 0):
            return self
        of_kind = dict(self.seen.get(kind, {}))
        of_kind[tenants] = (*of_kind.get(tenants, ()), min(1.0, beside / alone))[-_KEPT:]
        return Interference({**self.seen, kind: of_kind})

    def combined_throughput(self, kind: str) -> dict[int, float]:
        """Throughput of n tenants together, in units of one alone, by n, where there are enough observations."""
        enough = {n: parts for n, parts in self.seen.get(kind, {}).items() if n > 1 and len(parts) >= _ENOUGH}
        return {1: 1.0} | {n: n * statistics.median(enough[n]) for n in sorted(enough)}

    def max_tenants(self, kind: str) -> int | None:
        """The number of tenants with the highest throughput; None unless more were observed to be worse."""
        best, most = 1.0, 1
        known = self.combined_throughput(kind)
        for tenants, done in known.items():
            if done > best * (1 + _GAIN):
                best, most = done, tenants
        return most if most < max(known) else None

    def tenant_limits(self, nodes: Sequence[Node]) -> tuple[dict[str, int], dict[str, int]]:
        """Limits for packing: most members by name of a node without GPUs, most tenants by model of GPU."""
        by_node = {node.name: self.max_tenants(device_kind(node)) for node in nodes if not node.gpus}
        by_gpu = {gpu: self.max_tenants(gpu) for gpu in sorted({gpu for node in nodes for gpu in node.gpus})}
        return (
            {name: max_tenants for name, max_tenants in by_node.items() if max_tenants is not None},
            {name: max_tenants for name, max_tenants in by_gpu.items() if max_tenants is not None},
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {kind: {str(n): list(parts) for n, parts in seen.items()} for kind, seen in self.seen.items()}

    @classmethod
    def from_dict(cls, known: Mapping[str, Mapping[str, Sequence[float]]]) -> Interference:
        """The inverse of `as_dict`."""
        return cls({kind: {int(n): tuple(parts) for n, parts in seen.items()} for kind, seen in known.items()})


def device_kind(node: Node, device: str | None = None) -> str:
    """The kind of device that members share: a GPU by its model, or the cores of a node by their number."""
    return f"cpu x {node.cpus:g}" if device is None else node.find_gpu(device)
