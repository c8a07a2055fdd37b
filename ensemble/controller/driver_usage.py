"""The CPU time of the process that drives a run, and of its observers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from ensemble.events import Report
from ensemble.meter import CpuClock
from ensemble.schedule.needs import Node


class DriverUsage:
    """What this process and the observers use."""

    def __init__(self, clock: CpuClock, observers: Any, nodes: Sequence[Node]) -> None:
        here = [node.name for node in nodes if node.host == socket.gethostname()]
        self.node = (here or [node.name for node in nodes] or ["driver"])[0]
        self._clock, self._observers = clock, observers
        self._observers_cpu_s: dict[int, float] = {}  # of the last sample, by process

    def begin(self) -> Report:
        """What the start of this process has used; the rest is the run's, or of members that train here."""
        used = self._clock.report(self.node, "startup")
        self._clock.switch("orchestrate")
        return used

    def sample(self) -> list[Report]:
        """`usage` events with what has been used so far."""
        own = self._clock.report(self.node, "orchestrate")
        if self._observers is None:
            return [own]
        observers = self._observers.make_usage(self.node)
        self._observers.forget_closed()
        self._observers_cpu_s = {usage["pid"]: usage["cpu_s"] for usage in observers}
        return [own, *observers]

    def count_observers_rest(self) -> float:
        """The CPU-seconds that the observers have used since the last sample."""
        used = [] if self._observers is None else self._observers.make_usage(self.node)
        return float(sum(usage["cpu_s"] - self._observers_cpu_s.get(usage["pid"], 0.0) for usage in used))
