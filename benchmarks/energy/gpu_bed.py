"""Coalitions of members that train on one real GPU; see `benchmarks.energy.coalitions.Bed`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from benchmarks.energy.members import NODE, Event, Member
from ensemble.meter import PowerMeter
from ensemble.meter.gpu_activity import GpuActivity, RunProcess
from ensemble.meter.power import Absent, Gpu, list_gpus, open_nvml
from ensemble.spec import Energy, SpecError

_CUDA = "CUDA_VISIBLE_DEVICES"
#: name, share of the time in which it trains, share of the GPU that it reserves.
_LOADS = (("busy", 1.0, 0.5), ("half", 0.5, 0.25), ("light", 0.1, 0.25))


def find_gpu() -> Gpu:
    """The first GPU of this machine.

    Raises:
        SpecError: there is none.
    """
    gpus = list_gpus()
    if not gpus:
        raise SpecError("--gpu: no NVIDIA driver on this machine reports a GPU")
    return gpus[0]


class GpuBed:
    """The first GPU of this machine: three members train on it, and its own energy is what is metered.

    Args:
        gpu: the only one that this process and the members see.
        cool_s: see `Bed`: a GPU that is warm draws more.
    """

    name = "gpu"
    module = "benchmarks.energy.gpu_member"

    def __init__(self, gpu: Gpu, cool_s: float) -> None:
        self.cool_s, self.settle_s = cool_s, 5.0
        self.members: Sequence[Member] = [
            Member(name=name, duty=duty, gpu=gpu.id, gpu_share=share) for name, duty, share in _LOADS
        ]
        self.node: Event = {"cpus": os.cpu_count(), "gpus": [gpu.model]}
        self.node |= {"gpu_ids": [gpu.id], "gpu_parents": [gpu.parent]}
        self._gpu = gpu
        self._activity = GpuActivity([gpu])
        self._run: dict[int, RunProcess] = {}
        self._energy = self._find_idle()

    @classmethod
    @contextmanager
    def open(cls, cool_s: float) -> Iterator[GpuBed]:
        """Hides other GPUs while the context is open, from the members as well.

        Raises:
            SpecError: there is no GPU.
        """
        gpu = find_gpu()
        before = os.environ.get(_CUDA)
        os.environ[_CUDA] = gpu.id
        try:
            bed = cls(gpu, cool_s)
            with closing(bed._activity):
                yield bed
        finally:
            os.environ.pop(_CUDA)
            if before is not None:
                os.environ[_CUDA] = before

    def open_meter(self) -> PowerMeter:
        """See `Bed`."""
        return self._open_meter(self._energy)

    def add(self, member: Member, pid: int) -> None:
        """See `Bed`."""
        self._run[pid] = RunProcess("train", member.name, member.gpu)

    def annotate(self, power: Event) -> None:
        """See `Bed`."""
        self._activity.add_to(power, self._run)

    def read_other_j(self) -> float:
        """See `Bed`: nobody else is to use the GPU."""
        return 0.0

    def _find_idle(self) -> Energy:
        """The GPU's idle power, measured now if it is at rest; it is the same for all windows."""
        meter = self._open_meter(Energy())
        meter.start()
        watts = meter.describe()["idle"]["watts"]
        meter.close()
        return Energy(idle_w={"gpu": sum(watts.values())}) if watts else Energy(measure_idle_s=0)

    def _open_meter(self, energy: Energy) -> PowerMeter:
        nvml = open_nvml()
        if isinstance(nvml, Absent):
            raise SpecError(f"--gpu: {nvml.reason}")
        return PowerMeter(NODE, [nvml], energy=energy)
