"""What is kept of the checkpoints of members that have ended: `Ensemble.keep_checkpoints`.

What is to be kept is written to a file beside the checkpoint and logged (`checkpoint_reduced`); only then the
checkpoint is removed. What a killed controller has left undone, the next start does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ensemble.controller.actions import ReduceCheckpoint
from ensemble.events import NOT_COMBINED, Combined, Report
from ensemble.store import MemberState, RunDir, RunState, StoreError
from ensemble.store.regular_files import measure
from ensemble.store.snapshot import CLOSED

log = logging.getLogger(__name__)


def plan_reduction(member: MemberState, keep: str) -> ReduceCheckpoint | None:
    """What is to be taken out of the last checkpoint of a member that does not run; None: nothing.

    Args:
        keep: `Ensemble.keep_checkpoints`.
    """
    last = member.checkpoint
    if keep == "all" or last is None or member.state not in CLOSED:
        return None
    keeps_weights = keep == "weights" or member.state == "finished"  # which may be selected at the end
    if keeps_weights and member.has_weights_only:
        return None
    return ReduceCheckpoint(member.id, Path(last.path).name, last.digest, keeps_weights=keeps_weights)


def is_start_used_up(member: MemberState) -> bool:
    """Whether a member that went on from the whole state of another needs its copy of that no longer."""
    return member.state in CLOSED and bool((member.identity.get("lineage") or {}).get("whole"))


def name_weights(checkpoint: str) -> str:
    """The name of the file that has the weights alone of a checkpoint."""
    return f"{Path(checkpoint).stem}-weights.safetensors"


def list_unselected(members: Collection[MemberState], combined: Combined | None) -> list[MemberState]:
    """The finished members whose weights the run's combination does not need, nor those who look for the best one.

    Args:
        combined: the `combined` event; of one that has selected nobody all members are needed.
    """
    event = combined or NOT_COMBINED
    needed = {*event.members, event.best_member}
    if not event.members or event.failed:
        return []
    if event.method == "stack":  # it is fitted again to all of them where the ensemble is loaded
        needed.update(event.candidates or ())
    needed.update(member.id for member in members if member.outdated is not None)
    return [
        member
        for member in members
        if member.state == "finished" and member.checkpoint and member.id not in needed
    ]


def is_more_to_remove(state: RunState, keep: str) -> bool:
    """Whether a run that has ended keeps more of its checkpoints than it is to keep."""
    members = list(state.members.values())
    unselected = list_unselected(members, state.combined) if keep == "selected" else []
    return bool(unselected) or any(plan_reduction(member, keep) is not None for member in members)


class CheckpointReducer:
    """Takes out of checkpoints what is not to be kept, one by one, in a thread: they may have gigabytes."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[Report]] = []

    def add(self, action: ReduceCheckpoint) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending.append(self._thread.submit(self._reduce, action))

    def read(self) -> list[Report]:
        """What was done since the last call: `checkpoint_reduced` events, with `error` where it could not be."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        return [future.result() for future in done]

    def wait(self) -> list[Report]:
        """As `read`, when all has been done."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        return self.read()

    def close(self) -> None:
        """Do no more of it: a later start does."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        self._pending.clear()

    def _reduce(self, action: ReduceCheckpoint) -> Report:
        event: Report = {"type": "checkpoint_reduced", "member": action.member, "removed": action.name}
        path = self._run_dir.member(action.member) / action.name
        try:
            before = measure(path) or 0
            if not action.keeps_weights:
                return {**event, "path": None, "freed_bytes": before}
            from ensemble.train.checkpoint import keep_weights_only

            kept = path.with_name(name_weights(path.name))
            digest = keep_weights_only(path, kept, action.digest)
            return {**event, "path": str(kept), "digest": digest, "freed_bytes": before - kept.stat().st_size}
        except (StoreError, OSError) as error:  # the checkpoint stays as it is
            log.warning("%s: the state of the optimizer stays in its checkpoint: %s", action.member, error)
            return {**event, "error": str(error)}
