"""Runs a function on several ranks at once, on this machine's loopback or on hosts in network namespaces.

    run_ranks("benchmarks.scaling.measure:time_steps", options, placement=[0, 0, 1, 1], hosts=hosts)

calls `time_steps(comm, options)` on four ranks, two on each of two hosts, and returns each rank's result. The
ranks are forked by one process (`ensemble.bench.launch.rank_main`) once it has imported torch: an import
costs a second of processor time, and would for each rank. Options and results travel as JSON.

That process ends, with all ranks, when a rank fails, when the time limit is reached, and when the process that
called `run_ranks` has ended, killed or not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.bench.launch.backends import check_backend
from ensemble.bench.launch.hosts import INTERFACE, Hosts
from pipelines.child_processes import child_environment

LOOPBACK = "lo"


class RanksError(RuntimeError):
    """A rank failed, or not all finished in time; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """The ranks' task, which they read from a file.

    Attributes:
        function: "module:name"; each rank calls it with its communicator and `options`.
        placement: the number of each rank's host.
        namespaces: each host's network namespace; None for the machine's own.
        interface: through which ranks connect to each other.
        backend: a name of `ensemble.bench.launch.backends`.
        device: "cpu", or "cuda": each rank has the next GPU of its host as its current one.
        threads: of each rank.
        timeout_s: for all of it, and for each collective.
        directory: where the ranks meet and write their results.
    """

    function: str
    options: dict[str, Any]
    placement: list[int]
    namespaces: list[str | None]
    interface: str
    backend: str
    device: str
    threads: int
    timeout_s: float
    directory: str

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.placement)

    def result_file(self, rank: int) -> Path:
        """The file with a rank's result."""
        return Path(self.directory, f"{rank}.json")

    def log(self, rank: int) -> Path:
        """The file with a rank's standard output and standard error."""
        return Path(self.directory, f"{rank}.log")

    def failure(self, rank: int) -> Path:
        """The file that a rank makes when it fails."""
        return Path(self.directory, f"{rank}.failed")


def contiguous(ranks: int, hosts: int) -> list[int]:
    """A placement with neighbouring ranks on one host, in equal parts."""
    return [rank * hosts // ranks for rank in range(ranks)]


def interleaved(ranks: int, hosts: int) -> list[int]:
    """A placement with neighbouring ranks on different hosts, in turn."""
    return [rank % hosts for rank in range(ranks)]


def run_ranks(
    function: str,
    options: dict[str, Any],
    *,
    placement: Sequence[int],
    hosts: Hosts | None = None,
    backend: str = "gloo",
    device: str = "cpu",
    threads: int = 1,
    timeout_s: float = 600.0,
) -> list[Any]:
    """Call a function on several ranks at once; returns each rank's result, by rank.

    Args:
        function: "module:name", called as `name(comm: Communicator, options: dict)`; its result is JSON.
        placement: the number of each rank's host. Without `hosts` all ranks run on this machine and connect over
            its loopback; the numbers then only determine which ranks count as neighbours.
        hosts: on which the ranks run.
        backend: of the communicator: a name of `ensemble.bench.launch.backends`.
        device: "cpu" or "cuda".
        threads: of each rank.
        timeout_s: for all of it.

    Raises:
        RanksError: a rank failed (with its number and its last line on standard error), or time is over.
        SpecError: there is no such backend.
    """
    check_backend(backend)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        job = RankJob(
            function=function,
            options=options,
            placement=list(placement),
            namespaces=[None] * (max(placement) + 1) if hosts is None else list(hosts.names),
            interface=LOOPBACK if hosts is None else INTERFACE,
            backend=backend,
            device=device,
            threads=threads,
            timeout_s=timeout_s,
            directory=directory,
        )
        Path(directory, "job.json").write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        _run_job(job)
        return [json.loads(job.result_file(rank).read_text(encoding="utf-8")) for rank in range(job.world)]


def _run_job(job: RankJob) -> None:
    """Start the process of the ranks and wait for it; raises RanksError where a rank failed."""
    # The end of its standard input ends the process, also when this one was killed.
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ensemble.bench.launch.rank_main", job.directory],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**child_environment(), "OMP_NUM_THREADS": str(job.threads)},
        start_new_session=True,  # Ctrl-C is handled by the calling process
    )
    os.close(read_end)
    try:
        _, errors = process.communicate(timeout=job.timeout_s)
    except subprocess.TimeoutExpired:
        unfinished = [str(rank) for rank in range(job.world) if not job.result_file(rank).exists()]
        raise RanksError(
            f"{job.function} took more than {job.timeout_s:g} s; ranks that were not done: {', '.join(unfinished)}"
        ) from None
    finally:
        os.close(write_end)
        process.communicate()
    if process.returncode:
        raise RanksError(f"{job.function} with {job.backend}: {last_line(errors.decode(errors='replace'))}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
