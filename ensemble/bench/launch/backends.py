"""Communicators by one word, for studies that compare them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ensemble.spec import SpecError, unknown_name

if TYPE_CHECKING:
    from ensemble.comm import Communicator


# Elements of the largest message for which the ways of a hybrid are found out.
_LARGEST = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is, and how it reaches the others.

    Attributes:
        rank: this one.
        placement: of each rank, the number of its host.
        interface: through which ranks reach each other.
        device: "cpu" or "cuda:N".
        directory: private to these ranks, seen by all of them; the same word is connected once in it.
        timeout_s: for the others to come, and for a collective.
    """

    rank: int
    placement: tuple[int, ...]
    interface: str
    device: str
    directory: str
    timeout_s: float

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.placement)


def _torch(place: Place) -> Communicator:
    import torch

    from ensemble.comm.torch_dist import connect

    return connect(
        Path(place.directory, "meet").as_uri(),
        rank=place.rank,
        world=place.world,
        device=torch.device(place.device),
        interface=place.interface,
        rendezvous_timeout_s=place.timeout_s,
        timeout_s=place.timeout_s,
    )


def _topology(name: str, comm: Communicator) -> Communicator:
    """Groups, and sizes for the hybrid, as a member's communicator finds them when it starts."""
    from ensemble.comm.autotune.plan import open_communicator
    from ensemble.comm.gradients import BUCKET_BYTES

    options = {"name": name, "group_size": None, "bucket_bytes": BUCKET_BYTES}
    return open_communicator(comm, options, [_LARGEST])[0]


def _horovod(backend: Literal["horovod", "horovod-mpi"], place: Place) -> Communicator:
    import torch

    from ensemble.comm.horovod import connect

    return connect(
        Path(place.directory, "meet").as_uri(),
        rank=place.rank,
        world=place.world,
        device=torch.device(place.device),
        interface=place.interface,
        rendezvous_timeout_s=place.timeout_s,
        timeout_s=place.timeout_s,
        backend=backend,
    )


BACKENDS: dict[str, Callable[[Place], Communicator]] = {
    "gloo": _torch,
    "nccl": _torch,
    "horovod": functools.partial(_horovod, "horovod"),
    "horovod-mpi": functools.partial(_horovod, "horovod-mpi"),
}
# Whose ranks are started by `mpirun`.
UNDER_MPI = ("horovod-mpi",)
# Made of another one, with an all-reduce of their own.
LAYERS: dict[str, Callable[[Communicator], Communicator]] = {
    "hierarchical": functools.partial(_topology, "hierarchical"),
    "hybrid": functools.partial(_topology, "hybrid"),
}


def usual() -> list[str]:
    """Those that are here, without a GPU."""
    return ["gloo", *LAYERS, *(word for word in ("horovod", "horovod-mpi") if absent(word) is None)]


def absent(backend: str) -> str | None:
    """Why a backend cannot be had here, in one line; None where it can."""
    if not backend.startswith("horovod"):
        return None
    from pipelines.errors import PipelineError
    from pipelines.multinode.horovod_start import import_horovod

    try:
        built = import_horovod()
    except PipelineError as error:
        return str(error)
    if backend not in UNDER_MPI:
        return None
    if not built.mpi_built():
        return "Horovod is built without MPI (install libopenmpi-dev, then build it anew: make horovod)"
    return None if shutil.which("mpirun") else "there is no mpirun (install openmpi-bin)"


def check(backend: str) -> None:
    """Raises SpecError: there is no such backend."""
    if backend not in BACKENDS and backend not in LAYERS:
        raise SpecError(unknown_name("there is no backend", backend, [*BACKENDS, *LAYERS]))


def connect(backend: str, place: Place) -> Communicator:
    """This rank's communicator of all ranks.

    Raises:
        SpecError: there is no such backend.
        CommunicatorError: not all ranks came.
    """
    check(backend)
    if backend in LAYERS:
        return LAYERS[backend](_torch(place))
    return BACKENDS[backend](place)
