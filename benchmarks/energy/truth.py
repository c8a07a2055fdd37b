"""What a synthetic node and its GPUs truly used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

IDLE, OTHER = "idle", "other"


@dataclass(frozen=True)
class Truth:
    """What a node has used so far.

    Attributes:
        energy_j: of the whole node.
        idle_j: of it, what does not depend on load, by the names that reserve a share of the node, and `IDLE` for
            the rest.
        dynamic_j: of the processes by name, and of `OTHER` processes of the machine. Where the model is not linear
            a member has no part of its own; then those are only a split of their sum by load.
        cpu_s: CPU-seconds by the same names.
    """

    energy_j: float
    idle_j: Mapping[str, float]
    dynamic_j: Mapping[str, float]
    cpu_s: Mapping[str, float]

    def since(self, before: Truth) -> Truth:
        """What was used after an earlier moment."""
        return Truth(
            self.energy_j - before.energy_j,
            _subtract(self.idle_j, before.idle_j),
            _subtract(self.dynamic_j, before.dynamic_j),
            _subtract(self.cpu_s, before.cpu_s),
        )

    def joules_of(self, name: str) -> float:
        """All that a name cost: its share of what is idle, and its own."""
        return self.idle_j.get(name, 0.0) + self.dynamic_j.get(name, 0.0)


def _subtract(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
