"""Who prepares what, and who sends it to whom, when several nodes share one stream.

Pure functions of integers and measured rates, so that every node comes to the same decision from the same numbers.

With n nodes and p of them preparing (after Pittman et al., SC18, figure 3 and its artifact):

- `node`: every node prepares everything for itself; nothing is sent.
- `single`: the preparers share the blocks and all-gather them among themselves; one of them, the root, broadcasts
  to the nodes that do not prepare.
- `multi`: preparer i broadcasts its blocks to all, each in a lane of its own, so that p broadcasts are under way.
- `all`: every node prepares its share of the blocks; all-gather over all.

Blocks are pieces of the stream between multiples of the block length; which node prepares one depends on its
number alone. Every node gets each sample once and it is sent n - 1 times in all, in every design but `node`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.stream import Run, blocks

Name = Literal["node", "single", "multi", "all"]
DESIGNS: tuple[Name, ...] = ("node", "single", "multi", "all")
LANES = 2


@dataclass(frozen=True)
class Design:
    """A design, and how many nodes prepare: all of them in `node` and `all`."""

    name: Name
    preparers: int

    @classmethod
    def of(cls, name: Name, nodes: int, preparers: int | None = None) -> Design:
        """A design for so many nodes; one preparer in `single`, all in `multi`, unless said otherwise."""
        if name in ("node", "all"):
            return cls(name, nodes)
        usual = 1 if name == "single" else nodes
        return cls(name, max(1, min(nodes, preparers or usual)))

    def owner(self, block: int) -> int | None:
        """The rank that prepares a block; None where each does so for itself."""
        return None if self.name == "node" else block % self.preparers


@dataclass(frozen=True)
class Transfer:
    """One exchange between nodes.

    Attributes:
        ranks: who takes part.
        lane: transfers of the same ranks in different lanes may be under way at once.
        root: who sends, in a broadcast; None in an all-gather, to which each of `ranks` gives its part.
        parts: broadcast: the runs to send. All-gather: for each of `ranks`, its run, which may be empty.
    """

    ranks: tuple[int, ...]
    lane: int
    root: int | None
    parts: tuple[Run, ...]

    def gives(self, rank: int) -> tuple[Run, ...]:
        """The runs that a rank contributes."""
        if self.root is not None:
            return self.parts if rank == self.root else ()
        return tuple(
            run for who, run in zip(self.ranks, self.parts, strict=True) if who == rank and run[0] < run[1]
        )

    def takes(self, rank: int) -> tuple[Run, ...]:
        """The runs that a rank receives."""
        given = self.gives(rank)
        return tuple(run for run in self.parts if run[0] < run[1] and run not in given)


def owned(design: Design, rank: int, start: int, stop: int, block: int) -> list[Run]:
    """What a rank prepares of [start, stop)."""
    return [run for run in blocks(start, stop, block) if design.owner(run[0] // block) in (rank, None)]


def transfers(design: Design, nodes: int, start: int, stop: int, block: int) -> list[Transfer]:
    """What is sent for [start, stop), in an order that every node keeps."""
    if design.name == "node" or nodes == 1:
        return []
    everyone, p = tuple(range(nodes)), design.preparers
    if design.name == "multi":
        return [
            Transfer(everyone, number % p, number % p, (run,))
            for run in blocks(start, stop, block)
            for number in (run[0] // block,)
        ]
    planned = []
    for turn, parts in _turns(start, stop, block, p):
        lane = turn % LANES
        if p > 1:
            planned.append(Transfer(everyone[:p], lane, None, parts))
        if p < nodes:
            # The last preparer is in both groups: it has gathered what it sends on.
            sent = tuple(run for run in parts if run[0] < run[1])
            planned.append(Transfer(everyone[p - 1 :], lane, p - 1, sent))
    return planned


def _turns(start: int, stop: int, block: int, p: int) -> Iterator[tuple[int, tuple[Run, ...]]]:
    """(turn, the block of each of p ranks in it), empty where the block is not in [start, stop)."""
    turns: dict[int, list[Run]] = {}
    for run in blocks(start, stop, block):
        turn, rank = divmod(run[0] // block, p)
        turns.setdefault(turn, [(0, 0)] * p)[rank] = run
    for turn, parts in turns.items():
        yield turn, tuple(parts)


# --- what a design can carry ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """What the nodes measured.

    Attributes:
        prepare: samples/s that each node can prepare.
        link_bps: bytes/s that the slowest node's interface carries each way; 0 where nobody knows.
        consume: samples/s that the fastest member takes when it never waits; 0 where nobody knows.
        sample_bytes: of a sample in the ring.
    """

    prepare: tuple[float, ...]
    link_bps: float
    consume: float
    sample_bytes: int


def predicted(design: Design, rates: Rates) -> float:
    """Samples/s of a stream in a design: what preparers or the busiest interface allow, whichever is less."""
    nodes = len(rates.prepare)
    if design.name == "node":
        return min(rates.prepare)
    prepared = design.preparers * min(rates.prepare[: design.preparers])
    sent = max(interface_copies(design, nodes)) * rates.sample_bytes
    return min(prepared, rates.link_bps / sent) if rates.link_bps and sent else prepared


def interface_copies(design: Design, nodes: int) -> list[float]:
    """For each node, how many copies of an average sample its interface sends or receives, whichever is more.

    Broadcasts go along binomial trees, as in gloo and MPI; all-gathers from each to each.
    """
    p = design.preparers
    out, into = [0.0] * nodes, [0.0] * nodes
    if design.name in ("all", "single") and p > 1:
        for rank in range(p):
            out[rank] += (p - 1) / p
            into[rank] += (p - 1) / p
    if design.name == "single" and p < nodes:
        _add_tree(out, into, list(range(p - 1, nodes)), 1.0)
    if design.name == "multi":
        for root in range(p):
            _add_tree(out, into, [(root + i) % nodes for i in range(nodes)], 1 / p)
    return [max(pair) for pair in zip(out, into, strict=True)]


def _add_tree(out: list[float], into: list[float], ranks: Sequence[int], share: float) -> None:
    """Add a binomial broadcast over `ranks` from the first of them."""
    for place in range(1, len(ranks)):
        parent = place & (place - 1)
        out[ranks[parent]] += share
        into[ranks[place]] += share


def candidates(nodes: int, preparers: int | None = None) -> list[Design]:
    """The designs that `auto` chooses from; of equals the earlier: a broadcast need not wait for other blocks."""
    counts = {preparers} if preparers else {nodes, math.ceil(nodes / 2), 1}
    several = [Design.of(name, nodes, p) for p in sorted(counts, reverse=True) for name in ("multi", "single")]
    return [each for each in several if each != Design("single", nodes)] + [
        Design.of("all", nodes),
        Design.of("node", nodes),
    ]
