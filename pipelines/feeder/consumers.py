"""Serves a feeder's consumers: admits them, notifies them, and finds those that stall the others.

Every call comes from the feeder's one thread. Messages are sent without waiting: a consumer that does not read its
messages loses them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipelines.checks import shorten_repr
from pipelines.environment.processor import describe_machine
from pipelines.errors import PipelineError
from pipelines.feeder.hello import Consumer, Hello
from pipelines.ipc import messages
from pipelines.order.stream import Stream, min_capacity
from pipelines.shm.ring import Layout
from pipelines.shm.words import LIMIT, READY, RELEASED, SINCE, WANT, create_words, map_ring_words
from pipelines.workers.buffers import Buffer, Buffers

# Members of which some ranks have been assigned an epoch and others have not.
_MAX_JOINING = 1024
_MAX_POISON = 1000  # in one message


@dataclass
class _JoiningMember:
    """A member whose first epoch the feeder has chosen: the epoch, and the ranks admitted so far."""

    first_epoch: int
    admitted: dict[int, Consumer] = field(default_factory=dict)


class Consumers:
    """All consumers of one stream.

    Args:
        buffers: the ring and the resident sets that they read.
        selector: where their sockets are registered, each with its handler.
        block: the block size that the user asked for; None for the default.
        on_join: called when a consumer has been admitted.
        has_peers: whether feeders of other nodes prepare for this ring.

    Attributes:
        consumed: samples that members have released, counted once for all ranks of a member.
        detached: how many consumers were detached because others waited for them.
        members: how many members have a place now.
    """

    def __init__(
        self,
        stream: Stream,
        buffers: Buffers,
        selector: selectors.BaseSelector,
        block: int | None,
        on_join: Callable[[], None],
        *,
        has_peers: bool = False,
    ) -> None:
        self.consumed = 0
        self.detached = 0
        self.members = 0
        self._stream = stream
        self._buffers = buffers
        self._selector = selector
        self._block = block
        self._all: set[Consumer] = set()
        self._for_resident: dict[str, list[Consumer]] = {}
        self._joining: dict[str, _JoiningMember] = {}
        self._waiting_since: float | None = None
        self._on_join = on_join
        self._has_peers = has_peers
        self._map_ready(buffers.ring_buffer)
        self._wake_up = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _map_ready(self, ring: Buffer) -> None:
        layout = Layout(ring.pipeline.fields, ring.capacity)
        self._ring_words = map_ring_words(ring.fd, layout, writable=True)
        self._ring_words[READY] = self._stream.ready

    def accept(self, connection: socket.socket) -> None:
        """Admit a new connection if it comes from a process of the same user."""
        messages.close_in_children(connection)
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        consumer = Consumer(connection)
        self._all.add(consumer)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._handle_message(consumer))

    def count_complete_members(self) -> int:
        """The number of members whose ranks on this node have all been admitted."""
        here: dict[str, set[int]] = {}
        for consumer in self._admitted():
            here.setdefault(consumer.name, set()).add(consumer.rank)
        return len({c.name for c in self._admitted() if len(here[c.name]) >= c.local_world})

    def waits_since(self) -> float | None:
        """Since when some consumer waits for samples (time.monotonic); None if none does."""
        ready = self._stream.ready
        waiting = [c.words[SINCE] for c in self._all if c.want > ready and c.words is not None]
        return min(waiting) / 1e9 if waiting else None

    def _admitted(self) -> Iterator[Consumer]:
        return (consumer for consumer in self._all if consumer.is_admitted)

    # --- messages to consumers --------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish how far the stream is and can go, and wake the consumers if more is ready.

        They sleep on if every one of them waits for later samples. A want only grows: what is read here may be
        older than what the consumer has written; then it is lower, and the consumer is woken to no purpose.
        """
        ready, words = self._stream.ready, self._ring_words
        words[LIMIT] = self._stream.limit
        if ready != words[READY]:
            words[READY] = ready
            if any(c.words[WANT] <= ready for c in self._all if c.words is not None):
                os.eventfd_write(self._wake_up, 1)

    def send_resident(self, buffer: Buffer) -> None:
        for consumer in self._for_resident.pop(buffer.key, []):
            self._send_resident(consumer, buffer)

    def refuse_far_ahead(self) -> None:
        """Detach the consumers that are epochs ahead; they attach again when the stream is near."""
        for consumer in self._stream.readers_too_far_ahead():
            assert isinstance(consumer, Consumer)
            self._refuse(consumer, "the stream is far behind", retry=True)

    def replace_ring(self, ring: Buffer) -> None:
        """Send the ring's new memory to all its readers."""
        self._map_ready(ring)
        for consumer in list(self._admitted()):
            try:
                messages.send(consumer.connection, messages.NEW_RING)
                messages.send(consumer.connection, messages.pack("memory"), ring.read_only_fd)
            except messages.ConnectionLost:
                self._forget_joining(consumer)
                self._drop(consumer)  # else it would read memory that is no longer written

    def close(self) -> None:
        """End all connections."""
        for consumer in self._all:
            consumer.connection.close()
        os.close(self._wake_up)

    # --- what consumers release and want ----------------------------------------------------------------

    def look(self) -> None:
        """Take over what all consumers have released and want."""
        for consumer in self._all:
            if consumer.words is not None:
                self._look_at(consumer, consumer.words)

    def _look_at(self, consumer: Consumer, words: memoryview) -> None:
        before, released = consumer.released, words[RELEASED]
        reader = self._stream.readers[consumer]
        if released > before:
            consumer.released, consumer.last_heard = released, time.monotonic()
            self._stream.release(consumer, released)
            if consumer.is_counted:
                self.consumed += self._buffers.count_good(before, released)
        consumer.want = words[WANT] if reader.position < reader.stop else 0

    # --- stalled consumers ------------------------------------------------------------------------------

    def find_stalled(self, limit_s: float, *, for_others: bool = False) -> tuple[list[Consumer], float | None]:
        """Find consumers that have released nothing for `limit_s` while others waited for them.

        Args:
            limit_s: seconds.
            for_others: whether readers on other nodes wait for this node's ring.

        Returns:
            The stalled consumers, and the seconds until there may be one; None if there is one, or nobody waits.
        """
        head = self._stream.head
        if not for_others and not any(c.want > head for c in self._all):  # the usual case, tested first
            self._waiting_since = None
            return [], None
        holding = self._stream.blocking_readers()
        starving = [c for c in self._admitted() if c.want > head and c not in holding]
        # A consumer that itself waits for samples in preparation does not stall the others.
        to_blame = [c for c in self._admitted() if c in holding and c.want <= self._stream.ready]
        if not ((starving or for_others) and to_blame):
            self._waiting_since = None
            return [], None
        now_s = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now_s
        since = self._waiting_since
        due_s = {consumer: max(since, consumer.last_heard) + limit_s - now_s for consumer in to_blame}
        stalled = [consumer for consumer, seconds in due_s.items() if seconds <= 0]
        return stalled, None if stalled else min(due_s.values())

    def detach(self, consumers: list[Consumer]) -> None:
        """Detach consumers. They still hold samples in the ring, which has to continue in new memory."""
        self.detached += len(consumers)
        for consumer in consumers:
            self._refuse(consumer, "other consumers waited for this one", retry=True)

    # --- messages of consumers --------------------------------------------------------------------------

    def _handle_message(self, consumer: Consumer) -> None:
        if consumer not in self._all:  # dropped while this event was pending
            return
        try:
            message = messages.receive(
                consumer.connection,
                messages.MAX_STRUCT_BYTES if consumer.is_admitted else messages.MAX_MESSAGE_BYTES,
            )
            consumer.last_heard = time.monotonic()
            if consumer.is_admitted:
                if message != messages.LOOK:
                    raise PipelineError("not a reader's")
            else:
                request = messages.unpack(message)
                if request["kind"] == "hello":
                    self._handle_hello(consumer, request)
                else:
                    self._handle_resident(consumer, request)
        except messages.ConnectionLost:
            if consumer.words is not None:
                self._look_at(consumer, consumer.words)  # for the last time
            self._forget_joining(consumer)
            self._drop(consumer)
        except (PipelineError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            self._refuse(consumer, f"message not understood: {error}")

    def _handle_hello(self, consumer: Consumer, request: dict[str, Any]) -> None:
        ring, stream = self._buffers.ring_buffer, self._stream
        pipeline = ring.pipeline
        n = len(pipeline)
        hello = Hello.parse(request, n)
        goes_on = pipeline.is_continued_by(request)
        difference = pipeline.find_obstacle() if goes_on else pipeline.find_difference(request)
        if difference is not None:
            self._refuse(consumer, difference.reason, unsure=difference.unsure)
            return
        if min(hello.batch_size, n) > stream.max_batch_size():
            least = min_capacity(min(hello.batch_size, n), self._block, pipeline.batch_unit)
            too_small = f"capacity must be at least {least}, it is {stream.capacity}"
            self._refuse(consumer, f"a batch of {hello.batch_size} does not fit the ring: {too_small}")
            return
        consumer.name, consumer.rank, consumer.local_world = hello.name, hello.rank, hello.local_world
        first = self._assign_epoch(consumer) if hello.first_epoch is None else hello.first_epoch
        position = consumer.released = first * n + hello.place
        if not stream.join(consumer, position, (first + hello.epochs) * n):
            self._refuse(consumer, f"the stream is not at epoch {first}", retry=True, first_epoch=first)
            return
        consumer.is_counted = not any(
            other.name == consumer.name and other.is_counted for other in self._admitted()
        )
        try:
            theirs, consumer.words = create_words()
        except OSError as error:
            stream.leave(consumer)
            self._refuse(consumer, f"the feeder has no room for another: {error}", retry=True, first_epoch=first)
            return
        self._count_members()
        self.publish()  # the stream may have moved to its position
        held = pipeline.describe_samples() if goes_on or request["fields"] is None else {}
        held |= {"prepared_by": pipeline.token, "machine": describe_machine(), "has_peers": self._has_peers}
        held["poison"] = list(pipeline.poison_records.codes.items())[:_MAX_POISON]
        held["kept"] = stream.kept > 0
        held["lead"] = min(stream.capacity // 2, stream.capacity - stream.block_size)
        welcome = messages.pack("welcome", capacity=stream.capacity, first_epoch=first, position=position, **held)
        try:
            messages.send(consumer.connection, welcome, ring.read_only_fd, theirs, self._wake_up)
        finally:
            os.close(theirs)
        self._on_join()

    def _assign_epoch(self, consumer: Consumer) -> int:
        """Choose the epoch that a member joins: the next one for its first rank, the same for its other ranks."""
        joining = self._joining.pop(consumer.name, None)
        if joining is None or consumer.rank in joining.admitted:  # the member is new, or joins again
            joining = _JoiningMember(self._stream.next_epoch(len(self._buffers.ring_buffer.pipeline)))
        joining.admitted[consumer.rank] = consumer
        if len(joining.admitted) < consumer.local_world:
            self._joining[consumer.name] = joining
            if len(self._joining) > _MAX_JOINING:
                del self._joining[next(iter(self._joining))]  # the oldest entry
        return joining.first_epoch

    def _forget_joining(self, consumer: Consumer) -> None:
        """Forget the epoch chosen for a member if one of its ranks leaves early, before the others have joined."""
        joining = self._joining.get(consumer.name)
        if joining is not None and joining.admitted.get(consumer.rank) is consumer:
            reader = self._stream.readers.get(consumer)
            if reader is not None and reader.position < reader.stop:
                del self._joining[consumer.name]

    def _handle_resident(self, consumer: Consumer, request: dict[str, Any]) -> None:
        residents = self._buffers.residents
        buffer = residents.get(request["key"])
        if request["key"] in self._buffers.too_large:
            self._refuse(consumer, "its feeder has no memory for it", unsure=True)
            return
        if buffer is None:
            names = ", ".join(residents) or "none"
            self._refuse(consumer, f"no resident set {shorten_repr(request['key'])} here (known: {names})")
            return
        difference = buffer.pipeline.find_difference(request)
        if difference is not None:
            self._refuse(consumer, difference.reason, unsure=difference.unsure)
        elif buffer.unfinished:
            self._for_resident.setdefault(buffer.key, []).append(consumer)
        else:
            self._send_resident(consumer, buffer)

    def is_requested(self, key: str) -> bool:
        """Whether any consumer waits for a resident set."""
        return bool(self._for_resident.get(key))

    def _send_resident(self, consumer: Consumer, buffer: Buffer) -> None:
        with contextlib.suppress(messages.ConnectionLost):
            held = buffer.pipeline.describe_samples()
            answer = messages.pack("resident", capacity=buffer.capacity, machine=describe_machine(), **held)
            messages.send(consumer.connection, answer, buffer.read_only_fd)

    def _refuse(
        self,
        consumer: Consumer,
        reason: str,
        *,
        retry: bool = False,
        unsure: bool = False,
        first_epoch: int | None = None,
    ) -> None:
        refusal = messages.pack("refused", reason=reason, retry=retry, unsure=unsure, first_epoch=first_epoch)
        with contextlib.suppress(messages.ConnectionLost):
            messages.send(consumer.connection, refusal)
        self._drop(consumer)

    def _drop(self, consumer: Consumer) -> None:
        self._selector.unregister(consumer.connection)
        consumer.connection.close()
        self._all.discard(consumer)
        for waiting in self._for_resident.values():
            if consumer in waiting:
                waiting.remove(consumer)
        if consumer.is_admitted:
            self._stream.leave(consumer)
            self._count_members()

    def _count_members(self) -> None:
        self.members = len({consumer.name for consumer in self._admitted()})
