"""Members that run as processes beside a meter, and the event log of what they do, as a run writes it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from benchmarks.energy.busy import Config
from ensemble.meter import PowerMeter
from ensemble.meter.cpu import CpuClock
from pipelines.child_processes import child_environment
from pipelines.errors import PipelineError

NODE = "node-0"
POWER_EVERY_S = 1.0  # as the agent of a run's node does
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member of the study.

    Attributes:
        name: in events and rows.
        duty: share of the time in which it keeps a core, or its GPU, busy while it works.
        intensity: power of its work on a core over that of usual work.
        cpus: cores that it reserves.
        gpu: id of its GPU.  gpu_share: how much of it the member reserves.
        gpu_s: see `Config`.
    """

    name: str
    duty: float
    intensity: float = 1.0
    cpus: float = 1.0
    gpu: str | None = None
    gpu_share: float = 0.0
    gpu_s: float | None = None


class MemberProcesses:
    """The members' processes, which rest at first, and the log of all that happens; they end with the context.

    Args:
        meter: of their node.
        node: further fields of the node's event.
        module: that the processes run.
        started: called with each member and its process id at once when it is started.
        annotate: called with each `power` event before it is logged.

    Attributes:
        events: the log; they get their time when they arrive.
    """

    def __init__(
        self,
        meter: PowerMeter,
        node: Event,
        started: Callable[[Member, int], None],
        module: str = "benchmarks.energy.busy",
        annotate: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.events: list[Event] = []
        self._meter, self._module = meter, module
        self._started, self._annotate = started, annotate
        self._clock = CpuClock()
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._buffers: dict[str, bytes] = {}
        self._answering: set[str] = set()
        self._next_power = float("inf")
        self._log({"type": "run_started"})
        self._log(self._clock.report(NODE, "startup"))
        self._clock.switch("orchestrate")
        power = {**meter.describe(), "cores": node["cpus"]}  # a synthetic node has cores of its own
        self._log({"type": "node", "node": NODE, **node, "power": power})

    def __enter__(self) -> MemberProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        self._stack.close()

    def start_meter(self) -> None:
        """Starts to log the node's energy: what was used before does not count."""
        self._meter.start()
        self._next_power = time.monotonic() + POWER_EVERY_S

    def start(self, members: Sequence[Member]) -> None:
        """Starts members, and waits until they can work."""
        for member in members:
            self._start(member)
        self._wait_for_answers(*(member.name for member in members))

    def _start(self, member: Member) -> None:
        cores = sorted(os.sched_getaffinity(0))
        core = cores[len(self._processes) % len(cores)]
        config = Config(name=member.name, node=NODE, duty=member.duty, core=core, gpu_s=member.gpu_s)
        declared = {"workers": 1, "cpus_per_worker": member.cpus, "gpus_per_worker": member.gpu_share}
        self._log({"type": "member", "member": member.name, **declared})
        self._log({"type": "placed", "member": member.name, "node": NODE, "devices": [member.gpu]})
        command = [sys.executable, "-P", "-m", self._module, config.to_json()]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is handled by the calling process
        )
        self._processes[member.name] = self._stack.enter_context(process)
        self._started(member, process.pid)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, member.name)

    def tell(self, word: str) -> None:
        """Tells all members to `work` or to `rest`, and waits until they have reported what they used before."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(f"{word}\n".encode())
            process.stdin.flush()
        self._wait_for_answers(*self._processes)

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
        self._next_power = time.monotonic() + POWER_EVERY_S
        self._log(self._clock.report(NODE, "orchestrate"))
        for sampled in self._meter.sample():
            power = {"type": "power", **sampled}
            self._annotate(power)
            self._log(power)

    def _wait_for_answers(self, *members: str) -> None:
        self._answering |= set(members)
        while self._answering:
            self._step(POWER_EVERY_S)

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

    def _log(self, event: Event) -> None:
        self.events.append({"t": time.time(), **event})
