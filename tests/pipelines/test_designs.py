"""Designs and rounds, on integers alone: every node gets every block once, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.feeder.peers import DESIGNS
from pipelines.multinode import designs
from pipelines.multinode.agreement import DesignSelector, NodeState, agree
from pipelines.multinode.designs import Design, Rates, list_candidates, owned_blocks, plan_transfers, predict_rate
from pipelines.order.stream import Block, Stream, split_blocks


@st.composite
def plans(draw: st.DrawFn) -> tuple[Design, int, int, int, int]:
    """(design, nodes, start, stop, block)."""
    nodes = draw(st.integers(1, 6))
    design = Design.create(draw(st.sampled_from(DESIGNS)), nodes, draw(st.integers(1, 7)))
    start = draw(st.integers(0, 200))
    return design, nodes, start, start + draw(st.integers(1, 150)), draw(st.integers(1, 32))


@given(plans(), st.integers(1, 100))
def test_every_node_has_every_block_once_and_gives_only_what_it_has(
    plan: tuple[Design, int, int, int, int], at: int
) -> None:
    design, nodes, start, stop, block_size = plan
    blocks, middle = split_blocks(start, stop, block_size), min(stop, start + at)
    planned = plan_transfers(design, nodes, start, stop, block_size)
    for rank in range(nodes):
        owned = owned_blocks(design, rank, start, stop, block_size)
        have = Counter(owned)
        for transfer in planned:
            if rank in transfer.ranks:
                assert all(have[block] for block in transfer.blocks_sent_by(rank)), "not what it has not got yet"
                have.update(transfer.blocks_received_by(rank))
        assert have == Counter(blocks)
        # Rounds may be cut anywhere.
        parts = [owned_blocks(design, rank, *part, block_size) for part in ((start, middle), (middle, stop))]
        positions = [{p for block in part for p in range(*block)} for part in (owned, [*parts[0], *parts[1]])]
        assert positions[0] == positions[1]
    sent: Counter[Block] = Counter()
    for transfer in planned:
        for rank in transfer.ranks:
            for block in transfer.blocks_sent_by(rank):
                sent[block] += len(transfer.ranks) - 1
    assert all(sent[block] == (0 if design.name == "node" else nodes - 1) for block in blocks)


PREDICTED: list[tuple[Design, list[float], float, float]] = [
    (Design("node", 4), [0, 0, 0, 0], 400, 400),
    (Design("all", 4), [0.75, 0.75, 0.75, 0.75], 1000 / 0.75, 1600),
    (Design("single", 1), [2, 1, 1, 1], 400, 400),
    (Design("single", 2), [0.5, 2.5, 1, 1], 400, 800),
    (Design("multi", 4), [0.75, 0.75, 0.75, 0.75], 1000 / 0.75, 1600),
]


@pytest.mark.parametrize(("design", "copies", "rate", "fast"), PREDICTED, ids=str)
def test_the_prediction_is_the_slower_of_preparing_and_sending_by_the_busiest_interface(
    design: Design, copies: list[float], rate: float, fast: float
) -> None:
    assert designs.interface_copies(design, 4) == pytest.approx(copies)
    rates = Rates((400.0,) * 4, link_bps=150e6, consume=0.0, sample_bytes=150_000)
    assert predict_rate(design, rates) == pytest.approx(rate)
    assert predict_rate(design, dataclasses.replace(rates, link_bps=1e12)) == pytest.approx(fast)


ALL = Design("all", 2)


def bounds(agreed: Any) -> Any:
    return agreed and (agreed.start, agreed.stop)


def test_no_round_before_every_gate_is_open_or_while_nobody_reads() -> None:
    here, there = NodeState(gate=1, head=0, limit=64, end=100), NodeState(gate=1)
    assert agree([here, NodeState(gate=0)], ALL, 8, 32, 64) is None
    assert agree([there, there], ALL, 8, 32, 64) is None
    assert bounds(agree([here, there], ALL, 8, 32, 64)) == (0, 32)


def test_streams_too_far_from_each_other_part_and_near_ones_meet_at_the_foremost() -> None:
    states = [NodeState(gate=1, head=head, limit=head + 64, end=900) for head in (0, 48)]
    near, apart = (agree(states, ALL, 8, 32, capacity=capacity) for capacity in (64, 8))
    assert bounds(near) == (48, 48) and near is not None and not near.disband
    assert apart is not None and apart.disband


def led_stream(stop: int, released: int) -> Stream:
    """A stream of 64 slots that the group leads, in which one reader has read some of what was prepared."""
    stream = Stream(64, 8, is_group_led=True)
    stream.join("first", 0, 40 if released == stop else 500)
    assert stream.extend(0, stop)
    for block in split_blocks(0, stop, 8):
        stream.complete(block)
    stream.release("first", released)
    return stream


def test_what_nobody_reads_is_left_out_when_all_are_idle() -> None:
    ahead = NodeState(gate=1, head=40, low=100, limit=104, end=200, idle=1)
    assert agree([ahead, NodeState(gate=1, idle=0)], ALL, 8, 32, 64) is None
    assert bounds(agree([ahead, NodeState(gate=1, idle=1)], ALL, 8, 32, 64)) == (100, 128)
    stream = led_stream(40, 40)
    assert stream.join("late", 100, 200), "it waits for the others, who may be there in between"
    assert stream.head == 40
    assert stream.extend(100, 128)
    assert (stream.floor, stream.ready, stream.head) == (100, 100, 128)


def test_nobody_joins_below_what_other_nodes_were_promised() -> None:
    stream = led_stream(64, 40)
    stream.advertised_floor = stream.retained_from
    assert not stream.join("b", 8, 500)
    assert stream.extend(64, 104)


@dataclass
class Node:
    """A node of the simulation: its stream, and its readers' batch sizes."""

    stream: Stream
    batches: dict[str, int]
    have: set[int] = field(default_factory=set)

    def state(self) -> NodeState:
        stream = self.stream
        head = (stream.head if stream.has_started else stream.low) if stream.active_readers else -1
        kept = stream.retained_from if stream.has_started else stream.low
        end = max((r.stop for r in stream.active_readers), default=0)
        limit = kept + stream.capacity
        return NodeState(gate=1, head=head, low=stream.low, limit=limit, end=end, idle=stream.is_idle)

    def complete(self, block: Block) -> None:
        self.have.update(range(*block))
        self.stream.complete(block)

    def read(self, slow: bool) -> bool:
        """Each reader takes one batch if it is there."""
        moved = False
        for name, size in self.batches.items():
            reader = self.stream.readers[name]
            want = min(reader.stop, reader.position + size)
            if reader.position < want <= self.stream.ready and not (slow and name == "0"):
                assert set(range(max(reader.position, self.stream.floor), want)) <= self.have
                self.stream.release(name, want)
                moved = True
        return moved


@given(
    readers=st.lists(st.lists(st.integers(1, 24), max_size=3), min_size=1, max_size=4).filter(any),
    starts=st.lists(st.sampled_from([0, 8, 20]), min_size=4, max_size=4),
    stop=st.integers(30, 300),
    block_size=st.sampled_from([4, 8]),
    name=st.sampled_from(DESIGNS),
    slow=st.booleans(),
)
def test_the_nodes_go_on_until_every_reader_has_read_everything(
    readers: list[list[int]], starts: list[int], stop: int, block_size: int, name: Any, slow: bool
) -> None:
    nodes = [Node(Stream(32, block_size), {str(i): size for i, size in enumerate(sizes)}) for sizes in readers]
    for node, start in zip(nodes, starts, strict=False):
        for reader in node.batches:
            node.stream.join(reader, start, stop)
        node.stream.is_group_led = True
    design = Design.create(name, len(nodes))
    for turn in range(10_000):
        if not any(node.stream.active_readers for node in nodes):
            return
        agreed = agree([node.state() for node in nodes], design, block_size, 16, 32)
        for node in nodes if agreed is not None else ():
            assert not agreed.disband
            while agreed.start == agreed.stop and (block := node.stream.next_block(agreed.start)) is not None:
                node.complete(block)
            if agreed.start < agreed.stop:
                assert node.stream.extend(agreed.start, agreed.stop)
                for block in split_blocks(agreed.start, agreed.stop, block_size):
                    node.complete(block)
        read = [node.read(slow and turn % 3 != 0) for node in nodes]
        assert agreed is not None or any(read) or (slow and turn % 3), "all wait for each other"
    raise AssertionError("it never ends")


def run_choice(true: dict[Design, float], prepare: float, link_bps: float, consume: float) -> Design:
    """The design that `auto` comes to where these rates are the truth."""
    choice, ready = DesignSelector("auto", 4, None, 150_000), 0.0
    for turn in range(1, 401):
        rate = true[choice.design]
        taken = min(rate, consume or rate)
        ready += taken * 0.1
        waiting = 1.0 - taken / consume if consume and taken < consume else (0.0 if consume else 1.0)
        rates = {"prepare": prepare, "link_bps": link_bps, "consume": consume if waiting < 0.9 else 0.0}
        choice.update([NodeState(gate=1, ready=ready, clock_s=turn * 0.1, waiting=waiting, **rates)] * 4)
    return choice.design


@pytest.mark.parametrize("link_bps", [12.5e6, 125e6, 1.25e9])
def test_auto_comes_to_the_fastest_design_also_where_the_prediction_is_wrong(link_bps: float) -> None:
    rates = Rates((415.0,) * 4, link_bps, 0.0, 150_000)
    for wrong in (1.0, 0.5):
        true = {design: predict_rate(design, rates) * wrong for design in list_candidates(4)}
        true |= {design: rate / wrong for design, rate in true.items() if design.name == "node"}
        assert true[run_choice(true, 415.0, link_bps, 0.0)] >= 0.9 * max(true.values())


def test_where_members_do_not_wait_auto_prepares_once() -> None:
    rates = Rates((400.0,) * 4, 1.25e9, 0.0, 150_000)
    true = {each: predict_rate(each, rates) for each in list_candidates(4)}
    assert run_choice(true, 400.0, 1.25e9, consume=200.0) == Design("multi", 4)


def test_auto_begins_anew_when_what_it_measured_has_changed() -> None:
    choice = DesignSelector("auto", 4, None, 150_000)
    assert choice.is_undecided
    quick = NodeState(gate=1, waiting=1.0, prepare=400.0, link_bps=1.25e9)
    choice.update([quick] * 4)
    assert choice.design == Design("multi", 4) and not choice.is_undecided
    choice.update([dataclasses.replace(quick, clock_s=1.0, link_bps=1.25e6)] * 4)
    assert choice.design.name == "node"
