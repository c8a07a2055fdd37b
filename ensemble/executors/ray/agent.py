"""The agent of a node: an actor that starts the node's feeders and ranks, and measures the node.

Commands arrive numbered, since Ray may deliver calls in another order than they were made; events leave by a
streaming generator, whose end reveals the actor's death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import GATHER_S, dispatch
from ensemble.executors.host import find_interface
from ensemble.executors.memory_guard import MemoryGuard
from ensemble.executors.node_services import NodeServices, end_predecessor
from ensemble.meter.cpu import ReportPace, make_usage
from ensemble.store import RunDir
from ensemble.train.job import Job
from pipelines.errors import PipelineError

if TYPE_CHECKING:
    from pipelines import Peers

Command = tuple[Any, ...]  # the name of a method of `_Commands` and its arguments
_USAGE_EVERY_S = 2.0

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
        replaces: the directory of the agent that this one replaces; empty: there was none.
    """

    def __init__(
        self,
        node: str,
        run_dir: str,
        run_id: str,
        own_session: str | None,
        path: list[str],
        replaces: str = "",
    ) -> None:
        from ensemble.meter.ray_processes import RaySampler

        # Where the raylet is a subreaper, Ray ignores SIGCHLD in its workers, and with it how our processes end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.path += [folder for folder in path if folder not in sys.path]
        here = RunDir(run_dir)
        if not here.info_file.exists() or here.info["run_id"] != run_id:
            raise FileNotFoundError(
                f"node {node} does not see the run directory {run_dir}: it must be shared by all"
            )
        if replaces:
            end_predecessor(Path(replaces))
        self._node = node
        self._events: queue.SimpleQueue[Report | Exception | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[int, Sequence[Command]]] = queue.SimpleQueue()
        self._early: dict[int, Sequence[Command]] = {}
        self._next_number = 0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._read_inbox)
        ensemble = here.load_ensemble(takes_settings=True)
        self._services = NodeServices(node, ensemble, self._selector, self._events.put, here.path)
        self._ranks = self._services.ranks
        self._ranks.connect()  # now: its imports take long
        self._guard = MemoryGuard()
        # Ray's daemons are a cost of this run only if Ray was started for it.
        self._meter = RaySampler(node, own_session) if own_session is not None else None
        self._next_usage, self._usage_pace = 0.0, ReportPace()
        self._unreported = dict[tuple[int, int | None], Report]()
        self._closed = threading.Event()
        threading.Thread(target=self._loop, name="agent", daemon=True).start()

    def describe(self, address: str) -> tuple[dict[str, Any], str]:
        """The fields of `Node` with `gpu_names` (`Gpu.names` of each), and the node's directory.

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

    def perform(self, number: int, commands: Sequence[Command]) -> None:
        """Execute commands after those of all lower numbers; returns at once.

        Args:
            number: counts the calls of this method, from 0.
        """
        self._inbox.put((number, commands))
        os.eventfd_write(self._wake, 1)

    def events(self) -> Iterator[list[Report]]:
        """Yields the node's events as they arrive, in groups, until the command `close`."""
        while True:
            received = [self._events.get()]
            until = time.monotonic() + GATHER_S
            with contextlib.suppress(queue.Empty):
                while all(isinstance(event, dict) and not self._ranks.is_urgent(event) for event in received):
                    received.append(self._events.get(timeout=max(0.0, until - time.monotonic())))
                while True:
                    received.append(self._events.get_nowait())
            events = [event for event in received if isinstance(event, dict)]
            if events:
                yield events
            for event in received:
                if isinstance(event, Exception):
                    raise event
            if None in received:
                return

    # -- in the thread of its own -------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._closed.is_set():
                self._services.sample()
                for rank in self._guard.choose(self._ranks.list_memory):
                    self._ranks.kill_for_memory(rank)
                now_s = time.monotonic()
                if now_s >= self._next_usage:
                    self._next_usage = now_s + _USAGE_EVERY_S
                    self._look_at_usage()
                    if self._usage_pace.is_due():
                        self._emit_usage()
                dispatch(self._selector, max(0.0, min(self._services.next_sample, self._guard.next_look) - now_s))
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
        self._services.close()
        self._look_at_usage()
        self._emit_usage()
        self._events.put(None)
        self._closed.set()

    def _look_at_usage(self) -> None:
        """Look at the CPU time of Ray's daemons; that of one which has ended is known once."""
        if self._meter is not None:
            self._unreported |= {(usage["pid"], usage["began"]): usage for usage in self._meter.sample()}

    def _emit_usage(self) -> None:
        """Report the CPU time of this process and of Ray's daemons."""
        for usage in [self._make_own_usage(), *self._unreported.values()]:
            self._events.put(usage)
        self._unreported.clear()

    def _make_own_usage(self) -> Report:
        return make_usage(self._node, "orchestrate", os.getpid(), time.process_time())
