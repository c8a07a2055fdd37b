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
    """A digest: members that have it in common differ in nothing that a step's cost could depend on."""
    width = None if "workers" in identity.auto else identity.workers
    return hash_json([select_hyperparameters(identity), cost_options(identity), width])


def select_hyperparameters(identity: Identity) -> dict[str, Any]:
    """Those that may decide it; of options of an optimizer or a schedule (`lr`), only whether they are 0."""
    return {name: mask_magnitude(value) if name in _OPTIONS else value for name, value in identity.params.items()}


def cost_options(identity: Identity) -> dict[str, Any]:
    """What decides it besides hyperparameters and the number of workers."""
    named = ("batch_size", "precision", "accumulate", "threads")
    chosen = {name: getattr(identity, name) for name in named}
    chosen["weighted"] = identity.weights is not None
    chosen["optimizer"] = {name: mask_magnitude(value) for name, value in (identity.optimizer or {}).items()}
    if identity.workers > 1 or "workers" in identity.auto:
        chosen |= {"compression": identity.compression, "communicator": identity.communicator}
    return chosen


def mask_magnitude(value: Any) -> Any:
    """An option as far as it decides what a step costs: of a number, whether it is 0."""
    if isinstance(value, tuple | list):
        return [mask_magnitude(item) for item in value]
    return value == 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def hash_json(value: Any) -> str:
    """A short name for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
