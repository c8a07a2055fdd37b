"""Gives child processes their environment, ends them with their parent, and waits for their ends."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import subprocess
import sys
import threading

START_S = 300.0  # time limit for a child process to import its libraries and prepare one sample of each pipeline


#: Environment variables with which numerical libraries start on one thread.
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def child_environment() -> dict[str, str]:
    """The environment of a child process.

    Libraries use one thread each, imports use this process's path, and no `__pycache__` is written beside the
    user's modules.
    """
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**os.environ, **SINGLE_THREADED, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def end_with_parent(started: threading.Event | None = None) -> None:
    """End this process when its parent closes its standard input, even while it is busy.

    Args:
        started: once set, the process handles the end of its input itself.
    """
    parent = select.poll()
    parent.register(0, 0)  # hang-ups only, which are always reported; the input is not read here

    def wait() -> None:
        parent.poll()
        if started is None or not started.is_set():
            os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


_reaped_s = 0.0
_reaping = threading.Lock()


def reap(process: subprocess.Popen[bytes]) -> float | None:
    """Wait for the end of a child process that has an account of its own; its exit code is then in
    `process.returncode`.

    Returns:
        CPU-seconds of the process and of all processes that it waited for. They are unknown (None) if it was
        waited for before, or if this program ignores SIGCHLD.
    """
    global _reaped_s
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with _reaping:
                _, status, used = os.wait4(process.pid, 0)
                _reaped_s += used.ru_utime + used.ru_stime
            process.returncode = os.waitstatus_to_exitcode(status)
            return used.ru_utime + used.ru_stime
    process.wait()
    return None


def read_waited_cpu_s() -> float:
    """CPU-seconds of the children that this process has waited for, without those of which `reap` returned it."""
    with _reaping:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime - _reaped_s
