"""The fork server: a process that has imported torch and forks a worker for each job.

It is run as `python -m ensemble.executors.forkserver --fd N`. Importing torch and what its optimizers import costs
a process about two CPU-seconds and 300 MB. Here that is paid once a run; a worker is a copy of this process, ready
in milliseconds, and shares the imported pages. Forking is safe because this process has one thread and never
touches CUDA (torch is imported, not used, before the fork). Workers that train on a GPU are started as new
interpreters instead, since CUDA does not survive a fork.

Requests arrive over the socket N (`SOCK_SEQPACKET`, JSON messages): `{"fork": n, "env", "log"}` with the worker's
own socket attached. Answers are `{"forked": n, "pid"}` with a pidfd attached, and, when the worker has ended,
`{"ended": n, "code", "cpu_s"}`, where `cpu_s` includes all processes that it waited for. When the other end closes
or shuts down its side, all workers are killed with the processes that they started, and the server ends; its last
message is `{"waited_s"}`, the CPU-seconds of all its workers. With `--listener M` other processes can connect to
the listening socket M and send requests, too; when such a connection closes, the workers requested over it are
killed.
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
from collections.abc import Sequence
from typing import Any

from ensemble.executors import worker_main
from ensemble.executors.spawn import kill_group
from ensemble.interrupts import exit_process

#: What every worker needs.
PRELOADED = ("torch", "ensemble.store", "ensemble.train.worker")


class _Children:
    """The forked processes by their pidfds, each with the connection over which it was asked for."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[int, int, socket.socket]] = {}  # pidfd -> (number of the request, pid, asker)

    def add(self, pidfd: int, number: int, pid: int, client: socket.socket) -> None:
        self.alive[pidfd] = (number, pid, client)

    def reap(self, pidfd: int) -> None:
        """Tell the asker of one that has ended, number and exit code; kill what it started and left behind."""
        number, pid, client = self.alive.pop(pidfd)
        kill_group(pid)  # before it is waited for: until then nobody else can have its number
        _, status, used = os.wait4(pid, 0)
        os.close(pidfd)
        code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        _send(client, {"ended": number, "code": code, "cpu_s": cpu_s}, [])

    def kill_all(self, client: socket.socket | None = None) -> None:
        """End all workers, or all that one asked for."""
        for pidfd, (_, pid, owner) in list(self.alive.items()):
            if client is None or owner is client:
                kill_group(pid)
                self.reap(pidfd)


def serve(control: socket.socket, listener: socket.socket | None) -> int | None:
    """Fork on request until `control` has nothing more to say (None); in a worker, its socket's descriptor."""
    workers = _Children()
    clients = {control.fileno(): control}
    listeners = [] if listener is None else [listener]
    full: int | None = None  # how many others there were when there was no descriptor left for one more
    while True:
        if full is not None and len(clients) + len(workers.alive) < full:
            full = None
        waited = select.poll()  # select(2) knows no descriptor past 1023
        for each_fd in (
            *clients,
            *workers.alive,
            *(each_listener.fileno() for each_listener in listeners if full is None),
        ):
            waited.register(each_fd, select.POLLIN)
        ready = {fd for fd, _ in waited.poll()}
        for pidfd in [fd for fd in ready if fd in workers.alive]:
            workers.reap(pidfd)
        for each_listener in [each_listener for each_listener in listeners if each_listener.fileno() in ready]:
            try:
                client, _ = each_listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                full = len(clients) + len(workers.alive)  # who calls waits until one of these has gone
            else:
                clients[client.fileno()] = client
        for fd in [fd for fd in ready if fd in clients]:
            client = clients[fd]
            request = _receive(client)
            if request is None and client is control:
                workers.kill_all()
                used = resource.getrusage(resource.RUSAGE_CHILDREN)
                _send(control, {"waited_s": used.ru_utime + used.ru_stime}, [])
                return None
            if request is None:
                workers.kill_all(client)
                client.close()
                del clients[fd]
                continue
            descriptor = _fork(client, workers, *request)
            if descriptor is not None:
                for each in [*clients.values(), *listeners]:
                    each.close()
                return descriptor


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and the descriptors that came with it; None of one that has nothing more to say."""
    try:
        message, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 1)
    except ConnectionResetError:
        return None
    return (json.loads(message), descriptors) if message else None


def _fork(
    client: socket.socket, workers: _Children, request: dict[str, Any], descriptors: Sequence[int]
) -> int | None:
    """Answer a request; in the forked worker, its socket's descriptor."""
    if not descriptors:  # there was none left to take the worker's socket with
        _send(client, {"ended": request["fork"], "code": errno.EMFILE}, [])
        return None
    pid = os.fork()
    if pid == 0:
        for pidfd in workers.alive:
            os.close(pidfd)
        _become_worker(request["env"], request["log"])
        return descriptors[0]
    os.close(descriptors[0])
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it has ended already
        os.setpgid(pid, pid)  # as the worker does itself: whoever is first, it is so from here on
    pidfd = os.pidfd_open(pid)
    workers.add(pidfd, request["fork"], pid, client)
    _send(client, {"forked": request["fork"], "pid": pid}, [pidfd])
    return None


def _send(control: socket.socket, message: dict[str, float], descriptors: Sequence[int]) -> None:
    # when the other end is gone, the next receive tells
    with contextlib.suppress(OSError):
        socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def _become_worker(environment: dict[str, str], log: str) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze()


def main(arguments: list[str]) -> int:
    """The fork server; in its children, the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor decides when we end
    executor = os.getppid()
    control = socket.socket(fileno=int(arguments[arguments.index("--fd") + 1]))
    control.set_inheritable(False)
    listener = None
    if "--listener" in arguments:
        listener = socket.socket(fileno=int(arguments[arguments.index("--listener") + 1]))
        listener.set_inheritable(False)
    from ensemble.train.optimizers import load_optimizers

    for name in PRELOADED:
        importlib.import_module(name)
    load_optimizers()
    gc.collect()
    gc.freeze()  # so that collections in the workers do not write to, and thus copy, the shared pages
    descriptor = serve(control, listener)
    if descriptor is None:
        return 0
    return worker_main.main(["--fd", str(descriptor), "--parent", str(executor)])


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
