"""Runs a function on several ranks at once, on this machine's loopback or on hosts in network namespaces.

The ranks are forked by one process (`benchmarks.launch.rank_main`) once it has imported torch. It ends, with all
ranks, when a rank fails, when the time limit is reached, and when its parent has ended, killed or not.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launch.backends import UNDER_MPI, check_backend
from benchmarks.launch.child import ChildTimeoutError, run_child
from benchmarks.launch.hosts import INTERFACE, Hosts
from ensemble.comm import CommunicatorError
from ensemble.spec import SpecError
from pipelines.ipc.child_processes import child_environment

LOOPBACK = "lo"


class RanksError(CommunicatorError):
    """A rank failed, or not all finished in time; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """The ranks' task, which they read from a file; fields not listed are as of `run_ranks`.

    Attributes:
        namespaces: each host's network namespace; None for the machine's own.
        interface: through which ranks connect to each other.
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

    def file(self, rank: int, kind: str) -> Path:
        """A file of a rank: "json", its result; "log", its output; "failed", which it makes when it fails."""
        return Path(self.directory, f"{rank}.{kind}")


def contiguous(ranks: int, hosts: int) -> list[int]:
    """A placement with neighbouring ranks on one host, in equal parts."""
    return [rank * hosts // ranks for rank in range(ranks)]


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
        backend: of the communicator: a name of `benchmarks.launch.backends`.
        device: "cpu", or "cuda": each rank has the next GPU of its host as its current one.
        threads: of each rank.
        timeout_s: for all of it, and for each collective.

    Raises:
        RanksError: a rank failed (with its number and its last line on standard error), or time is over.
        SpecError: there is no such backend, or it is MPI's and there are hosts.
    """
    check_backend(backend)
    if backend in UNDER_MPI and hosts is not None:
        raise SpecError(f"{backend} is for ranks of this machine, without emulated hosts")
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
        environment = {**child_environment(), "OMP_NUM_THREADS": str(threads)}
        try:
            run_child("benchmarks.launch.rank_main", directory, environment=environment, timeout_s=timeout_s)
        except ChildTimeoutError:
            unfinished = [str(rank) for rank in range(job.world) if not job.file(rank, "json").exists()]
            missing = f"ranks that were not done: {', '.join(unfinished)}"
            raise RanksError(f"{function} took more than {timeout_s:g} s; {missing}") from None
        except RuntimeError as error:
            raise RanksError(f"{function} with {backend}: {error}") from None
        return [json.loads(job.file(rank, "json").read_text(encoding="utf-8")) for rank in range(job.world)]
