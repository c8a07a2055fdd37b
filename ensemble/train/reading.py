"""What the members of a run read, as far as a resume must find it again.

A member that goes on with other data would be neither the one it was nor a new one. So the log and each checkpoint
say what was read, and a resume compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ensemble.spec import Ensemble


def training_data(ensemble: Ensemble) -> dict[str, Any]:
    """What decides the batches beside the members' identities; JSON values.

    `fingerprint` is the training pipeline's (source, seed, order, stages), None where that cannot be said surely;
    `samples` its length. Arrays without an `id=` are read once for it.
    """
    train = ensemble.train
    return {"fingerprint": train.fingerprint, "samples": len(train), "drop_last": ensemble.drop_last}


def unsure(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether only the lengths can be compared."""
    return before.get("fingerprint") is None or now["fingerprint"] is None


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What `training_data` says otherwise than before, for the user; None where nothing does."""
    for name, meaning in (("samples", "samples of train"), ("drop_last", "drop_last")):
        if name in before and before[name] != now[name]:
            return f"{meaning} was {before[name]}, is {now[name]}"
    if not unsure(before, now) and before["fingerprint"] != now["fingerprint"]:
        return (
            "the training pipeline is another one (its source, seed, shuffle or stages): "
            f"its fingerprint was {before['fingerprint']}, is {now['fingerprint']}"
        )
    return None
