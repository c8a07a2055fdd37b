"""The inline executor: trains members in this process and thread, one after the other, for debuggers and tests.

Members train inside `events`. Their events are handled at once by the controller, so results and requests are
answered between two epochs although nothing runs beside the member. A breakpoint in the user's code stops the
whole run, with the controller's frames below it on the stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import EventHandler, make_exited
from ensemble.executors.host import describe_host
from ensemble.executors.memory_offers import MemoryOffers
from ensemble.executors.power_reports import PowerReports
from ensemble.meter.cpu import CpuClock
from ensemble.meter.gpu_activity import RunProcess
from ensemble.schedule import Node, Placement
from ensemble.spec import Ensemble, Identity, SpecError
from ensemble.train import Inbox, Job, work
from pipelines.ipc.child_processes import act_as_rank

if TYPE_CHECKING:
    from ensemble.store import RunDir
    from pipelines import Peers

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
    metrics = None

    def __init__(self) -> None:
        self.clock = CpuClock(has_children=True)
        self._jobs: list[tuple[Job, Inbox, str | None]] = []  # with the id of the GPU
        self._power: PowerReports | None = None
        self._last: list[Report] = []  # reported after the end

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """See `Executor`; the one node has one place."""
        from ensemble.meter.power import list_gpus
        from ensemble.train.gpu_busy import reset_gpu_busy

        check_widths(ensemble)
        reset_gpu_busy()
        self._ensemble, self._handle = ensemble, handle
        self._power = PowerReports(NODE, ensemble.energy)
        self._power.watch_gpus(list_gpus() if ensemble.devices != "cpu" else ())
        self._power.list_processes = lambda: {os.getpid(): self._describe_process()}
        host = describe_host(NODE, places=1, power=self._power.describe())
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
            return [*last, *self._sample_power(), *self._look_at_memory()]
        job, inbox, _ = self._jobs[0]
        before, self.clock.member = self.clock.switch("startup"), job.identity.member
        try:
            with act_as_rank(job.rank, job.identity.workers):
                outcome = work(job, self._ensemble, self._emit, inbox, self.clock)
        finally:
            self.clock.switch(before)
            self.clock.member = None
            self._jobs.pop(0)
        if self._power is not None:
            self._power.report_soon()
        return [make_exited(job, outcome), *self._sample_power(), *self._look_at_memory()]

    def _emit(self, event: Report) -> None:
        """Let the controller handle an event of the member, at its own expense."""
        before = self.clock.switch("orchestrate")
        try:
            self._handle([event, *self._sample_power()])
        finally:
            self.clock.switch(before)

    def _sample_power(self) -> list[Report]:
        if self._power is None or time.monotonic() < self._power.next_sample:
            return []
        return self._power.sample()

    def _look_at_memory(self) -> list[Report]:
        """The node, where others hold more or less of its memory than before."""
        found = self._memory.find_change() if self._power is not None else None
        if found is None:
            return []
        self._node = replace(self._node, memory_left_gb=found[0])
        return [{"type": "node", **self._node.as_event()}]

    def _describe_process(self) -> RunProcess:
        """For whom this process uses a GPU now."""
        for job, _, gpu in self._jobs:  # the first is in training
            return RunProcess("train", job.identity.member, gpu)
        return RunProcess("orchestrate", None, None)

    def send(self, member: str, command: str, **fields: Any) -> None:
        """See `Executor`."""
        for job, inbox, _ in self._jobs:
            if job.identity.member == member:
                inbox.put(command, **fields)

    def kill(self, member: str) -> None:
        """Ask the member to end, which it does at its next step: this thread cannot be killed."""
        self.send(member, "cancel")

    def close(self) -> None:
        """See `Executor`; `events` returns the last power sample after this."""
        self._jobs.clear()
        if self._power is not None:
            self._last += self._power.finish()
            self._power.close()
            self._power = None
            del self._ensemble  # members lead to this executor, and to each other in circles
