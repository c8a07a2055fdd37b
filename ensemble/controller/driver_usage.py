"""The CPU time of the process that drives a run, and of those of its loggers and its mirror."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from pathlib import Path

from ensemble.events import Report
from ensemble.meter import CpuClock
from ensemble.meter.tally import Tally
from ensemble.reporting.loggers.processes import LoggerProcesses
from ensemble.schedule import Node


class DriverUsage:
    """What this process and those of the loggers use; `loggers` are groups of these.

    Args:
        folder: where a tally is kept, for the case that this process is killed.
        nodes: of the run; the driver is on the first one of this host, or counts to the first one of all.
    """

    def __init__(
        self, folder: Path, clock: CpuClock, loggers: Sequence[LoggerProcesses], nodes: Sequence[Node]
    ) -> None:
        here = [node.name for node in nodes if node.host == socket.gethostname()]
        self._node = (here or [node.name for node in nodes] or ["driver"])[0]
        self._clock, self._loggers = clock, loggers
        self._tally = Tally(folder, functools.partial(clock.list_usage, self._node))
        self._loggers_cpu_s = 0.0  # of the last sample

    def begin(self) -> Report:
        """What the start of this process has used; the rest is the run's, or of members that train here."""
        used = self._clock.report(self._node, "startup")
        self._clock.switch("orchestrate")
        return used

    def sample(self) -> list[Report]:
        """`usage` events with what has been used so far."""
        own, loggers = self._clock.report(self._node, "orchestrate"), self._list_loggers()
        self._loggers_cpu_s = sum(each["cpu_s"] for each in loggers)
        return [own, *loggers]

    def _list_loggers(self) -> list[Report]:
        return [each for loggers in self._loggers for each in loggers.make_usage(self._node)]

    def count_loggers_rest(self) -> float:
        """The CPU-seconds that the loggers have used since the last sample."""
        used_s: float = sum(each["cpu_s"] for each in self._list_loggers())
        return used_s - self._loggers_cpu_s

    def close(self) -> None:
        """End the tally."""
        self._tally.close()
