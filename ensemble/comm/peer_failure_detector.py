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

Fate = Literal["ended", "stopped", "left", "silent"]
_WORDS: dict[Fate, str] = {
    "ended": "has ended",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "left": "has left",
    "silent": "does not answer",
}


@dataclass(frozen=True)
class Whereabouts:
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
class Missing:
    """A rank that did not sign, what is known of it, and where it ran (None: it never came)."""

    rank: int
    fate: Fate
    where: Whereabouts | None

    def __str__(self) -> str:
        place = "never came" if self.where is None else f"pid {self.where.pid} on {self.where.host}"
        return f"rank {self.rank} ({place}) {_WORDS[self.fate]}"


def here() -> Whereabouts:
    """Where this process runs."""
    pid = os.getpid()
    return Whereabouts(socket.gethostname(), pid, machine_key(), _stat(pid)[1])


def _stat(pid: int) -> tuple[str | None, str | None]:
    """A process's state letter and start time; None where there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None, None
    return fields[0], fields[19]


def fate(place: Whereabouts, own: Whereabouts) -> Fate:
    """What the process table knows of a rank that has not signed; "silent" where it is another machine's."""
    if place.started is None or place.machine != own.machine:
        return "silent"
    state, started = _stat(place.pid)
    if started != place.started or state in ("Z", "X", "x"):
        return "ended"
    return "stopped" if state in ("T", "t") else "silent"


def lost(missing: Sequence[Missing]) -> tuple[int, ...]:
    """The ranks that are to blame: those known to be gone; where there are none, those that did not answer.

    A rank in the middle of a long computation does not answer either: it is not lost where another is known to be.
    """
    known = [each.rank for each in missing if each.fate != "silent"]
    return tuple(known or [each.rank for each in missing])


class RollCall:
    """One rank's part in meeting the others, and in finding out who is lost.

    Every rank of a group makes one on a store of its own of the same file, calls `meet` once, and `error` when a
    collective has failed. A roll is called once in the life of a group: it is not used again after a failure.
    May be called from several threads.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mkdtemp() + "/meet", 1)
        >>> roll = RollCall(store, rank=0, world=1)
        >>> roll.meet(timeout_s=5.0)
        >>> roll.missing()
        []

    Args:
        store: of torch.distributed, the same for all ranks (`set`, `get`, `check` and `wait` are used).
        rank, world: of all ranks.
        grace_s: how long to wait for the signatures of the others.
    """

    def __init__(self, store: Any, rank: int, world: int, *, grace_s: float = GRACE_S) -> None:
        self._store, self.rank, self.world, self.grace_s = store, rank, world, grace_s
        self._own = here()
        self._lock = threading.Lock()
        self._missing: list[Missing] | None = None

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

    def sign(self) -> None:
        """Say that this rank is there, and has given up the group."""
        self._store.set(f"signed/{self.rank}", b"1")

    def missing(self) -> list[Missing]:
        """Sign, wait for the others, and say who is missing; the first answer stays."""
        with self._lock:
            if self._missing is None:
                self.sign()
                self._missing = self._wait()
            return self._missing

    def error(self, what: str, cause: BaseException | str) -> CommunicatorError:
        """Call the roll and make of it the error to raise.

        Args:
            what: failed, such as "all-reduce".
            cause: what the backend said.
        """
        missing = self.missing()
        said = next(iter(str(cause).splitlines()), "")
        if not missing:
            return CommunicatorError(
                f"{what} failed, though all {self.world} workers of this member answer: the network between them "
                f"failed, or one of them took longer than the time limit ({said})"
            )
        culprits = lost(missing)
        named = "; ".join(str(each) for each in missing if each.rank in culprits)
        return CommunicatorError(
            f"{what} failed, another worker of this member is lost: {named} ({said})", culprits
        )

    def _wait(self) -> list[Missing]:
        until = time.monotonic() + self.grace_s
        waiting = [peer for peer in range(self.world) if peer != self.rank]
        while True:
            waiting = [peer for peer in waiting if not self._store.check([f"signed/{peer}"])]
            missing = [self._look(peer) for peer in waiting]
            if not missing or any(each.fate != "silent" for each in missing) or time.monotonic() >= until:
                return missing  # who is known to be gone explains it: no need to wait for those that are busy
            time.sleep(_LOOK_EVERY_S)

    def _look(self, peer: int) -> Missing:
        if not self._store.check([f"here/{peer}"]):
            return Missing(peer, "silent", None)
        where = Whereabouts(**json.loads(self._store.get(f"here/{peer}")))
        seen = fate(where, self._own)
        if seen == "silent" and self._store.check([f"left/{peer}"]):
            seen = "left"
        return Missing(peer, seen, where)
