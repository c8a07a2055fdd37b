"""Predicts how long a collective takes: rounds of messages, by the rate of the busiest direction of a link.

A latency is added, taken from the smallest message S0: t(S) = rounds(S) + (measured(S0) - rounds(S0)). With one
rank a host a ring takes 2 (n - 1) / n * S / R (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# As `ensemble.comm.torch_dist.GATHER_BYTES`, which would import torch.
_GATHER_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Round:
    """Messages (from, to, bytes) that are sent at once; the round is repeated `times` times."""

    messages: list[tuple[int, int, float]]
    times: int = 1


def bus_factor(collective: str, world: int) -> float:
    """busbw / algbw of nccl-tests (its doc/PERFORMANCE.md)."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (world - 1) / world


def rounds(collective: str, ranks: Sequence[int], size: float, backend: str = "gloo") -> list[Round]:
    """The rounds of a collective among these ranks.

    The algorithms are those of gloo: rings, but a binomial tree for a broadcast, and for a reduction to one rank
    the first half of a ring, after which everybody sends its part to the root; a small one is sent there whole
    (`ensemble.comm.torch_dist`). torch's reduce-scatter over gloo is an all-reduce, and so is a reduction over
    Horovod. Otherwise other backends are assumed to do the same.

    Args:
        collective: of `benchmarks.fabric.measure.COLLECTIVES`; the root is the first rank.
        ranks: their numbers, in the group's order.
        size: bytes, as nccl-tests counts them: of a rank's input; of its output for an all-gather.
    """
    n = len(ranks)
    if n == 1:
        return []
    if collective == "reduce" and backend.startswith("horovod"):
        collective = "all_reduce"
    ring = [(rank, ranks[(i + 1) % n], size / n) for i, rank in enumerate(ranks)]
    if collective == "broadcast":  # in round i the 2^i ranks that have the message send it to the rank 2^i further
        steps = [2**i for i in range(math.ceil(math.log2(n)))]
        return [Round([(ranks[j], ranks[j + k], size) for j in range(min(k, n - k))]) for k in steps]
    if collective == "all_to_all":
        return [Round([(a, b, size / n) for a in ranks for b in ranks if a != b])]
    if collective == "reduce" and size * (n - 1) <= _GATHER_BYTES:
        return [Round([(rank, ranks[0], size) for rank in ranks[1:]])]
    if collective == "reduce":
        return [Round(ring, n - 1), Round([(rank, ranks[0], size / n) for rank in ranks[1:]])]
    twice = collective == "all_reduce" or (collective == "reduce_scatter" and backend == "gloo")
    return [Round(ring, (2 if twice else 1) * (n - 1))]


def _crossing(step: Round, placement: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes that each host sends over its link in a round, and bytes that it receives."""
    out, into = dict.fromkeys(placement, 0.0), dict.fromkeys(placement, 0.0)
    for a, b, size in step.messages:
        if placement[a] != placement[b]:
            out[placement[a]] += size
            into[placement[b]] += size
    return out, into


def seconds(steps: Sequence[Round], placement: Sequence[int], link_bps: float | None) -> float:
    """Seconds of these rounds on the busiest link, without latency.

    Args:
        placement: the host of each rank.
        link_bps: bytes per second of one direction of a host's link; None for no limit.
    """
    if link_bps is None:
        return 0.0
    directions = ((step.times, _crossing(step, placement)) for step in steps)
    return sum(times * max(*out.values(), *into.values()) / link_bps for times, (out, into) in directions)


def with_latency(computed: Sequence[float], smallest_s: float) -> list[float]:
    """Add a latency to predictions for ascending sizes: what the smallest took longer than predicted."""
    latency = max(0.0, smallest_s - computed[0])
    return [seconds + latency for seconds in computed]
