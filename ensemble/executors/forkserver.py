"""The fork server: it has imported torch once, has one thread, never begins CUDA, and forks a worker for each job.

It has imported, too, the installed packages that the run's declaration names. Where a fork would not be as a
process is that has imported them itself, it says `{"not_shared": why, "cpu_s"}` and begins anew, without them.

Requests arrive over the socket N (JSON): `{"fork": n, "env", "log"}` with the worker's socket attached, `"checks":
run_dir` for the node's checker. Answers are `{"forked": n, "pid"}` with a pidfd, and at its end `{"ended": n,
"code", "cpu_s"}`. When the other end closes, all workers are killed; the last message is `{"waited_s"}`, their
CPU-seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemble.executors import worker_main
from ensemble.executors.spawn import kill_group, make_worker_command
from ensemble.interrupts import exit_process
from ensemble.meter.memory import release_memory
from pipelines.ipc import messages
from pipelines.ipc.child_processes import SINGLE_THREADED

_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch reads it when it is asked whether there are GPUs
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: what CUDA's library answers before `cuInit`
PRELOADED = ("torch", "ensemble.store", "ensemble.train.worker")  # every worker needs them


class _Children:
    """The forked processes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.alive: dict[int, tuple[int, int]] = {}  # pidfd -> (number of the request, pid)

    def reap(self, pidfd: int) -> None:
        """Report the end of one, and kill the processes that it started and left."""
        number, pid = self.alive.pop(pidfd)
        kill_group(pid)  # before it is waited for: until then no other process can have its number
        _, status, used = os.wait4(pid, 0)
        os.close(pidfd)
        code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        self.report({"ended": number, "code": code, "cpu_s": cpu_s})

    def kill_all(self) -> None:
        """End all workers."""
        for pidfd, (_, pid) in list(self.alive.items()):
            kill_group(pid)
            self.reap(pidfd)

    def report(self, message: Mapping[str, float], descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it is gone: the next receive shows it
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)


def serve(control: socket.socket) -> tuple[int, str | None] | None:
    """Fork on request until `control` is closed.

    Returns:
        None; in a forked worker, the descriptor of its socket, and in a checker also the run directory.
    """
    workers = _Children(control)
    while True:
        waited = select.poll()  # select(2) knows no descriptor past 1023
        for fd in (control.fileno(), *workers.alive):
            waited.register(fd, select.POLLIN)
        ready = {fd for fd, _ in waited.poll()}
        for pidfd in ready & workers.alive.keys():
            workers.reap(pidfd)
        if control.fileno() not in ready:
            continue
        try:
            message, connection = messages.receive_with_descriptor(control)
        except messages.ConnectionLost:
            workers.kill_all()
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            workers.report({"waited_s": used.ru_utime + used.ru_stime})
            return None
        request = json.loads(message)
        if _fork(workers, request, connection):
            control.close()
            assert connection is not None
            return connection, request.get("checks")


def _fork(workers: _Children, request: dict[str, Any], connection: int | None) -> bool:
    """Fork a worker and answer its request; returns whether this process is the worker."""
    if connection is None:  # no descriptor was left to receive the worker's socket
        workers.report({"ended": request["fork"], "code": errno.EMFILE})
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
    workers.alive[pidfd] = (request["fork"], pid)
    workers.report({"forked": request["fork"], "pid": pid}, [pidfd])
    return False


def _become_worker(environment: dict[str, str], log: str) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    _lead_output(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (imports := sys.modules.get("ensemble.executors.declared_imports")) is not None:
        imports.adapt(int(environment["OMP_NUM_THREADS"]))


def _lead_output(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)


@contextlib.contextmanager
def _end_with_executor(control: socket.socket) -> Iterator[None]:
    """End this process when the executor is gone, also amid an import, and without a thread: a signal says so."""
    flags = fcntl.fcntl(control, fcntl.F_GETFL)

    def look(*_: object) -> None:  # the signal also says that a request has come
        waited = select.poll()
        waited.register(control, 0)  # hang-ups only, which are always reported
        if waited.poll(0):
            os._exit(0)

    signal.signal(signal.SIGIO, look)
    signal.siginterrupt(signal.SIGIO, False)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()
    yield
    fcntl.fcntl(control, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_DFL)


@contextlib.contextmanager
def _with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Within the block this process has these variables."""
    usual = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield
    for name, value in usual.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _preload() -> None:
    """Import what all workers need."""
    from ensemble.train.optimizers import warm_up

    for name in PRELOADED:
        importlib.import_module(name)
    warm_up()


def has_begun_cuda() -> bool:
    """Whether CUDA has begun in this process, so that no fork of it can use a GPU."""
    library = re.search(r"/\S*/libcuda\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    if library is None:
        return False
    try:
        count = ctypes.CDLL(library[0], mode=os.RTLD_NOLOAD).cuDeviceGetCount
    except (AttributeError, OSError):  # it was replaced on the disk, or is another library of that name
        return True
    return int(count(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


def _import_declared(control: socket.socket, run_dir: str, log: str) -> None:
    """Import what the members of a run will import; what this prints is in a log. Begins anew where that harms."""
    from ensemble.executors.declared_imports import import_declared

    kept, environment, began_s = (
        [os.dup(descriptor) for descriptor in (1, 2)],
        dict(os.environ),
        time.process_time(),
    )
    _lead_output(log)
    with _end_with_executor(control), _with_variables({_ASK_NVML: "1", **SINGLE_THREADED}):
        obstacle = import_declared(run_dir)
    for descriptor, usual in zip((1, 2), kept, strict=True):
        os.dup2(usual, descriptor)
        os.close(usual)
    if obstacle is None and not has_begun_cuda():
        return
    message = {"not_shared": obstacle or "CUDA", "cpu_s": time.process_time() - began_s}
    with contextlib.suppress(OSError):
        control.send(json.dumps(message).encode())
    control.set_inheritable(True)
    command = [sys.executable, "-P", "-m", "ensemble.executors.forkserver", str(control.fileno())]
    os.execve(sys.executable, command, environment)


def _work(descriptor: int, checks: str | None, executor: int, begun_cuda: bool) -> int:
    """Be a worker, as this process or as a new interpreter.

    A new one for a GPU if the fork server has begun CUDA; for one of several ranks if it has imported packages, as
    some of them look at the rank.

    Args:
        descriptor: of the socket.
        checks: the run directory, of a checker.
        executor: process id of the executor.
        begun_cuda: whether the fork server has begun CUDA.
    """
    if checks is not None:
        from ensemble.executors import checker_main

        return checker_main.main(descriptor, executor, checks)
    imports = sys.modules.get("ensemble.executors.declared_imports")
    is_rank = imports is not None and imports.has_imported() and os.environ["WORLD_SIZE"] != "1"
    if is_rank or (begun_cuda and os.environ["CUDA_VISIBLE_DEVICES"]):
        os.set_inheritable(descriptor, True)
        os.execv(sys.executable, make_worker_command(descriptor, executor))
    return worker_main.main(descriptor, executor)


def main(descriptor: int, run_dir: str | None = None, log: str = "") -> int:
    """Run the fork server; in its children, the worker.

    Args:
        descriptor: of the socket to the executor.
        run_dir: the run directory; None: what its declaration names is not imported.
        log: file of what these imports print.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):  # the executor decides when this process and its children end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the program ignores it, nobody learns how workers end
    executor = os.getppid()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    gc.disable()  # imports make many objects and little garbage; looking for it takes a quarter of their time
    with _end_with_executor(control), _with_variables({_ASK_NVML: "1"}):
        _preload()
    begun_cuda = has_begun_cuda()
    if run_dir is not None and not begun_cuda:  # else workers on GPUs are new interpreters
        _import_declared(control, run_dir, log)
    release_memory()
    gc.freeze()  # for good: collections in the workers do not write to, and thus copy, the shared pages
    gc.enable()
    with control:
        worker = serve(control)
    return 0 if worker is None else _work(*worker, executor, begun_cuda)


if __name__ == "__main__":
    exit_process(main(int(sys.argv[1]), *sys.argv[2:]))
