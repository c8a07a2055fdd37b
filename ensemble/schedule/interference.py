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

_KEPT = 64  # of the latest observations, for each number of tenants
_ENOUGH = 3  # observations of a number of tenants, before it counts: one may be chance
_GAIN = 0.02  # what more tenants must add: below that they only wait for each other


@dataclass(frozen=True)
class Interference:
    """What was observed so far.

    Attributes:
        seen: kind of device -> number of tenants -> own rate there as a part of the rate alone, the latest last.
    """

    seen: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)

    def with_observation(self, kind: str, tenants: int, alone: float, beside: float) -> Interference:
        """With one more observation of one member.

        Args:
            kind: of device, as `device_kind` says.
            tenants: members that shared it meanwhile, itself included.
            alone: samples/s that it trains at by itself; as it was measured.
            beside: samples/s that it trained at, time in which it waited for its stream left out.
        """
        if tenants < 1 or not (alone > 0 and beside > 0):
            return self
        of_kind = dict(self.seen.get(kind, {}))
        of_kind[tenants] = (*of_kind.get(tenants, ()), min(1.0, beside / alone))[-_KEPT:]
        return Interference({**self.seen, kind: of_kind})

    def combined_throughput(self, kind: str) -> dict[int, float]:
        """What so many tenants get done together, in units of one alone, where enough was observed; 1 for one."""
        enough = {n: parts for n, parts in self.seen.get(kind, {}).items() if n > 1 and len(parts) >= _ENOUGH}
        return {1: 1.0} | {n: n * statistics.median(enough[n]) for n in sorted(enough)}

    def max_tenants(self, kind: str) -> int | None:
        """Most tenants that still raise what they get done together; None where no more have been seen to fail."""
        best, most = 1.0, 1
        known = self.combined_throughput(kind)
        for tenants, done in known.items():
            if done > best * (1 + _GAIN):
                best, most = done, tenants
        return most if most < max(known) else None

    def tenant_limits(self, nodes: Sequence[Node]) -> tuple[dict[str, int], dict[str, int]]:
        """What packing is to respect: most members by name of a node without GPUs, most tenants by kind of GPU."""
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
        """What `as_dict` gave."""
        return cls({kind: {int(n): tuple(parts) for n, parts in seen.items()} for kind, seen in known.items()})


def device_kind(node: Node, device: int | None = None) -> str:
    """What members share there: a GPU by its model, or the cores of a node by their number."""
    return f"cpu x {node.cpus:g}" if device is None else node.gpus[device]
