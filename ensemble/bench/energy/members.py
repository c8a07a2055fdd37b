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

from ensemble.meter import PowerMeter
from ensemble.meter.cpu import DriverClock
from pipelines.child_processes import child_environment
from pipelines.errors import PipelineError

NODE = "synthetic"
POWER_EVERY_S = 1.0  # as the agent of a run's node does
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member of the study.

    Attributes:
        name: in events and rows.
        duty: cores that it keeps busy while it works.
        cpus: cores that it reserves.
    """

    name: str
    duty: float
    cpus: float = 1.0


class MemberProcesses:
    """The members' processes, which rest at first, and the log of all that happens; they end with the context.

    Args:
        meter: it has been started.
        started: called with the name and process id of each member at once when it is started.

    Attributes:
        events: the log; they get their time when they arrive.
    """

    def __init__(
        self, members: Sequence[Member], meter: PowerMeter, cpus: float, started: Callable[[str, int], None]
    ) -> None:
        self.events: list[Event] = []
        self._meter = meter
        self._clock = DriverClock()
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._buffers: dict[str, bytes] = {}
        self._answering: set[str] = set()
        self._next_power = time.monotonic() + POWER_EVERY_S
        self._log({"type": "run_started"})
        self._log({"type": "usage", **self._clock.begin(NODE)})
        self._log({"type": "node", "node": NODE, "cpus": cpus, "gpus": [], "power": meter.describe()})
        try:
            for number, member in enumerate(members):
                self._start(number, member, started)
            self._wait_for_answers(*self._processes)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _start(self, number: int, member: Member, started: Callable[[str, int], None]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        command = [sys.executable, "-P", "-m", "ensemble.bench.energy.busy", member.name, NODE, str(member.duty)]
        command.append(str(cores[number % len(cores)]))
        self._log({"type": "member", "member": member.name, "workers": 1, "cpus_per_worker": member.cpus})
        self._log({"type": "placed", "member": member.name, "node": NODE, "devices": [None]})
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
        self._processes[member.name] = self._stack.enter_context(process)
        started(member.name, process.pid)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, member.name)

    def __enter__(self) -> MemberProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        self._stack.close()

    def tell(self, word: str, *members: str) -> None:
        """Tells members to `work` or to `rest`, and waits until they have reported what they used before."""
        for name in members:
            pipe = self._processes[name].stdin
            assert pipe is not None
            pipe.write(f"{word}\n".encode())
            pipe.flush()
        self._wait_for_answers(*members)

    def watch(self, seconds: float) -> None:
        """Logs what members report, and the node's power each second, for that long."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._step(left_s)

    def sample(self) -> Event:
        """Logs what the node and the driver have used since the last sample, now."""
        self._next_power = time.monotonic() + POWER_EVERY_S
        self._log({"type": "usage", **self._clock.sample(NODE)})
        power = {"type": "power", **self._meter.sample()}
        self._log(power)
        return power

    def finish(self) -> None:
        """Ends the members' attempts and the run in the log, after a last sample."""
        self.sample()
        for name in self._processes:
            self._log({"type": "finished", "member": name})
        self._log({"type": "run_finished"})

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
            self.sample()

    def _read(self, name: str, stdout: int) -> None:
        data = os.read(stdout, 1 << 16)
        if not data:
            raise PipelineError(f"member {name} of the synthetic node has ended")
        *lines, self._buffers[name] = (self._buffers.get(name, b"") + data).split(b"\n")
        for line in lines:
            if line == b"ok":
                self._answering.discard(name)
            else:
                self._log(json.loads(line))

    def _log(self, event: Event) -> None:
        self.events.append({"t": time.time(), **event})
