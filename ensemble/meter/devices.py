"""GPUs as the core knows them. What reads them is loaded where an NVIDIA driver answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pipelines.providers import import_object

Mode = Literal["default", "exclusive", "prohibited"]


class Gpu(NamedTuple):
    """A GPU, or an instance of one in MIG mode.

    Attributes:
        id: its UUID; its number where NVML gives none.
        model: name of the model; of an instance, also of its profile.
        memory_gb: its memory in GiB.
        names: by which CUDA and Ray may call it or, of an instance, the physical GPU: number and UUID.
        parent: id of the physical GPU.
        share: its part of the physical GPU's slices, 1 of a whole GPU; None where NVML does not say it.
    """

    id: str
    model: str
    memory_gb: float
    names: tuple[str, ...] = ()
    parent: str = ""
    share: float | None = 1.0


class GpuState(NamedTuple):
    """What others make of a GPU.

    Attributes:
        mode: its compute mode.
        held_gb: its memory that processes of others hold, in GiB.
        is_shared: whether it runs a process of others.
    """

    mode: Mode = "default"
    held_gb: float = 0.0
    is_shared: bool = False


class RunProcess(NamedTuple):
    """A process of the run that may use a GPU.

    Attributes:
        role: "train" or "profile".
        member: that it works for, if it is one.
        gpu: the id of its GPU.
    """

    role: str
    member: str | None
    gpu: str | None


class NoGpus:
    """Stands for the GPUs of a node, and the activity on them, where there are none."""

    gpus: Sequence[Gpu] = ()
    lost: Sequence[str] = ()

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}

    def find_faults(self) -> dict[str, str]:
        return {}

    def read_states(self, in_use: Collection[str] = ()) -> dict[str, GpuState]:
        return {}

    def describe(self) -> str:
        return ""

    def add_to(self, power: Mapping[str, Any], run: Mapping[int, RunProcess]) -> None:
        pass

    def close(self) -> None:
        pass


def has_driver() -> bool:
    """Whether an NVIDIA driver answers."""
    try:
        import pynvml

        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except Exception:  # no package, or no driver
        return False
    return True


def list_gpus() -> list[Gpu]:
    """The GPUs that this process may use, without those that are lost."""
    gpus: list[Gpu] = import_object("ensemble.meter.power.nvml:list_gpus")() if has_driver() else []
    return gpus


def watch_gpus(is_own: Callable[[int], bool]) -> Any:
    """The GPUs that this process may use: an `ensemble.meter.gpus.GpuWatch`, or `NoGpus`.

    Args:
        is_own: whether a process, by its id, belongs to this run on this node.
    """
    return import_object("ensemble.meter.gpus:GpuWatch")(is_own) if has_driver() else NoGpus()


def open_activity(gpus: Sequence[Gpu], *, with_mps: bool = False) -> Any:
    """Who keeps these GPUs busy: an `ensemble.meter.gpu_activity.GpuActivity`, or `NoGpus`.

    Args:
        with_mps: whether the run's processes use them through its Multi-Process Service.
    """
    return import_object("ensemble.meter.gpu_activity:GpuActivity")(gpus, with_mps) if gpus else NoGpus()


def share_by_slices(gpus: Sequence[Gpu]) -> tuple[float, ...]:
    """The share of each GPU in its physical GPU; where NVML does not say it, instances have equal ones."""
    parents = [gpu.parent for gpu in gpus]
    unknown = {gpu.parent for gpu in gpus if gpu.share is None}
    return tuple(
        1 / parents.count(gpu.parent) if gpu.share is None or gpu.parent in unknown else gpu.share for gpu in gpus
    )
