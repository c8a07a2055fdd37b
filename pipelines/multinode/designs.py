"""Plans which node prepares which block, and the transfers, when several nodes share one stream.

Pure functions of integers and measured rates, so that every node comes to the same decision from the same numbers.

With n nodes and p of them preparing (after Pittman et al., SC18, figure 3 and its artifact):

- `node`: every node prepares everything for itself; nothing is sent.
- `single`: the preparers share the blocks and all-gather them; one preparer, the root, broadcasts
  to the nodes that do not prepare.
- `multi`: preparer i broadcasts its blocks to all, each in a channel of its own, so that p broadcasts
  are under way.
- `all`: every node prepares its share of the blocks; all-gather over all.

Blocks end at multiples of the block size, and the number of a block decides which node prepares it. In every
design but `node`, each node receives each sample once, and a sample is sent n - 1 times in all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.feeder.peers import DesignName
from pipelines.order.stream import Block, split_blocks

CHANNELS = 2


@dataclass(frozen=True)
class Design:
    """A design, and how many nodes prepare: all of them in `node` and `all`."""

    name: DesignName
    preparers: int

    @classmethod
    def create(cls, name: DesignName, nodes: int, preparers: int | None = None) -> Design:
        """A design for so many nodes; by default with one preparer in `single` and all in `multi`."""
        if name in ("node", "all"):
            return cls(name, nodes)
        usual = 1 if name == "single" else nodes
        return cls(name, max(1, min(nodes, preparers or usual)))

    def owner(self, number: int) -> int | None:
        """The rank that prepares the block of this number; None if every rank prepares it."""
        return None if self.name == "node" else number % self.preparers


@dataclass(frozen=True)
class Transfer:
    """One exchange between nodes.

    Attributes:
        ranks: the ranks that take part.
        channel: transfers of the same ranks in different channels may be under way at once.
        root: the sender of a broadcast; None in an all-gather, in which each rank sends its part.
        parts: of a broadcast, the blocks to send; of an all-gather, the block of each rank, which may be empty.
    """

    ranks: tuple[int, ...]
    channel: int
    root: int | None
    parts: tuple[Block, ...]

    def blocks_sent_by(self, rank: int) -> tuple[Block, ...]:
        if self.root is not None:
            return self.parts if rank == self.root else ()
        return tuple(
            block for who, block in zip(self.ranks, self.parts, strict=True) if who == rank and block[0] < block[1]
        )

    def blocks_received_by(self, rank: int) -> tuple[Block, ...]:
        sent = self.blocks_sent_by(rank)
        return tuple(block for block in self.parts if block[0] < block[1] and block not in sent)


def owned_blocks(design: Design, rank: int, start: int, stop: int, block_size: int) -> list[Block]:
    return [
        block
        for block in split_blocks(start, stop, block_size)
        if design.owner(block[0] // block_size) in (rank, None)
    ]


def plan_transfers(design: Design, nodes: int, start: int, stop: int, block_size: int) -> list[Transfer]:
    """The transfers for [start, stop), in the order that every node keeps."""
    if design.name == "node" or nodes == 1:
        return []
    everyone, p = tuple(range(nodes)), design.preparers
    if design.name == "multi":
        return [
            Transfer(everyone, number % p, number % p, (block,))
            for block in split_blocks(start, stop, block_size)
            for number in (block[0] // block_size,)
        ]
    planned = []
    for turn, parts in _rounds_of_blocks(start, stop, block_size, p):
        channel = turn % CHANNELS
        if p > 1:
            planned.append(Transfer(everyone[:p], channel, None, parts))
        if p < nodes:
            # The last preparer is in both groups: it broadcasts what it has gathered.
            sent = tuple(block for block in parts if block[0] < block[1])
            planned.append(Transfer(everyone[p - 1 :], channel, p - 1, sent))
    return planned


def _rounds_of_blocks(start: int, stop: int, block_size: int, p: int) -> Iterator[tuple[int, tuple[Block, ...]]]:
    turns: dict[int, list[Block]] = {}
    for block in split_blocks(start, stop, block_size):
        turn, rank = divmod(block[0] // block_size, p)
        turns.setdefault(turn, [(0, 0)] * p)[rank] = block
    for turn, parts in turns.items():
        yield turn, tuple(parts)


# --- what a design can carry ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Measured rates of the nodes.

    Attributes:
        prepare: samples/s that each node can prepare.
        link_bps: bytes/s of the slowest node's interface in each direction; 0 if unknown.
        consume: samples/s of the fastest member when it never waits; 0 if unknown.
    """

    prepare: tuple[float, ...]
    link_bps: float
    consume: float
    sample_bytes: int


def predict_rate(design: Design, rates: Rates) -> float:
    """Predict samples/s in a design: the smaller of what the preparers and the busiest interface allow."""
    nodes = len(rates.prepare)
    if design.name == "node":
        return min(rates.prepare)
    prepared = design.preparers * min(rates.prepare[: design.preparers])
    sent = max(interface_copies(design, nodes)) * rates.sample_bytes
    return min(prepared, rates.link_bps / sent) if rates.link_bps and sent else prepared


def interface_copies(design: Design, nodes: int) -> list[float]:
    """For each node, how many copies of an average sample its interface sends or receives, whichever is more.

    A broadcast is a binomial tree, as in gloo and MPI; an all-gather sends from each rank to each.
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


def list_candidates(nodes: int, preparers: int | None = None) -> list[Design]:
    """The designs that `auto` chooses from, preferred ones first: a broadcast waits for no other block."""
    counts = {preparers} if preparers else {nodes, math.ceil(nodes / 2), 1}
    several = [Design.create(name, nodes, p) for p in sorted(counts, reverse=True) for name in ("multi", "single")]
    return [design for design in several if design != Design("single", nodes)] + [
        Design.create("all", nodes),
        Design.create("node", nodes),
    ]
