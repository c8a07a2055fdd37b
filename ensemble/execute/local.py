"""The local executor: every rank a process of this host, feeders beside them, no Ray.

All news comes over descriptors that one selector waits on: a worker's socket, the fork server's (which tells when
a worker that it forked has ended), the pidfd of a worker that was started afresh, a feeder's standard output. No
signal handler is involved, so it works in any thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.execute import Node
from ensemble.execute._processes import (
    ForkServer,
    Worker,
    how_it_died,
    kill_group,
    start_fresh,
    unregister,
    wait_fresh,
    worker_environment,
)
from ensemble.execute.host import oom_kills
from ensemble.execute.services import NodeServices
from ensemble.spec import Ensemble
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.store import RunDir

log = logging.getLogger(__name__)

NODE = "local"


class LocalExecutor:
    """Runs members as processes of this host; see `ensemble.execute.Executor`."""

    name = "local"

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, Worker] = {}
        self._number = 0
        self._forks: ForkServer | None = None
        self._queue: list[dict[str, Any]] = []
        self._services: NodeServices | None = None
        self._oom_kills = 0

    def open(self, run_dir: RunDir, ensemble: Ensemble) -> list[Node]:
        """See `Executor`; the one node is this host."""
        self._services = NodeServices(NODE, run_dir.path, ensemble, self._selector, self._queue_up)
        self._oom_kills = oom_kills()
        self._server()  # its imports take their time: begin now
        return [self._services.describe()]

    def _queue_up(self, event: dict[str, Any]) -> None:
        self._queue.append(event)

    def start_feeder(self, node: str, cohort: int, expect: int, capacity: int) -> str | None:
        """See `Executor`."""
        assert self._services is not None
        return self._services.start_feeder(cohort, expect, capacity)

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`."""
        if self._services is not None:
            self._services.stop_feeder(cohort)

    def launch(self, jobs: Sequence[Job], devices: Sequence[int | None]) -> None:
        """See `Executor`."""
        started: list[Worker] = []
        try:
            for job, device in zip(jobs, devices, strict=True):
                started.append(self._start(job, device))
        except OSError:
            for worker in started:  # a member runs with all its ranks or not at all
                worker.kill()
            raise

    def _start(self, job: Job, device: int | None) -> Worker:
        self._number += 1
        output = Path(job.run_dir) / "members" / job.identity.member / "log.txt"
        output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        worker = Worker(self._number, job, ours, output)
        with theirs:
            if device is None:
                self._server().fork(worker, theirs, worker_environment(job, device))
            else:
                start_fresh(worker, theirs, worker_environment(job, device))
                self._watch(worker)
        self._workers[worker.number] = worker
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._from_worker(worker))
        self._send(worker, job.as_json())
        return worker

    def _watch(self, worker: Worker) -> None:
        """Learn of the end of a process that no fork server tells of."""
        assert worker.pidfd is not None
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._ended(worker))

    def _server(self) -> ForkServer:
        if self._forks is None:
            forks = self._forks = ForkServer()
            self._selector.register(forks.control, selectors.EVENT_READ, lambda: self._from_server(forks))
        return self._forks

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """See `Executor`."""
        assert self._services is not None
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._services.sample()
            until = self._services.next_sample if give_up is None else min(give_up, self._services.next_sample)
            for key, _ in self._selector.select(0 if self._queue else max(0.0, until - time.monotonic())):
                if self._selector.get_map().get(key.fd) == key:  # else one before it in this round gave it back
                    take: Callable[[], None] = key.data
                    take()
            if self._queue or (give_up is not None and time.monotonic() >= give_up):
                news, self._queue = self._queue, []
                return news

    def tell(self, member: str, command: str) -> None:
        """See `Executor`."""
        for worker in self._of(member):
            self._send(worker, json.dumps({"command": command}))

    def kill(self, member: str) -> None:
        """See `Executor`; what the member started itself ends with it."""
        for worker in self._of(member):
            worker.kill()

    def close(self) -> None:
        """See `Executor`."""
        for worker in self._workers.values():
            worker.kill()
        if self._forks is not None:
            self._forks.close()
            self._forks = None
        for worker in self._workers.values():
            if worker.process is not None:
                wait_fresh(worker.process)
            worker.close()
        self._workers.clear()
        if self._services is not None:
            self._services.close()
            self._services = None
        self._selector.close()

    # -- workers ------------------------------------------------------------------------------------------------

    def _of(self, member: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.job.identity.member == member]

    def _from_server(self, forks: ForkServer) -> None:
        told = forks.receive()
        if told is None:
            self._server_lost(forks)
            return
        message, pidfd = told
        if "forked" in message:
            worker = self._workers[message["forked"]]
            worker.pid, worker.pidfd = message["pid"], pidfd
            if worker.doomed:
                worker.kill()
            self._queue.append(_usage_of(forks))
        else:
            self._ended(self._workers[message["ended"]], message["code"])

    def _server_lost(self, forks: ForkServer) -> None:
        """The fork server died: its workers live on, but nobody can tell any more with what code they end."""
        unregister(self._selector, forks.control)
        forks.close()
        log.warning("the fork server ended (code %s); the next member starts another", forks.process.returncode)
        self._forks = None
        for worker in [worker for worker in self._workers.values() if worker.process is None]:
            worker.orphaned = True
            if worker.pidfd is None:
                self._ended(worker)
            else:
                self._watch(worker)

    def _send(self, worker: Worker, line: str) -> None:
        # one that has just died is noticed otherwise
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.sendall(line.encode() + b"\n")

    def _from_worker(self, worker: Worker) -> None:
        try:
            got = worker.connection.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            got = b""
        if not got:
            unregister(self._selector, worker.connection)
            return
        *lines, worker.buffer = (worker.buffer + got).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] == "exited":
                worker.exit = event  # told when the process is gone: only then is its place free
            else:
                self._queue.append(event)

    def _ended(self, worker: Worker, code: int | None = None) -> None:
        """The process is gone: take what it still said, then tell."""
        while worker.connection in self._selector.get_map():
            before = len(worker.buffer), len(self._queue), worker.exit
            self._from_worker(worker)
            if before == (len(worker.buffer), len(self._queue), worker.exit):
                break  # something that it started keeps the socket open
        for item in (worker.connection, worker.pidfd):
            unregister(self._selector, item)
        if worker.process is not None:
            code = wait_fresh(worker.process)
        elif worker.orphaned and worker.pid is not None:
            kill_group(worker.pid)
        worker.close()
        del self._workers[worker.number]
        job = worker.job
        event = worker.exit or {
            "type": "exited",
            "member": job.identity.member,
            "attempt": job.attempt,
            "rank": job.rank,
            "outcome": None,
            "detail": how_it_died(code, worker.log),
        }
        if worker.exit is None and code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            self._oom_kills = oom_kills()
            event["reason"] = "oom"
        self._queue.append(event)


def _usage_of(forks: ForkServer) -> dict[str, Any]:
    """What the imports have cost that all forked workers share."""
    from ensemble.meter import cpu_seconds

    return {
        "type": "usage",
        "node": NODE,
        "role": "startup",
        "member": None,
        "rank": None,
        "pid": forks.process.pid,
        "cpu_s": cpu_seconds(forks.process.pid) or 0.0,
        "origin": "measured",
    }
