"""The nodes on which members run as processes beside a meter: synthetic processors or GPUs, and a real GPU."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from benchmarks.energy.member import NODE, Member
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
from ensemble.meter.cpu import CpuClock
from ensemble.meter.power import Absent, list_gpus, open_nvml, open_rapl
from ensemble.spec import Energy, SpecError
from pipelines.errors import PipelineError
from pipelines.ipc.child_processes import child_environment

_CUDA = "CUDA_VISIBLE_DEVICES"
_POWER_EVERY_S = 1.0  # as the agent of a run's node does


class Bed:
    """A node on which members run; what it holds is given back at the end of the context.

    Attributes:
        name: in rows.
        members: all of them.
        node: fields of its event.
        cool_s: seconds to wait before each window.
        settle_s: seconds for which members work before a window begins.
    """

    name: str
    members: Sequence[Member]
    node: Report
    cool_s = settle_s = 0.0

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def open_meter(self) -> PowerMeter:
        """A meter of the node."""
        raise NotImplementedError

    def add(self, member: Member, pid: int) -> None:
        """A member's process was started."""

    def annotate(self, power: Report) -> None:
        """Adds to a `power` event what the agent of a node adds."""

    def read(self) -> Truth:
        """What was truly used so far, as far as it is known."""
        return Truth()


@dataclass(frozen=True)
class Measured:
    """What a node truly used while its members worked, and the event log."""

    truth: Truth
    events: Sequence[Report]


def measure(bed: Bed, members: Sequence[Member], seconds: float, settle_s: float | None = None) -> Measured:
    """Run members for that long.

    Args:
        settle_s: the meter starts when they have worked for so long; None: before they are started.
    """
    with MemberProcesses(bed) as processes:
        if settle_s is None:
            before = processes.start_meter()
        processes.start(members)
        processes.tell("work")
        if settle_s is not None:
            processes.watch(settle_s)
            before = processes.start_meter()
        processes.watch(seconds)
        processes.tell("rest")
        truth = bed.read().since(before)
        processes.finish()
    return Measured(truth, processes.events)


class MemberProcesses:
    """Processes of members, which rest at first, and the log of all that happens; they end with the context.

    Attributes:
        events: the log; they get their time when they arrive.
    """

    def __init__(self, bed: Bed) -> None:
        self.events: list[Report] = []
        self._bed, self._meter = bed, bed.open_meter()
        self._clock = CpuClock()
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._meter.close)
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._buffers: dict[str, bytes] = {}
        self._answering: set[str] = set()
        self._next_power = float("inf")
        self._log({"type": "run_started"})
        self._log(self._clock.report(NODE, "startup"))
        self._clock.switch("orchestrate")
        power = {**self._meter.describe(), "cores": bed.node["cpus"]}  # a synthetic node has cores of its own
        self._log({"type": "node", "node": NODE, **bed.node, "power": power})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        self._stack.close()

    def start_meter(self) -> Truth:
        """Starts to log the node's energy: what was used before, which is returned, does not count."""
        before = self._bed.read()
        self._meter.start()
        self._next_power = time.monotonic() + _POWER_EVERY_S
        return before

    def start(self, members: Sequence[Member]) -> None:
        """Starts members, and waits until they can work."""
        cores = sorted(os.sched_getaffinity(0))
        for number, member in enumerate(members):
            declared = {"workers": 1, "cpus_per_worker": member.cpus, "gpus_per_worker": member.gpu_share}
            self._log({"type": "member", "member": member.name, **declared})
            self._log({"type": "placed", "member": member.name, "node": NODE, "devices": [member.gpu]})
            process = subprocess.Popen(
                member.command(cores[number % len(cores)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is handled by the calling process
            )
            self._processes[member.name] = self._stack.enter_context(process)
            self._bed.add(member, process.pid)
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, member.name)
        self._wait_for_answers()

    def tell(self, word: str) -> None:
        """Tells all members to `work` or to `rest`, and waits until they have reported what they used before."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(f"{word}\n".encode())
            process.stdin.flush()
        self._wait_for_answers()

    def watch(self, seconds: float) -> None:
        """Logs what members report, and the node's power each second, for that long."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._step(left_s)

    def finish(self) -> None:
        """Ends the members' attempts and the run in the log, after a last sample."""
        self._sample()
        for name in self._processes:
            self._log({"type": "finished", "member": name})
        self._log({"type": "run_finished"})

    def _sample(self) -> None:
        self._next_power = time.monotonic() + _POWER_EVERY_S
        self._log(self._clock.report(NODE, "orchestrate"))
        for sampled in self._meter.sample():
            power = {"type": "power", **sampled}
            self._bed.annotate(power)
            self._log(power)

    def _wait_for_answers(self) -> None:
        self._answering |= set(self._processes)
        while self._answering:
            self._step(_POWER_EVERY_S)

    def _step(self, most_s: float) -> None:
        """Waits for the next report or sample."""
        due_s = self._next_power - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(most_s, due_s))):
            self._read(key.data, key.fd)
        if time.monotonic() >= self._next_power:
            self._sample()

    def _read(self, name: str, stdout: int) -> None:
        data = os.read(stdout, 1 << 16)
        if not data:
            raise PipelineError(f"member {name} of the energy study has ended")
        *lines, self._buffers[name] = (self._buffers.get(name, b"") + data).split(b"\n")
        for line in lines:
            if line == b"ok":
                self._answering.discard(name)
            else:
                self._log(json.loads(line))

    def _log(self, event: Report) -> None:
        self.events.append({"t": time.time(), **event})


# --- the nodes -----------------------------------------------------------------------------------------------


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
