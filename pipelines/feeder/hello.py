"""A consumer of a feeder, and its first message."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipelines.checks import MOST_RANKS, check_integer, check_name

_LAST_POSITION = 1 << 62  # the messages' integers are 64 bits wide


@dataclass(eq=False)
class Consumer:
    """One connection.

    Attributes:
        name, rank: its member, and its rank there.
        local_world: how many of the member's ranks read this feeder.
        is_counted: whether what it releases counts for its member.
        words: what it says of itself (`pipelines.shm.words`); None before it has a place in the stream.
        released, want: of its words, at the last look: all positions below are released; it waits, or has waited,
            until all positions below are ready.
        last_heard: when it last sent a message or had released more (time.monotonic).
    """

    connection: socket.socket
    name: str = ""
    rank: int = 0
    local_world: int = 1
    is_counted: bool = False
    words: memoryview | None = None
    released: int = 0
    want: int = 0
    last_heard: float = field(default_factory=time.monotonic)

    @property
    def is_admitted(self) -> bool:
        """Whether it has a place in the stream."""
        return self.words is not None


class Hello(NamedTuple):
    """The first message of a consumer: who it is, and which part of the stream it reads.

    Attributes:
        name, rank, local_world: as of the `Consumer`.
        batch_size: samples in the global batch.
        place: place of the first sample in that epoch.
        epochs: how many epochs it reads.
    """

    name: str
    rank: int
    local_world: int
    batch_size: int
    first_epoch: int | None
    place: int
    epochs: int

    @classmethod
    def parse(cls, request: dict[str, Any], n: int) -> Hello:
        """Parse the message of a consumer of a pipeline with n samples."""
        last, first = _LAST_POSITION // n, request["first_epoch"]
        world = check_integer("world", request["world"], 1, MOST_RANKS)
        return cls(
            check_name("name", request["name"]),
            check_integer("rank", request["rank"], 0, world - 1, f" of world {world}"),
            check_integer("local_world", request.get("local_world") or world, 1, world),
            check_integer("batch_size", request["batch_size"], 1, _LAST_POSITION),
            None if first is None else check_integer("first_epoch", first, 0, last),
            check_integer("place", request["place"], 0, n),
            check_integer("epochs", request["epochs"], 0, last - (first or 0)),
        )
