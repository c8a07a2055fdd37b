"""Connects a consumer to a feeder: its socket, and its private view of the ring."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.description import PipelineDescription
from pipelines.ipc import messages
from pipelines.loader.ring_reader import RingReader
from pipelines.samples.fields import GOOD, INDEX, OK, Columns, Field, describe_fields
from pipelines.samples.memory_order import copy_in_layout
from pipelines.samples.structure import Inferred, Structure
from pipelines.shm.ring import Layout, RingView
from pipelines.shm.words import LIMIT, READY, RELEASED, SINCE, WANT, map_ring_words, map_words
from pipelines.verification.reader import StreamOrigin

if TYPE_CHECKING:
    import torch

    from pipelines.verification.checker import ServedSample


class StreamRefused(Exception):
    """The feeder has refused a consumer.

    Attributes:
        retry: whether a later attempt may succeed.
        unsure: whether the pipelines could not be compared.
        first_epoch: the epoch that the feeder chose for this consumer, if it was to choose.
    """

    def __init__(
        self, reason: str, *, retry: bool = False, unsure: bool = False, first_epoch: int | None = None
    ) -> None:
        super().__init__(reason)
        self.retry = retry
        self.unsure = unsure
        self.first_epoch = first_epoch


_WAIT_S = 1.0
OnWait = Callable[[], None]
Answer = TypeVar("Answer")


def _retry_on_timeout(receive: Callable[[], Answer], on_wait: OnWait | None) -> Answer:
    """Call `receive` until it returns; call `on_wait` after each timeout of the socket."""
    while True:
        try:
            return receive()
        except messages.NothingReceived:
            if on_wait is not None:
                on_wait()


def _request(
    address: str, request: bytes, sent: int, on_wait: OnWait | None = None
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """The connection, what a feeder answers, and as many descriptors as are sent with it."""
    connection, descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), list[int]()
    messages.close_in_children(connection)
    # Without `on_wait` it blocks until there is an answer.
    connection.settimeout(None if on_wait is None else _WAIT_S)
    try:
        try:
            connection.connect(address)
        except OSError as error:
            raise messages.ConnectionLost(f"no feeder at {address}: {error}") from error
        try:
            messages.send(connection, request)
            message, descriptors = _retry_on_timeout(
                lambda: messages.receive_with_descriptors(connection, sent), on_wait
            )
            answer = messages.unpack(message)
        except messages.ConnectionLost as lost:
            raise messages.ConnectionLost(f"no feeder at {address} any more: {lost}") from lost
        except ValueError as error:
            raise StreamRefused(f"no feeder of this version at {address}: {error}") from None
        if answer["kind"] == "refused":
            details = {key: answer[key] for key in ("retry", "unsure", "first_epoch")}
            raise StreamRefused(answer["reason"], **details)
        if len(descriptors) < sent:
            raise messages.ConnectionLost(f"no file descriptor is left for the memory of the feeder at {address}")
    except BaseException:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return connection, answer, descriptors


def _parse_samples(answer: dict[str, Any]) -> Inferred:
    """The fields, layouts and structure of a feeder's samples (`Pipeline.describe_samples`)."""
    fields = {name: Field(tuple(shape), dtype) for name, shape, dtype in answer["fields"]}
    layouts = answer["layouts"]
    if isinstance(layouts, dict):
        layouts = {name: tuple(form) if isinstance(form, list) else form for name, form in layouts.items()}
    nested = answer.get("structure")
    return Inferred(fields, layouts, None if nested is None else Structure.from_record(nested))


def _find_fields(pipeline: PipelineDescription, answer: dict[str, Any]) -> dict[str, Field]:
    """The fields of a pipeline, which the feeder has as well.

    A copy of the feeder's own pipeline takes over what the feeder knows of the samples. It prepares no sample to
    find out, so that a process which only reads batches neither imports decoders nor opens the source.
    """
    if answer.get("token") == pipeline.token:
        pipeline.__dict__["_inferred"] = _parse_samples(answer)
    elif "fields" in answer:
        mine, theirs = describe_fields(pipeline.fields), describe_fields(_parse_samples(answer)[0])
        if mine != theirs:
            reason = f"the fields differ: {mine} at the consumer, {theirs} at the feeder"
            raise StreamRefused(reason, unsure=pipeline.why_unsure is not None)
    return pipeline.fields


def _leave(connection: socket.socket, reader: RingReader, events: select.epoll) -> None:
    reader.keep()
    connection.close()
    events.close()


class StreamClient:
    """A place in a feeder's stream.

    Args:
        on_wait: called every second while `wait` waits; what it raises ends the waiting.

    Attributes:
        position: all positions below it are released.
        kept: whether the ring holds all samples, each once, for every epoch (`Stream.kept`).
        stages: how many of the pipeline's stages were applied to the samples: fewer than all if the feeder holds a
            prefix.
        stream: what the feeder says of its samples.

    Raises:
        ConnectionLost: no feeder answers, now or in any later call.
        StreamRefused: the feeder refuses this consumer.
    """

    def __init__(
        self, address: str, pipeline: PipelineDescription, on_wait: OnWait | None = None, **place: Any
    ) -> None:
        hello = messages.pack("hello", **pipeline.describe_for_peers(), **place)
        self._connection, answer, descriptors = _request(address, hello, 3, on_wait)
        try:
            self._events = select.epoll()
        except OSError as error:
            self._connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise messages.ConnectionLost(f"no descriptor is left: {error}") from error
        try:
            self._on_wait = on_wait
            pipeline.poison_records.codes.update(map(tuple, answer["poison"]))
            memory, words, wake_up = descriptors
            self.first_epoch: int = answer["first_epoch"]
            self.capacity: int = answer["capacity"]
            self.position: int = answer["position"]
            self.kept: bool = answer.get("kept", False)
            self.stages = answer.get("stages", len(pipeline.stages))
            own = pipeline.take_stages(self.stages).token
            self.stream = _describe_stream(answer, answer["prepared_by"] == own, self._connection)
            self._lead: int = answer["lead"]
            self._announced = self.position
            layout = Layout(self._find_fields(pipeline, answer), self.capacity)
            self._reader = RingReader(RingView(memory, layout, wraps=True), pipeline.poison_records)
            self._ring_words = map_ring_words(memory, layout, writable=False)
            self._words = map_words(words, writable=True)
            self._events.register(self._connection, select.EPOLLIN)
            # It stays registered while the feeder has it open.
            self._events.register(wake_up, select.EPOLLIN | select.EPOLLET)
        except BaseException:
            self._connection.close()
            self._events.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        # A loader that was not closed leaves the stream with its last reference.
        self._detach = weakref.finalize(self, _leave, self._connection, self._reader, self._events)
        self._ready = self._ring_words[READY]  # at the last look; the samples below it can be read

    def _find_fields(self, pipeline: PipelineDescription, answer: dict[str, Any]) -> dict[str, Field]:
        """The fields of the samples in the ring; also the layouts of those that are to be completed here."""
        if self.stages == len(pipeline.stages):
            return _find_fields(pipeline, answer)
        fields, layouts, self._structure = _parse_samples(answer)
        assert isinstance(layouts, dict)  # else the feeder refuses
        self._layouts = layouts
        return fields

    def wait(self, *, released: int, want: int) -> None:
        """Release all positions below `released`, and wait until all below `want` are ready.

        What the consumer wrote into the last batch is undone.
        """
        self._release(released)
        self._ready = self._ring_words[READY]
        if want > self._ready:
            self._words[SINCE] = time.monotonic_ns()
            self._words[WANT] = want
        # The feeder looks at these words with each block that it prepares. It has to be woken where it may prepare
        # nothing before it knows what was released, or where others keep it from preparing what is wanted.
        if self._ring_words[READY] > self._announced + self._lead or want > self._ring_words[LIMIT]:
            self._announce()
        due = time.monotonic() + _WAIT_S
        while self._ready < want:
            for descriptor, _ in self._events.poll(max(0.0, due - time.monotonic())):
                if descriptor == self._connection.fileno():
                    self._receive()
            # After the messages: a new ring, sent before more was ready, has words of its own.
            self._ready = self._ring_words[READY]
            if self._ready < want and time.monotonic() >= due:  # also where others are woken again and again
                self._announce()
                if self._on_wait is not None:
                    self._on_wait()
                due = time.monotonic() + _WAIT_S

    def _receive(self) -> None:
        if messages.receive(self._connection, messages.MAX_STRUCT_BYTES) != messages.NEW_RING:
            raise messages.ConnectionLost("the feeder has detached this consumer")
        self._switch_ring()

    def _switch_ring(self) -> None:
        """Continue in the ring's new memory; batches read so far stay in the old one."""
        _, descriptor = _retry_on_timeout(lambda: messages.receive_json(self._connection), self._on_wait)
        if descriptor is None:
            raise messages.ConnectionLost("the feeder sent no new memory")
        old = self._reader.view
        old.close()
        try:
            self._reader.view = RingView(descriptor, old.layout, wraps=True)
            self._ring_words = map_ring_words(descriptor, old.layout, writable=False)
        finally:
            os.close(descriptor)

    def release(self, position: int) -> None:
        """Release all positions below `position`, and undo what was written into the last batch."""
        self._release(position)
        self._announce()

    def _release(self, position: int) -> None:
        if self._connection.fileno() < 0:  # a copy in a forked process: the place is its parent's
            raise messages.ConnectionLost("this process was forked from the consumer")
        self._reader.release()
        if position > self.position:
            self._words[RELEASED] = self.position = position

    def _announce(self) -> None:
        """Have the feeder look at this consumer's words."""
        messages.send(self._connection, messages.LOOK)
        self._announced = self.position

    @property
    def columns(self) -> Columns:
        """The fields in the ring, by slot."""
        return self._reader.view.columns

    def read_status(self, start: int, stop: int) -> bytes:
        first = start % self.capacity
        return self._reader.read_status(first, first + stop - start)

    def read_served(self, pipeline: PipelineDescription, epoch: int, place: int) -> ServedSample:
        from pipelines.verification.checker import ServedSample

        structure = pipeline.structure if self.stages == len(pipeline.stages) else self._structure
        return ServedSample.read(
            self._reader.view.columns,
            (epoch * len(pipeline) + place) % self.capacity,
            stages=self.stages,
            epoch=epoch,
            place=place,
            structure=None if structure is None else structure.as_record(),
        )

    def read_shared_part(self, position: int) -> tuple[int, dict[str, Any] | None]:
        """The index of the sample at a position, and the sample as `stages` have left it; copied.

        The sample is None if the ring cannot hold it in that form: it has to be prepared in full.
        """
        columns, slot = self._reader.view.columns, position % self.capacity
        index = int(columns[INDEX][slot])
        if columns[OK][slot] != GOOD:
            return index, None
        if self._structure is not None:
            return index, self._structure.read_sample(columns, slot, self._layouts)
        return index, {name: copy_in_layout(columns[name][slot], form) for name, form in self._layouts.items()}

    def read_batch(self, start: int, stop: int, *, copy: bool) -> dict[str, torch.Tensor]:
        first = start % self.capacity
        return self._reader.read_batch(first, first + stop - start, copy=copy)

    def close(self) -> None:
        """Leave the stream; the last batch stays valid."""
        self._detach()
        self._reader.view.close()


def _describe_stream(answer: dict[str, Any], is_same_object: bool, connection: socket.socket) -> StreamOrigin:
    # The process that listens at the other end (unix(7), SO_PEERCRED).
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return StreamOrigin(
        machine=answer["machine"],
        is_same_object=is_same_object,
        is_in_process=struct.unpack("3i", credentials)[0] == os.getpid(),
        has_peers=answer.get("has_peers", False),
    )


def request_resident(
    address: str, key: str, pipeline: PipelineDescription, on_wait: OnWait | None = None
) -> tuple[RingView, StreamOrigin]:
    """A private view of a feeder's resident set, when it is complete, and what the feeder says of it.

    Raises:
        ConnectionLost: the feeder has ended.
        StreamRefused: the feeder has no such set, or another pipeline under that name.
    """
    request = messages.pack("resident", key=key, **pipeline.describe_for_peers())
    connection, answer, (descriptor,) = _request(address, request, 1, on_wait)
    stream = _describe_stream(answer, answer["token"] == pipeline.token, connection)
    connection.close()
    try:
        return RingView(descriptor, Layout(_find_fields(pipeline, answer), answer["capacity"])), stream
    finally:
        os.close(descriptor)
