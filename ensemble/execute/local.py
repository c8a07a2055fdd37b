"""The local executor: every rank a process of this host, feeders beside them, no Ray.

All news comes over descriptors that one selector waits on: a worker's socket, its pidfd (which becomes readable
when the process ends, even if something it started keeps its socket open), a feeder's standard output. There is no
signal handler, so it works in any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.execute import Node
from ensemble.execute.host import oom_kills
from ensemble.execute.services import NodeServices
from ensemble.spec import Ensemble
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.store import RunDir

NODE = "local"


@dataclass(eq=False)
class _Worker:
    """One rank's process and our end of its socket."""

    job: Job
    process: subprocess.Popen[bytes]
    pidfd: int
    connection: socket.socket
    log: Path
    buffer: bytes = b""
    exit: dict[str, Any] | None = None


class LocalExecutor:
    """Runs members as processes of this host; see `ensemble.execute.Executor`."""

    name = "local"

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._queue: list[dict[str, Any]] = []
        self._services: NodeServices | None = None
        self._oom_kills = 0

    def open(self, run_dir: RunDir, ensemble: Ensemble) -> list[Node]:
        """See `Executor`; the one node is this host."""
        self._services = NodeServices(NODE, run_dir.path, ensemble, self._selector, self._queue_up)
        self._oom_kills = oom_kills()
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
        started: list[_Worker] = []
        try:
            for job, device in zip(jobs, devices, strict=True):
                started.append(self._start(job, device))
        except OSError:
            for worker in started:  # a member runs with all its ranks or not at all
                worker.process.kill()
                self._forget(worker)
            raise

    def _start(self, job: Job, device: int | None) -> _Worker:
        log = Path(job.run_dir) / "members" / job.identity.member / "log.txt"
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ensemble.execute.worker", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=worker_environment(job, device),
                process_group=0,  # Ctrl-C in the terminal is for the controller, which asks members to checkpoint
            )
        worker = _Worker(job, process, os.pidfd_open(process.pid), ours, log)
        self._workers.append(worker)
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._from_worker(worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._ended(worker))
        self._send(worker, job.as_json())
        return worker

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
            _kill_group(worker)

    def close(self) -> None:
        """See `Executor`."""
        for worker in self._workers:
            _kill_group(worker)
        for worker in list(self._workers):
            self._forget(worker)
        if self._services is not None:
            self._services.close()
            self._services = None
        self._selector.close()

    # -- workers ------------------------------------------------------------------------------------------------

    def _of(self, member: str) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job.identity.member == member]

    def _send(self, worker: _Worker, line: str) -> None:
        # one that has just died is noticed by its pidfd
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.sendall(line.encode() + b"\n")

    def _from_worker(self, worker: _Worker) -> None:
        try:
            got = worker.connection.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            got = b""
        if not got:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.connection)
            return
        *lines, worker.buffer = (worker.buffer + got).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] == "exited":
                worker.exit = event  # told when the process is gone: only then is its place free
            else:
                self._queue.append(event)

    def _ended(self, worker: _Worker) -> None:
        """The process is gone: take what it still said, then tell."""
        while worker.connection in self._selector.get_map():
            before = len(worker.buffer), len(self._queue), worker.exit
            self._from_worker(worker)
            if before == (len(worker.buffer), len(self._queue), worker.exit):
                break  # something that it started keeps the socket open
        code = self._forget(worker)
        job = worker.job
        event = worker.exit or {
            "type": "exited",
            "member": job.identity.member,
            "attempt": job.attempt,
            "rank": job.rank,
            "outcome": None,
            "detail": _how_it_died(code, worker.log),
        }
        if worker.exit is None and code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            self._oom_kills = oom_kills()
            event["reason"] = "oom"
        self._queue.append(event)

    def _forget(self, worker: _Worker) -> int:
        """Give back what is held for a process that has ended or was killed; its exit code."""
        for item in (worker.connection, worker.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(item)
        _kill_group(worker)
        code = worker.process.wait()
        worker.connection.close()
        os.close(worker.pidfd)
        self._workers.remove(worker)
        return code


def worker_environment(job: Job, device: int | None) -> dict[str, str]:
    """The environment of a worker: this process's import path, its own threads, the one GPU that it may see."""
    from ensemble.meter.power.nvml import visible_devices

    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(job.identity.threads),
        "MKL_NUM_THREADS": str(job.identity.threads),
        "CUDA_VISIBLE_DEVICES": "" if device is None else str(visible[device] if visible else device),
    }


def _kill_group(worker: _Worker) -> None:
    """End a worker and all processes of its group; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)


def _how_it_died(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"was killed by signal {-code} ({name}); see {log}"
    return f"ended with code {code} without a word; see {log}"
