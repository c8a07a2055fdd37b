"""Starts the worker processes of one host, exchanges commands and events with them, and reports their ends.

All input arrives over descriptors that one selector waits on: the socket of each worker, and that of the fork
server, which reports the end of the workers. No signal handler is involved, so it works in any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ensemble.events import Report
from ensemble.executors.base import make_exited
from ensemble.executors.checker import CheckerProcess
from ensemble.executors.host import count_oom_kills
from ensemble.executors.limits import find_memory_room, raise_memory_limit
from ensemble.executors.memory_guard import RankMemory
from ensemble.executors.spawn import (
    ForkServer,
    WorkerProcess,
    describe_end,
    kill_group,
    make_worker_environment,
)
from ensemble.meter.cpu import read_start
from ensemble.meter.devices import RunProcess
from ensemble.meter.memory import tree_memory_gb
from ensemble.store.files import make_directory
from ensemble.train.job import Job
from pipelines.errors import PipelineError
from pipelines.ipc.messages import ConnectionLost

#: Events on which nothing is decided at once; an `epoch` is one of them where nobody waits for a result.
_DEFERRABLE = frozenset(("plan", "started", "progress", "usage", "checkpoint", "power", "feeder", "node_health"))
_SLOW_IMPORT_S = 1.0  # from here on it is worth a warning that each member repeats it

log = logging.getLogger(__name__)


class ProcessPool:
    """Worker processes of this host.

    Args:
        node: its name in the events.
        selector: where descriptors are registered, each with the function to call when it is ready.
        emit: called with each event.
        forks: makes the connection to a fork server; called when a worker is to be forked and there is none.
        directory: of the node, as in `make_worker_environment`.

    Attributes:
        find_gpu_fault: returns why a GPU is broken, by its id; None where it works.
        note_end: called when a worker has ended.
    """

    def __init__(
        self,
        node: str,
        selector: selectors.BaseSelector,
        emit: Callable[[Report], None],
        forks: Callable[[], ForkServer],
        directory: Path | None = None,
    ) -> None:
        self.node, self.directory = node, directory
        self.find_gpu_fault: Callable[[str], str | None] = lambda gpu: None
        self.note_end: Callable[[], None] = lambda: None
        self._deferrable = _DEFERRABLE | {"epoch"}
        self._selector = selector
        self._emit = emit
        self._connect_forks = forks
        self._workers: dict[int, WorkerProcess] = {}
        self._ended: dict[int, RunProcess] = {}
        self._count = itertools.count(1).__next__
        self._forks: ForkServer | None = None
        self._checker: CheckerProcess | None = None
        self._oom_kills = count_oom_kills()

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        if any(job.awaits_pruner for job in jobs):
            self._deferrable = _DEFERRABLE
        broken = next((why for gpu in devices if gpu is not None and (why := self.find_gpu_fault(gpu))), None)
        if broken is not None:
            for job in jobs:
                self._emit(make_exited(job, None, f"was not started: {broken}", gpu_lost=True))
            return
        started: list[WorkerProcess] = []
        try:
            for job, device in zip(jobs, devices, strict=True):
                started.append(self._start(job, device))
        except OSError:
            for worker in started:  # a member runs with all its ranks or not at all
                worker.kill()
            raise

    def is_urgent(self, event: Report) -> bool:
        """Whether something is decided on an event at once; others wait for more, up to `GATHER_S`.

        A turn of the controller, and a message at both ends of Ray, take about a millisecond of CPU time each.
        """
        return event["type"] not in self._deferrable

    def _listen_for_checks(self, job: Job) -> None:
        """Let members of this node ask for comparisons, if they share what a feeder prepares."""
        if self._checker is not None or self.directory is None or job.feeder is None:
            return
        try:
            self._checker = CheckerProcess(
                self.node, self.directory, job.run_dir, self._selector, self._emit, self.fork, self._count
            )
        except PipelineError as error:  # members then report that nothing is compared
            log.warning("node %s has no checker: %s", self.node, error)

    def report_servers(self) -> None:
        """Emit what the node's fork server and its checker have used so far, where there is more to say."""
        forks = self._forks
        if forks is not None and (used := forks.usage(self.node))["cpu_s"] > forks.reported_s:
            forks.reported_s = used["cpu_s"]
            self._emit(used)
        if self._checker is not None:
            self._checker.report_usage()

    def _start(self, job: Job, device: str | None) -> WorkerProcess:
        self._listen_for_checks(job)
        output = Path(job.run_dir) / "members" / job.identity.member / "log.txt"
        make_directory(output.parent)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # a worker that does not read must not block this process
        worker = WorkerProcess(self._count(), job, ours, output)
        worker.log_begins = output.stat().st_size if output.exists() else 0
        environment = make_worker_environment(job, device, self.directory)
        try:
            with theirs:
                self._selector.register(ours, selectors.EVENT_READ, lambda: self._exchange(worker))
                self.fork(lambda forks: forks.fork(worker, theirs, environment))
        except OSError:
            self._unregister(worker.connection, worker.pidfd)
            worker.close()  # if the fork server still forks it, it ends because its socket is closed
            raise
        self._workers[worker.number] = worker
        self._send(worker, job.as_json())  # a forked worker receives it when its process id is known here
        return worker

    def _watch(self, worker: WorkerProcess) -> None:
        """Wait for the end of a process that no fork server reports."""
        assert worker.pidfd is not None
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._finish(worker))

    def fork(self, request: Callable[[ForkServer], None]) -> None:
        """Make a request to the fork server, to another one where it has just died.

        Raises:
            OSError: there is none, and none can be started.
        """
        forks = self.connect()
        try:
            request(forks)
        except OSError:
            self._handle_lost_server(forks)
            request(self.connect())

    def connect(self) -> ForkServer:
        """The connection to a fork server, made now if there is none."""
        if self._forks is None:
            forks = self._forks = self._connect_forks()
            self._selector.register(forks.control, selectors.EVENT_READ, lambda: self._read_server(forks))
        return self._forks

    def _unregister(self, *items: Any) -> None:
        for item in items:
            with contextlib.suppress(KeyError, ValueError):  # None, closed, or not registered
                self._selector.unregister(item)

    def send(self, member: str, command: str, **fields: Any) -> None:
        for worker in self._find(member):
            self._send(worker, json.dumps({"command": command, **fields}))

    def kill(self, member: str) -> None:
        """See `ensemble.executors.Executor`; the processes that the member started end as well."""
        for worker in self._find(member):
            worker.kill()

    def list_gpus(self) -> set[str]:
        """The ids of the GPUs on which workers run."""
        return {worker.job.gpu for worker in self._workers.values() if worker.job.gpu is not None}

    def list_pids(self) -> set[int]:
        """The process ids of the workers that have started."""
        return {worker.pid for worker in self._workers.values() if worker.pid is not None}

    def list_processes(self) -> dict[int, RunProcess]:
        """The workers that have run at any time since the last call, by process id."""
        running = {pid: w.describe() for w in self._workers.values() if (pid := w.pid) is not None}
        ended, self._ended = self._ended, {}
        return ended | running

    def end_on_gpus(self, gpus: Collection[str], why: str) -> None:
        """Kill all ranks of the members with a rank on one of these GPUs; their events say that it was lost."""
        for member in {worker.job.identity.member for worker in self._workers.values() if worker.job.gpu in gpus}:
            for worker in self._find(member):
                worker.lost_gpu = why
                worker.kill()

    def raise_memory_limits(self) -> None:
        """Let ranks whose need was measured, not declared, grow while the machine has memory free."""
        workers = list(self._workers.values())
        room_gb = find_memory_room(len(workers)) if workers else 0.0
        for worker in workers:
            identity, pid = worker.job.identity, worker.pid
            if pid is not None and identity.memory_gb is not None and "memory_gb" in identity.auto:
                with contextlib.suppress(OSError):  # it has ended
                    raise_memory_limit(pid, room_gb)

    def list_memory(self) -> list[RankMemory]:
        """What each worker and the processes that it started hold for themselves, as far as it can be read."""
        ranks = []
        for worker in self._workers.values():
            pid = worker.pid
            if pid is not None and (used_gb := tree_memory_gb(pid)) is not None:
                granted_gb = worker.job.identity.memory_gb
                granted = None if granted_gb is None else int(granted_gb * 2**30)
                ranks.append(RankMemory(worker.number, int(used_gb * 2**30), granted))
        return ranks

    def kill_for_memory(self, number: int) -> None:
        """Kill a worker because the node is short of memory; its `exited` event has the reason "oom"."""
        worker = self._workers[number]
        worker.killed_for_memory = True
        who = f"rank {worker.job.rank} of {worker.job.identity.member}"
        log.warning("node %s is short of memory: %s is ended", self.node, who)
        worker.kill()

    def close(self) -> None:
        """End all workers."""
        self._ended = self.list_processes()  # the node's last power is still to be attributed
        for worker in self._workers.values():
            worker.kill()
        if self._checker is not None:
            self._checker.close()
        if self._forks is not None:
            self._forks.close()
            self._emit(self._forks.usage(self.node))
            self._forks = None
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _find(self, member: str) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.job.identity.member == member]

    def _read_server(self, forks: ForkServer) -> None:
        try:
            message, pidfd = forks.receive()
        except ConnectionLost:
            self._handle_lost_server(forks)
            return
        if "not_shared" in message:
            if message["cpu_s"] >= _SLOW_IMPORT_S:
                text = "node %s: imports left %s behind, so each member imports its packages itself (%.1f CPU-s)"
                log.warning(text, self.node, message["not_shared"], message["cpu_s"])
            return
        number = message["forked"] if "forked" in message else message["ended"]
        if self._checker is not None and number == self._checker.number:
            if "forked" in message:
                self._checker.has_started(message["pid"], pidfd)
            else:
                self._checker.has_ended(message.get("cpu_s"), message["code"])
            return
        worker = self._workers.get(number)
        if worker is None:  # it could not be started, and ends because its socket is closed
            if pidfd is not None:
                os.close(pidfd)
        elif "forked" in message:
            worker.pid, worker.pidfd, worker.began = message["pid"], pidfd, read_start(message["pid"])
            if worker.kill_pending:
                worker.kill()
            self._flush(worker)
        else:
            self._finish(worker, message["code"], message.get("cpu_s"))

    def _handle_lost_server(self, forks: ForkServer) -> None:
        """The fork server died: its workers live on, but their exit codes cannot be known."""
        self._unregister(forks.control)
        forks.usage(self.node)  # which is still to be had of it until it is waited for
        forks.close()
        self._emit(forks.usage(self.node))
        log.warning("the fork server of node %s died; another is started for the next member", self.node)
        self._forks = None
        if self._checker is not None:
            self._checker.watch()
        for worker in list(self._workers.values()):
            worker.orphaned = True
            if worker.pidfd is None:
                self._finish(worker)
            else:
                self._watch(worker)

    def _send(self, worker: WorkerProcess, line: str) -> None:
        """Send a line; what does not fit into the socket is sent when the worker has read what is in it."""
        worker.unsent += line.encode() + b"\n"
        self._flush(worker)

    def _flush(self, worker: WorkerProcess) -> None:
        if worker.pid is None:  # without a job it does nothing that could not be attributed to it
            return
        if worker.connection not in self._selector.get_map():
            return  # it has closed its end
        try:
            while worker.unsent:
                sent = worker.connection.send(worker.unsent)
                del worker.unsent[:sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # it has just died; its end is reported elsewhere
            worker.unsent.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        key = self._selector.get_key(worker.connection)
        if key.events != wanted:
            self._selector.modify(worker.connection, wanted, key.data)

    def _exchange(self, worker: WorkerProcess) -> None:
        if worker.unsent:
            self._flush(worker)
        self._read_worker(worker)

    def _read_worker(self, worker: WorkerProcess) -> bool:
        """Emit the events that a worker has sent; returns False if there are no more."""
        try:
            got = worker.connection.recv(1 << 18)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            got = b""
        if not got:
            self._unregister(worker.connection)
            return False
        *lines, worker.buffer = (worker.buffer + got).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] == "failed" and (why := self._find_lost_gpu(worker)) is not None:
                event |= {"reason": "lost", "gpu_lost": True, "error": f"{why}: {event['error']}"}
            if event["type"] == "usage":
                worker.reported_s[event["role"]] = event["cpu_s"]
            if event["type"] == "exited":
                worker.exit = event  # emitted when the process is gone: only then are its resources free
            else:
                self._emit(event)
        return True

    def _find_lost_gpu(self, worker: WorkerProcess) -> str | None:
        """Why a worker that failed, or another rank of its member, has lost its GPU; None where it has not."""
        for rank in self._find(worker.job.identity.member):
            if worker.lost_gpu is None and rank.job.gpu is not None:
                worker.lost_gpu = self.find_gpu_fault(rank.job.gpu)
        return worker.lost_gpu

    def _has_killed_for_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the last call."""
        before, self._oom_kills = self._oom_kills, count_oom_kills()
        return self._oom_kills > before

    def _finish(self, worker: WorkerProcess, code: int | None = None, used_s: float | None = None) -> None:
        """The process is gone: emit its last events, then its end."""
        # Processes that it started may keep the socket open, so do not wait for the socket's end.
        while worker.connection in self._selector.get_map() and self._read_worker(worker):
            pass
        self._unregister(worker.connection, worker.pidfd)
        if worker.orphaned and worker.pid is not None:
            kill_group(worker.pid)
        worker.close()
        has_failed = worker.exit is None or worker.exit["outcome"] == "failed"
        lost_gpu = self._find_lost_gpu(worker) if has_failed else None
        del self._workers[worker.number]
        if (pid := worker.pid) is not None:
            self._ended[pid] = worker.describe()
        is_oom = self._has_killed_for_memory() if worker.exit is None and code == -signal.SIGKILL else False
        event = describe_end(worker, code, is_oom=is_oom, lost_gpu=lost_gpu)
        if used_s is not None and (remaining := worker.make_remaining_usage(used_s)) is not None:
            self._emit(remaining)
        self._emit(event)
        self.note_end()
