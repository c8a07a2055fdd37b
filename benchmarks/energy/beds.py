"""The nodes on which members run: synthetic processors, synthetic GPUs, and a real GPU."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.energy.member import NODE, Member
from benchmarks.energy.processes import Bed, Event
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
    """The first GPU of this machine, the only one that members see: its own energy is what is metered.

    Raises:
        SpecError: there is none.
    """

    name = "gpu"
    settle_s = 5.0

    def __init__(self, cool_s: float = 0.0) -> None:
        super().__init__()
        self.cool_s = cool_s  # a GPU that is warm draws more
        found = list_gpus()
        if not found:
            raise SpecError("--gpu: no NVIDIA driver on this machine reports a GPU")
        self._hide_other_gpus(found[0].id)
        self._watch_gpus()
        loads = (("busy", 1.0, 0.5), ("half", 0.5, 0.25), ("light", 0.1, 0.25))
        self.members = [
            Member(name=name, duty=duty, gpu=found[0].id, gpu_share=share, trains=True)
            for name, duty, share in loads
        ]
        self._energy = self._find_idle()

    def _watch_gpus(self) -> None:
        from ensemble.executors.host import describe_host
        from ensemble.meter.gpu_activity import GpuActivity, RunProcess

        self.node = describe_host(NODE).as_event()
        self._activity = GpuActivity(list_gpus())
        self.stack.callback(self._activity.close)
        self._run: dict[int, RunProcess] = {}
        self._energy = Energy()

    def _hide_other_gpus(self, gpu: str) -> None:
        before = os.environ.get(_CUDA)
        self.stack.callback(os.environ.update, {} if before is None else {_CUDA: before})
        self.stack.callback(os.environ.pop, _CUDA)
        os.environ[_CUDA] = gpu

    def _find_idle(self) -> Energy:
        """The GPU's idle power, measured now if it is at rest; it is the same for all windows."""
        meter = self.open_meter()
        meter.start()
        watts = meter.describe()["idle"]["watts"]
        meter.close()
        return Energy(idle_w={"gpu": sum(watts.values())}) if watts else Energy(measure_idle_s=0)

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

    def annotate(self, power: Event) -> None:
        """See `Bed`."""
        self._activity.add_to(power, self._run)


class SyntheticGpuBed(GpuBed):
    """Synthetic GPUs behind the stand-in for NVIDIA's library, with which this process must have been started.

    Args:
        loads: of the members by name.
        state: file of the stand-in's state.
    """

    name = "synthetic GPUs"

    def __init__(self, members: Sequence[Member], loads: dict[str, Load], state: Path) -> None:
        Bed.__init__(self)
        self._watch_gpus()
        known = list_gpus()
        devices = (load.gpu if load.instance is None else number for number, load in enumerate(loads.values()))
        self.members = [
            dataclasses.replace(member, gpu=known[device].id)
            for member, device in zip(members, devices, strict=True)
        ]
        self._loads = loads
        number = 1 + max(load.gpu for load in loads.values())
        self._gpus = self.stack.enter_context(SyntheticGpus(state, number))
        self._energy = Energy(idle_w={"gpu": GPU_IDLE_W})

    def add(self, member: Member, pid: int) -> None:
        """See `Bed`."""
        super().add(member, pid)
        self._gpus.add(member.name, pid, self._loads[member.name])

    def read(self) -> Truth:
        """See `Bed`."""
        return self._gpus.read()
