"""Predicts how long a collective takes, from the messages between ranks and the busiest link.

A collective is a list of *rounds*; in a round ranks send messages at once. Messages over a host's link take
bytes / rate, of the direction with more bytes, and the link's delay; messages within a host cost only processor
time. In an emulation all hosts are on one machine, whose processor moves every byte at measured rates. A latency
is added, taken from the smallest message:

    t(S) = rounds(S) + (measured(S0) - rounds(S0))

A training step is simulated bucket by bucket (`step_seconds`): what the link takes is hidden behind the backward
pass, what the processor takes is not where the backward pass needs all cores.

With one rank a host this is the known 2 (n - 1) / n * S / R for the ring's all-reduce (Patarasuk and Yuan
2009). With more, the placement matters: with interleaved ranks every message of a ring crosses a link, with k
neighbouring ranks on a host one in k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble.bench.step_model import exchange_end

# As `ensemble.comm.torch_dist.GATHER_BYTES`, which would import torch.
_GATHER_BYTES = 4 * 2**20
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")


@dataclass(frozen=True)
class PredictedMachine:
    """Bytes/s that the processor of one machine moves for all emulated hosts together; None: no limit.

    Attributes:
        inside_bps: between ranks of one host.
        across_bps: between hosts whose links have no limit.
    """

    inside_bps: float | None = None
    across_bps: float | None = None


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
        collective: one of `COLLECTIVES`; the root is the first rank.
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


def layered_rounds(
    collective: str,
    world: int,
    size: int,
    backend: str,
    groups: Sequence[Sequence[int]] = (),
    ways: Sequence[tuple[int, str]] = (),
) -> list[Round]:
    """The rounds of a collective on a communicator whose all-reduce may be hierarchical.

    Args:
        groups: of a hierarchical all-reduce; none for a flat one.
        ways: of a hybrid one: flat or hierarchical, by size (`ensemble.comm.hierarchical.choose_way`).
    """
    from ensemble.comm.hierarchical import choose_way

    flat = collective != "all_reduce" or not groups
    if flat or (ways and choose_way(tuple((up_to, way) for up_to, way in ways), size) == "flat"):  # type: ignore[misc]
        return rounds(collective, range(world), size, backend)
    return hierarchical_rounds(groups, size)


def hierarchical_rounds(groups: Sequence[Sequence[int]], size: float) -> list[Round]:
    """The rounds of an all-reduce: to the first rank of each group, among those ranks, and back."""

    def at_once(collective: str) -> list[Round]:
        """The rounds of all groups, which communicate at once; those of smaller groups end earlier."""
        each = [rounds(collective, group, size) for group in groups]
        longest: list[Round] = max(each, key=len)
        parts = itertools.zip_longest(*each, fillvalue=Round([]))
        return [
            Round([message for part in same for message in part.messages], long.times)
            for same, long in zip(parts, longest, strict=True)
        ]

    among = rounds("all_reduce", [group[0] for group in groups], size)
    return [*at_once("reduce"), *among, *at_once("broadcast")]


def wire_bytes(steps: Sequence[Round], placement: Sequence[int]) -> float:
    """Bytes of messages that the busiest host sends over its link."""
    sent = dict.fromkeys(placement, 0.0)
    for each in steps:
        for host, size in _crossing(each, placement)[0].items():
            sent[host] += each.times * size
    return max(sent.values())


def _crossing(each: Round, placement: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes that each host sends over its link in a round, and bytes that it receives."""
    out, into = dict.fromkeys(placement, 0.0), dict.fromkeys(placement, 0.0)
    for a, b, size in each.messages:
        if placement[a] != placement[b]:
            out[placement[a]] += size
            into[placement[b]] += size
    return out, into


def loads(
    steps: Sequence[Round],
    placement: Sequence[int],
    link_bps: float | None,
    machine: PredictedMachine = PredictedMachine(),
    delay_s: float = 0.0,
) -> Iterator[tuple[float, float]]:
    """For each of these rounds the seconds of the busiest link, and those of the processor; at once.

    Args:
        placement: the host of each rank.
        link_bps: bytes per second of one direction of a host's link; None for no limit.
        machine: on which all ranks are.
        delay_s: of a message from host to host (`message_delay`).
    """
    for each in steps:
        out, into = _crossing(each, placement)
        on_link = max(*out.values(), *into.values()) / link_bps if link_bps else 0.0
        across = sum(out.values())
        inside = sum(size for *_, size in each.messages) - across
        moving = inside / (machine.inside_bps or math.inf) + across / (machine.across_bps or math.inf)
        yield each.times * (on_link + (delay_s if across else 0.0)), each.times * moving


def message_delay(backend: str, delay_s: float) -> float:
    """Seconds by which a link's delay makes a message later.

    Over gloo twice the delay: a receiver says that it is ready, and only then the message is sent. MPI sends short
    messages at once.
    """
    return delay_s if backend == "horovod-mpi" else 2 * delay_s


def seconds(steps: Sequence[Round], placement: Sequence[int], *how: Any) -> float:
    """Seconds of these rounds, without latency; arguments as of `loads`."""
    return sum(max(pair) for pair in loads(steps, placement, *how))


def with_latency(computed: Sequence[float], smallest_s: float) -> list[float]:
    """Add a latency to predictions for ascending sizes: what the smallest took longer than predicted."""
    latency = max(0.0, smallest_s - computed[0])
    return [each + latency for each in computed]


@dataclass(frozen=True)
class Message:
    """One bucket of a step's gradients.

    Attributes:
        ready_s: from the step's begin until its last gradient is computed and packed, while nobody exchanges.
        link_s: of its exchange on the link, latency included.  moving_s: of the processor, all cores at it.
    """

    ready_s: float
    link_s: float
    moving_s: float


def step_seconds(messages: Sequence[Message], tail_s: float, busy: float) -> float:
    """Seconds of a step whose gradients are exchanged one bucket after the other during the backward pass.

    While a bucket is exchanged, the processor's part of it is taken from the backward pass as far as that needs
    the cores, so that all later buckets are ready later by `busy * moving_s`.

    Args:
        messages: in the order in which they are ready.
        tail_s: from the last one's being ready to the step's end: sums are unpacked, weights change.
        busy: which share of all cores the ranks use while they compute.
    """
    ready, link, moving = np.array([(m.ready_s, m.link_s, m.moving_s) for m in messages]).T
    late = busy * (np.cumsum(moving) - moving)
    return exchange_end(ready + late, np.maximum(link, moving)) + tail_s
