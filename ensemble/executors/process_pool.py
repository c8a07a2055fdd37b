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
from ensemble.executors.limits import raise_memory_limits
from ensemble.executors.memory_guard import RankMemory
from ensemble.executors.spawn import (
    Forks,
    ForkServer,
    WorkerProcess,
    describe_end,
    kill_group,
    make_worker_environment,
)
from ensemble.executors.templates import Template, Templates
from ensemble.meter.cpu import read_start
from ensemble.meter.devices import RunProcess
from ensemble.meter.memory import tree_memory_gb
from ensemble.store.files import make_directory
from ensemble.train.job import Job
from pipelines.errors import PipelineError
from pipelines.ipc.messages import ConnectionLost

#: Events on which nothing is decided at once; an `epoch` is one of them where nobody waits for a result.
_DEFERRABLE = frozenset(("plan", "started", "progress", "usage", "checkpoint", "power", "feeder", "node_health"))

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
        self._connect_forks, self._count = forks, itertools.count(1).__next__
        self._workers: dict[int, WorkerProcess] = {}
        self._ended: dict[int, RunProcess] = {}
        self._forks: ForkServer | None = None
        self._templates = Templates(node, selector, self._count, self.fork, self._read_forks, self._finish)
        self._checker: CheckerProcess | None = None
        self._checks_by: Forks | None = None
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
                self._kill(worker)
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
                self.node, self.directory, job.run_dir, self._selector, self._emit, self._fork_checker, self._count
            )
        except PipelineError as error:  # members then report that nothing is compared
            log.warning("node %s has no checker: %s", self.node, error)

    def report_servers(self) -> None:
        """Emit what the node's fork server, templates and checker have used so far, where there is more to say."""
        servers: list[Forks] = [] if self._forks is None else [self._forks]
        for forks in (*servers, *self._templates.list_started()):
            if (used := forks.usage(self.node))["cpu_s"] > forks.reported_s:
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
                self._templates.fork(worker, theirs, environment)
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

    def fork(self, request: Callable[[Forks], None], template: Template | None = None) -> Forks:
        """Make a request to a template or to the fork server; to a fork server where that one has just died.

        Raises:
            OSError: there is none, and none can be started.
        """
        forks = template or self.connect()
        try:
            request(forks)
        except OSError:
            self._handle_lost(forks)
            forks = self.connect()
            request(forks)
        return forks

    def _fork_checker(self, request: Callable[[Forks], None]) -> None:
        self._checks_by = self.fork(request, self._templates.find_ready())  # which has loaded the declaration

    def connect(self) -> ForkServer:
        """The connection to a fork server, made now if there is none."""
        if self._forks is None:
            forks = self._forks = self._connect_forks()
            self._selector.register(forks.control, selectors.EVENT_READ, lambda: self._read_forks(forks))
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
            self._kill(worker)

    def _kill(self, worker: WorkerProcess) -> None:
        worker.kill()
        if self._templates.drop(worker):  # it is not forked yet
            self._finish(worker, -signal.SIGKILL)

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
                self._kill(worker)

    def raise_memory_limits(self) -> None:
        """Let ranks whose need was measured, not declared, grow while the machine has memory free."""
        raise_memory_limits({w.pid: w.job.identity for w in self._workers.values() if w.pid is not None})

    def list_memory(self) -> list[RankMemory]:
        """What each worker and the processes that it started hold for themselves, as far as it can be read."""
        ranks = []
        for worker in self._workers.values():
            if (pid := worker.pid) is not None and (used_gb := tree_memory_gb(pid)) is not None:
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
        for usage in self._templates.close():
            self._emit(usage)
        if self._forks is not None:
            self._forks.close()
            self._emit(self._forks.usage(self.node))
            self._forks = None
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _find(self, member: str) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.job.identity.member == member]

    def _read_forks(self, forks: ForkServer | Template) -> None:
        try:
            message, pidfd = forks.receive()
        except ConnectionLost:
            self._handle_lost(forks)
            return
        if isinstance(forks, Template) and not forks.is_ready:
            self._templates.settle(forks, message.get("refused"))
            return
        if "forked" in message:
            self._note_started(message["forked"], message["pid"], pidfd)
        elif self._checker is not None and message["ended"] == self._checker.number:
            self._checker.has_ended(message.get("cpu_s"), message["code"])
        elif (worker := self._workers.get(message["ended"])) is not None:
            self._finish(worker, message["code"], message.get("cpu_s"))

    def _note_started(self, number: int, pid: int, pidfd: int | None) -> None:
        if self._checker is not None and number == self._checker.number:
            self._checker.has_started(pid, pidfd)
        elif (template := self._templates.find(number)) is not None:
            template.has_started(pid)
            template.pidfd = pidfd
        elif (worker := self._workers.get(number)) is not None:
            worker.pid, worker.pidfd, worker.began = pid, pidfd, read_start(pid)
            if worker.kill_pending:
                worker.kill()
            self._flush(worker)
        elif pidfd is not None:  # of one that could not be started
            os.close(pidfd)

    def _handle_lost(self, forks: ForkServer | Template) -> None:
        """A fork server or a template died: its workers live on, but their exit codes cannot be known."""
        self._unregister(forks.control)
        if isinstance(forks, Template):
            self._templates.lose(forks)
        else:
            forks.usage(self.node)  # which is still to be had of it until it is waited for
            forks.close()
            log.warning("the fork server of node %s died; another is started for the next member", self.node)
            self._forks = None
        if forks.pid is not None:
            self._emit(forks.usage(self.node))
        if self._checker is not None and forks is self._checks_by:
            self._checker.watch()
        for worker in [worker for worker in self._workers.values() if worker.forks is forks]:
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
