"""Finds which workers of a member are lost after a collective has failed.

Every rank writes its process's location into the store by which the ranks met. After a failure each survivor
reports there that it is **alive** and waits a short *grace* for the others; of a rank on the same machine /proc
shows that its process has ended.
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
_POLL_S = 0.02

PeerStatus = Literal["ended", "stopped", "left", "silent"]
_DESCRIPTIONS: dict[PeerStatus, str] = {
    "ended": "has ended",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "left": "has left",
    "silent": "does not answer",
}


@dataclass(frozen=True)
class ProcessLocation:
    """The process of a rank.

    Attributes:
        host: the machine's name.
        pid: in the process's own PID namespace.
        machine: equal for two ranks whose processes see each other in /proc.
        started: start time in clock ticks since boot; distinguishes the process from a later one with the same
            pid.
    """

    host: str
    pid: int
    machine: str
    started: str | None


@dataclass(frozen=True)
class MissingPeer:
    """A rank that did not report, its status, and its location (None: it never met the others)."""

    rank: int
    status: PeerStatus
    location: ProcessLocation | None

    def __str__(self) -> str:
        place = "never came" if self.location is None else f"pid {self.location.pid} on {self.location.host}"
        return f"rank {self.rank} ({place}) {_DESCRIPTIONS[self.status]}"


def current_location() -> ProcessLocation:
    """The location of this process."""
    pid = os.getpid()
    return ProcessLocation(socket.gethostname(), pid, machine_key(), _stat(pid)[1])


def _stat(pid: int) -> tuple[str | None, str | None]:
    """A process's state letter and start time; None where there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None, None
    return fields[0], fields[19]


def peer_status(place: ProcessLocation, own: ProcessLocation) -> PeerStatus:
    """The status of a rank that has not reported, from the process table; "silent" on another machine."""
    if place.started is None or place.machine != own.machine:
        return "silent"
    state, started = _stat(place.pid)
    if started != place.started or state in ("Z", "X", "x"):
        return "ended"
    return "stopped" if state in ("T", "t") else "silent"


def lost_ranks(missing: Sequence[MissingPeer]) -> tuple[int, ...]:
    """The ranks known to be gone; where there are none, those that did not answer.

    A rank in the middle of a long computation does not answer either: it is not lost if another is known to be.
    """
    gone = [peer.rank for peer in missing if peer.status != "silent"]
    return tuple(gone or [peer.rank for peer in missing])


class PeerFailureDetector:
    """Meets the other ranks at the start, and finds the lost ones after a failure.

    Every rank of a group makes one on its own store of the same file. It calls `meet` once, and `make_error` when
    a collective has failed, after which the group is given up. Several threads may use it.

    Examples:
        >>> import tempfile, torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mkdtemp() + "/meet", 1)
        >>> detector = PeerFailureDetector(store, rank=0, world=1)
        >>> detector.meet(timeout_s=5.0)
        >>> detector.find_missing()
        []

    Args:
        store: of torch.distributed, the same for all ranks (`set`, `get`, `check` and `wait` are used).
        rank, world: of this rank, and the number of ranks.
        grace_s: how long to wait for the reports of the others, seconds.
    """

    def __init__(self, store: Any, rank: int, world: int, *, grace_s: float = GRACE_S) -> None:
        self._store, self.rank, self.world, self.grace_s = store, rank, world, grace_s
        self._own = current_location()
        self._lock = threading.Lock()
        self._missing: list[MissingPeer] | None = None

    def meet(self, timeout_s: float, place: str = "the rendezvous") -> None:
        """Write this rank's location and wait until all ranks have written theirs.

        Raises:
            CommunicatorError: some ranks did not, which it names.
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
        """Report that this rank leaves normally, for peers that still wait for it."""
        self._store.set(f"left/{self.rank}", b"1")

    def report_alive(self) -> None:
        """Report that this rank is alive and has given up the group."""
        self._store.set(f"signed/{self.rank}", b"1")

    def find_missing(self) -> list[MissingPeer]:
        """Report, wait for the others, and return the missing ranks; later calls return the same."""
        with self._lock:
            if self._missing is None:
                self.report_alive()
                self._missing = self._wait_for_peers()
            return self._missing

    def make_error(self, what: str, cause: BaseException | str) -> CommunicatorError:
        """Find the lost ranks and return the error to raise.

        Args:
            what: the collective that failed, such as "all-reduce".
            cause: the error of the backend.
        """
        missing = self.find_missing()
        line = next(iter(str(cause).splitlines()), "")
        if not missing:
            return CommunicatorError(
                f"{what} failed, though all {self.world} workers of this member answer: the network between them "
                f"failed, or one of them took longer than the time limit ({line})"
            )
        culprits = lost_ranks(missing)
        named = "; ".join(str(peer) for peer in missing if peer.rank in culprits)
        return CommunicatorError(
            f"{what} failed, another worker of this member is lost: {named} ({line})", culprits
        )

    def _wait_for_peers(self) -> list[MissingPeer]:
        until = time.monotonic() + self.grace_s
        waiting = [peer for peer in range(self.world) if peer != self.rank]
        while True:
            waiting = [peer for peer in waiting if not self._store.check([f"signed/{peer}"])]
            missing = [self._inspect(peer) for peer in waiting]
            if (
                not missing
                or any(status_of.status != "silent" for status_of in missing)
                or time.monotonic() >= until
            ):
                return missing  # a rank known to be gone explains the failure: busy ones need not be awaited
            time.sleep(_POLL_S)

    def _inspect(self, peer: int) -> MissingPeer:
        if not self._store.check([f"here/{peer}"]):
            return MissingPeer(peer, "silent", None)
        location = ProcessLocation(**json.loads(self._store.get(f"here/{peer}")))
        status = peer_status(location, self._own)
        if status == "silent" and self._store.check([f"left/{peer}"]):
            status = "left"
        return MissingPeer(peer, status, location)
