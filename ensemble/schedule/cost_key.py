"""What of a member decides the cost of its steps, as far as that is seen without building its network."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ensemble.spec.identity import Identity
from ensemble.spec.options import OPTIMIZERS, SCHEDULES

_OPTIONS = frozenset(name for table in (OPTIMIZERS, SCHEDULES) for known in table.values() for name in known)


def outline(identity: Identity) -> str:
    """A digest: members that have it in common differ in nothing that a step's cost could depend on."""
    width = None if "workers" in identity.auto else identity.workers
    return digest([hyperparameters(identity), words(identity), width])


def hyperparameters(identity: Identity) -> dict[str, Any]:
    """Those that may decide it; of options of an optimizer or a schedule (`lr`), only whether they are 0."""
    return {name: plain(value) if name in _OPTIONS else value for name, value in identity.params.items()}


def words(identity: Identity) -> dict[str, Any]:
    """What decides it besides hyperparameters and the number of workers."""
    named = ("batch_size", "precision", "accumulate", "threads")
    chosen = {name: getattr(identity, name) for name in named}
    chosen["weighted"] = identity.weights is not None
    chosen["optimizer"] = {name: plain(value) for name, value in (identity.optimizer or {}).items()}
    if identity.workers > 1 or "workers" in identity.auto:
        chosen |= {"compression": identity.compression, "communicator": identity.communicator}
    return chosen


def plain(value: Any) -> Any:
    """An option as far as it decides what a step costs: of a number, whether it is 0."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value == 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def digest(value: Any) -> str:
    """A short name for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
