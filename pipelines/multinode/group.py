"""Shares a feeder's stream with the feeders of other nodes.

A node without a group prepares everything itself. It does so whenever its group ends: the link process ends, a
node does not answer, or the stream has to move; meanwhile it searches for a new group. Every call comes from the
feeder's one thread.
"""

from __future__ import annotations

import hashlib
import json
import selectors
import time
from collections.abc import Callable
from typing import Any

from pipelines.description import PipelineDescription
from pipelines.feeder.peers import Peers
from pipelines.fingerprint import SCHEME
from pipelines.ipc import messages
from pipelines.multinode.agreement import (
    NEAR_RINGS,
    DesignSelector,
    Membership,
    NodeState,
    Round,
    agree,
)
from pipelines.multinode.designs import Transfer, owned_blocks, plan_transfers
from pipelines.multinode.link import LinkProcess
from pipelines.multinode.rendezvous import POLL_S, Rendezvous
from pipelines.order.stream import Block, Stream
from pipelines.samples.fields import describe_fields
from pipelines.workers.buffers import Buffer

_MIN_WAITING = 0.5  # the share of the time from which a node's readers count as waiting
_HEARTBEAT_S = 0.5
_ANSWER_S = 15.0
#: A link loads torch and its transport first: a minute on a busy node or a shared file system. The death of a node
#: that is waited for is noticed before (`Rendezvous.is_superseded`).
_JOIN_S = 120.0


class NodeGroup:
    """The group of a feeder's node, if it has one.

    Args:
        ring: the ring, whose slots are exchanged.
        stream: the stream's state; a group decides how far it advances.
        selector: where the link's socket is registered.
        measure: returns what this feeder reports: `gate`, `waiting`, `prepare`, `consume` of `NodeState`.
        on_ready: called with each block that has arrived from another node.
        first_timeout_s: how long the first group waits for all nodes.

    Attributes:
        received: samples received from other nodes.
        sent_bytes: bytes of samples that other nodes received from here, counted once for each node; in a
            broadcast other nodes forward some of them.
        lost_groups: groups that ended because of a failure.
    """

    def __init__(
        self,
        peers: Peers,
        design: str,
        preparers: int | None,
        ring: Buffer,
        stream: Stream,
        selector: selectors.BaseSelector,
        measure: Callable[[], tuple[bool, float, float, float]],
        on_ready: Callable[[Block], None],
        sample_bytes: int,
        first_timeout_s: float,
    ) -> None:
        self.peers = peers
        self.received = 0
        self.sent_bytes = 0
        self._ended_cpu_s = self._link_cpu_s = 0.0
        self.lost_groups = 0
        self._design, self._preparers = design, preparers
        self._ring = ring
        self._stream = stream
        self._measure = measure
        self._on_ready = on_ready
        self._sample_bytes = sample_bytes
        identity = _stream_identity(ring.pipeline, stream, design, preparers)
        self._search = Rendezvous(peers, identity, NEAR_RINGS * stream.capacity, first_timeout_s)
        self._group: Membership | None = None
        self._link = LinkProcess(selector, self._handle_message)
        self._link.start()

    @property
    def has_met(self) -> bool:
        return self._search.has_met

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of the link's processes."""
        return self._ended_cpu_s + self._link_cpu_s

    @property
    def is_active(self) -> bool:
        """Whether this node is in a group, which decides how far the stream advances."""
        return self._group is not None and self._group.joined

    @property
    def link_level(self) -> float:
        """1 while samples are being sent or received, else 0."""
        group = self._group
        return float(group is not None and bool(group.incoming or self._stream.sending) and group.busy > 0)

    def stats(self) -> dict[str, Any]:
        """The present group: `generation`, `nodes`, `design`, `preparers`; `sent_bytes`, `received` samples ..."""
        group = self._group if self.is_active else None
        return {
            "generation": group.assignment.generation if group else None,
            "nodes": list(group.assignment.nodes) if group else [self.peers.node],
            "design": group.selector.design.name if group else "node",
            "preparers": group.selector.design.preparers if group else 1,
            "link_bps": group.link_bps if group else None,
            "sent_bytes": self.sent_bytes,
            "received": self.received,
            "lost_groups": self.lost_groups,
            "pid": self._link.pid,
        }

    # --- the feeder's calls -----------------------------------------------------------------------------

    def next_block(self) -> Block | None:
        group = self._group
        if group is None or not group.joined:
            return self._stream.next_block()
        again = self._stream.next_lost_block()
        if again is not None:
            return again
        if group.own_blocks:
            return group.own_blocks.pop(0)
        if group.prepare_until is not None:
            return self._stream.next_block(group.prepare_until)
        return None

    def on_prepared(self, block: Block) -> None:
        """Send a block that was prepared here to the nodes that wait for it."""
        if self._group is not None and block in self._stream.sending:
            self._link.send(messages.TRANSFERRED.pack(b"H", *block))

    def tick(self) -> float:
        """Search, join or exchange states, whichever is due; returns the seconds until the next call."""
        now_s = time.monotonic()
        if self._link.is_blocked:
            self._fail()
        group = self._group
        if group is None:
            if self._search.is_due(now_s):
                self._join_group(now_s)
            return self._search.interval_s(now_s)
        if not group.joined:
            if now_s - group.last_exchange_s > _JOIN_S:
                self._fail()
            elif self._search.is_superseded(group.assignment, now_s):
                self._leave_group()
            return POLL_S
        if group.state_sent is not None:
            due_s = group.state_sent + _ANSWER_S - now_s
            if due_s <= 0:
                self._fail()
                return 0.0
            return due_s
        if self._is_round_due(group):
            self._send_state(group, now_s)
            return _ANSWER_S
        due_s = max(0.0, group.last_exchange_s + _HEARTBEAT_S - now_s)
        if due_s <= 0:
            self._send_state(group, now_s)
            return _ANSWER_S
        return due_s

    def leave(self) -> None:
        """Leave the group, because the stream moves or its ring gets new memory."""
        if self._group is not None:
            self._leave_group()

    def use_ring(self, ring: Buffer) -> None:
        """Use the ring's new memory; called after `leave`."""
        self._ring = ring

    def close(self) -> None:
        """End the link and remove this node's files from the rendezvous directory."""
        self._search.withdraw()
        self._end_link()
        self._search.remove_files()

    def _join_group(self, now_s: float) -> None:
        """Look for a group, and ask the link to join it."""
        if not self._link.is_running:
            self._link.start()
        assignment = self._search.find_group(self._head(), now_s)
        if assignment is None:
            return
        world = len(assignment.nodes)
        selector = DesignSelector(self._design, world, self._preparers, self._sample_bytes)
        self._group = Membership(assignment, selector, last_exchange_s=now_s)
        pipeline, stream = self._ring.pipeline, self._stream
        join = messages.pack(
            "join",
            store=assignment.store,
            rank=assignment.rank,
            world=world,
            interface=self.peers.interface,
            timeout_s=self.peers.timeout_s,
            fields=describe_fields(pipeline.fields),
            capacity=stream.capacity,
            block_size=stream.block_size,
        )
        self._link.send(join, self._ring.fd)

    def _head(self) -> int:
        """The position of this node's stream; -1 if it may be anywhere."""
        return self._stream.head if self._stream.active_readers and self._stream.has_started else -1

    # --- rounds -----------------------------------------------------------------------------------------

    def _node_state(self, group: Membership) -> NodeState:
        stream, (gate, waiting, prepare, consume) = self._stream, self._measure()
        head, kept = self._head(), stream.retained_from
        if stream.active_readers and not stream.has_started:
            head = kept = stream.low
        return NodeState(
            gate=gate,
            leave=group.assignment.rank == 0 and self._search.has_newcomers(group.assignment, group.head),
            head=head,
            low=stream.low,
            limit=kept + stream.capacity,
            end=max((reader.stop for reader in stream.active_readers), default=0),
            ready=stream.ready,
            idle=stream.is_idle,
            clock_s=time.monotonic(),
            waiting=waiting,
            prepare=prepare,
            consume=consume,
            link_bps=group.link_bps,
        )

    @property
    def holds_others(self) -> bool:
        """Whether readers on other nodes wait because this node's ring is full."""
        return self._group is not None and self._group.holds_others

    def _is_round_due(self, group: Membership) -> bool:
        """Whether this node has room for a new round and a reader needs one."""
        stream = self._stream
        if group.prepare_until is not None and stream.ready < group.prepare_until:
            return False
        wants = group.needed or any(reader.stop > stream.head for reader in stream.active_readers)
        if not wants or not self._measure()[0] or self._stream_position() == group.sent_position:
            return False
        if group.selector.is_undecided and stream.ready < stream.head:
            return False
        whole_blocks = (stream.retained_from + stream.capacity) // stream.block_size * stream.block_size
        return not stream.active_readers or not stream.has_started or whole_blocks > stream.head

    def _stream_position(self) -> tuple[int, ...]:
        """The state of this node's stream; a new exchange is due at once when it has changed."""
        stream = self._stream
        return stream.head, stream.low, stream.retained_from, stream.is_idle, len(stream.active_readers)

    def _send_state(self, group: Membership, now_s: float) -> None:
        group.state_sent = group.last_exchange_s = now_s
        group.sent_position = self._stream_position()
        self._link.send(messages.pack("state", numbers=self._node_state(group).as_numbers()))
        self._stream.advertised_floor = self._stream.retained_from

    def _handle_states(self, group: Membership, reply: dict[str, Any]) -> None:
        group.state_sent = None
        group.has_exchanged = True
        self._search.failures = 0
        self._stream.advertised_floor = 0
        group.last_exchange_s = time.monotonic()
        group.busy = reply["busy"]
        self._link_cpu_s = reply["cpu_s"]
        states = [NodeState(*numbers) for numbers in reply["states"]]
        design = group.selector.update(states)
        block_size = self._stream.block_size
        longest = (
            block_size
            if group.selector.is_undecided
            else max(block_size, self._stream.capacity // 2 // block_size * block_size)
        )
        agreed = agree(states, design, block_size, longest, self._stream.capacity)
        group.head = max(int(state.head) for state in states)
        group.needed = any(state.end > state.head >= 0 for state in states)
        mine, others = states[group.assignment.rank], [s for s in states if s.head >= 0]
        full = (
            mine.head >= 0 and mine.limit < mine.head + block_size and mine.limit == min(s.limit for s in others)
        )
        held = [s for s in others if s is not mine and s.limit >= s.head + block_size and s.waiting > _MIN_WAITING]
        group.holds_others = full and bool(held)
        if agreed is None:
            group.prepare_until = None
        elif agreed.disband:
            self._leave_group()
        elif agreed.stop == agreed.start:
            group.prepare_until = agreed.start if self._stream.active_readers else None
        else:
            self._start_round(group, agreed)

    def _start_round(self, group: Membership, agreed: Round) -> None:
        """Advance the stream over a round: plan what this node prepares, sends and receives."""
        group.prepare_until = None
        stream, rank, world = self._stream, group.assignment.rank, len(group.assignment.nodes)
        where = agreed.start, agreed.stop, stream.block_size
        if not stream.extend(agreed.start, agreed.stop):
            self._fail()  # this node's stream is not at the agreed position
            return
        own_blocks = owned_blocks(agreed.design, rank, *where)
        planned: list[Transfer] = plan_transfers(agreed.design, world, *where)
        group.own_blocks += own_blocks
        group.incoming |= {block for transfer in planned for block in transfer.blocks_received_by(rank)}
        for transfer in planned:
            for block in transfer.blocks_sent_by(rank):
                stream.sending.add(block)
                group.copies[block] += len(transfer.ranks) - 1
        if planned:
            design = {"design": agreed.design.name, "preparers": agreed.design.preparers}
            self._link.send(messages.pack("round", start=agreed.start, stop=agreed.stop, **design))

    # --- messages of the link ---------------------------------------------------------------------------

    def _handle_message(self, message: bytes | None) -> None:
        if message is None:
            self._fail()
            return
        group = self._group
        if group is None:
            return
        if messages.is_struct(message, messages.TRANSFERRED, b"G"):
            block = messages.TRANSFERRED.unpack(message)[1:]
            group.incoming.discard(block)
            self.received += block[1] - block[0]
            self._on_ready(block)
        elif messages.is_struct(message, messages.TRANSFERRED, b"S"):
            block = messages.TRANSFERRED.unpack(message)[1:]
            self._stream.sending.discard(block)
            self.sent_bytes += (block[1] - block[0]) * self._sample_bytes * group.copies.pop(block)
        else:
            reply = messages.unpack(message)
            if reply["kind"] == "joined":
                group.joined = self._search.has_met = self._stream.is_group_led = True
                group.link_bps = reply["link_bps"]
                group.last_exchange_s = 0.0
            else:
                self._handle_states(group, reply)

    def _end_link(self) -> None:
        self._link.terminate()
        self._ended_cpu_s, self._link_cpu_s = self.cpu_s, 0.0

    def _fail(self) -> None:
        self.lost_groups += 1
        if self._group is None or not self._group.has_exchanged:
            self._search.record_failure()
        self._leave_group()

    def _leave_group(self) -> None:
        self._end_link()
        group, self._group = self._group, None
        self._search.alone_since = time.monotonic()
        stream = self._stream
        stream.is_group_led, stream.advertised_floor = False, 0
        stream.sending.clear()
        if group is not None:
            for block in sorted({*group.own_blocks, *group.incoming}):
                stream.requeue(block)
        if not self._search.failures:
            self._link.start()


def _stream_identity(pipeline: PipelineDescription, stream: Stream, design: str, preparers: int | None) -> str:
    """A hash that is equal for feeders that may exchange samples: same pipeline, ring, blocks and design."""
    samples = [SCHEME, pipeline.fingerprint or pipeline.token, describe_fields(pipeline.fields)]
    what = [*samples, stream.capacity, stream.block_size, design, preparers]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
