"""The main program of a worker process, which trains one rank of a member.

It is run as `python -m ensemble.executors.worker_main --fd N`, or forked. N is an inherited socket: one JSON line
with the job arrives first, then commands. Events are sent, one JSON line each, the last of them `exited` with the
outcome. Standard output and error are the member's log.

The process never outlives the executor: a thread waits on the socket and on the executor's process
(pidfd_open(2)), and kills the process group when either is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ensemble.interrupts import exit_process
from ensemble.train.job import Inbox, Job


class EventWriter:
    """Events to the parent, whole lines from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, event: dict[str, Any]) -> None:
        """Send one event; blocks while the parent is busy. NaN and infinities are allowed (as json's words)."""
        line = json.dumps(event, default=_unwrap_number).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)


def _unwrap_number(value: Any) -> Any:
    """Numbers of torch and numpy as plain ones."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"an event cannot hold {value!r}")
    return item()


def _read_line(connection: socket.socket) -> tuple[bytes, bytes]:
    """The first line and what came after it."""
    buffer = b""
    while b"\n" not in buffer:
        got = connection.recv(1 << 16)
        if not got:
            raise SystemExit("the parent went away before it sent a job")
        buffer += got
    line, _, rest = buffer.partition(b"\n")
    return line, rest


def _receive_commands(connection: socket.socket, parent: int, rest: bytes, inbox: Inbox) -> None:
    """Commands into the inbox; death of the parent ends this process and all it started."""
    buffer = rest
    either = select.poll()  # select(2) knows no descriptor past 1023, and a fork server's children may have them
    for descriptor in (connection.fileno(), parent):
        either.register(descriptor, select.POLLIN)
    while True:
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            inbox.put(**json.loads(line))
        ready = [descriptor for descriptor, _ in either.poll()]
        try:
            got = connection.recv(1 << 16) if connection.fileno() in ready else b""
        except ConnectionResetError:
            got = b""
        if not got:
            os.killpg(0, signal.SIGKILL)
        buffer += got


def main(arguments: list[str]) -> int:
    """Receive a job, train, report how it ended."""
    connection = socket.socket(fileno=int(arguments[arguments.index("--fd") + 1]))
    connection.set_inheritable(False)  # a process that the member starts must not keep it open
    with contextlib.suppress(PermissionError):  # not when it is a session's leader, which already has its group
        os.setpgid(0, 0)
    forked = "--parent" in arguments  # the parent is then the fork server, the executor its parent
    parent = os.pidfd_open(int(arguments[arguments.index("--parent") + 1]) if forked else os.getppid())
    line, rest = _read_line(connection)
    job = Job.from_json(line.decode())
    inbox, uplink = Inbox(), EventWriter(connection)
    listener = threading.Thread(
        target=_receive_commands, args=(connection, parent, rest, inbox), name="commands", daemon=True
    )
    listener.start()
    uplink.send(run_job(job, uplink.send, inbox))
    return 0


def run_job(job: Job, send: Callable[[dict[str, Any]], None], inbox: Inbox) -> dict[str, Any]:
    """Load the run's declaration and train one rank; returns its `exited` event, whatever happens."""
    outcome = _train(job, send, inbox)
    return {
        "type": "exited",
        "member": job.identity.member,
        "attempt": job.attempt,
        "rank": job.rank,
        "outcome": outcome,
        "detail": "",
    }


def _train(job: Job, send: Callable[[dict[str, Any]], None], inbox: Inbox) -> str:
    from ensemble.store import RunDir

    try:
        ensemble = RunDir(job.run_dir).load_ensemble()

        # imports torch: to be counted as start-up, so before the clock is read
        if job.profile is None:
            from ensemble.train.worker import run
        else:
            from ensemble.train.profile import run

        from ensemble.executors.limits import limit_memory

        limit_memory(job.identity.memory_gb, job.device)  # after the imports, which are not the member's
        return run(job, ensemble, send, inbox, startup_cpu_s=time.process_time())
    except Exception as error:  # what `work` did not turn into news itself: the declaration cannot be loaded
        traceback.print_exc()
        send(
            {
                "type": "failed",
                "member": job.identity.member,
                "attempt": job.attempt,
                "error": f"{type(error).__name__}: {error}".splitlines()[0],
                "reason": "error",
            }
        )
        return "failed"


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
