"""Members and nodes of the tests of packing and placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ensemble.schedule import Node
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
