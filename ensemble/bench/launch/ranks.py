"""A function on several ranks at once, on this machine's loopback or on hosts in network namespaces.

    run_ranks("ensemble.bench.fabric.measure:measure", {"sizes": [4096]}, placement=[0, 0, 1, 1], hosts=made)

calls `measure(comm, options)` on four ranks, two on each of two hosts, and returns what each rank returned. The
ranks are forked by one process (`ensemble.bench.launch.rank_main`) once it has imported torch: an import
costs a second of processor time, and would for each rank. Options and results travel as JSON.

Nothing is left: that process ends, with all ranks, when a rank fails, when the time is over, and when the one
that asked is gone, however it went.
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

from ensemble.bench.launch.backends import check
from ensemble.bench.launch.hosts import INTERFACE, Hosts
from pipelines.child_processes import child_environment

LOOPBACK = "lo"


class RanksError(RuntimeError):
    """A rank failed, or not all were done in time; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks are to do, as they read it.

    Attributes:
        function: "module:name" of what each rank calls with its communicator and `options`.
        placement: of each rank, the number of its host.
        namespaces: of each host, its network namespace; None for the machine's own.
        interface: through which ranks reach each other.
        backend: a word of `ensemble.bench.launch.backends`.
        device: "cpu", or "cuda": each rank has the next GPU of its host as its current one.
        threads: of each rank.
        timeout_s: for all of it, and so for a collective.
        directory: where the ranks meet and leave their results.
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

    def result(self, rank: int) -> Path:
        """The file with what a rank returned."""
        return Path(self.directory, f"{rank}.json")

    def said(self, rank: int) -> Path:
        """The file with what a rank wrote to its standard output and standard error."""
        return Path(self.directory, f"{rank}.log")


def contiguous(ranks: int, hosts: int) -> list[int]:
    """A placement: neighbouring ranks on one host, as equally many on each as can be."""
    return [rank * hosts // ranks for rank in range(ranks)]


def interleaved(ranks: int, hosts: int) -> list[int]:
    """A placement: neighbouring ranks on different hosts, dealt out in turn."""
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
    """Call a function on some ranks at once; returns what each returned, by rank.

    Args:
        function: "module:name", called as `name(comm: Communicator, options: dict)`; what it returns is JSON.
        placement: the host of each rank, by number. Without `hosts` all ranks are on this machine and reach each
            other over its loopback; the numbers then only say which ranks count as neighbours.
        hosts: that are there already.
        backend: what the communicator is: a word of `ensemble.bench.launch.backends`.
        device: "cpu" or "cuda".
        threads: of each rank.
        timeout_s: for all of it.

    Raises:
        RanksError: a rank failed: which one, and the last line that it wrote to standard error; or time is over.
        SpecError: there is no such backend.
    """
    check(backend)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        job = Job(
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
        Path(directory, "job.json").write_text(json.dumps(dataclasses.asdict(job)))
        _run(job)
        return [json.loads(job.result(rank).read_text()) for rank in range(job.world)]


def _run(job: Job) -> None:
    """Raises RanksError: it did not go well."""
    ours, theirs = os.pipe()
    # The end of its standard input tells the process to end, also when this one was killed.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ensemble.bench.launch.rank_main", job.directory],
        stdin=ours,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**child_environment(), "OMP_NUM_THREADS": str(job.threads)},
        start_new_session=True,  # Ctrl-C is for the one that asked
    )
    os.close(ours)
    try:
        _, said = process.communicate(timeout=job.timeout_s)
    except subprocess.TimeoutExpired:
        late = [str(rank) for rank in range(job.world) if not job.result(rank).exists()]
        raise RanksError(
            f"{job.function} took more than {job.timeout_s:g} s; ranks that were not done: {', '.join(late)}"
        ) from None
    finally:
        os.close(theirs)
        process.communicate()
    if process.returncode:
        raise RanksError(f"{job.function} with {job.backend}: {last_line(said.decode(errors='replace'))}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
