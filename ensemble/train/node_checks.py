"""What members do once on a node: they ask its checker to compare samples that they were served
(docs/decisions/0042), and let one of them do first what the others then need not do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pipelines.ipc import messages
from pipelines.verification.checker import ServedSample
from pipelines.verification.compare import CheckResult

#: The variable that names a node's directory to the processes of its members.
NODE_DIRECTORY = "ENSEMBLE_NODE_DIRECTORY"
#: The checker's name, as that of a member in the run directory.
CHECKER = "checker"
#: Seconds for which members of a node wait for the first one.
FIRST_S = 120.0
_WAIT_S = 1.0
_SILENT: set[Path] = set()  # addresses at which nobody has answered in time


def make_checker_address(directory: Path) -> Path:
    """Where the checker of a node listens, in the node's directory."""
    return directory / CHECKER


class NodeChecks:
    """The comparisons of one member and one set, for `pipelines.verification.reader.Verification`.

    Where no checker answers, samples are left out.

    Args:
        is_exact: whether bytes must be equal.
        limit_s: how long a comparison may take; after that nothing is compared any more on this node.
        on_wait: called every second meanwhile; what it raises ends the waiting.
    """

    def __init__(
        self,
        address: Path,
        split: str,
        params: Mapping[str, Any],
        *,
        is_exact: bool,
        limit_s: float,
        on_wait: Callable[[], None] | None,
    ) -> None:
        self._address, self._limit_s, self._on_wait = address, limit_s, on_wait
        self._about = {"split": split, "params": dict(params), "is_exact": is_exact}

    def check(self, served: ServedSample) -> CheckResult:
        """Compares one sample."""
        if self._address in _SILENT:
            return CheckResult(kind="left_out", detail="no checker answers")
        # As it is now: the member's own code may have changed it since its process was started.
        packed = served.pack({**self._about, "environment": dict(os.environ)})
        memory = os.memfd_create("served", os.MFD_CLOEXEC)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(packed)
            return self._ask(memory)
        except (OSError, messages.ConnectionLost) as error:
            return CheckResult(kind="left_out", detail=f"the checker does not answer: {error}")
        finally:
            os.close(memory)

    def _ask(self, memory: int) -> CheckResult:
        # Within one limit it ends itself, unless it is stopped, or has others to serve.
        until = time.monotonic() + 2 * self._limit_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(self._address))
            connection.settimeout(_WAIT_S)
            messages.send(connection, messages.pack("check", limit_s=self._limit_s), memory)
            while True:
                try:
                    message = messages.receive(connection)
                except TimeoutError:
                    if self._on_wait is not None:
                        self._on_wait()
                    if time.monotonic() > until:
                        _SILENT.add(self._address)
                        return CheckResult(kind="left_out", detail=f"no result within {2 * self._limit_s:g} s")
                    continue
                try:
                    return CheckResult.from_record(messages.unpack(message)["found"])
                except (ValueError, KeyError, TypeError) as error:
                    return CheckResult(kind="left_out", detail=f"the checker's answer cannot be read: {error!r}")


@contextlib.contextmanager
def first_on_node(
    what: str,
    limit_s: float = FIRST_S,
    *,
    counts_failure: bool = False,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[bool]:
    """Yield whether no member of this node has run the block `what` yet. Others wait while the first one does: no
    more than that once, not when its process is gone (flock(2)), and not for ever.

    Args:
        counts_failure: whether the block has run also where it has raised.
        on_wait: called again and again while others are waited for.
    """
    directory = os.environ.get(NODE_DIRECTORY)
    if directory is None:
        yield True
        return
    with open(Path(directory, what), "ab", buffering=0) as file:  # empty until the block has run
        is_locked = _wait_for_lock(file, limit_s, on_wait)
        is_first = is_locked and not os.fstat(file.fileno()).st_size
        if is_locked and not is_first:
            fcntl.flock(file, fcntl.LOCK_UN)
        mark = b"." if counts_failure else b""
        try:
            yield is_first
            mark = b"."
        finally:
            if is_first:
                file.write(mark)
                fcntl.flock(file, fcntl.LOCK_UN)  # a process that the block has forked has the file, too


def _wait_for_lock(file: IO[bytes], limit_s: float, on_wait: Callable[[], None] | None) -> bool:
    """Whether the lock was got within so many seconds."""
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            if on_wait is not None:
                on_wait()
            time.sleep(0.02)
        else:
            return True
