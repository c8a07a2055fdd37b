"""The nodes on which members run: synthetic processors, synthetic GPUs, and a real GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.energy.member import NODE, Member
from benchmarks.energy.processes import Bed
from benchmarks.energy.synthetic import (
    DRIVER,
    GPU_IDLE_W,
    IDLE_W,
    Load,
    PowerModel,
    SyntheticGpus,
    SyntheticProcessors,
    Truth,
)
from ensemble.bench.pipelines.processes import process_clock_s
from ensemble.events import Report
from ensemble.meter import PowerMeter
from ensemble.meter.power import Absent, list_gpus, open_nvml, open_rapl
from ensemble.spec import Energy, SpecError

_CUDA = "CUDA_VISIBLE_DEVICES"


class ProcessorBed(Bed):
    """A synthetic node of processors, with that many cores."""

    name = "synthetic"
    settle_s = 0.3

    def __init__(self, model: PowerModel, cpus: float, members: Sequence[Member]) -> None:
        super().__init__()
        self.members, self.node = members, {"cpus": cpus, "gpus": []}
        self._root = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._node = self.stack.enter_context(SyntheticProcessors(self._root, model))
        self._energy = Energy(idle_w=IDLE_W)
        self._node.add(DRIVER, os.getpid(), Load(), process_clock_s(os.getpid()))

    def open_meter(self) -> PowerMeter:
        """See `Bed`."""
        rapl = open_rapl(self._root)
        assert not isinstance(rapl, Absent), rapl.reason
        return PowerMeter(NODE, [rapl], energy=self._energy)

    def add(self, member: Member, pid: int) -> None:
        """See `Bed`."""
        share = member.cpus / self.node["cpus"]
        self._node.add(member.name, pid, Load(share=share, intensity=member.intensity))

    def read(self) -> Truth:
        """See `Bed`."""
        return self._node.read()


class GpuBed(Bed):
    """The GPUs that this process sees: their own energy is what is metered."""

    def __init__(self, energy: Energy) -> None:
        from ensemble.executors.host import describe_host
        from ensemble.meter.gpu_activity import GpuActivity, RunProcess

        super().__init__()
        self.node, self._energy = describe_host(NODE).as_event(), energy
        self._activity = GpuActivity(list_gpus())
        self.stack.callback(self._activity.close)
        self._run: dict[int, RunProcess] = {}

    def open_meter(self) -> PowerMeter:
        """See `Bed`."""
        nvml = open_nvml()
        if isinstance(nvml, Absent):
            raise SpecError(f"--gpu: {nvml.reason}")
        return PowerMeter(NODE, [nvml], energy=self._energy)

    def add(self, member: Member, pid: int) -> None:
        """See `Bed`."""
        from ensemble.meter.gpu_activity import RunProcess

        self._run[pid] = RunProcess("train", member.name, member.gpu)

    def annotate(self, power: Report) -> None:
        """See `Bed`."""
        self._activity.add_to(power, self._run)


class RealGpuBed(GpuBed):
    """The first GPU of this machine, the only one that members see.

    Raises:
        SpecError: there is none.
    """

    name = "gpu"
    settle_s = 5.0

    def __init__(self, cool_s: float = 0.0) -> None:
        found, before = list_gpus(), os.environ.get(_CUDA)
        if not found:
            raise SpecError("--gpu: no NVIDIA driver on this machine reports a GPU")
        gpu = os.environ[_CUDA] = found[0].id
        super().__init__(Energy())
        self.stack.callback(os.environ.update, {} if before is None else {_CUDA: before})
        self.stack.callback(os.environ.pop, _CUDA)
        self.cool_s = cool_s  # a GPU that is warm draws more
        loads = (("busy", 1.0, 0.5), ("half", 0.5, 0.25), ("light", 0.1, 0.25))
        self.members = [
            Member(name=name, duty=duty, gpu=gpu, gpu_share=share, trains=True) for name, duty, share in loads
        ]
        self._energy = self._find_idle()

    def _find_idle(self) -> Energy:
        """The GPU's idle power, measured now if it is at rest; it is the same for all windows."""
        meter = self.open_meter()
        meter.start()
        watts = meter.describe()["idle"]["watts"]
        meter.close()
        return Energy(idle_w={"gpu": sum(watts.values())}) if watts else Energy(measure_idle_s=0)


class SyntheticGpuBed(GpuBed):
    """Synthetic GPUs behind the stand-in for NVIDIA's library, with which this process must have been started.

    Args:
        members: on physical GPUs, or each on the instance of its number.
        loads: of the members by name.
        state: file of the stand-in's state.
    """

    def __init__(self, members: Sequence[Member], loads: dict[str, Load], state: Path) -> None:
        super().__init__(Energy(idle_w={"gpu": GPU_IDLE_W}))
        ids = self.node["gpu_ids"]
        on = (load.gpu if load.instance is None else number for number, load in enumerate(loads.values()))
        self.members = [replace(each, gpu=ids[device]) for each, device in zip(members, on, strict=True)]
        self._loads = loads
        gpus = SyntheticGpus(state, 1 + max(load.gpu for load in loads.values()))
        self._gpus = self.stack.enter_context(gpus)

    def add(self, member: Member, pid: int) -> None:
        """See `Bed`."""
        super().add(member, pid)
        self._gpus.add(member.name, pid, self._loads[member.name])

    def read(self) -> Truth:
        """See `Bed`."""
        return self._gpus.read()
