"""Who of a member's workers is lost: a roll call in the store that they met by.

A failed collective says that something is wrong, not who it is: a broken connection names an address, a time
limit nobody at all, and one lost worker breaks the connections of all the others one after the other. So every
rank leaves in the store where it runs, and after a failure every survivor **signs** there and waits a short
*grace* for the others. Who does not sign is lost. Where a rank runs on the same machine as the one that asks, the
process table (proc_pid_stat(5)) says more, and at once: that its process has ended, or is stopped.

The store is any of torch.distributed's; nothing here needs a process group, so every backend can use it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from ensemble.comm.communicator import CommunicatorError
from ensemble.comm.hosts import machine_key

#: How long the survivors wait for each other, seconds.
GRACE_S = 2.0
_LOOK_EVERY_S = 0.02

PeerStatus = Literal["ended", "stopped", "left", "silent"]
_WORDS: dict[PeerStatus, str] = {
    "ended": "has ended",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "left": "has left",
    "silent": "does not answer",
}


@dataclass(frozen=True)
class ProcessLocation:
    """Where a rank runs.

    Attributes:
        host: the machine's name.  pid: there, as its own PID namespace counts.
        machine: the same for two ranks whose processes see each other in /proc.
        started: when the process began, in clock ticks since boot; tells a process from a later one of its number.
    """

    host: str
    pid: int
    machine: str
    started: str | None


@dataclass(frozen=True)
class MissingPeer:
    """A rank that did not sign, what is known of it, and where it ran (None: it never came)."""

    rank: int
    peer_status: PeerStatus
    where: ProcessLocation | None

    def __str__(self) -> str:
        place = "never came" if self.where is None else f"pid {self.where.pid} on {self.where.host}"
        return f"rank {self.rank} ({place}) {_WORDS[self.peer_status]}"


def current_location() -> ProcessLocation:
    """Where this process runs."""
    pid = os.getpid()
    return ProcessLocation(socket.gethostname(), pid, machine_key(), _stat(pid)[1])


def _stat(pid: int) -> tuple[str | None, str | None]:
    """A process's state letter and start time; None where there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None, None
    return fields[0], fields[19]


def peer_status(place: ProcessLocation, own: ProcessLocation) -> PeerStatus:
    """What the process table knows of a rank that has not signed; "silent" where it is another machine's."""
    if place.started is None or place.machine != own.machine:
        return "silent"
    state, started = _stat(place.pid)
    if started != place.started or state in ("Z", "X", "x"):
        return "ended"
    return "stopped" if state in ("T", "t") else "silent"


def lost_ranks(missing: Sequence[MissingPeer]) -> tuple[int, ...]:
    """The ranks that are to blame: those known to be gone; where there are none, those that did not answer.

    A rank in the middle of a long computation does not answer either: it is not lost where another is known to be.
    """
    known = [each.rank for each in missing if each.peer_status != "silent"]
    return tuple(known or [each.rank for each in missing])


class PeerFailureDetector:
    """One rank's part in meeting the others, and in finding out who is lost.

    Every rank of a group makes one on a store of its own of the same file, calls `meet` once, and `make_error`
    when a collective has failed. A roll is called once in the life of a group: it is not used again after a
    failure. May be called from several threads.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mkdtemp() + "/meet", 1)
        >>> detector = PeerFailureDetector(store, rank=0, world=1)
        >>> detector.meet(timeout_s=5.0)
        >>> detector.find_missing()
        []

    Args:
        store: of torch.distributed, the same for all ranks (`set`, `get`, `check` and `wait` are used).
        rank, world: of all ranks.
        grace_s: how long to wait for the signatures of the others.
    """

    def __init__(self, store: Any, rank: int, world: int, *, grace_s: float = GRACE_S) -> None:
        self._store, self.rank, self.world, self.grace_s = store, rank, world, grace_s
        self._own = current_location()
        self._lock = threading.Lock()
        self._missing: list[MissingPeer] | None = None

    def meet(self, timeout_s: float, place: str = "the rendezvous") -> None:
        """Sign in with this rank's whereabouts and wait until all have.

        Raises:
            CommunicatorError: not all came; names those that did not.
        """
        self._store.set(f"here/{self.rank}", json.dumps(asdict(self._own)))
        try:
            self._store.wait([f"here/{peer}" for peer in range(self.world)], timedelta(seconds=timeout_s))
        except RuntimeError:
            absent = [peer for peer in range(self.world) if not self._store.check([f"here/{peer}"])]
            raise CommunicatorError(
                f"rank {self.rank} waited {timeout_s:g} s at {place} for the other workers of its member; "
                f"missing ranks: {', '.join(map(str, absent)) or 'none, they came too late'}",
                absent,
            ) from None

    def leave(self) -> None:
        """Say that this rank goes in good order, so that peers that still wait for it know."""
        self._store.set(f"left/{self.rank}", b"1")

    def report_alive(self) -> None:
        """Say that this rank is there, and has given up the group."""
        self._store.set(f"signed/{self.rank}", b"1")

    def find_missing(self) -> list[MissingPeer]:
        """Sign, wait for the others, and say who is missing; the first answer stays."""
        with self._lock:
            if self._missing is None:
                self.report_alive()
                self._missing = self._wait_for_peers()
            return self._missing

    def make_error(self, what: str, cause: BaseException | str) -> CommunicatorError:
        """Call the roll and make of it the error to raise.

        Args:
            what: failed, such as "all-reduce".
            cause: what the backend said.
        """
        missing = self.find_missing()
        said = next(iter(str(cause).splitlines()), "")
        if not missing:
            return CommunicatorError(
                f"{what} failed, though all {self.world} workers of this member answer: the network between them "
                f"failed, or one of them took longer than the time limit ({said})"
            )
        culprits = lost_ranks(missing)
        named = "; ".join(str(each) for each in missing if each.rank in culprits)
        return CommunicatorError(
            f"{what} failed, another worker of this member is lost: {named} ({said})", culprits
        )

    def _wait_for_peers(self) -> list[MissingPeer]:
        until = time.monotonic() + self.grace_s
        waiting = [peer for peer in range(self.world) if peer != self.rank]
        while True:
            waiting = [peer for peer in waiting if not self._store.check([f"signed/{peer}"])]
            missing = [self._inspect(peer) for peer in waiting]
            if not missing or any(each.peer_status != "silent" for each in missing) or time.monotonic() >= until:
                return missing  # who is known to be gone explains it: no need to wait for those that are busy
            time.sleep(_LOOK_EVERY_S)

    def _inspect(self, peer: int) -> MissingPeer:
        if not self._store.check([f"here/{peer}"]):
            return MissingPeer(peer, "silent", None)
        where = ProcessLocation(**json.loads(self._store.get(f"here/{peer}")))
        seen = peer_status(where, self._own)
        if seen == "silent" and self._store.check([f"left/{peer}"]):
            seen = "left"
        return MissingPeer(peer, seen, where)
