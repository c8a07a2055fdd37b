"""The main program of a worker process: `python -m ensemble.executors.worker_main N EXECUTOR`, or forked.

N is an inherited socket: a JSON line with the job arrives first, then commands; events are sent, the last of them
`exited`. A thread kills the process group when the socket or the executor (its process id) is gone.
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
import traceback
from collections.abc import Callable
from typing import Any

from ensemble.events import Report
from ensemble.executors.base import make_exited
from ensemble.executors.spawned import enter_modules
from ensemble.interrupts import exit_process
from ensemble.meter.cpu import CpuClock
from ensemble.train import load_work
from ensemble.train.job import Inbox, Job


def _unwrap_number(value: Any) -> Any:
    """A number of torch or numpy as one of Python."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"an event cannot hold {value!r}")
    return item()


def _read_line(connection: socket.socket) -> tuple[bytes, bytes]:
    """The first line, and what was received after it."""
    buffer = b""
    while b"\n" not in buffer:
        got = connection.recv(1 << 16)
        if not got:
            raise SystemExit("the parent ended before it sent a job")
        buffer += got
    line, _, more = buffer.partition(b"\n")
    return line, more


def make_sender(connection: socket.socket) -> Callable[[Report], None]:
    """A function that sends an event from any thread; it blocks while the parent is busy.

    NaN and infinities are written as json does.
    """
    lock = threading.Lock()

    def send(event: Report) -> None:
        line = json.dumps(event, default=_unwrap_number).encode() + b"\n"
        with lock:
            connection.sendall(line)

    return send


def _receive_commands(connection: socket.socket, parent: int, buffer: bytes, inbox: Inbox) -> None:
    """Put commands into the inbox; if the parent ends, kill this process and those that it started."""
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


def main(descriptor: int, executor: int) -> int:
    """Receive a job over a socket, train, report the outcome.

    Args:
        descriptor: of the socket.
        executor: process id of the executor.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # a process that the member starts must not keep it open
    with contextlib.suppress(PermissionError):  # it is a session's leader, and has a group already
        os.setpgid(0, 0)
    parent = os.pidfd_open(executor)
    line, more = _read_line(connection)
    job, inbox, send = Job.from_json(line.decode()), Inbox(), make_sender(connection)
    threading.Thread(
        target=_receive_commands, args=(connection, parent, more, inbox), name="commands", daemon=True
    ).start()
    send(make_exited(job, _train(job, send, inbox)))
    return 0


def _train(job: Job, send: Callable[[Report], None], inbox: Inbox) -> str:
    """Load the run's declaration and train one rank; returns the outcome."""
    from ensemble.store import RunDir

    try:
        enter_modules(job.run_dir)
        ensemble = RunDir(job.run_dir, job.files).load_ensemble(takes_settings=True, takes_modules=True)
        work = load_work(job)

        from ensemble.executors.limits import limit_memory

        limit_memory(job.identity.memory_gb, job.device)  # after the imports, which are not the member's
        return work(job, ensemble, send, inbox, CpuClock(whole=True, has_children=True))
    except Exception as error:  # `work` reports its own: here the declaration cannot be loaded
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
    exit_process(main(int(sys.argv[1]), int(sys.argv[2])))
