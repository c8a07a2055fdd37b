"""Forks a node's fork server off the command itself, once it has imported what a spec file imports first.

The packages are then imported once for the command and all members. The fork server loads no spec, and waits until
the run is opened. Where the spec has changed meanwhile what a process inherits, it is given up.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ensemble.executors.declared_imports import list_files
from ensemble.executors.spawn import (
    ForkServer,
    make_control,
    make_node_directory,
    make_server_environment,
    name_import_log,
)
from ensemble.interrupts import exit_process, repeat_lost_signals
from ensemble.meter.cpu import is_command
from ensemble.spec import SpecError
from ensemble.spec.user_imports import check_hidden_modules, without_bytecode
from ensemble.train.node_checks import NODE_DIRECTORY
from pipelines.ipc import messages
from pipelines.ipc.child_processes import is_of_launch

if TYPE_CHECKING:
    import socket

    from ensemble.executors.private_directory import PrivateDirectory
    from ensemble.spec import Ensemble

_TITLE = b"python\0-P\0-m\0ensemble.executors.forkserver\0"
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_early: list[EarlyServer] = []


class _ForkedProcess:
    """A fork of this process, as far as it is used like a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # the program has waited for it
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = 0  # unknown where the program ignores SIGCHLD, or has waited for it
            with contextlib.suppress(ChildProcessError):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class EarlyServer(ForkServer):
    """A fork server that waits for `declare`, in a fork of this process.

    Args:
        directory: of the node.
        state: of the process when it is forked, by `_read_state`.
    """

    def __init__(self, directory: PrivateDirectory, state: dict[str, Any]) -> None:
        self.directory, self.state = directory, state
        self.control, theirs = make_control()
        messages.close_in_children(self.control)
        descriptors = list_files()
        for stream in filter(None, (sys.stdout, sys.stderr, sys.__stderr__)):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            try:
                _serve(theirs, directory.path, {*descriptors} - {theirs.fileno()})
            except BaseException:  # the command's frames are below this one
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self.process = _ForkedProcess(pid)
        self._set_up()

    def declare(self, run_dir: Path | None) -> None:
        """Let it import what the run declares, and fork workers; raises OSError if it is gone."""
        declared = {"path": sys.path, "limits": _read_limits(), "run_dir": run_dir and str(run_dir)}
        self.control.send(json.dumps(declared).encode())

    def discard(self) -> None:
        """End it and remove its directory; its CPU time is that of a child of this process."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        self.directory.close()


@contextlib.contextmanager
def begun_early(spec: Path) -> Iterator[None]:
    """Begin a fork server for a run of a spec file that is opened within the block, where that is possible.

    Args:
        spec: the file, whose first imports are executed.
    """
    if _import_for(spec):
        state = _read_state()  # some packages set variables
        with contextlib.suppress(OSError, SpecError):  # no process or directory can be made: the run will say so
            _early.append(EarlyServer(make_node_directory(), state))
    try:
        yield
    finally:
        _discard()


def take(ensemble: Ensemble) -> EarlyServer | None:
    """Take over the fork server that has been begun for this run, with its directory; None: there is none.

    It serves only if the spec has changed nothing that a process inherits, and no member has several ranks: some
    packages look at the rank when they are imported.
    """
    declared = [getattr(member, "workers", None) for member in ensemble.members or ()]
    widths = {workers or ensemble.resources.workers for workers in declared or [None]}
    if _early and (widths != {1} or _early[0].state != _read_state()):
        _discard()
    return _early.pop() if _early else None


def _discard() -> None:
    while _early:
        _early.pop().discard()


def _read_state() -> dict[str, Any]:
    """What this process hands down to a process that it starts, without limits and descriptors."""
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "users": (os.getresuid(), os.getresgid(), os.getgroups()),
        "cores": os.sched_getaffinity(0),
        "schedule": (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)),
        "signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
    }


def _read_limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(limit) for name, limit in _LIMITS.items()}


def _import_for(spec: Path) -> bool:
    """Execute the imports that a spec file begins with; returns whether a fork of this process may be the server.

    Torch has to be among them: else what the spec does first may be meant for torch's import.
    """
    from ensemble.executors.declared_imports import import_for_forks, is_installed
    from ensemble.executors.forkserver import has_begun_cuda
    from ensemble.user_code.imports import users_modules
    from ensemble.user_code.preamble import Preamble

    folder = spec.resolve().parent
    if not spec.is_file() or (folder / "__init__.py").exists() or not is_command() or "torch" in sys.modules:
        return False
    flags = {*subprocess._args_from_interpreter_flags()} - {"-B"}  # type: ignore[attr-defined]
    if flags or any(map(is_of_launch, os.environ)):  # which members do not get
        return False
    check_hidden_modules(folder)
    if str(folder) not in sys.path:  # as for the spec file
        sys.path.insert(0, str(folder))
    usual = contextlib.redirect_stderr(sys.__stderr__)  # not the command's own, which the fork closes
    with repeat_lost_signals(), without_bytecode(), usual:
        obstacle = import_for_forks(lambda: Preamble(is_installed).execute(spec))
    is_whole = obstacle is None and "torch" in sys.modules and not users_modules(folder)
    return is_whole and not has_begun_cuda()


def _serve(control: socket.socket, directory: Path, inherited: Collection[int]) -> NoReturn:
    """Be the fork server, in the fork, and end; in a worker of it, be the worker.

    Args:
        inherited: descriptors of the command, which the fork closes.
    """
    from ensemble.executors import forkserver

    _be_an_interpreter(forkserver, inherited)
    environment = make_server_environment(directory)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)

    def wait_for_declaration() -> tuple[str | None, str]:
        try:
            declared = json.loads(messages.receive(control))
        except messages.ConnectionLost:
            os._exit(0)
        sys.path[:] = [folder or os.getcwd() for folder in declared["path"]]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        for name, limit in declared["limits"].items():
            resource.setrlimit(_LIMITS[name], tuple(limit))
        _take_title(directory)
        return declared["run_dir"], name_import_log(directory)

    exit_process(forkserver.run(control, wait_for_declaration))


def _be_an_interpreter(module: Any, inherited: Collection[int]) -> None:
    """Make a fork of the command as a new interpreter is that runs a module."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # which packages may have kept
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors, line_buffering=True, write_through=True)
    for descriptor in inherited:  # such as the command's own standard error, and the lock of the directory
        if descriptor > 2:
            with contextlib.suppress(OSError):  # it was closed with the stream before
                os.close(descriptor)
    sys.argv, sys.dont_write_bytecode, sys.modules["__main__"] = [module.__file__], True, module
    warnings.formatwarning = warnings._formatwarning_orig  # type: ignore[attr-defined]
    tempfile._name_sequence = None  # type: ignore[attr-defined]  # as before its first use
    importlib.import_module("threadpoolctl").threadpool_limits(1)  # of scikit-learn


def _take_title(directory: Path) -> None:
    """Show the command line and the directory of a fork server to `ps`, `pkill -f` and `is_of_node`.

    All variables have been set anew, so that none of them is read where they were at the beginning.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    shown = (_TITLE, f"{NODE_DIRECTORY}={directory}\0".encode())
    for text, first in zip(shown, (45, 47), strict=True):  # arg_start, arg_end, env_start, env_end; proc(5)
        begin, end = int(fields[first]), int(fields[first + 1])
        if len(text) <= end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
