"""The actors that run inside Ray: the agent of a node, and the worker that runs one rank of a member.

Both report by streaming generators: events arrive as they are produced, and the end of the stream reveals the
actor's death.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.executors.base import Event, make_usage
from ensemble.executors.host import find_interface
from ensemble.executors.node_services import NodeServices
from ensemble.executors.process_pool import ProcessPool, dispatch
from ensemble.executors.spawn import ForkClient, ForkServer
from ensemble.store import RunDir
from ensemble.train.job import Job

if TYPE_CHECKING:
    from pipelines import Peers

Command = tuple[str, dict[str, Any]]  # its name and fields
Share = tuple[str, float, int | None]  # node, cores and bytes of memory of one actor
KEPT_S = 10.0  # time for which an idle actor is kept
_USAGE_EVERY_S = 2.0
_GATHER_S = 0.25  # events are sent together: each message costs Ray a millisecond of CPU time at both ends
_DEFERRABLE = frozenset(
    ("plan", "started", "progress", "usage", "checkpoint")
)  # nothing is decided on them at once

log = logging.getLogger(__name__)


def list_import_directories() -> list[str]:
    """Where this process finds modules; an actor looks there as well, as far as its node has them."""
    return [path or os.getcwd() for path in sys.path]


def _extend_sys_path(path: list[str]) -> None:
    sys.path += [each for each in path if each not in sys.path]


class MemberWorker:
    """Holds the resources of one rank in Ray, starts the rank's process and yields its events.

    The process is forked from the node's fork server to train on the CPU, and is a new interpreter on a GPU. It
    ends when this actor does, however that ends. An actor may run several ranks, one after the other.

    Args:
        path: the driver's `list_import_directories()`.
    """

    def __init__(self, path: list[str]) -> None:
        _extend_sys_path(path)
        self._inbox: queue.SimpleQueue[tuple[str, int, Command]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ready(self) -> None:
        """Return at once: Ray calls this when the actor has its resources."""

    def run(
        self, job: str, device: int | None, forks: str, unsent: Sequence[Command] = ()
    ) -> Iterator[list[Event]]:
        """Train; yields the member's events in groups, the last event is `exited`.

        Args:
            job: `Job.as_json()`.
            device: number of its GPU, None for the CPU.
            forks: the address of the node's fork server.
            unsent: commands that were given before this call.
        """
        made = Job.from_json(job)
        deferrable = _DEFERRABLE if made.gated else _DEFERRABLE | {"epoch"}
        events: list[Event] = []
        with selectors.DefaultSelector() as selector:
            workers = ProcessPool(made.node, selector, events.append, lambda: ForkClient.connect(forks))
            workers.directory = Path(forks).parent
            workers.launch([made], [device])
            for command, fields in unsent:
                workers.send(made.identity.member, command, **fields)
            selector.register(self._wake, selectors.EVENT_READ, lambda: self._forward_commands(workers, made))
            while True:
                dispatch(selector, None)
                until = time.monotonic() + _GATHER_S
                while all(e["type"] in deferrable for e in events) and (left_s := until - time.monotonic()) > 0:
                    dispatch(selector, left_s)
                gathered = list(events)
                events.clear()
                if gathered and gathered[-1]["type"] == "exited":
                    workers.close()
                    yield [*gathered[:-1], _make_own_usage(made.node, "ray"), gathered[-1]]
                    return
                if gathered:
                    yield gathered

    def send(self, member: str, attempt: int, command: str, fields: dict[str, Any]) -> None:
        """Put a command into the inbox; Ray calls this in another thread than `run`, perhaps before `run`."""
        self._inbox.put((member, attempt, (command, fields)))
        os.eventfd_write(self._wake, 1)

    def _forward_commands(self, workers: ProcessPool, job: Job) -> None:
        """In the thread of `run`: send the commands for its rank; drop those for a rank that has ended."""
        os.eventfd_read(self._wake)
        while not self._inbox.empty():
            member, attempt, (command, fields) = self._inbox.get()
            if (member, attempt) == (job.identity.member, job.attempt):
                workers.send(member, command, **fields)


def _make_own_usage(node: str, role: str) -> Event:
    return make_usage(node, role, os.getpid(), time.process_time())


class NodeAgent:
    """Starts the feeders of a node and measures the node.

    One thread of its own waits on all descriptors and executes the calls from Ray's threads. `events` raises the
    exception that ends it; the executor then starts another agent.

    Args:
        own_session: the directory of a Ray that was started for this run, None on another cluster.
        takes_over: the fork server's address of an agent that has ended.
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

        _extend_sys_path(path)
        here = RunDir(run_dir)
        if not here.info_file.exists() or here.info["run_id"] != run_id:
            raise FileNotFoundError(
                f"node {node} does not see the run directory {run_dir}: it must be shared by all"
            )
        self._node = node
        self._events: queue.SimpleQueue[Event | Exception | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._answer_calls)
        ensemble = here.load_ensemble()
        before = None if takes_over is None else Path(takes_over).parent
        self._services = NodeServices(node, ensemble, self._selector, self._events.put, before)
        self._fork_address = str(self._services.directory / "forks")
        self._forks: ForkServer | None = None
        if ensemble.devices == "cpu" or not self._services.describe().gpus:
            self._forks = ForkServer(self._services.directory, self._fork_address)  # now: its imports take long
        # Ray's daemons are a cost of this run only if Ray was started for it.
        self._meter = RaySampler(node, own_session) if own_session is not None else None
        self._next_usage = 0.0
        self._closed = self._failed = False
        self._thread = threading.Thread(target=self._loop, name="agent", daemon=True)
        self._thread.start()

    def describe(self, address: str) -> tuple[dict[str, Any], str]:
        """The fields of `ensemble.schedule.Node`, and the address of the node's fork server, if it runs.

        Args:
            address: of the node in the cluster.
        """
        node = self._services.describe()
        return {**dataclasses.asdict(node), "interface": find_interface(address)}, self._fork_address

    def start_feeder(self, cohort: int, expect: int, capacity: int, peers: Peers | None, late: bool) -> str:
        """See `NodeServices`."""
        return str(self._call(lambda: self._services.start_feeder(cohort, expect, capacity, peers, late)))

    def expect_readers(self, cohort: int, members: int) -> None:
        """See `NodeServices`."""
        self._call(lambda: self._services.expect_readers(cohort, members))

    def stop_feeder(self, cohort: int) -> None:
        """See `NodeServices`."""
        self._call(lambda: self._services.stop_feeder(cohort))

    def events(self) -> Iterator[list[Event]]:
        """Yields the node's events as they arrive, until `close`."""
        while True:
            received = [self._events.get()]
            while not self._events.empty():
                received.append(self._events.get())
            events = [event for event in received if isinstance(event, dict)]
            if events:
                yield events
            for each in received:
                if isinstance(each, Exception):
                    raise each
            if None in received:
                return

    def close(self) -> None:
        """End all feeders; `events` yields their last events and ends."""
        self._call(self._close)

    def _close(self) -> None:
        if self._forks is not None:
            self._forks.close()
        self._services.close()
        self._emit_usage()
        self._events.put(None)
        self._closed = True

    def _call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((function, future))
        os.eventfd_write(self._wake, 1)
        if self._failed:
            self._refuse_calls()
        return future.result()

    def _refuse_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()[1].set_exception(RuntimeError(f"the agent of node {self._node} has ended"))

    def _answer_calls(self) -> None:
        os.eventfd_read(self._wake)
        while not self._calls.empty():
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _loop(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.exception("the agent of node %s has failed", self._node)
            self._failed = True
            self._events.put(error)
            self._refuse_calls()

    def _work(self) -> None:
        while not self._closed:
            self._services.sample()
            now = time.monotonic()
            if now >= self._next_usage:
                self._next_usage = now + _USAGE_EVERY_S
                self._emit_usage()
            dispatch(self._selector, max(0.0, self._services.next_sample - now))

    def _emit_usage(self) -> None:
        """Report the CPU time of this process, of the fork server, and of Ray's daemons."""
        self._events.put(_make_own_usage(self._node, "orchestrate"))
        if self._forks is not None:
            self._events.put(self._forks.usage(self._node))
        if self._meter is not None:
            for used in self._meter.sample():
                self._events.put({"type": "usage", **used})


class IdleActors:
    """Worker actors whose rank has ended and that can run another.

    Starting an actor takes a second or two. An idle actor holds its share of the node in Ray, so it is kept for
    seconds only, and ended at once if an actor with another share is needed.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[float, Share, Any]] = []  # since when

    def keep(self, share: Share, actor: Any) -> None:
        """Keep an actor whose rank has ended."""
        self._kept.append((time.monotonic(), share, actor))

    def pop(self, share: Share, *, on_gpu: bool = False) -> Any | None:
        """Remove and return an actor with that share; without one, or for a GPU, end all others of the node."""
        for item in [] if on_gpu else self._kept:
            if item[1] == share:
                self._kept.remove(item)
                return item[2]
        self.end(share[0])
        return None

    def end(self, node: str | None = None, *, older_than_s: float = 0.0) -> None:
        """End the actors of one node, or of all nodes, that have been idle for so long."""
        import ray

        before = time.monotonic() - older_than_s
        for item in list(self._kept):
            if node in (None, item[1][0]) and item[0] <= before:
                self._kept.remove(item)
                ray.kill(item[2])
