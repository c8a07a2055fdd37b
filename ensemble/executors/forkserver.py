"""The fork server: a process that has imported torch and forks a worker for each job.

It is run as `python -m ensemble.executors.forkserver N [M]`. Importing torch and what its optimizers import costs
a process about two CPU-seconds and 300 MB. Here that is paid once a run; a worker is a copy of this process, ready
in milliseconds, and shares the imported pages. Forking is safe because this process has one thread and never
touches CUDA (torch is imported, not used, before the fork). Workers that train on a GPU are started as new
interpreters instead, since CUDA does not survive a fork.

Requests arrive over the socket N (`SOCK_SEQPACKET`, JSON messages): `{"fork": n, "env", "log"}` with the worker's
own socket attached. Answers are `{"forked": n, "pid"}` with a pidfd attached, and, when the worker has ended,
`{"ended": n, "code", "cpu_s"}`, where `cpu_s` includes all processes that it waited for. When the other end closes
or shuts down its side, all workers are killed with the processes that they started, and the server ends; its last
message is `{"waited_s"}`, the CPU-seconds of all its workers. Other processes can connect to the listening socket
M and send requests as well; when such a connection closes, the workers requested over it are killed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ensemble.executors import worker_main
from ensemble.executors.spawn import kill_group
from ensemble.interrupts import exit_process
from pipelines import ipc

PRELOADED = ("torch", "ensemble.store", "ensemble.train.worker")  # every worker needs them


class _Children:
    """The forked processes, each with the connection over which it was requested."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[int, int, socket.socket]] = {}  # pidfd -> (number of the request, pid, client)

    def reap(self, pidfd: int) -> None:
        """Report the end of one to its client, and kill the processes that it started and left."""
        number, pid, client = self.alive.pop(pidfd)
        kill_group(pid)  # before it is waited for: until then no other process can have its number
        _, status, used = os.wait4(pid, 0)
        os.close(pidfd)
        code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        _send(client, {"ended": number, "code": code, "cpu_s": cpu_s}, [])

    def kill_all(self, client: socket.socket | None = None) -> None:
        """End all workers, or all that one client requested."""
        for pidfd, (_, pid, owner) in list(self.alive.items()):
            if client is None or owner is client:
                kill_group(pid)
                self.reap(pidfd)


def serve(control: socket.socket, listener: socket.socket | None) -> int | None:
    """Fork on request until `control` is closed.

    Returns:
        None; in a forked worker, the descriptor of its socket.
    """
    workers = _Children()
    clients = {control.fileno(): control}
    full = 0  # clients and workers when no descriptor was left for one more client; 0: there are descriptors
    while True:
        if len(clients) + len(workers.alive) < full:
            full = 0
        waited = select.poll()  # select(2) knows no descriptor past 1023
        accepting = [listener.fileno()] if listener is not None and not full else []
        for fd in (*clients, *workers.alive, *accepting):
            waited.register(fd, select.POLLIN)
        ready = {fd for fd, _ in waited.poll()}
        requests = ready & clients.keys()  # before a client that is accepted gets the number of a worker's pidfd
        for pidfd in ready & workers.alive.keys():
            workers.reap(pidfd)
        if listener is not None and listener.fileno() in ready:
            try:
                client, _ = listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                full = len(clients) + len(workers.alive)  # the client waits until one of these has ended
            else:
                clients[client.fileno()] = client
        for fd in requests:
            client = clients[fd]
            try:
                message, connection = ipc.receive_with_descriptor(client)
            except ipc.ConnectionLost:
                if client is control:
                    workers.kill_all()
                    used = resource.getrusage(resource.RUSAGE_CHILDREN)
                    _send(control, {"waited_s": used.ru_utime + used.ru_stime}, [])
                    return None
                workers.kill_all(client)
                client.close()
                del clients[fd]
                continue
            if _fork(client, workers, json.loads(message), connection):
                for each in (*clients.values(), *([] if listener is None else [listener])):
                    each.close()
                return connection


def _fork(client: socket.socket, workers: _Children, request: dict[str, Any], connection: int | None) -> bool:
    """Fork a worker and answer its request; returns whether this process is the worker."""
    if connection is None:  # no descriptor was left to receive the worker's socket
        _send(client, {"ended": request["fork"], "code": errno.EMFILE}, [])
        return False
    pid = os.fork()
    if pid == 0:
        for pidfd in workers.alive:
            os.close(pidfd)
        _become_worker(request["env"], request["log"])
        return True
    os.close(connection)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it has ended already
        os.setpgid(pid, pid)  # the worker does it as well: whichever is first, the group exists from here on
    pidfd = os.pidfd_open(pid)
    workers.alive[pidfd] = (request["fork"], pid, client)
    _send(client, {"forked": request["fork"], "pid": pid}, [pidfd])
    return False


def _send(client: socket.socket, message: Mapping[str, float], descriptors: Sequence[int]) -> None:
    with contextlib.suppress(OSError):  # the other end is gone: the next receive shows it
        socket.send_fds(client, [json.dumps(message).encode()], descriptors)


def _become_worker(environment: dict[str, str], log: str) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze()


def main(descriptors: Sequence[int]) -> int:
    """Run the fork server; in its children, the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor decides when this process ends
    executor = os.getppid()
    control, *listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for each in (control, *listeners):
        each.set_inheritable(False)
    from ensemble.train.optimizers import load_optimizers

    for name in PRELOADED:
        importlib.import_module(name)
    load_optimizers()
    gc.collect()
    gc.freeze()  # so that collections in the workers do not write to, and thus copy, the shared pages
    descriptor = serve(control, listeners[0] if listeners else None)
    return 0 if descriptor is None else worker_main.main(descriptor, executor)


if __name__ == "__main__":
    exit_process(main([int(argument) for argument in sys.argv[1:]]))
