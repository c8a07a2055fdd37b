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

if TYPE_CHECKING:
    from ensemble.executors.spawn import ForkServer
    from pipelines import Peers

Event = dict[str, Any]
Command = tuple[str, dict[str, Any]]  # its name and fields
USAGE_EVERY_S = 2.0
# Each thing that is said costs Ray a millisecond of CPU time on either side, however much it is.
GATHER_S = 0.25
KEPT_S = 10.0  # time for which an idle actor is kept
#: Node, cores and bytes of memory of one actor.
Share = tuple[str, float, int | None]
PATIENT = frozenset(("plan", "started", "progress", "usage", "checkpoint"))

log = logging.getLogger(__name__)


def import_directories() -> list[str]:
    """Where this process finds modules; an actor looks there as well, as far as its node has it."""
    return [path or os.getcwd() for path in sys.path]


def _extend_sys_path(path: list[str]) -> None:
    sys.path += [each for each in path if each not in sys.path]


def _dispatch(selector: selectors.BaseSelector, timeout_s: float | None) -> None:
    for key, _ in selector.select(timeout_s):
        if selector.get_map().get(key.fd) == key:
            key.data()


def _is_deferrable(event: Event, gated: bool) -> bool:
    """Whether nobody decides anything on it at once."""
    return event["type"] in PATIENT or (event["type"] == "epoch" and not gated)


class MemberWorker:
    """Stands for one rank of one attempt: holds its resources in Ray, starts its process and hands its news on.

    The process that trains is forked from the node's fork server where it trains on the CPU, and started
    afresh on a GPU. It ends when this actor does, however that ends. One actor may run one after the other.

    Args:
        path: the driver's `import_directories()`.
    """

    def __init__(self, path: list[str]) -> None:
        _extend_sys_path(path)
        from ensemble.executors import process_pool as workers
        from ensemble.train.job import Job

        self._modules, self._job_class = workers, Job
        self._inbox: queue.SimpleQueue[tuple[str, int, Command]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ready(self) -> None:
        """Answers once Ray has given this rank its place."""

    def run(
        self, job: str, device: int | None, forks: str, unsent: Sequence[Command] = ()
    ) -> Iterator[list[Event]]:
        """Train; yields the member's events, the last of them `exited`, those together that come together.

        Args:
            job: `Job.as_json()`.
            device: number of its GPU, None for the CPU.
            forks: the address of the node's fork server.
            untold: commands that came before this.
        """
        from ensemble.executors.spawn import ForkClient

        made = self._job_class.from_json(job)
        events: list[Event] = []
        with selectors.DefaultSelector() as selector:
            workers = self._modules.ProcessPool(
                made.node, selector, events.append, lambda: ForkClient.connect(forks)
            )
            workers.directory = Path(forks).parent
            workers.launch([made], [device])
            for command, fields in unsent:
                workers.send(made.identity.member, command, **fields)
            selector.register(self._wake, selectors.EVENT_READ, lambda: self._forward_commands(workers, made))
            while True:
                _dispatch(selector, None)
                until = time.monotonic() + GATHER_S
                while (
                    all(_is_deferrable(e, made.gated) for e in events) and (left_s := until - time.monotonic()) > 0
                ):
                    _dispatch(selector, left_s)
                news = list(events)
                events.clear()
                if news and news[-1]["type"] == "exited":
                    workers.close()
                    yield [*news[:-1], _make_usage(made.node, "ray"), news[-1]]
                    return
                if news:
                    yield news

    def send(self, member: str, attempt: int, command: str, fields: dict[str, Any]) -> None:
        """Put a command into the inbox; Ray calls this in another thread than `run`, and may do so before it."""
        self._inbox.put((member, attempt, (command, fields)))
        os.eventfd_write(self._wake, 1)

    def _forward_commands(self, workers: Any, job: Any) -> None:
        """In the thread of `run`: send what is for its rank; what was for one that has ended is dropped."""
        os.eventfd_read(self._wake)
        while not self._inbox.empty():
            member, attempt, (command, fields) = self._inbox.get()
            if (member, attempt) == (job.identity.member, job.attempt):
                workers.send(member, command, **fields)


def _make_usage(node: str, role: str) -> Event:
    """A `usage` event of this process."""
    return {
        "type": "usage",
        "node": node,
        "role": role,
        "member": None,
        "rank": None,
        "pid": os.getpid(),
        "cpu_s": time.process_time(),
        "origin": "measured",
    }


class NodeAgent:
    """Keeps a node's feeders and meters it.

    One thread of its own waits on all descriptors; calls from Ray's threads are handed to it. What goes wrong in
    it is raised by `events`, and another agent is to take its place.

    Args:
        own_session: the directory of a Ray that was started for this run, None on a cluster of others.
        takes_over: the `fork_address` of an agent that has ended.
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
        _extend_sys_path(path)
        from ensemble.executors.node_services import NodeServices
        from ensemble.executors.spawn import ForkServer
        from ensemble.store import RunDir

        here = RunDir(run_dir)
        if not here.info_file.exists() or here.info["run_id"] != run_id:
            raise FileNotFoundError(
                f"node {node} does not see the run directory {run_dir}: it must be shared by all"
            )
        self._node = node
        self._events: queue.SimpleQueue[Event | Exception | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._answer)
        ensemble = here.load_ensemble()
        before = None if takes_over is None else Path(takes_over).parent
        self._services = NodeServices(node, ensemble, self._selector, self._events.put, before)
        self._forks: ForkServer | None = None
        if ensemble.devices == "cpu" or not self._services.describe().gpus:
            self._forks = ForkServer(
                self._services.directory, self.fork_address()
            )  # its imports take their time: begin now
        self._meter = self._ray_meter(own_session)
        self._next_usage = 0.0
        self._closed = self._failed = False
        self._thread = threading.Thread(target=self._loop, name="agent", daemon=True)
        self._thread.start()

    def _ray_meter(self, own_session: str | None) -> Any:
        """Ray's daemons are this run's cost only where Ray was started for this run."""
        from ensemble.meter import RaySampler

        return RaySampler(self._node, own_session) if own_session is not None else None

    def describe(self) -> dict[str, Any]:
        """The node, as `ensemble.schedule.Node` fields."""
        return dataclasses.asdict(self._services.describe())

    def fork_address(self) -> str:
        """Where the node's fork server listens, if it runs."""
        return str(self._services.directory / "forks")

    def interface_of(self, address: str) -> str | None:
        """The network interface that has this node's address in the cluster."""
        from ensemble.executors.host import find_interface

        return find_interface(address)

    def start_feeder(self, cohort: int, expect: int, capacity: int, peers: Peers | None, late: bool) -> str:
        """Start a cohort's feeder; its address."""
        return str(self._call(lambda: self._services.start_feeder(cohort, expect, capacity, peers, late)))

    def expect_readers(self, cohort: int, members: int) -> None:
        """Let its start gate wait for that many members."""
        self._call(lambda: self._services.expect_readers(cohort, members))

    def stop_feeder(self, cohort: int) -> None:
        """End it."""
        self._call(lambda: self._services.stop_feeder(cohort))

    def events(self) -> Iterator[list[Event]]:
        """What the node has to say, as it comes."""
        while True:
            events = [self._events.get()]
            while not self._events.empty():
                events.append(self._events.get())
            news = [event for event in events if isinstance(event, dict)]
            if news:
                yield news
            for last in events:
                if isinstance(last, Exception):
                    raise last
            if None in events:
                return

    def close(self) -> None:
        """End all feeders; `events` ends after what they still said."""
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
        os.write(self._wake_write, b"x")
        if self._failed:
            self._refuse_calls()
        return future.result()

    def _refuse_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()[1].set_exception(RuntimeError(f"the agent of node {self._node} has ended"))

    def _answer(self) -> None:
        os.read(self._wake_read, 1)
        function, future = self._calls.get()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def _loop(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.exception("the agent of node %s cannot go on", self._node)
            self._failed = True
            self._events.put(error)
            self._refuse_calls()

    def _work(self) -> None:
        while not self._closed:
            self._services.sample()
            now = time.monotonic()
            if now >= self._next_usage:
                self._next_usage = now + USAGE_EVERY_S
                self._emit_usage()
            for key, _ in self._selector.select(max(0.0, self._services.next_sample - now)):
                if not self._closed and self._selector.get_map().get(key.fd) == key:
                    key.data()

    def _emit_usage(self) -> None:
        """CPU time of this process, of the fork server, and of Ray's daemons."""
        self._events.put(_make_usage(self._node, "orchestrate"))
        if self._forks is not None:
            self._events.put(self._forks.usage(self._node))
        if self._meter is not None:
            for used in self._meter.sample():
                self._events.put({"type": "usage", **used})


class IdleActors:
    """Worker actors that have ended their rank and can run another.

    Starting an actor takes a second or two. Kept ones hold their share of the node in Ray meanwhile, so they are
    kept for seconds only, and ended at once where an actor of another share is needed.
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
