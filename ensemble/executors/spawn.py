"""Starts worker processes: forked from the fork server for the CPU, as new interpreters for a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.executors.mps import client_environment
from ensemble.train.job import Job

if TYPE_CHECKING:
    import selectors


PARTING_S = 10.0  # what a fork server may take to end


@dataclass(eq=False)
class WorkerProcess:
    """One rank's process and our end of its socket.

    Attributes:
        process: of a fresh process; None for a forked one, which is the fork server's child.
        pid, pidfd: None until a forked process is there.
        orphaned: whether the fork server that would wait for it is gone.
        buffer: what it said of a line that has not ended.
        unsent: what it is still to be told.
        doomed: whether it is to be killed as soon as it is there.
        exit: the `exited` event that it sent, None while it has not.
        reported_s: CPU-seconds by role, as it reported last.
    """

    number: int
    job: Job
    connection: socket.socket
    log: Path
    process: subprocess.Popen[bytes] | None = None
    pid: int | None = None
    pidfd: int | None = None
    orphaned: bool = False
    buffer: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    kill_pending: bool = False
    exit: dict[str, Any] | None = None
    reported_s: dict[str, float] = field(default_factory=dict)

    def kill(self) -> None:
        """End it, now or as soon as it is there; what it started itself ends when it is waited for."""
        self.kill_pending = True
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def remaining_usage(self, used_s: float) -> dict[str, Any] | None:
        """What its process has used and not told, as a `usage` event of what it did last; None of none.

        It tells at the end of an epoch, and when it ends by itself. What it started and waited for is in none of
        that, nor is what came after it, all of an epoch where it was killed.

        Args:
            used_s: CPU-seconds of the process and of all that it waited for.
        """
        if used_s <= sum(self.reported_s.values()):
            return None
        measures = self.job.profile is not None
        roles = [role for role in self.reported_s if role != "prepare"]
        role = roles[-1] if roles else "profile" if measures else "startup"
        return {
            "type": "usage",
            "node": self.job.node,
            "role": role,
            "member": None if measures else self.job.identity.member,
            "rank": self.job.rank,
            "pid": self.pid if self.process is None else self.process.pid,
            "cpu_s": used_s - sum(self.reported_s.values()) + self.reported_s.get(role, 0.0),
            "origin": "measured",
        }

    def close(self) -> None:
        """Give back its descriptors."""
        self.connection.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class ForkClient:
    """A connection to a fork server, over which workers are asked for; see `ensemble.executors.forkserver`."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control

    @classmethod
    def connect(cls, path: str) -> ForkClient:
        """A connection to a server that listens; OSError where none does."""
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            control.connect(path)
        except OSError:
            control.close()
            raise
        return cls(control)

    def fork(self, worker: WorkerProcess, theirs: socket.socket, environment: dict[str, str]) -> None:
        """Ask for a worker; it comes as a `forked` message."""
        request = {"fork": worker.number, "env": environment, "log": str(worker.log)}
        socket.send_fds(self.control, [json.dumps(request).encode()], [theirs.fileno()])

    def receive(self) -> tuple[dict[str, Any], int | None] | None:
        """Its next message and a pidfd that came with it; None when it is gone."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 1 << 16, 1)
        except ConnectionResetError:
            return None
        return (json.loads(message), descriptors[0] if descriptors else None) if message else None

    def close(self) -> None:
        """Leave; all workers that were asked for over this connection end."""
        self.control.close()


class ForkServer(ForkClient):
    """The process that forks workers, started by this one.

    Args:
        directory: of the node, for what its workers keep between them.
        listen: a path where others may ask, too.
    """

    def __init__(self, directory: Path, listen: str | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "ensemble.executors.forkserver", "--fd", str(theirs.fileno())]
        with contextlib.ExitStack() as handed_on:
            inherited = [handed_on.enter_context(theirs)]
            if listen is not None:
                # Listening before the process is there: who asks early waits, and is not refused.
                inherited.append(handed_on.enter_context(_make_listener(listen)))
                command += ["--listener", str(inherited[-1].fileno())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[each.fileno() for each in inherited],
                env={
                    **os.environ,
                    **import_path(),
                    **cache_environment(directory),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                process_group=0,
            )
        super().__init__(ours)
        self._idle, self._shared = True, listen is not None
        self._used_s = 0.0

    def fork(self, worker: WorkerProcess, theirs: socket.socket, environment: dict[str, str]) -> None:
        """See `ForkClient`."""
        self._idle = False
        super().fork(worker, theirs, environment)

    def usage(self, node: str) -> dict[str, Any]:
        """A `usage` event: what the imports have cost that all forked workers share, and what it did since."""
        from ensemble.meter import cpu_seconds

        if self.process.returncode is None:
            self._used_s = max(self._used_s, cpu_seconds(self.process.pid) or 0.0)
        return {
            "type": "usage",
            "node": node,
            "role": "startup",
            "member": None,
            "rank": None,
            "pid": self.process.pid,
            "cpu_s": self._used_s,
            "origin": "measured",
        }

    def close(self) -> None:
        """End it and all workers that it forked; `usage` then says all that it has used."""
        if self._idle:  # it may be in the middle of its imports, and has nobody of ours to end
            self.usage("")  # what its workers have used that others asked for it could not say any more
            self.process.kill()
            waited_s = None if self._shared else 0.0
        else:
            waited_s = self._shut_down()
        super().close()
        used_s = reap(self.process)[1]
        if used_s is not None and waited_s is not None:
            self._used_s = max(self._used_s, used_s - waited_s)

    def _shut_down(self) -> float | None:
        """Let it end its workers and itself: what these have used; it is killed where it does not say so."""
        self.control.settimeout(PARTING_S)
        with contextlib.suppress(OSError):  # it has gone, or hangs
            self.control.shutdown(socket.SHUT_WR)
            while (received := self.receive()) is not None:
                message, pidfd = received
                if pidfd is not None:
                    os.close(pidfd)
                if "waited_s" in message:
                    return float(message["waited_s"])
        self.process.kill()
        return None


def _make_listener(path: str) -> socket.socket:
    """A socket that listens at a path; its directory keeps other users out."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a server that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(128)
    return listener


def start_process(worker: WorkerProcess, theirs: socket.socket, environment: dict[str, str]) -> None:
    """Start a worker as a new interpreter."""
    with open(worker.log, "ab") as output:
        worker.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ensemble.executors.worker_main", "--fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **import_path(), **environment},
            process_group=0,  # Ctrl-C in the terminal is for the controller, which asks members to checkpoint
        )
    worker.pidfd = os.pidfd_open(worker.process.pid)


def reap_group(process: subprocess.Popen[bytes]) -> tuple[int, float | None]:
    """As `reap`, of one that has ended or was killed; what it started itself ends, too."""
    kill_group(process.pid)  # before it is waited for: until then its number is its own
    return reap(process)


def reap(process: subprocess.Popen[bytes]) -> tuple[int, float | None]:
    """Wait for the end of a child: its exit code, and the CPU-seconds of it and of all that it waited for.

    These are unknown (None) where it was waited for before.
    """
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):  # this program ignores SIGCHLD: nobody can know
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used.ru_utime + used.ru_stime
    return process.wait(), None


def kill_group(pid: int) -> None:
    """End a process group, if there is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def import_path() -> dict[str, str]:
    """Environment that lets a child import what this process can, and shows what it prints at once.

    It leaves no `__pycache__` beside the user's modules.
    """
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def cache_environment(directory: Path) -> dict[str, str]:
    """Environment that has compilers keep what they compile in a directory of ours, unless the user named one.

    PyTorch would make `torchinductor_USER` in the machine's temporary directory as soon as an optimizer is
    imported; Triton and CUDA write to the user's home.
    """
    kept = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
    return {name: os.environ.get(name) or str(directory / folder) for name, folder in kept.items()}


def worker_environment(job: Job, device: int | None, directory: Path | None = None) -> dict[str, str]:
    """What differs in a worker's environment: its threads, the one GPU that it may see, how it shares that.

    CUDA counts as NVML does, in the order of the bus, and not from the fastest.

    Args:
        device: number of its GPU, None for the CPU.
        directory: of the node, where its Multi-Process Service may run and compilers keep what they compile.
    """
    from ensemble.meter.power.nvml import visible_devices

    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    shared = device is not None and directory is not None
    return {
        **(client_environment(directory, job.identity.gpus_per_worker) if shared and directory else {}),
        **(cache_environment(directory) if directory is not None else {}),
        "OMP_NUM_THREADS": str(job.identity.threads),
        "MKL_NUM_THREADS": str(job.identity.threads),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "" if device is None else str(visible[device] if visible else device),
    }


def describe_death(code: int | None, log: Path) -> str:
    """One line for a process that ended without saying how."""
    if code is None:
        return f"is gone, and so is the process that could tell how it ended; see {log}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"was killed by signal {-code} ({name}); see {log}"
    return f"ended with code {code} without a word; see {log}"


def unregister(selector: selectors.BaseSelector, item: Any) -> None:
    """Stop waiting for a descriptor; harmless when it is not waited for."""
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(item)
