"""The consumers of a feeder: who is there, what each was told, who keeps the others waiting.

Every call comes from the feeder's one thread. What is said to consumers is said without waiting: one that does not
read its answers goes without them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines import checks, ipc
from pipelines.errors import PipelineError
from pipelines.feeder.handshake import Hello
from pipelines.feeder.worker_pool import Target
from pipelines.stream import Stream, least_capacity

# Members of which some ranks have asked where to begin and others have not.
_MOST_JOINING = 1024
_MOST_DEADLY = 1000  # told in one message


@dataclass(eq=False)
class Consumer:
    """One connection.

    Attributes:
        want: it waits for everything below; 0 where it does not wait.
        heard: when it last said something (time.monotonic).
        welcome: whether it has a place in the stream.
    """

    connection: socket.socket
    name: str = ""
    rank: int = 0
    world: int = 1
    want: int = 0
    heard: float = field(default_factory=time.monotonic)
    welcome: bool = False


@dataclass
class _Joining:
    """A member that left it to the feeder where to begin: its epoch, and the ranks that have been told."""

    first_epoch: int
    told: dict[int, Consumer] = field(default_factory=dict)


class Consumers:
    """All consumers of one stream.

    Args:
        stream: the bookkeeping.
        ring: the memory that they read.
        residents: resident sets by name.
        selector: where their sockets are registered, each with a function that takes what is there.
        block: that was asked for; None for the usual one.
        came: called when one has come.
        kept: how many samples lie at the positions from one to another.

    Attributes:
        consumed: samples that members (not ranks) have given back.
        detached: how often one was sent on alone because others waited for it.
        members: how many have a place now, each counted once for all its ranks.
    """

    def __init__(
        self,
        stream: Stream,
        ring: Target,
        residents: Mapping[str, Target],
        selector: selectors.BaseSelector,
        block: int | None,
        came: Callable[[], None],
        kept: Callable[[int, int], int],
    ) -> None:
        self.ring = ring
        self.consumed = 0
        self.detached = 0
        self.members = 0
        self._stream = stream
        self._residents = residents
        self._selector = selector
        self._block = block
        self._all: set[Consumer] = set()
        self._for_resident: dict[str, list[Consumer]] = {}
        self._joining: dict[str, _Joining] = {}
        self._starving_since: float | None = None
        self._came, self._kept = came, kept

    def enter(self, connection: socket.socket) -> None:
        """Take a new connection, if it is of this user."""
        ipc.keep_from_children(connection)
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        consumer = Consumer(connection)
        self._all.add(consumer)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(consumer))

    def complete(self) -> int:
        """Members that are here with all their ranks."""
        here: dict[str, set[int]] = {}
        for consumer in self._welcome():
            here.setdefault(consumer.name, set()).add(consumer.rank)
        return len({c.name for c in self._welcome() if len(here[c.name]) >= c.world})

    def waiting(self) -> bool:
        """Whether anybody waits for samples."""
        ready = self._stream.ready
        return any(c.want > ready for c in self._all)

    def _welcome(self) -> Iterator[Consumer]:
        return (consumer for consumer in self._all if consumer.welcome)

    # --- what is said to them ---------------------------------------------------------------------------

    def tell_ready(self) -> None:
        """Answer those whose samples are there."""
        for consumer in self._all:
            if consumer.want and consumer.want <= self._stream.ready:
                self._send_ready(consumer)

    def give_resident(self, target: Target) -> None:
        """A resident set is complete: hand it to those who asked."""
        for consumer in self._for_resident.pop(target.key, []):
            self._give(consumer, target)

    def refuse_far(self) -> None:
        """Send those on alone who are epochs ahead: they look for the stream when it has come nearer."""
        for consumer in self._stream.too_far():
            assert isinstance(consumer, Consumer)
            self._refuse(consumer, "the stream is far behind", retry=True)

    def renew_ring(self, ring: Target) -> None:
        """The ring goes on in other memory: all who read it are given that."""
        self.ring = ring
        for consumer in list(self._welcome()):
            try:
                ipc.send(consumer.connection, ipc.RING)
                ipc.send(consumer.connection, ipc.pack("memory"), ring.shown_fd)
            except ipc.Lost:
                self._has_left(consumer)
                self._drop(consumer)  # it would read on where nobody writes

    def close(self) -> None:
        """End all connections."""
        for consumer in self._all:
            consumer.connection.close()

    # --- who keeps the others waiting -------------------------------------------------------------------

    def stalled(self, limit_s: float, *, for_others: bool = False) -> tuple[list[Consumer], float | None]:
        """Those who have given nothing back for `limit_s` while others waited for them, and otherwise the seconds
        until there may be some; None where nobody waits for anybody.

        Args:
            for_others: members of other nodes wait for this one's ring.
        """
        head = self._stream.head
        if not for_others and not any(c.want > head for c in self._all):  # nearly always, and quickly said
            self._starving_since = None
            return [], None
        holding = self._stream.holding()
        starving = [c for c in self._welcome() if c.want > head and c not in holding]
        # Who waits himself for what is being prepared is not the one to blame.
        to_blame = [c for c in self._welcome() if c in holding and c.want <= self._stream.ready]
        if not ((starving or for_others) and to_blame):
            self._starving_since = None
            return [], None
        now = time.monotonic()
        if self._starving_since is None:
            self._starving_since = now
        since = self._starving_since
        left = {consumer: max(since, consumer.heard) + limit_s - now for consumer in to_blame}
        late = [consumer for consumer, seconds in left.items() if seconds <= 0]
        return late, None if late else min(left.values())

    def detach(self, consumers: list[Consumer]) -> None:
        """Send them on alone. What they hold in their hands lies in the ring: it needs new memory after this."""
        self.detached += len(consumers)
        for consumer in consumers:
            self._refuse(consumer, "the others waited for this consumer", retry=True)

    # --- what they say ----------------------------------------------------------------------------------

    def _hear(self, consumer: Consumer) -> None:
        if consumer not in self._all:  # sent away a moment ago
            return
        try:
            message = ipc.receive(consumer.connection, ipc.STRUCT if consumer.welcome else ipc.LARGEST)
            consumer.heard = time.monotonic()
            if consumer.welcome:
                _, released, want = ipc.WANT.unpack(message)
                self._released(consumer, released)
                consumer.want = want
                if want and want <= self._stream.ready:
                    self._send_ready(consumer)
            else:
                said = ipc.unpack(message)
                if said["kind"] == "hello":
                    self._hello(consumer, said)
                else:
                    self._resident(consumer, said)
        except ipc.Lost:
            self._has_left(consumer)
            self._drop(consumer)
        except (PipelineError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            self._refuse(consumer, f"message not understood: {error}")

    def _hello(self, consumer: Consumer, said: dict[str, Any]) -> None:
        pipeline, stream = self.ring.pipeline, self._stream
        n = len(pipeline)
        hello = Hello.of(said, n)
        goes_on = pipeline.is_continued_by(said)
        difference = pipeline.find_obstacle() if goes_on else pipeline.find_difference(said)
        if difference is not None:
            self._refuse(consumer, difference.reason, unsure=difference.unsure)
            return
        if min(hello.batch_size, n) > stream.largest_batch():
            self._refuse(
                consumer,
                f"a batch of {hello.batch_size} does not fit the ring: capacity must be at least "
                f"{least_capacity(min(hello.batch_size, n), self._block)}, it is {stream.capacity}",
            )
            return
        consumer.name, consumer.rank, consumer.world = hello.name, hello.rank, hello.world
        first = self._next_boundary(consumer) if hello.first_epoch is None else hello.first_epoch
        position = first * n + hello.place
        if not stream.join(consumer, position, (first + hello.epochs) * n):
            self._refuse(consumer, f"the stream is elsewhere than at epoch {first}", retry=True, first_epoch=first)
            return
        consumer.welcome = True
        self._count()
        held = pipeline.describe_samples() if goes_on else {}
        held["deadly"] = list(pipeline.hazards.deadly.items())[:_MOST_DEADLY]
        welcome = ipc.pack("welcome", capacity=stream.capacity, first_epoch=first, position=position, **held)
        ipc.send(consumer.connection, welcome, self.ring.shown_fd)
        self._came()

    def _next_boundary(self, consumer: Consumer) -> int:
        """The epoch that a member joins: where its first rank asks, and the same for its other ranks."""
        joining = self._joining.pop(consumer.name, None)
        if joining is None or consumer.rank in joining.told:  # the member is new, or has come back
            joining = _Joining(self._stream.boundary(len(self.ring.pipeline)))
        joining.told[consumer.rank] = consumer
        if len(joining.told) < consumer.world:
            self._joining[consumer.name] = joining
            if len(self._joining) > _MOST_JOINING:
                del self._joining[next(iter(self._joining))]  # who asked longest ago
        return joining.first_epoch

    def _has_left(self, consumer: Consumer) -> None:
        """Before the end of what it was to read: its member, if others of it have yet to come, begins anew."""
        joining = self._joining.get(consumer.name)
        if joining is not None and joining.told.get(consumer.rank) is consumer:
            reader = self._stream.readers.get(consumer)
            if reader is not None and reader.position < reader.stop:
                del self._joining[consumer.name]

    def _resident(self, consumer: Consumer, said: dict[str, Any]) -> None:
        target = self._residents.get(said["key"])
        if target is None:
            known = ", ".join(self._residents) or "none"
            self._refuse(consumer, f"no resident set {checks.shown(said['key'])} here (known: {known})")
            return
        difference = target.pipeline.find_difference(said)
        if difference is not None:
            self._refuse(consumer, difference.reason, unsure=difference.unsure)
        elif target.left:
            self._for_resident.setdefault(target.key, []).append(consumer)
        else:
            self._give(consumer, target)

    def asked_for(self, key: str) -> bool:
        """Whether anybody waits for a resident set."""
        return bool(self._for_resident.get(key))

    def _give(self, consumer: Consumer, target: Target) -> None:
        with contextlib.suppress(ipc.Lost):
            ipc.send(consumer.connection, ipc.pack("resident", capacity=target.capacity), target.shown_fd)

    def _released(self, consumer: Consumer, position: int) -> None:
        reader = self._stream.readers[consumer]
        before = reader.position
        self._stream.release(consumer, position)
        if consumer.rank == 0:
            self.consumed += self._kept(before, reader.position)

    def _send_ready(self, consumer: Consumer) -> None:
        consumer.want = 0
        # One who is gone is noticed at its end-of-file.
        with contextlib.suppress(ipc.Lost):
            ipc.send(consumer.connection, ipc.READY.pack(b"Y", self._stream.ready))

    def _refuse(
        self,
        consumer: Consumer,
        reason: str,
        *,
        retry: bool = False,
        unsure: bool = False,
        first_epoch: int | None = None,
    ) -> None:
        said = ipc.pack("refused", reason=reason, retry=retry, unsure=unsure, first_epoch=first_epoch)
        with contextlib.suppress(ipc.Lost):
            ipc.send(consumer.connection, said)
        self._drop(consumer)

    def _drop(self, consumer: Consumer) -> None:
        self._selector.unregister(consumer.connection)
        consumer.connection.close()
        self._all.discard(consumer)
        for waiting in self._for_resident.values():
            if consumer in waiting:
                waiting.remove(consumer)
        if consumer.welcome:
            self._stream.leave(consumer)
            self._count()

    def _count(self) -> None:
        self.members = len({consumer.name for consumer in self._welcome()})
