"""The inline executor: trains members in this process and thread, one after the other, for debuggers and tests.

Members train inside `events`; their events are handled at once by the controller, between two epochs. A breakpoint
in the user's code stops the whole run, with the controller's frames below it on the stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import LAST_S, EventHandler, make_exited
from ensemble.executors.host import describe_host
from ensemble.executors.memory_offers import MemoryOffers
from ensemble.meter.cpu import CpuClock
from ensemble.schedule.needs import Node, Placement
from ensemble.spec import Ensemble, Identity, SpecError
from ensemble.train import Inbox, Job, work
from pipelines.ipc.child_processes import act_as_rank

if TYPE_CHECKING:
    from ensemble.meter import PowerMeter
    from ensemble.meter.devices import RunProcess
    from ensemble.store import RunDir
    from pipelines import Peers

_POWER_EVERY_S = 1.0
NODE = "inline"


def check_widths(ensemble: Ensemble) -> None:
    """Check that each member has one worker.

    Raises:
        SpecError: one has more.
    """
    widths = {f"members[{n}]": ensemble.identify(n).workers for n in range(len(ensemble.members or ()))}
    for who, workers in (widths or {"Ensemble.resources": ensemble.identify(0, {}).workers}).items():
        if workers > 1:
            raise SpecError(
                f"{who} asks for {workers} workers; the inline executor is one process: "
                "use executor='local' or 'ray', or workers=1"
            )


class InlineExecutor:
    """Trains members here; see `ensemble.executors.Executor`."""

    name = "inline"
    in_process = True
    cluster: Sequence[Node] | None = None

    def __init__(self) -> None:
        self.clock = CpuClock(has_children=True)
        self._jobs: list[tuple[Job, Inbox, str | None]] = []  # with the id of the GPU
        self._meter: PowerMeter | None = None
        self._power_at = 0.0
        self._last: list[Report] = []  # reported after the end

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """See `Executor`; the one node has one place."""
        from ensemble.meter import PowerMeter
        from ensemble.meter.cpu import ReportPace
        from ensemble.meter.devices import list_gpus, open_activity
        from ensemble.meter.power import PowerReports
        from ensemble.train.gpu_busy import reset_gpu_busy

        check_widths(ensemble)
        reset_gpu_busy()
        self._ensemble, self._handle = ensemble, handle
        meter = PowerMeter(NODE, energy=ensemble.energy)
        try:
            meter.start()
        except BaseException:  # a signal, while idle power is measured
            meter.close()
            raise
        self._power_at = time.monotonic() + _POWER_EVERY_S
        self._activity = open_activity(list_gpus() if ensemble.devices != "cpu" else ())
        self._meter, self._reports = meter, PowerReports(ReportPace())
        activity = self._activity.describe()
        power = {**meter.describe(), **({"gpu_activity": activity} if activity else {})}
        host = describe_host(NODE, places=1, power=power)
        self._memory = MemoryOffers()
        self._node = replace(host, memory_left_gb=self._memory.offer(host))
        return [self._node]

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        """None: members that train one after the other cannot share a stream."""
        return None

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        """See `Executor`; there is no feeder."""

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`; there is no feeder."""

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        """See `Executor`; the run holds all of this host."""

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        """See `Executor`; the member trains when `events` is called next."""
        for job, device in zip(jobs, devices, strict=True):
            # This process sees all GPUs; a worker process would see only its own.
            here = job.device if device is None else f"cuda:{self._node.gpu_ids.index(device)}"
            # NVML's numbers are not CUDA's, unless the user's environment says so.
            self._jobs.append((replace(job, device=here, gpu=None), Inbox(), device))

    def events(self, timeout_s: float | None) -> list[Report]:
        """Train the next member that was launched to its end, and return its `exited` event."""
        if not self._jobs:
            if timeout_s:  # all are paused
                time.sleep(timeout_s)
            last, self._last = self._last, []
            return [*last, *self._power(), *self._look_at_memory()]
        job, inbox, _ = self._jobs[0]
        before = self.clock.switch("startup")
        try:
            with act_as_rank(job.rank, job.identity.workers):
                outcome = work(job, self._ensemble, self._emit, inbox, self.clock)
        finally:
            self.clock.switch(before)
            self._jobs.pop(0)
        self._reports.pace.hurry()  # a search may wait for what the member has cost
        return [make_exited(job, outcome), *self._power(), *self._look_at_memory()]

    def _emit(self, event: Report) -> None:
        """Let the controller handle an event of the member, at its own expense."""
        before = self.clock.switch("orchestrate")
        try:
            self._handle([event, *self._power()])
        finally:
            self.clock.switch(before)

    def _power(self, *, is_last: bool = False) -> list[Report]:
        """What is reported of the power: it is measured a second after the last time, and at the end."""
        if self._meter is None or not (is_last or time.monotonic() >= self._power_at):
            return []
        power = self._meter.sample()
        self._power_at = time.monotonic() + _POWER_EVERY_S
        if power["parts"]:
            self._activity.add_to(power, {os.getpid(): self._describe_process()})
        return self._as_events([*self._reports.add(power), *(self._reports.take() if is_last else [])])

    def _as_events(self, reported: Sequence[Mapping[str, Any]]) -> list[Report]:
        return [{"type": "power", **power} for power in reported]

    def _look_at_memory(self) -> list[Report]:
        """The node, where others hold more or less of its memory than before."""
        change = self._memory.find_change() if self._meter is not None else None
        if change is None:
            return []
        self._node = replace(self._node, memory_left_gb=change[0])
        held = self._as_events(self._reports.take())  # power begins anew behind a `node` event
        return [*held, {"type": "node", **self._node.as_event()}]

    def _describe_process(self) -> RunProcess:
        """For whom this process uses a GPU now."""
        from ensemble.meter.devices import RunProcess

        for job, _, gpu in self._jobs:  # the first is in training
            return RunProcess("train", job.identity.member, gpu)
        return RunProcess("orchestrate", None, None)

    def send(self, member: str, command: str, **fields: Any) -> None:
        for job, inbox, _ in self._jobs:
            if job.identity.member == member:
                inbox.put(command, **fields)

    def kill(self, member: str) -> None:
        """Ask the member to end, which it does at its next step: this thread cannot be killed."""
        self.send(member, "cancel")

    def release(self) -> None:
        """See `Executor`; nobody waits for this host."""

    def close(self) -> None:
        """See `Executor`; `events` returns the last power sample after this."""
        self._jobs.clear()
        if self._meter is not None:
            time.sleep(max(0.0, self._power_at - _POWER_EVERY_S + LAST_S - time.monotonic()))
            self._last += self._power(is_last=True)
            self._meter.close()
            self._activity.close()
            self._meter = None
            del self._ensemble  # members lead to this executor, and to each other in circles
