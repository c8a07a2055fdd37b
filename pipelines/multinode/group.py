"""A feeder's side of the group of nodes that share its stream.

Without a group a node prepares everything itself, and so it does whenever the group is no more: a link that
ends, a node that does not answer, a stream that has to be elsewhere. Meanwhile it looks for a new group. Every
call comes from the feeder's one thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import selectors
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines import ipc
from pipelines.fingerprint import SCHEME
from pipelines.multinode.agreement import NEAR_RINGS, Choice, Round, State, agree
from pipelines.multinode.designs import Transfer, owned, transfers
from pipelines.multinode.link import LinkProcess
from pipelines.multinode.rendezvous import Invitation, Meeting, Peers
from pipelines.pipeline import Pipeline
from pipelines.prepare.fields import describe_fields
from pipelines.stream import Run, Stream

if TYPE_CHECKING:
    from pipelines.feeder.worker_pool import Target

_LOOK_S = 0.2
_SOON_S = 10.0
_GRACE_S = 6.0
_SELDOM_S = 2.0
_WAITS = 0.5
_HEARTBEAT_S = 0.5
_NEWCOMERS_S = 1.0
_SILENCE_S = 15.0
_JOIN_S = 20.0


@dataclass
class Measured:
    """What a feeder tells its peers about itself (`rounds.State`)."""

    gate: bool
    waiting: float
    prepare: float
    consume: float


@dataclass
class _Group:
    """A group that this node is in, or is joining."""

    invitation: Invitation
    choice: Choice
    asked: float
    joined: bool = False
    link_bps: float = 0.0
    busy: int = 0
    spoken: bool = False  # whether the nodes have told each other their states
    state_sent: float | None = None  # when; None while none is under way
    told: tuple[int, ...] | None = None
    needed: bool = True  # whether somebody wanted more, when the nodes spoke last
    own: list[Run] = field(default_factory=list)
    coming: set[Run] = field(default_factory=set)
    copies: Counter[Run] = field(default_factory=Counter)
    prepare_until: int | None = None
    holds_others: bool = False
    head: int = -1  # of all nodes, when they spoke last


class Peering:
    """The group of a feeder's node, if there is one.

    Args:
        ring: the memory; its slots are what is exchanged.
        stream: the bookkeeping, of which a group takes over how far it goes.
        selector: where the link's socket is registered.
        measure: what to tell the peers.
        ready: called when a run has come from another node.
        patience_s: how long the first group waits for all nodes.

    Attributes:
        received: samples that came from other nodes.
        sent_bytes: what other nodes were given from here, each counted; in a broadcast some of it is passed on by
            others.
        lost_groups: how many groups ended because of a failure.
    """

    def __init__(
        self,
        peers: Peers,
        design: str,
        preparers: int | None,
        ring: Target,
        stream: Stream,
        selector: selectors.BaseSelector,
        measure: Callable[[], Measured],
        ready: Callable[[Run], None],
        sample_bytes: int,
        patience_s: float,
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
        self._ready = ready
        self._sample_bytes = sample_bytes
        identity = _identity(ring.pipeline, stream, design, preparers)
        self._meeting = Meeting(peers, identity, NEAR_RINGS * stream.capacity)
        self._met_before = False
        self._patience_s = patience_s
        self._failures = 0
        self._not_before = 0.0
        self._warned: set[str] = set()
        self._led: list[int] = []  # the generations in which this node was the first
        self._group: _Group | None = None
        self._link = LinkProcess(peers.transport, selector, self._hear)
        self._looked = 0.0
        self._parted = time.monotonic()
        self._link.start()

    @property
    def met(self) -> bool:
        """Whether this node is, or was, in a group."""
        return self._met_before

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of the link's processes."""
        return self._ended_cpu_s + self._link_cpu_s

    @property
    def leads(self) -> bool:
        """Whether a group says how far the stream goes."""
        return self._group is not None and self._group.joined

    @property
    def link_level(self) -> float:
        """1 while samples are being sent or fetched, else 0."""
        group = self._group
        return float(group is not None and bool(group.coming or self._stream.sending) and group.busy > 0)

    def stats(self) -> dict[str, Any]:
        """The present group: `generation`, `nodes`, `design`, `preparers`; `sent_bytes`, `received` samples ..."""
        group = self._group if self.leads else None
        return {
            "generation": group.invitation.generation if group else None,
            "nodes": list(group.invitation.nodes) if group else [self.peers.node],
            "design": group.choice.design.name if group else "node",
            "preparers": group.choice.design.preparers if group else 1,
            "link_bps": group.link_bps if group else None,
            "sent_bytes": self.sent_bytes,
            "received": self.received,
            "lost_groups": self.lost_groups,
            "pid": self._link.pid,
        }

    # --- what the feeder asks and says ------------------------------------------------------------------

    def next_run(self) -> Run | None:
        """The next run of the stream that is to be prepared on this node."""
        group = self._group
        if group is None or not group.joined:
            return self._stream.next_run()
        again = self._stream.next_again()
        if again is not None:
            return again
        if group.own:
            return group.own.pop(0)
        if group.prepare_until is not None:
            return self._stream.next_run(group.prepare_until)
        return None

    def prepared(self, run: Run) -> None:
        """A run was prepared on this node."""
        if self._group is not None and run in self._stream.sending:
            self._link.tell(ipc.MOVED.pack(b"H", *run))

    def tick(self) -> float:
        """Do what is due; returns the seconds until something is due again."""
        now = time.monotonic()
        if self._link.jammed:
            self._lose()
        group = self._group
        if group is None:
            self._look(now)
            return self._look_s(now)
        if not group.joined:
            if now - group.asked > _JOIN_S:
                self._lose()
            elif now - self._looked > _NEWCOMERS_S and self._superseded(group):
                self._part()
            return _LOOK_S
        if group.state_sent is not None:
            left = group.state_sent + _SILENCE_S - now
            if left <= 0:
                self._lose()
                return 0.0
            return left
        if self._due(group):
            self._send_state(group, now)
            return _SILENCE_S
        left = max(0.0, group.asked + _HEARTBEAT_S - now)
        if left <= 0:
            self._send_state(group, now)
            return _SILENCE_S
        return left

    def leave(self) -> None:
        """Go on without the group: the stream is to be elsewhere, or its ring in other memory."""
        if self._group is not None:
            self._part()

    def renewed(self, ring: Target) -> None:
        """The ring is in other memory now; the group was left before."""
        self._ring = ring

    def close(self) -> None:
        """End the link and leave nothing in the directory that waits."""
        self._meeting.leave()
        self._end_link()
        for generation in self._led:
            self._meeting.clear(generation)

    # --- meeting ----------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if now < self._not_before or now - self._looked < self._look_s(now):
            return
        if not self._link.running:
            self._link.start()
        self._looked = now
        # All nodes that part at once are to meet at once, though some need longer to come.
        patience_s = _GRACE_S if self._met_before else self._patience_s
        patient = now - self._parted < patience_s
        try:
            invitation = self._meeting.look(self._head(), everybody=patient)
            strangers = [] if invitation else self._meeting.strangers()
        except OSError as error:
            self._warn(f"cannot meet other nodes in {self.peers.directory}: {error}")
            return
        if strangers:
            who = ", ".join(map(str, strangers))
            other = "another pipeline, capacity, block or design, or another version of ray-ensemble"
            self._warn(f"shares no stream with node {who}, which has {other}")
        if invitation is None:
            return
        world = len(invitation.nodes)
        choice = Choice(self._design, world, self._preparers, self._sample_bytes)
        self._group = _Group(invitation, choice, asked=now)
        if invitation.rank == 0:
            self._led.append(invitation.generation)
        pipeline, stream = self._ring.pipeline, self._stream
        join = ipc.pack(
            "join",
            store=invitation.store,
            rank=invitation.rank,
            world=world,
            interface=self.peers.interface,
            transport=self.peers.transport,
            timeout_s=self.peers.timeout_s,
            fields=describe_fields(pipeline.fields),
            capacity=stream.capacity,
            block=stream.block,
        )
        self._link.tell(join, self._ring.fd)

    def _look_s(self, now: float) -> float:
        """How often to look for others: seldom where nobody has come for long."""
        return _LOOK_S if now - self._parted < _SOON_S else _SELDOM_S

    def _warn(self, what: str) -> None:
        """Say once what keeps this node by itself."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"node {self.peers.node} {what}; it prepares for itself", stacklevel=2)

    def _head(self) -> int:
        return self._stream.head if self._stream.reading and self._stream.started else -1

    # --- rounds -----------------------------------------------------------------------------------------

    def _state(self, group: _Group) -> State:
        stream, measured = self._stream, self._measure()
        head, kept = self._head(), stream.kept
        if stream.reading and not stream.started:
            head = kept = stream.low
        return State(
            gate=measured.gate,
            leave=group.invitation.rank == 0 and self._newcomers(group),
            head=head,
            low=stream.low,
            limit=kept + stream.capacity,
            end=max((reader.stop for reader in stream.reading), default=0),
            ready=stream.ready,
            idle=stream.idle,
            clock_s=time.monotonic(),
            waiting=measured.waiting,
            prepare=measured.prepare,
            consume=measured.consume,
            link_bps=group.link_bps,
        )

    def _superseded(self, group: _Group) -> bool:
        self._looked = time.monotonic()
        with contextlib.suppress(OSError):
            return self._meeting.superseded(group.invitation)
        return False

    def _newcomers(self, group: _Group) -> bool:
        """Whether somebody waits to come in; asked of the directory now and then."""
        now = time.monotonic()
        if now - self._looked < _NEWCOMERS_S or now - self._parted < _SOON_S:
            return False
        self._looked = now
        try:
            return bool(self._meeting.newcomers(group.invitation.nodes, group.head))
        except OSError as error:
            self._warn(f"cannot see whether other nodes wait in {self.peers.directory}: {error}")
            return False

    @property
    def holds_others(self) -> bool:
        """Whether members of other nodes wait, and what is full is the ring of this one."""
        return self._group is not None and self._group.holds_others

    def _due(self, group: _Group) -> bool:
        """Whether the nodes could go on as far as this one is concerned, and somebody wants to."""
        stream = self._stream
        if group.prepare_until is not None and stream.ready < group.prepare_until:
            return False
        wants = group.needed or any(reader.stop > stream.head for reader in stream.reading)
        if not wants or not self._measure().gate or self._position() == group.told:
            return False
        if group.choice.undecided and stream.ready < stream.head:
            return False
        whole_blocks = (stream.kept + stream.capacity) // stream.block * stream.block
        return not stream.reading or not stream.started or whole_blocks > stream.head

    def _position(self) -> tuple[int, ...]:
        """Where this node's stream is: what has to change before the others are told again at once."""
        stream = self._stream
        return stream.head, stream.low, stream.kept, stream.idle, len(stream.reading)

    def _send_state(self, group: _Group, now: float) -> None:
        group.state_sent = group.asked = now
        group.told = self._position()
        self._link.tell(ipc.pack("state", numbers=self._state(group).numbers()))
        self._stream.promised = self._stream.kept

    def _heard_states(self, group: _Group, said: dict[str, Any]) -> None:
        group.state_sent = None
        group.spoken = True
        self._failures = 0
        self._stream.promised = 0
        group.asked = time.monotonic()
        group.busy = said["busy"]
        self._link_cpu_s = said["cpu_s"]
        states = [State(*numbers) for numbers in said["states"]]
        design = group.choice.update(states)
        block = self._stream.block
        longest = block if group.choice.undecided else max(block, self._stream.capacity // 2 // block * block)
        agreed = agree(states, design, block, longest, self._stream.capacity)
        group.head = max(int(state.head) for state in states)
        group.needed = any(state.end > state.head >= 0 for state in states)
        mine, others = states[group.invitation.rank], [s for s in states if s.head >= 0]
        full = mine.head >= 0 and mine.limit < mine.head + block and mine.limit == min(s.limit for s in others)
        held = [s for s in others if s is not mine and s.limit >= s.head + block and s.waiting > _WAITS]
        group.holds_others = full and bool(held)
        if agreed is None:
            group.prepare_until = None
        elif agreed.meet:
            self._part()
        elif agreed.stop == agreed.start:
            group.prepare_until = agreed.start if self._stream.reading else None
        else:
            self._go_on(group, agreed)

    def _go_on(self, group: _Group, agreed: Round) -> None:
        """Take part in a round."""
        group.prepare_until = None
        stream, rank, world = self._stream, group.invitation.rank, len(group.invitation.nodes)
        where = agreed.start, agreed.stop, stream.block
        if not stream.extend(agreed.start, agreed.stop):
            self._lose()  # this node's stream is not where the group believed
            return
        own = owned(agreed.design, rank, *where)
        planned: list[Transfer] = transfers(agreed.design, world, *where)
        group.own += own
        group.coming |= {run for transfer in planned for run in transfer.takes(rank)}
        for transfer in planned:
            for run in transfer.gives(rank):
                stream.sending.add(run)
                group.copies[run] += len(transfer.ranks) - 1
        if planned:
            design = {"design": agreed.design.name, "preparers": agreed.design.preparers}
            self._link.tell(ipc.pack("round", start=agreed.start, stop=agreed.stop, **design))

    # --- what the link says -----------------------------------------------------------------------------

    def _hear(self, message: bytes | None) -> None:
        if message is None:
            self._lose()
            return
        group = self._group
        if group is None:
            return
        if ipc.is_struct(message, ipc.MOVED, b"G"):
            run = ipc.MOVED.unpack(message)[1:]
            group.coming.discard(run)
            self.received += run[1] - run[0]
            self._ready(run)
        elif ipc.is_struct(message, ipc.MOVED, b"S"):
            run = ipc.MOVED.unpack(message)[1:]
            self._stream.sending.discard(run)
            self.sent_bytes += (run[1] - run[0]) * self._sample_bytes * group.copies.pop(run)
        else:
            said = ipc.unpack(message)
            if said["kind"] == "joined":
                group.joined = self._met_before = self._stream.led = True
                group.link_bps = said["link_bps"]
                group.asked = 0.0
            else:
                self._heard_states(group, said)

    def _end_link(self) -> None:
        self._link.end()
        self._ended_cpu_s, self._link_cpu_s = self.cpu_s, 0.0

    def _lose(self) -> None:
        """The group, or the way into it, has failed."""
        self.lost_groups += 1
        if self._group is None or not self._group.spoken:  # not again at once what fails at once
            self._failures += 1
            self._not_before = time.monotonic() + min(30.0, 2.0**self._failures)
        self._part()

    def _part(self) -> None:
        """End this group; what it was to bring is prepared here, and another is looked for."""
        self._end_link()
        group, self._group = self._group, None
        self._parted = time.monotonic()
        stream = self._stream
        stream.led, stream.promised = False, 0
        stream.sending.clear()
        if group is not None:
            for run in sorted({*group.own, *group.coming}):
                stream.lost(run)
        if not self._failures:
            self._link.start()


def _identity(pipeline: Pipeline, stream: Stream, design: str, preparers: int | None) -> str:
    """Equal for feeders that may exchange samples: the same pipeline, ring and blocks, shared in the same way."""
    samples = [SCHEME, pipeline.fingerprint or pipeline.token, describe_fields(pipeline.fields)]
    what = [*samples, stream.capacity, stream.block, design, preparers]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
