"""Where declared weights come from: `Member(start=...)` names a file, or a member of another run.

The run takes a copy when it declares the member (`ensemble.store.initial_weights`), which is then all that counts:
the file may change, and the other run go on. The digest of the weights is part of the member's identity.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.spec import Ensemble, Identity, unknown_name
from ensemble.spec.identity import is_same_start, select_warm
from ensemble.store import (
    MemberState,
    RunDir,
    RunState,
    StoreError,
    fold,
    keep_checkpoint,
    keep_weights,
    read_events,
)
from ensemble.store.initial_weights import KeptCheckpoint, digest_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The weights that a declaration names.

    Attributes:
        file: with them.
        logged: of a run's member: its last `checkpoint` event; None for a file.
    """

    file: Path
    logged: Mapping[str, Any] | None

    def keep(self, run_dir: RunDir) -> KeptCheckpoint:
        """Copy them into a run.

        Raises:
            StoreError: they cannot be read or copied.
        """
        if self.logged is None:
            return keep_weights(run_dir, self.file)
        return keep_checkpoint(run_dir, self.file, self.logged)

    def digest(self) -> str:
        """The digest of the weights as they are now."""
        known: str | None = None if self.logged is None else self.logged.get("weights_sha256")
        return known or digest_weights(self.file)


def find_start(start: str) -> Start:
    """The weights of `start`: a safetensors file, or RUN_DIR/MEMBER.

    Raises:
        StoreError: it is neither, or the member has no checkpoint.
    """
    path = Path(start).expanduser()
    if path.is_file():
        return Start(path, None)
    folder = path.parent.parent if path.parent.name == "members" else path.parent
    if RunDir(path).events.exists():
        raise StoreError(f"start={start!r} is a whole run: name one of its members, such as {start}/member-0")
    if not RunDir(folder).events.exists():
        raise StoreError(f"start={start!r} is neither a file of weights nor RUN_DIR/MEMBER")
    members = fold(read_events(RunDir(folder).events)).members
    if path.name not in members:
        raise StoreError(unknown_name(f"start={start!r}: {folder} has no member", path.name, list(members)))
    member = members[path.name]
    if member.checkpoint is None:
        raise StoreError(f"start={start!r}: {path.name} has no checkpoint yet ({member.state})")
    return Start(RunDir(folder).valid_checkpoint(member), member.checkpoint)


def describe_kept(lineage: Mapping[str, Any], kept: KeptCheckpoint) -> dict[str, Any]:
    """A lineage with what is known of the weights that were copied."""
    return {**lineage, **{name: getattr(kept, name) for name in ("epoch", "step", "weights_sha256")}}


def keep_start(run_dir: RunDir, identity: Identity, known: MemberState | None = None) -> Identity:
    """The identity with the digest of the weights that it is declared to start with, of which the run has a copy.

    Args:
        known: the member, where it was declared before. The copy that it has already stays.

    Raises:
        StoreError: there are no such weights.
    """
    lineage = select_warm(identity.lineage)
    if lineage is None or lineage["weights_sha256"] is not None:
        return identity
    recorded = None if known is None else select_warm(known.identity.get("lineage"))
    if recorded is not None and is_same_start(lineage, recorded):
        return dataclasses.replace(identity, lineage=recorded)
    kept = find_start(lineage["from"]).keep(run_dir)
    try:
        kept.give_to(run_dir, identity.member)
    except StoreError:
        kept.remove()
        raise
    return dataclasses.replace(identity, lineage=describe_kept(lineage, kept))


def check_starts(ensemble: Ensemble, state: RunState) -> None:
    """Check that there are the weights that members are declared to start with; warn where they have changed.

    Raises:
        StoreError: the message names the first member whose weights are missing.
    """
    for number in range(len(ensemble.members or ())):
        lineage = select_warm(ensemble.identify(number).lineage)
        known = state.members.get(f"member-{number}")
        recorded = None if known is None else select_warm(known.identity.get("lineage"))
        if lineage is None or (known is not None and known.state in ("finished", "pruned", "cancelled")):
            continue
        try:
            found = find_start(lineage["from"])
            changed = recorded is not None and found.digest() != recorded["weights_sha256"]
        except StoreError as error:
            if recorded is None:
                raise StoreError(f"members[{number}]: {error}") from None
            continue  # the run has its copy
        if changed:
            log.warning(
                "%s has other weights now than member-%d started with; the member goes on with the run's copy",
                lineage["from"],
                number,
            )
