"""The communicators that studies compare, by name."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.spec import SpecError, unknown_name

if TYPE_CHECKING:
    from ensemble.comm import Communicator

BACKENDS = ("gloo", "nccl", "horovod", "horovod-mpi")
# Backends whose ranks are started by `mpirun`.
UNDER_MPI = ("horovod-mpi",)
# Elements of the largest message for which a hybrid chooses between flat and hierarchical.
_LARGEST = 4 * 2**20


def _add_layer(name: str, comm: Communicator) -> Communicator:
    """The layer with the groups, and the hybrid's sizes, that a member's communicator chooses when it starts."""
    from ensemble.comm.exchange_plan import open_communicator
    from ensemble.comm.gradients import BUCKET_BYTES

    options = {"name": name, "group_size": None, "bucket_bytes": BUCKET_BYTES}
    return open_communicator(comm, options, 4 * _LARGEST)[0]


# Layers over another communicator, with an all-reduce of their own.
LAYERS: dict[str, Callable[[Communicator], Communicator]] = {
    name: functools.partial(_add_layer, name) for name in ("hierarchical", "hybrid")
}


def default_backends() -> list[str]:
    """The backends that this machine has, without those that need a GPU or `mpirun`."""
    return ["gloo", *LAYERS, *(["horovod"] if unavailable_reason("horovod") is None else [])]


def unavailable_reason(backend: str) -> str | None:
    """Why this machine does not have a backend, in one line; None where it has."""
    if not backend.startswith("horovod"):
        return None
    from ensemble.comm.horovod_start import import_horovod
    from pipelines.errors import PipelineError

    try:
        built = import_horovod()
    except PipelineError as error:
        return str(error)
    if backend not in UNDER_MPI:
        return None
    if not built.mpi_built():
        return "Horovod is built without MPI (install libopenmpi-dev, then build it anew: make horovod)"
    return None if shutil.which("mpirun") else "there is no mpirun (install openmpi-bin)"


def check_backend(backend: str) -> None:
    """Raises SpecError: there is no such backend."""
    if backend not in BACKENDS and backend not in LAYERS:
        raise SpecError(unknown_name("there is no backend", backend, [*BACKENDS, *LAYERS]))


def call(
    function: Callable[..., Any],
    options: dict[str, Any],
    backend: str,
    *,
    rank: int,
    device: str,
    directory: str,
    timeout_s: float,
    **where: Any,
) -> Any:
    """Connect this rank, call `function(comm, options)` and wait until all ranks have done so; returns its result.

    A rank that fails does not disconnect: the others are to see that it is lost.

    Args:
        backend: a name of `BACKENDS` or `LAYERS`.
        device: "cpu" or "cuda:N".
        directory: of these ranks alone, seen by all of them; used for one connection.
        timeout_s: for the others to connect, and for a collective.
        where: `world`, how many ranks there are, and the `interface` through which they reach each other.

    Raises:
        CommunicatorError: not all ranks have connected.
    """
    import torch

    where |= {"rendezvous": Path(directory, "meet").as_uri(), "rank": rank, "device": torch.device(device)}
    where |= {"rendezvous_timeout_s": timeout_s, "timeout_s": timeout_s}
    if backend.startswith("horovod"):
        from ensemble.comm import horovod

        comm: Communicator = horovod.connect(**where, backend=backend)  # type: ignore[arg-type]
    else:
        from ensemble.comm import torch_dist

        comm = torch_dist.connect(**where)
    comm = LAYERS[backend](comm) if backend in LAYERS else comm
    result = function(comm, options)
    comm.barrier(timeout_s)  # others may still communicate with this rank
    comm.close()
    return result
