"""Worker processes of one host: started, spoken to, waited for.

All news comes over descriptors that one selector waits on: a worker's socket, the fork server's (which tells when
a worker that it forked has ended), the pidfd of a worker that was started afresh. No signal handler is involved,
so it works in any thread.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ensemble.executors.host import oom_kills
from ensemble.executors.spawn import (
    ForkClient,
    ForkServer,
    Worker,
    how_it_died,
    kill_group,
    start_fresh,
    unregister,
    wait_fresh,
    worker_environment,
)
from ensemble.store.files import make_directory
from ensemble.train.job import Job

log = logging.getLogger(__name__)


class Workers:
    """Worker processes of this host.

    Args:
        node: its name in the events.
        selector: where descriptors to wait on are registered, each with a function that takes what is there.
        tell: gets each event.
        forks: makes the connection to a fork server; called when a worker is to be forked and there is none.

    Attributes:
        directory: of the node, where its Multi-Process Service may run; None where none does.
    """

    def __init__(
        self,
        node: str,
        selector: selectors.BaseSelector,
        tell: Callable[[dict[str, Any]], None],
        forks: Callable[[], ForkClient],
    ) -> None:
        self.node = node
        self.directory: Path | None = None
        self._selector = selector
        self._tell = tell
        self._open_forks = forks
        self._workers: dict[int, Worker] = {}
        self._number = 0
        self._forks: ForkClient | None = None
        self._oom_kills = oom_kills()

    def launch(self, jobs: Sequence[Job], devices: Sequence[int | None]) -> None:
        """See `ensemble.executors.Executor`."""
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
        make_directory(output.parent)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # a worker that does not listen keeps nobody waiting
        worker = Worker(self._number, job, ours, output)
        environment = worker_environment(job, device, self.directory)
        try:
            with theirs:
                self._selector.register(ours, selectors.EVENT_READ, lambda: self._to_and_from(worker))
                if device is not None or not self._fork(worker, theirs, environment):
                    start_fresh(worker, theirs, environment)
                    self._watch(worker)
        except OSError:
            self._drop(worker)
            raise
        self._workers[worker.number] = worker
        self._send(worker, job.as_json())
        return worker

    def _drop(self, worker: Worker) -> None:
        """End one that is not ours yet; what a fork server still makes of it is ended in `_from_server`."""
        for item in (worker.connection, worker.pidfd):
            unregister(self._selector, item)
        if worker.process is not None:
            wait_fresh(worker.process)
        worker.close()

    def _fork(self, worker: Worker, theirs: socket.socket, environment: dict[str, str]) -> bool:
        """Ask the fork server; False when there is none any more."""
        try:
            self.connect().fork(worker, theirs, environment)
        except OSError:
            return False
        return True

    def _watch(self, worker: Worker) -> None:
        """Learn of the end of a process that no fork server tells of."""
        assert worker.pidfd is not None
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._ended(worker))

    def connect(self) -> ForkClient:
        """The connection to a fork server, made now if there is none."""
        if self._forks is None:
            forks = self._forks = self._open_forks()
            self._selector.register(forks.control, selectors.EVENT_READ, lambda: self._from_server(forks))
        return self._forks

    def send(self, member: str, command: str, **fields: Any) -> None:
        """See `ensemble.executors.Executor.tell`."""
        for worker in self._of(member):
            self._send(worker, json.dumps({"command": command, **fields}))

    def kill(self, member: str) -> None:
        """See `ensemble.executors.Executor`; what the member started itself ends with it."""
        for worker in self._of(member):
            worker.kill()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.kill()
        if self._forks is not None:
            self._forks.close()
            if isinstance(self._forks, ForkServer):
                self._tell(self._forks.usage(self.node))
            self._forks = None
        for worker in self._workers.values():
            if worker.process is not None:
                wait_fresh(worker.process)
            worker.close()
        self._workers.clear()

    def _of(self, member: str) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.job.identity.member == member]

    def _from_server(self, forks: ForkClient) -> None:
        told = forks.receive()
        if told is None:
            self._server_lost(forks)
            return
        message, pidfd = told
        worker = self._workers.get(message["forked"] if "forked" in message else message["ended"])
        if worker is None:  # dropped: its socket's end is its own
            if pidfd is not None:
                os.close(pidfd)
        elif "forked" in message:
            worker.pid, worker.pidfd = message["pid"], pidfd
            if worker.doomed:
                worker.kill()
            if isinstance(forks, ForkServer):
                self._tell(forks.usage(self.node))
        else:
            self._ended(worker, message["code"], message.get("cpu_s"))

    def _server_lost(self, forks: ForkClient) -> None:
        """The fork server died: its workers live on, but nobody can tell any more with what code they end."""
        unregister(self._selector, forks.control)
        forks.close()
        log.warning("the fork server of node %s is gone; the next member needs another", self.node)
        self._forks = None
        for worker in [worker for worker in self._workers.values() if worker.process is None]:
            worker.orphaned = True
            if worker.pidfd is None:
                self._ended(worker)
            else:
                self._watch(worker)

    def _send(self, worker: Worker, line: str) -> None:
        """Send a line, what does not fit into the socket as soon as the worker has taken what is there."""
        worker.unsent += line.encode() + b"\n"
        self._flush(worker)

    def _flush(self, worker: Worker) -> None:
        if worker.connection not in self._selector.get_map():
            return  # it has closed its end
        try:
            while worker.unsent:
                sent = worker.connection.send(worker.unsent)
                del worker.unsent[:sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # one that has just died is noticed otherwise
            worker.unsent.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        key = self._selector.get_key(worker.connection)
        if key.events != wanted:
            self._selector.modify(worker.connection, wanted, key.data)

    def _to_and_from(self, worker: Worker) -> None:
        if worker.unsent:
            self._flush(worker)
        self._from_worker(worker)

    def _from_worker(self, worker: Worker) -> bool:
        """Take what a worker has said; False when there is nothing (more)."""
        try:
            got = worker.connection.recv(1 << 18)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            got = b""
        if not got:
            unregister(self._selector, worker.connection)
            return False
        *lines, worker.buffer = (worker.buffer + got).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] == "usage":
                worker.told_s[event["role"]] = event["cpu_s"]
            if event["type"] == "exited":
                worker.exit = event  # told when the process is gone: only then is its place free
            else:
                self._tell(event)
        return True

    def _ended(self, worker: Worker, code: int | None = None, used_s: float | None = None) -> None:
        """The process is gone: take what it still said, then tell."""
        # something that it started may keep the socket open: no waiting for its end
        while worker.connection in self._selector.get_map() and self._from_worker(worker):
            pass
        for item in (worker.connection, worker.pidfd):
            unregister(self._selector, item)
        if worker.process is not None:
            code, used_s = wait_fresh(worker.process)
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
        if used_s is not None and (rest := worker.rest(used_s)) is not None:
            self._tell(rest)
        self._tell(event)
