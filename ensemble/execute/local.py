"""The local executor: every rank a process of this host, feeders beside them, no Ray.

All news comes over descriptors that one selector waits on: a worker's socket, its pidfd (which becomes readable
when the process ends, even if something it started keeps its socket open), a feeder's standard output. There is no
signal handler, so it works in any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.execute import Node
from ensemble.execute.host import oom_kills, this_node
from ensemble.spec import Ensemble, SpecError
from ensemble.train.job import Job

if TYPE_CHECKING:
    from ensemble.meter import PowerMeter
    from ensemble.store import RunDir
    from pipelines.feed import FeederProcess

POWER_EVERY_S = 1.0
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


@dataclass(eq=False)
class _Feeder:
    cohort: int
    process: FeederProcess
    usage: dict[str, float] = field(default_factory=dict)


class LocalExecutor:
    """Runs members as processes of this host; see `ensemble.execute.Executor`."""

    name = "local"

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._feeders: dict[int, _Feeder] = {}
        self._queue: list[dict[str, Any]] = []
        self._directory: Path | None = None
        self._meter: PowerMeter | None = None
        self._power_at = 0.0
        self._oom_kills = 0

    def open(self, run_dir: RunDir, ensemble: Ensemble) -> list[Node]:
        """See `Executor`; the one node is this host."""
        from ensemble.meter import PowerMeter

        self._ensemble = ensemble
        self._directory = _socket_directory(run_dir.path)
        self._meter = PowerMeter(NODE)
        self._meter.start()
        self._power_at = time.monotonic() + POWER_EVERY_S
        self._oom_kills = oom_kills()
        return [this_node(NODE, power=self._meter.describe())]

    def start_feeder(self, node: str, cohort: int, expect: int, capacity: int) -> str | None:
        """See `Executor`."""
        from pipelines.feed import spawn

        assert self._directory is not None
        ensemble = self._ensemble
        splits = {"valid": ensemble.valid, "test": ensemble.test}
        process = spawn(
            ensemble.train,
            resident={key: pipe for key, pipe in splits.items() if pipe is not None},
            expect=expect,
            capacity=capacity,
            workers=ensemble.prep_workers,
            gate_timeout_s=ensemble.gate_timeout_s,
            address=self._directory / f"feeder-{cohort}",
        )
        feeder = self._feeders[cohort] = _Feeder(cohort, process)
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._from_feeder(feeder))
        return process.address

    def stop_feeder(self, node: str, cohort: int) -> None:
        """See `Executor`."""
        feeder = self._feeders.pop(cohort, None)
        if feeder is not None:
            self._selector.unregister(feeder.process.stdout)
            for report in feeder.process.stop():
                self._report(feeder, report)

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
        assert self._directory is not None
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
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            if now >= self._power_at and self._meter is not None:
                self._power_at = now + POWER_EVERY_S
                self._queue.append({"type": "power", **self._meter.sample()})
            until = self._power_at if give_up is None else min(give_up, self._power_at)
            for key, _ in self._selector.select(0 if self._queue else max(0.0, until - now)):
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
        for cohort in list(self._feeders):
            self.stop_feeder(NODE, cohort)
        self._selector.close()
        if self._meter is not None:
            self._meter.close()
            self._meter = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

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

    # -- feeders ------------------------------------------------------------------------------------------------

    def _from_feeder(self, feeder: _Feeder) -> None:
        reports = feeder.process.read()
        for report in reports or []:
            self._report(feeder, report)
        if reports is None:
            self._selector.unregister(feeder.process.stdout)
            del self._feeders[feeder.cohort]
            feeder.process.stop()
            self._queue.append(
                {"type": "feeder_exited", "node": NODE, "cohort": feeder.cohort, "detail": "it died"}
            )

    def _report(self, feeder: _Feeder, report: dict[str, Any]) -> None:
        """One line of a feeder as a `feeder` and two `usage` events; whole processes, their start included."""
        from ensemble.meter import cpu_seconds

        if report["type"] != "feeder":
            return
        pids = report["pids"]
        live = {"feed": [pids["feed"]], "prepare": pids["prepare"]}
        for role, reported_s in report["cpu"].items():
            seen_s = sum(cpu_seconds(pid) or 0.0 for pid in live[role])
            feeder.usage[role] = max(reported_s, seen_s, feeder.usage.get(role, 0.0))
        counts = {key: report[key] for key in ("prepared", "consumed", "skipped", "restarts")}
        self._queue.append({"type": "feeder", "node": NODE, "cohort": feeder.cohort, **counts})
        for role, cpu_s in feeder.usage.items():
            self._queue.append(
                {
                    "type": "usage",
                    "node": NODE,
                    "role": role,
                    "member": None,
                    "rank": None,
                    "pid": pids["feed"],
                    "cpu_s": cpu_s,
                    "origin": "measured",
                }
            )


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


def _socket_directory(run_dir: Path) -> Path:
    """A directory of mode 0700 for sockets, short enough for their names, the same each time for a run.

    The same, so that a resume removes what a killed controller left.
    """
    name = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()) / f"ensemble-{os.geteuid()}-{name}"
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        found = directory.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or not directory.is_dir():
            raise SpecError(f"{directory} is not a directory of yours alone (mode 0700); remove it") from None
    return directory
