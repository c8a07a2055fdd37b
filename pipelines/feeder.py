"""The process that prepares samples once for all its consumers.

`Feeder` is a thin shell around `pipelines.stream.Stream`: one thread waits on all sockets at once, tells
workers what to prepare and consumers what is there. It holds no lock in shared memory and touches no
sample: a consumer or worker that dies is an end-of-file on its socket.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines import ring, wire
from pipelines.crew import Crew, Target
from pipelines.errors import PipelineError
from pipelines.pipeline import Pipeline
from pipelines.stream import Run, Stream, least_capacity, usual_block, usual_capacity

_RING = 0
# The messages' integers are 64 bits wide.
_LAST_POSITION = 1 << 62


@dataclass(eq=False)
class _Consumer:
    connection: socket.socket
    name: str = ""
    rank: int = 0
    world: int = 1
    want: int = 0
    welcome: bool = False


class Feeder:
    """Prepares a pipeline's samples once and hands them to every consumer that attaches.

    Use it as a context manager; `address` is what consumers pass to `pipelines.attach`.

    Args:
        pipeline: what is prepared.
        workers: preparation processes.
        capacity: samples in the ring; by default as many as 64 MiB hold, but 512 if 256 MiB hold them, and
            4096 at most: a ring that is larger than it needs to be costs the writers the processor's cache.
        expect: members (each with all its ranks) for which the first sample waits; 0 does not wait.
        gate_timeout_s: how long it waits for them.
        resident: named pipelines without randomness, prepared once and kept whole (`pipelines.resident`).
        address: the path of the socket, in a directory that is made with mode 0700; by default in a new one.
            A feeder that takes the address of one that died finds its consumers there again.
        block: samples that one worker prepares at a time.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        workers: int = 1,
        capacity: int | None = None,
        expect: int = 0,
        gate_timeout_s: float = 60.0,
        resident: Mapping[str, Pipeline] | None = None,
        address: str | os.PathLike[str] | None = None,
        block: int | None = None,
    ) -> None:
        if workers < 1:
            raise PipelineError(f"a Feeder needs at least one worker, got {workers!r}")
        if capacity is None:
            capacity = usual_capacity(ring.sample_bytes(pipeline.fields))
        if capacity < 2:
            raise PipelineError(f"capacity must be at least 2 samples, got {capacity!r}")
        self._block = block
        block = block or usual_block(capacity)
        self.pipeline = pipeline
        self.expect = expect
        self.gate_timeout_s = gate_timeout_s
        self._stream = Stream(capacity, block, far=max(capacity, len(pipeline)))
        self._targets: dict[int, Target] = {}
        self._waiting: dict[int, list[_Consumer]] = {}
        self._consumers: set[_Consumer] = set()
        self._first_epochs: dict[str, tuple[int, set[int]]] = {}
        self._counts = {"prepared": 0, "resident": 0, "consumed": 0}
        self._cpu_s = 0.0
        self._began = time.monotonic()
        self._gate_open = expect == 0
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._listener: socket.socket | None = None
        self._owned = contextlib.ExitStack()
        try:
            self._add_target("ring", pipeline, capacity)
            for key, pipe in (resident or {}).items():
                still = pipe.without_randomness()
                target = self._add_target(key, still, len(still))
                target.todo = [(i, min(i + block, len(still))) for i in range(0, len(still), block)]
                target.left = len(target.todo)
            if address is None:
                directory = tempfile.mkdtemp(prefix="feeder-")
                self._owned.callback(shutil.rmtree, directory, ignore_errors=True)
                address = os.path.join(directory, "socket")
            self.address = os.fspath(address)
            self._listener = wire.listen(self.address)
            self._selector = self._owned.enter_context(selectors.DefaultSelector())
            # Sockets, not a pipe's numbers: writing to one that is closed cannot reach another's file.
            self._woken, self._wake = map(self._owned.enter_context, socket.socketpair())
            self._crew = Crew(self._targets, self._selector, self._next_run, self._done, self._lost)
            self._owned.callback(self._crew.close)
            self._crew.start(workers)
        except BaseException:
            self._end()
            raise
        self._thread.start()
        atexit.register(self.close)

    def _add_target(self, key: str, pipeline: Pipeline, capacity: int) -> Target:
        fd = ring.create(ring.Layout(pipeline.fields, capacity), f"{key}-{len(pipeline)}")
        self._owned.callback(os.close, fd)
        target = self._targets[len(self._targets)] = Target(key, pipeline, capacity, fd)
        return target

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """Samples in the ring."""
        return self._stream.capacity

    def stats(self) -> dict[str, Any]:
        """Samples `prepared`, `resident`, `consumed`, `skipped`; worker `restarts`; CPU-seconds by role; pids."""
        crew = self._crew
        return {
            **self._counts,
            "skipped": crew.skipped,
            "restarts": crew.restarts,
            "cpu_s": {"feed": self._cpu_s, "prepare": crew.cpu_s},
            "workers": crew.pids,
            "bad": dict(crew.bad),
            "failure": self._failure,
        }

    def set_expect(self, members: int) -> None:
        """Wait at the start gate for another number of members: one has failed before it came."""
        self.expect = members
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """End the workers and the socket; consumers go on alone."""
        self._closing = True
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._listener is not None
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._awoken)
        try:
            while not self._closing:
                self._crew.dispatch()
                for key, _ in self._selector.select(self._patience_s()):
                    key.data(key.fileobj)
                self._cpu_s = time.thread_time()
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end()

    def _patience_s(self) -> float | None:
        if self._gate_open:
            return None
        left = self._began + self.gate_timeout_s - time.monotonic()
        if left <= 0:
            self._open_gate()
            self._crew.dispatch()
            return None
        return left

    def _awoken(self, woken: Any) -> None:
        woken.recv(64)
        self._look_at_gate()

    def _look_at_gate(self) -> None:
        """Open the gate if all are there."""
        if self._gate_open:
            return
        here: dict[str, set[int]] = {}
        for c in self._consumers:
            if c.welcome:
                here.setdefault(c.name, set()).add(c.rank)
        complete = {c.name for c in self._consumers if c.welcome and len(here[c.name]) >= c.world}
        if len(complete) >= self.expect:
            self._open_gate()

    def _open_gate(self) -> None:
        self._gate_open = True
        # Who is epochs ahead of the others goes on alone, and looks for the stream when it has come nearer.
        for consumer in self._stream.too_far():
            assert isinstance(consumer, _Consumer)
            self._refuse(consumer, "the stream is far behind", retry=True)

    def _next_run(self) -> tuple[int, Run] | None:
        """What to prepare next: resident sets first, then the stream."""
        for number, target in self._targets.items():
            if target.todo:
                return number, target.todo.pop(0)
        run = self._stream.next_run() if self._gate_open else None
        return None if run is None else (_RING, run)

    def _done(self, number: int, run: Run) -> None:
        """A run of a target is prepared."""
        if number == _RING:
            self._counts["prepared"] += run[1] - run[0]
            if self._stream.done(run):
                self._tell_ready()
            return
        self._counts["resident"] += run[1] - run[0]
        target = self._targets[number]
        target.left -= 1
        if target.left == 0:
            for consumer in self._waiting.pop(number, []):
                self._give_resident(consumer, target)

    def _lost(self, number: int, run: Run) -> None:
        """A run of a target has to be prepared again."""
        if number == _RING:
            self._stream.lost(run)
        else:
            self._targets[number].todo.insert(0, run)

    # --- consumers --------------------------------------------------------------------------------------

    def _accept(self, listener: Any) -> None:
        connection, _address = listener.accept()
        # One that does not read its answers goes without them: the others do not wait for it.
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            return
        consumer = _Consumer(connection)
        self._consumers.add(consumer)
        self._selector.register(connection, selectors.EVENT_READ, lambda _, c=consumer: self._from_consumer(c))

    def _from_consumer(self, consumer: _Consumer) -> None:
        try:
            message = wire.receive(consumer.connection)
            if consumer.welcome:
                _, released, want = wire.WANT.unpack(message)
                self._released(consumer, released)
                consumer.want = want
                if want and want <= self._stream.ready:
                    self._send_ready(consumer)
            else:
                said = wire.unpack(message)
                if said["kind"] == "hello":
                    self._hello(consumer, said)
                else:
                    self._resident(consumer, said)
        except wire.Lost:
            self._drop(consumer)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error) as error:
            self._refuse(consumer, f"message not understood: {error}")

    def _hello(self, consumer: _Consumer, said: dict[str, Any]) -> None:
        name, rank, world = str(said["name"]), int(said["rank"]), int(said["world"])
        n, batch_size = len(self.pipeline), int(said["batch_size"])
        place, epochs, first = int(said["place"]), int(said["epochs"]), int(said["first_epoch"] or 0)
        if not (0 <= rank < world and 0 <= place <= n and epochs >= 0 and first >= 0):
            raise ValueError(f"no place in a stream: {said}")
        if (first + epochs) * n > _LAST_POSITION:
            raise ValueError(f"epochs up to {first + epochs} of {n} samples")
        difference = self.pipeline.difference(said)
        if difference is not None:
            self._refuse(consumer, difference.reason, unsure=difference.unsure)
            return
        if min(batch_size, n) > self._stream.largest_batch():
            self._refuse(
                consumer,
                f"a batch of {batch_size} does not fit the ring: capacity must be at least "
                f"{least_capacity(min(batch_size, n), self._block)}, it is {self.capacity}",
            )
            return
        consumer.name, consumer.rank, consumer.world = name, rank, world
        if said["first_epoch"] is None:
            first = self._next_boundary(name, rank, world)
        position = first * n + place
        if not self._stream.join(consumer, position, (first + epochs) * n):
            self._refuse(consumer, f"the stream is elsewhere than at epoch {first}", retry=True, first_epoch=first)
            return
        consumer.welcome = True
        welcome = wire.pack("welcome", capacity=self.capacity, first_epoch=first, position=position)
        wire.send(consumer.connection, welcome, self._targets[_RING].fd)
        self._look_at_gate()

    def _next_boundary(self, name: str, rank: int, world: int) -> int:
        """The epoch that a member joins: where its first rank asks, and the same for its other ranks."""
        first, asked = self._first_epochs.pop(name, (0, {rank}))
        if rank in asked:  # the member is new, or has come back
            first, asked = self._stream.boundary(len(self.pipeline)), set()
        asked.add(rank)
        if len(asked) < world:
            self._first_epochs[name] = first, asked
        return first

    def _resident(self, consumer: _Consumer, said: dict[str, Any]) -> None:
        sets = {target.key: number for number, target in self._targets.items() if number != _RING}
        number = sets.get(said["key"])
        if number is None:
            known = ", ".join(sets) or "none"
            self._refuse(consumer, f"no resident set {said['key']!r} here (known: {known})")
            return
        target = self._targets[number]
        difference = target.pipeline.difference(said)
        if difference is not None:
            self._refuse(consumer, difference.reason, unsure=difference.unsure)
        elif target.left:
            self._waiting.setdefault(number, []).append(consumer)
        else:
            self._give_resident(consumer, target)

    def _give_resident(self, consumer: _Consumer, target: Target) -> None:
        with contextlib.suppress(wire.Lost):
            wire.send(consumer.connection, wire.pack("resident", capacity=target.capacity), target.fd)

    def _released(self, consumer: _Consumer, position: int) -> None:
        reader = self._stream.readers[consumer]
        before = reader.position
        self._stream.release(consumer, position)
        if consumer.rank == 0:
            self._counts["consumed"] += reader.position - before

    def _tell_ready(self) -> None:
        for consumer in self._consumers:
            if consumer.want and consumer.want <= self._stream.ready:
                self._send_ready(consumer)

    def _send_ready(self, consumer: _Consumer) -> None:
        consumer.want = 0
        # One who is gone is noticed at its end-of-file.
        with contextlib.suppress(wire.Lost):
            wire.send(consumer.connection, wire.READY.pack(b"Y", self._stream.ready))

    def _refuse(
        self,
        consumer: _Consumer,
        reason: str,
        *,
        retry: bool = False,
        unsure: bool = False,
        first_epoch: int | None = None,
    ) -> None:
        said = wire.pack("refused", reason=reason, retry=retry, unsure=unsure, first_epoch=first_epoch)
        with contextlib.suppress(wire.Lost):
            wire.send(consumer.connection, said)
        self._drop(consumer)

    def _drop(self, consumer: _Consumer) -> None:
        self._selector.unregister(consumer.connection)
        consumer.connection.close()
        self._consumers.discard(consumer)
        for waiting in self._waiting.values():
            if consumer in waiting:
                waiting.remove(consumer)
        if consumer.welcome:
            self._stream.leave(consumer)

    def _end(self) -> None:
        self._closing = True
        for consumer in self._consumers:
            consumer.connection.close()
        if self._listener is not None:
            # In this order: once nobody listens, another feeder may take the address.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)
            self._listener.close()
        self._owned.close()
