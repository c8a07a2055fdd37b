"""Computes the cost key of a member: a digest of everything that its step cost can depend on.

The key is computed from the declaration alone, without building the network. The log calls it `outline`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ensemble.spec.identity import Identity
from ensemble.spec.options import OPTIMIZERS, SCHEDULES

_OPTIONS = frozenset(name for table in (OPTIMIZERS, SCHEDULES) for known in table.values() for name in known)


def compute_cost_key(identity: Identity) -> str:
    """A digest of everything that the cost of a step can depend on: members with equal keys have equal costs."""
    width = None if "workers" in identity.auto else identity.workers
    return hash_json([select_hyperparameters(identity), cost_options(identity), width])


def select_hyperparameters(identity: Identity) -> dict[str, Any]:
    """Hyperparameters that may affect the cost; options of an optimizer or a schedule (`lr`) are masked."""
    return {name: mask_magnitude(value) if name in _OPTIONS else value for name, value in identity.params.items()}


def cost_options(identity: Identity) -> dict[str, Any]:
    """Options of a member, besides hyperparameters and workers, that affect the cost."""
    named = ("batch_size", "precision", "accumulate", "threads")
    chosen = {name: getattr(identity, name) for name in named}
    chosen["weighted"] = identity.weights is not None
    chosen["optimizer"] = {name: mask_magnitude(value) for name, value in (identity.optimizer or {}).items()}
    if identity.workers > 1 or "workers" in identity.auto:
        chosen |= {"compression": identity.compression, "communicator": identity.communicator}
    return chosen


def mask_magnitude(value: Any) -> Any:
    """The value with each number replaced by whether it is 0: its magnitude does not affect the cost."""
    if isinstance(value, tuple | list):
        return [mask_magnitude(item) for item in value]
    return value == 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def hash_json(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
