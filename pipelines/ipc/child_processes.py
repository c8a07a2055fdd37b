"""Gives child processes their environment, ends them with their parent, and waits for their ends."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Iterator

from pipelines.environment.machine_limits import PINNING, free_pinned_thread

START_S = 300.0  # time limit for a child process to import its libraries and prepare one sample of each pipeline


#: Environment variables with which numerical libraries start on one thread.
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


#: Variables by which a launcher of a job (torchrun, Slurm, Open MPI, PMI, MVAPICH, Intel MPI, PALS, jsrun, Flux,
#: Horovod) tells a process its rank: torch, Lightning and others believe them.
_RANK_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|NODE_RANK|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NPROCS|NTASKS\w*|STEP_NUM_TASKS)"
    r"|(OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI|PALS|JSM_NAMESPACE|FLUX_TASK)_\w+|OMPI_UNIVERSE_SIZE"
    r"|PMIX_(RANK|NAMESPACE|ID|SERVER_\w+)|MPI_LOCAL(RANKID|NRANKS)|HOROVOD_((LOCAL|CROSS)_)?(RANK|SIZE)"
)


def child_environment() -> dict[str, str]:
    """The environment of a child process; this thread's cores, which a child inherits, are those of the process.

    Libraries use one thread each, on any core, imports use this process's path, and no `__pycache__` is written
    beside the user's modules. A child is no rank of the job in which this process was started.
    """
    free_pinned_thread()
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {
        **{name: value for name, value in os.environ.items() if not _is_of_launch(name)},
        **SINGLE_THREADED,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _is_of_launch(name: str) -> bool:
    return name in PINNING or _RANK_VARIABLES.fullmatch(name) is not None


def make_rank_environment(rank: int, world: int) -> dict[str, str]:
    """The variables that tell libraries in a member's process its rank, of so many; there is one GPU a process."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world)}


@contextlib.contextmanager
def act_as_rank(rank: int, world: int) -> Iterator[None]:
    """Run the block with `make_rank_environment` in this process, in place of what the job's launcher has set."""
    before = {name: value for name, value in os.environ.items() if _RANK_VARIABLES.fullmatch(name)}
    for name in before:
        del os.environ[name]
    own = make_rank_environment(rank, world)
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
        os.environ.update(before)


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
