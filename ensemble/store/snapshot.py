"""Reads the status of a run from a snapshot of its state and the end of its log, and writes that snapshot.

A `RunStatus` is the fold of the log with less: of members that have ended for good not their epochs one by one,
of none its plan or checkpoint. The snapshot is a cache of it: a line of JSON (version, offset in the log,
digests), then MessagePack.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging

import msgspec

from ensemble.events import Epoch
from ensemble.meter import LedgerView
from ensemble.store.event_handlers import apply_event
from ensemble.store.files import StoreError, write_bytes
from ensemble.store.folding import EVENT_ERRORS, make_event_error, without_garbage_collection
from ensemble.store.follower import LogFollower, LogReplacedError
from ensemble.store.member import UnknownEpochsError
from ensemble.store.rundir import RunDir
from ensemble.store.state import RunState

VERSION = 15

#: Bytes at the end of what a snapshot has seen that tell whether it belongs to a log.
TAIL_BYTES = 2**16
#: Bytes that a log grows by, at least, before another snapshot is worth its while; a tenth of a second to fold.
GROWN_BYTES = 4 * 2**20

#: Members of which no more epochs will come, whoever goes on with the run.
CLOSED = frozenset(("finished", "pruned", "cancelled"))
#: Of a member's identity.
IDENTITY = (
    "params",
    "seed",
    "epochs",
    "workers",
    "cpus_per_worker",
    "gpus_per_worker",
    "first_epoch",
    "lineage",
    "population",
)

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct):
    state: RunState
    used: LedgerView


_DECODER = msgspec.msgpack.Decoder(_Kept)


class RunStatus:
    """The present state of the run in a directory, from its snapshot, if there is one, and the log.

    Attributes:
        state: as `fold` has it, but for what is left out; of the present log, also where it has replaced another.
        used: what was used.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._reset()

    def _reset(self) -> None:
        self.state, self.used = RunState(), LedgerView()
        self._log, self._kept_at, self._kept_bytes = LogFollower(self._run_dir), 0, 0

    @property
    def offset(self) -> int:
        """Bytes of the log that it has seen."""
        return self._log.offset

    @classmethod
    def load(cls, run_dir: RunDir) -> RunStatus:
        """Reads the present status of a run.

        Raises:
            StoreError: there is no run, or its log is unreadable.
        """
        status = cls(run_dir)
        with without_garbage_collection():
            status._load_snapshot()
            status.update()
        return status

    def update(self) -> None:
        """Applies what is new in the log.

        Raises:
            StoreError: there is no run, or its log is unreadable.
        """
        try:
            self._fold_new_events()
        except (UnknownEpochsError, LogReplacedError):
            # A member that had ended goes back to an epoch that is left out here; or it is another log.
            self._reset()
            self._fold_new_events()
        except StoreError:  # part of a batch may have been applied
            self._reset()
            raise

    def _fold_new_events(self) -> None:
        for events, _ in self._log.read():
            for event in events:
                try:
                    self.used.apply(event)
                    apply_event(self.state, _shorten(event) if isinstance(event, Epoch) else event)
                except EVENT_ERRORS as error:
                    raise make_event_error(event, error) from error
            self.state.finished.clear()

    def read_used(self) -> LedgerView:
        """What was used, up to the present end of the log.

        Raises:
            StoreError: the log is unreadable.
        """
        if not self.offset:
            self._load_snapshot()
        self.update()
        return self.used

    # -- the snapshot ---------------------------------------------------------------------------------------------

    def save_if_grown(self) -> None:
        """Writes the snapshot again if the log has grown enough; only the controller calls it.

        Raises:
            StoreError: the log is unreadable, or the snapshot cannot be written.
        """
        size = self._run_dir.events.stat().st_size
        if size - self._kept_at < max(GROWN_BYTES, self._kept_bytes):
            return
        self.read_used()
        for member in self.state.members.values():
            member.identity = {name: member.identity[name] for name in IDENTITY if name in member.identity}
            if member.state in CLOSED:
                member.drop_epochs()
            if member.result is not None:
                member.result.drop_epochs()
        body = msgspec.msgpack.encode(_Kept(_leave_out_hidden(self.state), self.used))
        head = {
            "v": VERSION,
            "offset": self.offset,
            "tail": self._digest_tail(self.offset),
            "sha256": _digest(body),
        }
        write_bytes(self._run_dir.snapshot, json.dumps(head).encode() + b"\n" + body)
        self._kept_at, self._kept_bytes = self.offset, len(body)

    def _load_snapshot(self) -> None:
        """Starts from the snapshot, if there is a valid one of this log."""
        try:
            with open(self._run_dir.snapshot, "rb") as file:
                head, body = json.loads(file.readline()), file.read()
            is_valid = head["v"] == VERSION and head["sha256"] == _digest(body)
            if not is_valid or head["tail"] != self._digest_tail(head["offset"]):
                return
            kept = _DECODER.decode(body)
            self.state, self.used = kept.state, kept.used
            self._kept_at = head["offset"]
            self._log = LogFollower(self._run_dir, self._kept_at)
            self._kept_bytes = len(body)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.debug("%s is not used: %s", self._run_dir.snapshot, error)
            self._reset()

    def _digest_tail(self, offset: int) -> str:
        """A digest of the last bytes of the log before an offset, and of how many there are."""
        with open(self._run_dir.events, "rb") as file:
            first = file.read(TAIL_BYTES // 16)[:offset]
            file.seek(max(0, offset - TAIL_BYTES))
            return _digest(b"%d " % offset + first + file.read(min(offset, TAIL_BYTES)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _shorten(epoch: Epoch) -> Epoch:
    """An epoch with what a status shows of it."""
    return Epoch(
        t=epoch.t,
        member=epoch.member,
        attempt=epoch.attempt,
        epoch=epoch.epoch,
        metrics=epoch.metrics,
        samples=epoch.samples,
        samples_per_s=epoch.samples_per_s,
        wall_s=epoch.wall_s,
    )


def _leave_out_hidden(state: RunState) -> RunState:
    """The state without what no status shows."""
    members = {
        name: dataclasses.replace(member, plan=None, checkpoint=None, checkpoint_before=None, weights_sha256=None)
        for name, member in state.members.items()
    }
    return dataclasses.replace(
        state,
        members=members,
        files={},
        finished={},
        profiles={},
        planned=None,
        memory_increases=[],
    )
