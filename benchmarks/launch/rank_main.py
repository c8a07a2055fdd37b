"""The ranks of `run_ranks`: `python -m benchmarks.launch.rank_main DIRECTORY`, with the job in the directory.

This process imports torch, without using it, and forks the ranks. A rank enters its host's network namespace
(setns(2)) before it opens a socket. All ranks end when one fails or standard input ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.launch.backends import UNDER_MPI, call
from benchmarks.launch.child import last_line
from benchmarks.launch.ranks import RankJob
from pipelines.providers import import_object

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TERMINATE_S = 5.0


def main() -> int:
    """Run all ranks, or this one where MPI has started it; returns 0 where each has finished."""
    job = RankJob(**json.loads(Path(sys.argv[1], "job.json").read_text(encoding="utf-8")))
    if sys.argv[2:] == ["mpi"]:
        return _run_rank(job, int(os.environ["OMPI_COMM_WORLD_RANK"]))
    failure = _run_under_mpi(job) if job.backend in UNDER_MPI else _fork_ranks(job)
    if failure is not None:
        print(failure, file=sys.stderr)
    return failure is not None


def _fork_ranks(job: RankJob) -> str | None:
    """Run the ranks as forks of this process; returns a description of a failure."""
    import_object(job.function)
    importlib.import_module("torch")
    pids = {}
    for rank in range(job.world):
        pid = os.fork()
        if pid == 0:
            os._exit(_run_rank(job, rank))
        pids[os.pidfd_open(pid)] = rank, pid
    failed = _wait_for_ranks(pids)
    return _describe_failure(job, failed) if failed else None


def _run_under_mpi(job: RankJob) -> str | None:
    """Run the ranks under `mpirun`; returns a description of a failure."""
    log = Path(job.directory, "mpirun.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            _mpi_command(job), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_mpi_environment(job)
        )
        select.select([0, os.pidfd_open(process.pid)], [], [])
        process.send_signal(signal.SIGTERM)  # mpirun ends the ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_S)
        process.kill()
        process.wait()
    if process.returncode == 0:
        return None
    if failed := {rank: 1 for rank in range(job.world) if job.file(rank, "failed").exists()}:
        return _describe_failure(job, failed)
    return last_line(log.read_text(errors="replace", encoding="utf-8"))


def _mpi_command(job: RankJob) -> list[str]:
    """The command line of `mpirun`, which starts this module on each rank."""
    from ensemble.comm.horovod import mpi_command

    rank_command = [sys.executable, "-P", "-m", "benchmarks.launch.rank_main", job.directory, "mpi"]
    return mpi_command(job.world, rank_command, job.interface)


def _mpi_environment(job: RankJob) -> dict[str, str]:
    """The environment of `mpirun`, with Open MPI's options (OMPI_MCA_..., mpirun(1))."""
    variables = {"OMPI_MCA_orte_tmpdir_base": job.directory}  # removed with the directory, also after a kill
    if job.world > len(os.sched_getaffinity(0)):
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else a waiting rank occupies a core
    return {**os.environ, **variables}


# --- all ranks -----------------------------------------------------------------------------------------------


def _wait_for_ranks(pids: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Wait for all ranks (pidfd -> rank and process); returns the statuses of those that failed first, by rank.

    The others are killed once a rank has failed, and all of them once standard input ends.
    """
    failed: dict[int, int] = {}
    while pids and not failed:
        ended = select.select([0, *pids], [], [])[0]
        if 0 in ended:
            break
        for fd in ended:
            rank, pid = pids.pop(fd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                failed[rank] = status
    for _, pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed


def _describe_failure(job: RankJob, failed: dict[int, int]) -> str:
    """A line about the first rank that failed; the others may have failed because of it."""
    when = {
        rank: job.file(rank, "failed").stat().st_mtime_ns for rank in failed if job.file(rank, "failed").exists()
    }
    rank = min(failed, key=lambda rank: when.get(rank, 0))
    reason = last_line(job.file(rank, "log").read_text(errors="replace", encoding="utf-8"))
    if failed[rank] < 0:
        reason = f"ended by {signal.Signals(-failed[rank]).name}; its last output: {reason}"
    return f"rank {rank} of {job.world} failed: {reason}"


# --- one rank ------------------------------------------------------------------------------------------------


def _run_rank(job: RankJob, rank: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        log = os.open(job.file(rank, "log"), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        namespace = job.namespaces[job.placement[rank]]
        if namespace is not None:
            fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            if libc.setns(fd, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
            os.close(fd)
        result = _call_function(job, rank)
        part = job.file(rank, "part")
        part.write_text(json.dumps(result), encoding="utf-8")
        part.rename(job.file(rank, "json"))  # atomically
    except BaseException:
        job.file(rank, "failed").touch()
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _call_function(job: RankJob, rank: int) -> Any:
    import torch

    torch.set_num_threads(job.threads)
    where: dict[str, Any] = {"rank": rank, "world": job.world, "interface": job.interface, "device": "cpu"}
    if job.device == "cuda":
        number = job.placement[:rank].count(job.placement[rank])
        torch.cuda.set_device(number)
        where["device"] = f"cuda:{number}"
    function, directory = import_object(job.function), job.directory
    return call(function, job.options, job.backend, directory=directory, timeout_s=job.timeout_s, **where)


if __name__ == "__main__":
    sys.exit(main())
