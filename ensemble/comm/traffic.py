"""How many bytes a rank sends in a collective, by the formulas of the usual algorithms.

Ring all-reduce sends 2 (n - 1) / n of the message from every rank, reduce-scatter and all-to-all (n - 1) / n, an
all-gather n - 1 times the rank's own part (Patarasuk and Yuan 2009). Of a tree's broadcast or reduction every rank
but one sends, or receives, the message once: (n - 1) / n of it on the average. Headers are not counted.
"""

from __future__ import annotations

from typing import Literal

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]


def sent_bytes(collective: Collective, size: int, world: int) -> float:
    """Bytes that each of `world` ranks sends on the average.

    Args:
        size: bytes of the tensor that the rank hands over.
    """
    if collective == "all_gather":
        return float(size * (world - 1))
    times = 2 if collective == "all_reduce" else 1
    return times * size * (world - 1) / world
