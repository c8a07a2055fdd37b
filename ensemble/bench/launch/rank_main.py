"""The ranks of `run_ranks`: `python -m ensemble.bench.launch.rank_main DIRECTORY`, with the job in the directory.

This process imports what the ranks need and forks them: torch is imported, not used, before, so there is one
thread. A rank enters its host's network namespace (setns(2)) before it opens a socket. Everything ends when a rank
fails or standard input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ensemble.bench.launch import mpi
from ensemble.bench.launch.backends import UNDER_MPI, Place, connect
from ensemble.bench.launch.ranks import Job, last_line

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_END_S = 5.0


def main() -> int:
    """Run all ranks, or under MPI, which has started this process as one, that; 0 when each has returned."""
    job = Job(**json.loads(Path(sys.argv[1], "job.json").read_text()))
    if sys.argv[2:] == ["mpi"]:
        return _rank(dataclasses.replace(job, namespaces=[None] * len(job.namespaces)), mpi.rank())
    said = _under_mpi(job) if job.backend in UNDER_MPI else _forked(job)
    if said is not None:
        print(said, file=sys.stderr)
    return said is not None


def _forked(job: Job) -> str | None:
    """Run the ranks as copies of this process; what is said if that fails."""
    _function(job.function)
    importlib.import_module("torch")
    pids = {}
    for rank in range(job.world):
        pid = os.fork()
        if pid == 0:
            os._exit(_rank(job, rank))
        pids[os.pidfd_open(pid)] = rank, pid
    failed = _wait(pids)
    return _first(job, failed) if failed else None


def _under_mpi(job: Job) -> str | None:
    """Run the ranks under `mpirun`; what is said if that fails."""
    log = Path(job.directory, "mpirun.log")
    with log.open("wb") as said:
        process = subprocess.Popen(
            mpi.command(job), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=mpi.environment(job)
        )
        with contextlib.closing(select.epoll()) as poll:
            ended = os.pidfd_open(process.pid)
            poll.register(ended, select.EPOLLIN)
            poll.register(0, select.EPOLLIN)
            poll.poll()
        process.send_signal(signal.SIGTERM)  # it ends the ranks; nothing where it has ended itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
    if process.returncode == 0:
        return None
    failed = {rank: 1 for rank in range(job.world) if _failed_at(job, rank).exists()}
    return _first(job, failed) if failed else last_line(log.read_text(errors="replace"))


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


# --- all ranks -----------------------------------------------------------------------------------------------


def _wait(pids: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Wait for all ranks (pidfd -> rank and process); the statuses of those that failed first, by rank.

    Once one has failed the others are killed, and all of them once standard input ends.
    """
    poll = select.poll()
    for fd in (0, *pids):
        poll.register(fd, select.POLLIN)
    failed: dict[int, int] = {}
    while pids and not failed:
        ended = [fd for fd, _ in poll.poll()]
        if 0 in ended:
            break
        for fd in ended:
            rank, pid = pids.pop(fd)
            poll.unregister(fd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                failed[rank] = status
    for _, pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed


def _first(job: Job, failed: dict[int, int]) -> str:
    """What is said of ranks that failed: of the first, since others may have failed because of it."""

    def when(rank: int) -> float:
        return float(_failed_at(job, rank).read_text()) if _failed_at(job, rank).exists() else 0.0

    rank = min(failed, key=when)
    said = last_line(job.said(rank).read_text(errors="replace"))
    if failed[rank] < 0:
        said = f"ended by {signal.Signals(-failed[rank]).name}, last words: {said}"
    return f"rank {rank} of {job.world} failed: {said}"


def _failed_at(job: Job, rank: int) -> Path:
    return Path(job.directory, f"{rank}.failed")


# --- one rank ------------------------------------------------------------------------------------------------


def _rank(job: Job, rank: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        log = os.open(job.said(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        namespace = job.namespaces[job.placement[rank]]
        if namespace is not None:
            _enter(libc, namespace)
        result = _call(job, rank)
        part = job.result(rank).with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(job.result(rank))  # whole or absent
    except BaseException:
        _failed_at(job, rank).write_text(repr(time.monotonic()))
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _enter(libc: ctypes.CDLL, namespace: str) -> None:
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    os.close(fd)


def _call(job: Job, rank: int) -> Any:
    import torch

    torch.set_num_threads(job.threads)
    device = "cpu"
    if job.device == "cuda":
        number = job.placement[:rank].count(job.placement[rank])
        torch.cuda.set_device(number)
        device = f"cuda:{number}"
    place = Place(
        rank=rank,
        placement=tuple(job.placement),
        interface=job.interface,
        device=device,
        directory=job.directory,
        timeout_s=job.timeout_s,
    )
    comm = connect(job.backend, place)
    result = _function(job.function)(comm, job.options)
    comm.barrier(job.timeout_s)  # a rank that leaves first would break what others still have under way
    comm.close()
    return result


if __name__ == "__main__":
    sys.exit(main())
