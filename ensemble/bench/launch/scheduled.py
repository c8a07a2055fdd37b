"""This process as one rank of a job that `srun`, `mpirun` or `torchrun` has started on several machines.

Every rank runs the same command; all make the same calls in the same order, and each receives all results.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.bench.launch.backends import call, check_backend, import_function
from ensemble.spec import SpecError

if TYPE_CHECKING:
    from ensemble.comm import Communicator

# The variables in which launchers pass rank, world and the rank on its machine.
_ENVIRONMENT = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class ScheduledJob:
    """The job, as one of its ranks knows it.

    Attributes:
        rank: this one.  world: number of ranks.  local: this rank's number on its machine.
        directory: seen by all ranks, for this job alone.
        interface: through which they reach each other.
        timeout_s: for the others to connect, and for a collective.
    """

    rank: int
    world: int
    local: int
    directory: str
    interface: str
    timeout_s: float = 600.0
    _calls: itertools.count[int] = field(default_factory=itertools.count, compare=False)

    def run(self, function: str, options: dict[str, Any], *, backend: str = "gloo") -> list[Any]:
        """Call "module:name" as `name(comm, options)` on every rank; returns what each returned, by rank."""
        import torch

        check_backend(backend)
        directory = Path(self.directory, str(next(self._calls)))
        directory.mkdir(exist_ok=True)
        device = "cpu"
        if backend == "nccl":
            device = f"cuda:{self.local}"
            torch.cuda.set_device(self.local)

        def measure(comm: Communicator, options: dict[str, Any]) -> list[Any]:
            """Every rank's result, sent as JSON."""
            result = json.dumps(import_function(function)(comm, options))
            own = torch.frombuffer(bytearray(result.encode()), dtype=torch.uint8)
            return [json.loads(bytes(each.tolist())) for each in comm.all_gather(own)]

        where: dict[str, Any] = {"rank": self.rank, "world": self.world, "interface": self.interface}
        where |= {"device": device, "directory": str(directory), "timeout_s": self.timeout_s}
        found: list[Any] = call(measure, options, backend, **where)
        return found

    def placement(self) -> tuple[int, ...]:
        """The machine of each rank, by number."""
        keys = self.run("ensemble.bench.launch.scheduled:machine_key", {})
        known = list(dict.fromkeys(keys))
        return tuple(known.index(key) for key in keys)


def scheduled_job(directory: str, interface: str) -> ScheduledJob:
    """The job of this process, from its launcher's environment variables.

    Raises:
        SpecError: no launcher has started this process.
    """
    for names in _ENVIRONMENT:
        if names[0] in os.environ and names[1] in os.environ:
            rank, world, local = (int(os.environ.get(name, 0)) for name in names)
            return ScheduledJob(rank, world, local, directory, interface)
    raise SpecError("--meet is for ranks that torchrun, mpirun or srun has started; this process is none")


def machine_key(comm: Communicator, options: dict[str, Any]) -> str:
    """A key that ranks on one machine have in common."""
    from ensemble.comm.hosts import host_key

    return host_key()
