"""Members and nodes of the tests of packing, placement and flotillas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ensemble.schedule.flotilla.model import RatedMember
from ensemble.schedule.needs import Node
from ensemble.spec import Identity


def identity(number: int = 0, **options: Any) -> Identity:
    """A member of one worker that asks for a core, unless an option says otherwise."""
    plain = {"params": {}, "seed": 0, "threads": 1, "precision": "fp32", "epochs": 1, "batch_size": 8}
    asked = {"workers": 1, "cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "memory_gb": None}
    return Identity(member=f"member-{number}", number=number, **{**plain, **asked, **options})


def node(
    name: str = "a", cpus: float = 4, gpus: Sequence[str] = (), memory_gb: float = 16, places: int | None = None
) -> Node:
    """A node with a GPU for each name of a model."""
    return Node(name, cpus, tuple(gpus), memory_gb, name, places)


def rated(rng: random.Random, number: int, most_workers: int, epochs: int, fixed: bool = False) -> RatedMember:
    """Rates spread over a factor of 16; the efficiency of w workers is 1 / (1 + a(w - 1)), a up to 0.3."""
    alone, loss = 1000 * 2 ** rng.uniform(-2, 2), rng.uniform(0.0, 0.3)
    measured = {w: alone * w / (1 + loss * (w - 1)) for w in range(1, most_workers + 1)}
    workers = rng.randint(1, most_workers) if fixed else None
    return RatedMember(member=f"member-{number}", samples_per_s=measured, epochs=epochs, workers=workers)
