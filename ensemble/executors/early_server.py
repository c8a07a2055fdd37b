"""Forks a node's fork server off the command itself, once it has imported what a spec file imports first.

The packages are then imported once for the command and all members. The fork server imports torch, loads no spec,
and waits until the run is opened: it then gets the environment and the limits that the command has by that time.
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
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ensemble.executors.declared_imports import list_files
from ensemble.executors.spawn import (
    ForkServer,
    make_control,
    make_node_environment,
    make_server_environment,
    name_import_log,
)
from ensemble.interrupts import exit_process, repeat_lost_signals
from ensemble.meter.cpu import is_command
from ensemble.spec.user_imports import check_hidden_modules, without_bytecode
from ensemble.train.node_checks import NODE_DIRECTORY
from pipelines.ipc import messages
from pipelines.ipc.child_processes import is_of_launch

if TYPE_CHECKING:
    import socket

    from ensemble.executors.private_directory import PrivateDirectory
    from ensemble.spec import Ensemble

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_TITLE = b"python\0-P\0-m\0ensemble.executors.forkserver\0"
_MOST_BYTES = 2**20  # of a message with an environment
_early: list[EarlyServer] = []


class _ForkedProcess:
    """A fork of this process, as far as it is used like a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class EarlyServer(ForkServer):
    """A fork server that waits for `declare`, in a fork of this process.

    Attributes:
        directory: of the node.
    """

    def __init__(self, directory: PrivateDirectory) -> None:
        self.directory = directory
        self.control, theirs = make_control()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self.control.close()
                _serve(theirs, directory.path)
            except BaseException:  # the command's frames are below this one
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self.process = _ForkedProcess(pid)
        self._set_up()

    def declare(self, run_dir: Path | None) -> None:
        """Give it the state that a process has which is begun now, and let it import what the run declares.

        Raises:
            OSError: it is gone, or the state is too large for a message.
        """
        for limit in _LIMITS:
            resource.prlimit(self.process.pid, limit, resource.getrlimit(limit))
        state = {
            "environment": make_server_environment(self.directory.path),
            "folder": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "run_dir": None if run_dir is None else str(run_dir),
        }
        self.control.send(json.dumps(state).encode())


@contextlib.contextmanager
def begun_early(spec: Path) -> Iterator[None]:
    """Begin a fork server for a run of a spec file that is opened within the block, where that is possible.

    Args:
        spec: the file, whose first imports are executed.
    """
    from ensemble.executors.node_services import make_node_directory

    if _import_for(spec):
        _early.append(EarlyServer(make_node_directory()))
    try:
        yield
    finally:
        _discard()


def take(ensemble: Ensemble) -> EarlyServer | None:
    """Take over the fork server that has been begun for this run, with its directory; None: there is none.

    A run with members of several ranks gets none: some packages look at the rank when they are imported.
    """
    declared = [getattr(member, "workers", None) for member in ensemble.members or ()]
    widths = {workers or ensemble.resources.workers for workers in declared or [None]}
    if widths != {1}:
        _discard()
    return _early.pop() if _early else None


def _discard() -> None:
    while _early:
        server = _early.pop()
        server.close()
        server.directory.close()


def _import_for(spec: Path) -> bool:
    """Execute the imports that a spec file begins with; returns whether a fork of this process may be the server.

    Torch has to be among them: else what the spec does first may be meant for torch's import.
    """
    from ensemble.executors.declared_imports import import_for_forks
    from ensemble.executors.forkserver import has_begun_cuda
    from ensemble.user_code.imports import users_modules
    from ensemble.user_code.preamble import Preamble

    folder = spec.resolve().parent
    if not spec.is_file() or (folder / "__init__.py").exists() or not is_command() or "torch" in sys.modules:
        return False
    if any(map(is_of_launch, os.environ)):  # which members do not get
        return False
    check_hidden_modules(folder)
    if str(folder) not in sys.path:  # as for the spec file
        sys.path.insert(0, str(folder))
    with repeat_lost_signals(), without_bytecode():
        obstacle = import_for_forks(lambda: Preamble().execute(spec))
    is_whole = obstacle is None and "torch" in sys.modules and not users_modules(folder)
    return is_whole and not has_begun_cuda()


def _serve(control: socket.socket, directory: Path) -> NoReturn:
    """Be the fork server, in the fork, and end; in a worker of it, be the worker."""
    from ensemble.executors import forkserver

    _be_an_interpreter(forkserver, control.fileno())
    os.environ.update(make_node_environment(directory))

    def wait_for_declaration() -> tuple[str | None, str]:
        try:
            state = json.loads(messages.receive(control, _MOST_BYTES))
        except messages.ConnectionLost:
            os._exit(0)
        _take_state(state)
        _take_title(directory)
        return state["run_dir"], name_import_log(directory)

    exit_process(forkserver.run(control, wait_for_declaration))


def _be_an_interpreter(module: Any, control: int) -> None:
    """Make a fork of the command as a new interpreter is that runs a module, and inherits one descriptor."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8", errors, write_through=True)
        for descriptor, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    for descriptor in list_files():  # such as the command's own standard error, and the lock of the directory
        if descriptor > 2 and descriptor != control:
            with contextlib.suppress(OSError):  # it was that of the list
                os.close(descriptor)
    sys.argv, sys.dont_write_bytecode, sys.modules["__main__"] = [module.__file__], True, module
    warnings.formatwarning = warnings._formatwarning_orig  # type: ignore[attr-defined]
    importlib.import_module("threadpoolctl").threadpool_limits(1)  # of scikit-learn


def _take_state(state: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(state["environment"])
    sys.path[:] = state["environment"]["PYTHONPATH"].split(os.pathsep)
    tempfile.tempdir = tempfile._name_sequence = None  # type: ignore[attr-defined]  # as before its first use
    os.chdir(state["folder"])
    os.sched_setaffinity(0, state["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, state["niceness"])


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
