"""The local executor: every rank is a process of this host, with the feeders beside them. It does not use Ray.

All events arrive over descriptors that one selector waits on. It installs no signal handler, so it works in any
thread.
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import GATHER_S, EventHandler, dispatch
from ensemble.executors.node_services import NodeServices
from ensemble.schedule.needs import Node, Placement
from ensemble.spec import Ensemble, Identity
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.store import RunDir
    from pipelines import Peers

NODE = "local"


class LocalExecutor:
    """Runs members as processes of this host; see `ensemble.executors.Executor`."""

    name = "local"
    in_process = False
    clock = None
    cluster: Sequence[Node] | None = None

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._queue: list[Report] = []
        self._services: NodeServices | None = None

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """See `Executor`; the one node is this host."""
        put = self._queue.append
        self._services = NodeServices(NODE, ensemble, self._selector, put, run_dir=run_dir.path)
        self._services.ranks.connect()  # starts the fork server now, because its imports take long
        return [self._services.describe()]

    def _pop_queue(self) -> list[Report]:
        events = list(self._queue)
        self._queue.clear()
        return events

    def start_feeder(
        self, node: str, cohort: int, expect: int, capacity: int, peers: Peers | None = None, late: bool = False
    ) -> str | None:
        assert self._services is not None
        return self._services.start_feeder(cohort, expect, capacity, peers, late)

    def expect_readers(self, node: str, cohort: int, members: int) -> None:
        if self._services is not None:
            self._services.expect_readers(cohort, members)

    def stop_feeder(self, node: str, cohort: int) -> None:
        if self._services is not None:
            self._services.stop_feeder(cohort)

    def request(self, waiting: Sequence[Identity], placed: Sequence[Placement]) -> None:
        """See `Executor`; the run holds all of this host."""

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        assert self._services is not None
        self._services.ranks.launch(jobs, devices)

    def events(self, timeout_s: float | None) -> list[Report]:
        if self._services is None:
            return self._pop_queue()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._services.sample()
            if self._queue:
                deadline = min(deadline, time.monotonic() + GATHER_S)
            until = 0.0 if self._has_urgent(self._services) else min(deadline, self._services.next_sample)
            dispatch(self._selector, max(0.0, until - time.monotonic()))
            if self._has_urgent(self._services) or time.monotonic() >= deadline:
                return self._pop_queue()

    def _has_urgent(self, services: NodeServices) -> bool:
        """Whether an event may not wait for others; an epoch may be what a user's `on_event` waits for."""
        return any(event["type"] == "epoch" or services.ranks.is_urgent(event) for event in self._queue)

    def send(self, member: str, command: str, **fields: Any) -> None:
        if self._services is not None:
            self._services.ranks.send(member, command, **fields)

    def kill(self, member: str) -> None:
        """See `Executor`; the processes that the member started end as well."""
        if self._services is not None:
            self._services.ranks.kill(member)

    def release(self) -> None:
        """See `Executor`; nobody waits for this host."""

    def close(self) -> None:
        if self._services is not None:
            self._services.close()
            self._services = None
        self._selector.close()
