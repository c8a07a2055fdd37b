"""What a consumer says when it comes: checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines import checks

# The messages' integers are 64 bits wide.
LAST_POSITION = 1 << 62


@dataclass(frozen=True)
class Hello:
    """Who comes, and what it is to read.

    Attributes:
        name: of its member; rank and world: which of the member's ranks it is.
        batch_size: of the global batch.
        first_epoch: where it begins; None leaves that to the feeder.
        place: in that epoch, of the first sample.
        epochs: how many it reads.
    """

    name: str
    rank: int
    world: int
    batch_size: int
    first_epoch: int | None
    place: int
    epochs: int

    @classmethod
    def of(cls, said: Mapping[str, Any], n: int) -> Hello:
        """The hello of a consumer of epochs of n samples.

        Raises:
            PipelineError: it says what cannot be.
            KeyError: it does not say all.
        """
        last = LAST_POSITION // n
        world = checks.integer("world", said["world"], 1, checks.MOST_RANKS)
        first = said["first_epoch"]
        if first is not None:
            first = checks.integer("first_epoch", first, 0, last)
        return cls(
            name=checks.name("name", said["name"]),
            rank=checks.integer("rank", said["rank"], 0, world - 1, f" of world {world}"),
            world=world,
            batch_size=checks.integer("batch_size", said["batch_size"], 1, LAST_POSITION),
            first_epoch=first,
            place=checks.integer("place", said["place"], 0, n),
            epochs=checks.integer("epochs", said["epochs"], 0, last - (first or 0)),
        )
