"""Parses and checks the first message of a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.checks import MOST_RANKS, check_integer, check_name

# The messages' integers are 64 bits wide.
LAST_POSITION = 1 << 62


@dataclass(frozen=True)
class Hello:
    """A consumer's identity and the part of the stream that it reads.

    Attributes:
        name: name of its member.
        rank, world: its rank in the member, and how many ranks there are.
        local_world: how many of them read this feeder.
        batch_size: samples in the global batch.
        first_epoch: the first epoch; None leaves the choice to the feeder.
        place: place of the first sample in that epoch.
        epochs: how many epochs it reads.
    """

    name: str
    rank: int
    world: int
    local_world: int
    batch_size: int
    first_epoch: int | None
    place: int
    epochs: int

    @classmethod
    def parse(cls, request: Mapping[str, Any], n: int) -> Hello:
        """Parse the message of a consumer of a pipeline with n samples.

        Raises:
            PipelineError: a value is out of range.
            KeyError: a field is missing.
        """
        last = LAST_POSITION // n
        world = check_integer("world", request["world"], 1, MOST_RANKS)
        first = request["first_epoch"]
        if first is not None:
            first = check_integer("first_epoch", first, 0, last)
        return cls(
            name=check_name("name", request["name"]),
            rank=check_integer("rank", request["rank"], 0, world - 1, f" of world {world}"),
            world=world,
            local_world=check_integer("local_world", request.get("local_world") or world, 1, world),
            batch_size=check_integer("batch_size", request["batch_size"], 1, LAST_POSITION),
            first_epoch=first,
            place=check_integer("place", request["place"], 0, n),
            epochs=check_integer("epochs", request["epochs"], 0, last - (first or 0)),
        )
