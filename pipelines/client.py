"""A consumer's end of a feeder: its connection and its private view of the ring."""

from __future__ import annotations

import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines import wire
from pipelines.fields import described
from pipelines.prepare import OK
from pipelines.ring import Layout, PrivateMemory

if TYPE_CHECKING:
    from pipelines.pipeline import Pipeline


class Refused(Exception):
    """The feeder said no.

    Attributes:
        retry: it may say yes later.
        unsure: the pipelines could not be compared.
        first_epoch: where this consumer was to begin, if it left that to the feeder.
    """

    def __init__(
        self, reason: str, *, retry: bool = False, unsure: bool = False, first_epoch: int | None = None
    ) -> None:
        super().__init__(reason)
        self.retry = retry
        self.unsure = unsure
        self.first_epoch = first_epoch


def _ask(address: str, question: bytes) -> tuple[socket.socket, dict[str, Any], int | None]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            connection.connect(address)
        except OSError as error:
            raise wire.Lost(f"no feeder at {address}: {error}") from error
        wire.send(connection, question)
        try:
            answer, descriptor = wire.receive_with_descriptor(connection)
        except ValueError as error:
            raise Refused(f"no feeder of this version at {address}: {error}") from None
        if answer["kind"] == "refused":
            said = {key: answer[key] for key in ("retry", "unsure", "first_epoch")}
            raise Refused(answer["reason"], **said)
    except BaseException:
        connection.close()
        raise
    return connection, answer, descriptor


def _who(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "token": pipeline.token,
        "parts": pipeline.parts(),
        "why_unsure": pipeline.why_unsure,
        "fields": described(pipeline.fields),
    }


class Attachment:
    """A place in a feeder's stream.

    Attributes:
        first_epoch: where it began.
        position: everything below it was given back.

    Raises:
        wire.Lost: nobody answers, now or in any later call.
        Refused: the feeder does not take this consumer.
    """

    def __init__(self, address: str, pipeline: Pipeline, **place: Any) -> None:
        self._connection, answer, descriptor = _ask(address, wire.pack("hello", **_who(pipeline), **place))
        # A loader that nobody closed leaves the stream with its last reference.
        self._leave = weakref.finalize(self, self._connection.close)
        assert descriptor is not None
        self.first_epoch: int = answer["first_epoch"]
        self.capacity: int = answer["capacity"]
        self.position: int = answer["position"]
        try:
            self._memory = PrivateMemory(descriptor, Layout(pipeline.fields, self.capacity))
        finally:
            os.close(descriptor)
        self.fields = [name for name in self._memory.columns if name != OK]
        self._ready = 0

    def wait(self, *, released: int, want: int) -> None:
        """Give back all positions below `released`; return when all below `want` are there."""
        if want <= self._ready:
            self.release(released)
            return
        self.position = max(self.position, released)
        wire.send(self._connection, wire.WANT.pack(b"W", released, want))
        while self._ready < want:
            answer = wire.receive(self._connection)
            if not wire.is_struct(answer, wire.READY, b"Y"):
                raise wire.Lost("the feeder has thrown this consumer out")
            _, self._ready = wire.READY.unpack(answer)

    def release(self, position: int) -> None:
        """Give back all positions below `position`."""
        self.position = max(self.position, position)
        wire.send(self._connection, wire.WANT.pack(b"W", position, 0))

    def view(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """A field at the positions [start, stop): a view, or a copy where it wraps round the ring's end."""
        column = self._memory.columns[name]
        first, count = start % self.capacity, stop - start
        if first + count <= self.capacity:
            return column[first : first + count]
        return np.concatenate([column[first:], column[: first + count - self.capacity]])

    def restore(self, start: int, stop: int) -> None:
        """Undo whatever this process wrote at the positions [start, stop)."""
        first, count = start % self.capacity, stop - start
        if first + count <= self.capacity:
            self._memory.restore(first, first + count)

    def close(self) -> None:
        """Leave the stream."""
        self._leave()
        self._memory.close()


def resident_memory(address: str, key: str, pipeline: Pipeline) -> PrivateMemory:
    """A private view of a feeder's resident set, when it is complete.

    Raises:
        wire.Lost: the feeder is gone.
        Refused: it has no such set.
    """
    connection, answer, descriptor = _ask(address, wire.pack("resident", key=key, **_who(pipeline)))
    connection.close()
    assert descriptor is not None
    try:
        return PrivateMemory(descriptor, Layout(pipeline.fields, answer["capacity"]))
    finally:
        os.close(descriptor)
