"""The agent of a node: an actor that starts the node's feeders and ranks, and measures the node.

It does on its node what the local executor does on this host. Commands arrive numbered, since Ray may deliver
calls in another order than they were made; events leave by a streaming generator, so that they arrive as they are
produced, and the end of the stream reveals the actor's death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import queue
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.host import find_interface
from ensemble.executors.memory_guard import MemoryGuard
from ensemble.executors.node_services import NodeServices
from ensemble.executors.process_pool import GATHER_S, ProcessPool, dispatch
from ensemble.executors.spawn import ForkServer, find_processes
from ensemble.meter.cpu import ReportPace, make_usage
from ensemble.meter.tally import Tally
from ensemble.store import RunDir
from ensemble.train.job import Job
from pipelines.errors import PipelineError

if TYPE_CHECKING:
    from pipelines import Peers

Command = tuple[Any, ...]  # the name of a method of `_Commands` and its arguments
_USAGE_EVERY_S = 2.0
_ENDING_S = 10.0  # time limit for the end of the processes that an agent left which was killed

log = logging.getLogger(__name__)


def list_import_directories() -> list[str]:
    """Where this process finds modules; an agent looks there as well, as far as its node has them."""
    return [path or os.getcwd() for path in sys.path]


class NodeAgent:
    """Starts the feeders and ranks of a node, and measures the node.

    One thread of its own waits on all descriptors and executes the commands. `events` raises the exception that
    ends it; the executor then starts another agent. Its ranks end with it, however it ends.

    Args:
        own_session: the directory of a Ray that was started for this run, None on another cluster.
        path: the driver's `list_import_directories()`.
        takes_over: the directory of an agent that has ended. What is left of its processes is ended first.
    """

    def __init__(
        self,
        node: str,
        run_dir: str,
        run_id: str,
        own_session: str | None,
        path: list[str],
        takes_over: str | None,
    ) -> None:
        from ensemble.meter import RaySampler

        # Where the raylet is a subreaper, Ray ignores SIGCHLD in its workers, and with it how our processes end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.path += [each for each in path if each not in sys.path]
        here = RunDir(run_dir)
        if not here.info_file.exists() or here.info["run_id"] != run_id:
            raise FileNotFoundError(
                f"node {node} does not see the run directory {run_dir}: it must be shared by all"
            )
        if takes_over is not None:
            _end_processes(Path(takes_over))
        self._node = node
        self._events: queue.SimpleQueue[Report | Exception | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[int, Sequence[Command]]] = queue.SimpleQueue()
        self._early: dict[int, Sequence[Command]] = {}
        self._next_number = 0
        self._ahead_s, self._is_ahead_old = math.inf, True  # of the clock, at most, in seconds
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._read_inbox)
        ensemble = here.load_ensemble(takes_settings=True)
        before = None if takes_over is None else Path(takes_over)
        self._services = NodeServices(node, ensemble, self._selector, self._events.put, before, here.path)
        self._ranks = ProcessPool(node, self._selector, self._events.put, self._start_fork_server)
        self._ranks.directory = self._services.directory
        self._services.attach(self._ranks)
        self._ranks.connect()  # now: its imports take long
        if takes_over is not None:
            self._services.describe()  # which nobody asks of it: the node is known
            self._services.report()
        self._guard = MemoryGuard()
        # Ray's daemons are a cost of this run only if Ray was started for it.
        self._meter = RaySampler(node, own_session) if own_session is not None else None
        self._next_usage, self._usage_pace = 0.0, ReportPace()
        self._of_ray, self._unreported = list[Report](), dict[tuple[int, int | None], Report]()
        self._tally = Tally(here.usage, self._list_usage)
        self._closed = threading.Event()
        threading.Thread(target=self._loop, name="agent", daemon=True).start()

    def describe(self, address: str) -> tuple[dict[str, Any], str]:
        """The fields of `ensemble.schedule.Node` with `gpu_names` (`Gpu.names` of each), and the node's directory.

        `gpu_reasons` among the fields are those of `GpuOffers.list_reasons`.

        Args:
            address: of the node in the cluster.
        """
        fields = dataclasses.asdict(self._services.describe())
        offers = self._services.gpus
        names = [(gpu,) for gpu in fields["gpu_ids"]] if offers is None else offers.list_names()
        reasons = [] if offers is None else offers.list_reasons()
        fields |= {"interface": find_interface(address), "gpu_names": names, "gpu_reasons": reasons}
        return fields, str(self._services.directory)

    def perform(self, number: int, commands: Sequence[Command], sent: float | None = None) -> None:
        """Execute commands after those of all lower numbers; returns at once.

        Args:
            number: counts the calls of this method, from 0.
            sent: when the call was made, by the controller's clock; None: unknown.
        """
        if sent is not None:
            ahead_s = time.time() - sent
            self._ahead_s = ahead_s if self._is_ahead_old else min(ahead_s, self._ahead_s)
            self._is_ahead_old = False
        self._inbox.put((number, commands))
        os.eventfd_write(self._wake, 1)

    def events(self) -> Iterator[list[Report]]:
        """Yields the node's events as they arrive, in groups, until the command `close`."""
        while True:
            received = [self._events.get()]
            until = time.monotonic() + GATHER_S
            with contextlib.suppress(queue.Empty):
                while all(isinstance(each, dict) and not self._ranks.is_urgent(each) for each in received):
                    received.append(self._events.get(timeout=max(0.0, until - time.monotonic())))
                while True:
                    received.append(self._events.get_nowait())
            events = [self._stamp(event) for event in received if isinstance(event, dict)]
            if events:
                yield events
            for each in received:
                if isinstance(each, Exception):
                    raise each
            if None in received:
                return

    def _stamp(self, event: Report) -> Report:
        """Add to what is said of the node's health by what its clock can be compared with the controller's."""
        if event["type"] != "node_health":
            return event
        ahead_s, self._is_ahead_old = self._ahead_s if math.isfinite(self._ahead_s) else None, True
        return event | {"clock_s": None, "clock_error_s": None, "sent": time.time(), "ahead_s": ahead_s}

    # -- in the thread of its own -------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._closed.is_set():
                self._services.sample()
                for rank in self._guard.choose(self._ranks.list_memory):
                    self._ranks.kill_for_memory(rank)
                now = time.monotonic()
                if now >= self._next_usage:
                    self._next_usage = now + _USAGE_EVERY_S
                    self._look_at_usage()
                    if self._usage_pace.is_due():
                        self._emit_usage()
                dispatch(self._selector, max(0.0, min(self._services.next_sample, self._guard.next_look) - now))
        except Exception as error:
            log.exception("the agent of node %s has failed", self._node)
            self._events.put(error)

    def _read_inbox(self) -> None:
        os.eventfd_read(self._wake)
        while not self._inbox.empty():
            number, commands = self._inbox.get()
            self._early[number] = commands
        while self._next_number in self._early:
            for name, *arguments in self._early.pop(self._next_number):
                getattr(self, f"_{name}")(*arguments)
            self._next_number += 1

    def _launch(self, texts: Sequence[str], devices: Sequence[str | None]) -> None:
        """See `Executor`; `texts` are `Job.as_json()`."""
        jobs = [Job.from_json(text) for text in texts]
        try:
            self._ranks.launch(jobs, devices)
        except OSError as error:
            who = {"member": jobs[0].identity.member, "attempt": jobs[0].attempt}
            self._events.put({"type": "launch_failed", **who, "detail": str(error)})

    def _send(self, member: str, command: str, fields: dict[str, Any]) -> None:
        self._ranks.send(member, command, **fields)

    def _kill(self, member: str) -> None:
        self._ranks.kill(member)

    def _start_feeder(self, cohort: int, expect: int, capacity: int, peers: Peers | None, late: bool) -> None:
        try:
            self._services.start_feeder(cohort, expect, capacity, peers, late)
        except (OSError, PipelineError) as error:
            exited = {"type": "feeder_exited", "node": self._node, "cohort": cohort}
            self._events.put({**exited, "started": False, "detail": str(error)})

    def _expect_readers(self, cohort: int, members: int) -> None:
        self._services.expect_readers(cohort, members)

    def _stop_feeder(self, cohort: int) -> None:
        self._services.stop_feeder(cohort)

    def _close(self) -> None:
        """End all ranks and feeders; `events` yields their last events and ends."""
        self._tally.close()
        self._ranks.close()
        self._services.close()
        self._look_at_usage()
        self._emit_usage()
        self._events.put(None)
        self._closed.set()

    def _start_fork_server(self) -> ForkServer:
        return ForkServer(self._services.directory)

    def _look_at_usage(self) -> None:
        """Look at the CPU time of Ray's daemons; that of one which has ended is known once."""
        if self._meter is not None:
            self._of_ray = self._meter.sample()
            self._unreported |= {(usage["pid"], usage["began"]): usage for usage in self._of_ray}

    def _emit_usage(self) -> None:
        """Report the CPU time of this process and of Ray's daemons."""
        for usage in [self._make_own_usage(), *self._unreported.values()]:
            self._events.put(usage)
        self._unreported.clear()

    def _make_own_usage(self) -> Report:
        return make_usage(self._node, "orchestrate", os.getpid(), time.process_time())

    def _list_usage(self) -> list[Report]:
        """What all processes of the node have used, Ray's as it was last looked at; called in another thread."""
        return [self._make_own_usage(), *self._of_ray, *self._ranks.list_usage(), *self._services.list_usage()]


def _end_processes(directory: Path) -> None:
    """End what is left of the processes of members of the agent before this one, and wait until it is gone.

    They end by themselves when their agent does, unless they are stopped or busy in the kernel.
    """
    import psutil

    left = find_processes(directory)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    until = time.monotonic() + _ENDING_S
    alive = [process.pid for process in left if not _wait_for_end(process.pid, until)]
    if alive:
        raise RuntimeError(f"processes of the agent before do not end: {', '.join(map(str, alive))}")


def _wait_for_end(pid: int, until: float) -> bool:
    """Wait for the end of a process, whose parent may never wait for it; returns whether it has ended.

    Args:
        pid: of any process.
        until: on the monotonic clock.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    try:
        return bool(ended.poll(max(0.0, until - time.monotonic()) * 1000))
    finally:
        os.close(pidfd)
