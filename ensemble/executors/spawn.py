"""Starts the fork server of a node, from which all worker processes are forked, and what these have in common."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.events import Report
from ensemble.executors.base import make_exited
from ensemble.executors.mps import make_client_environment
from ensemble.meter.cpu import cpu_seconds, make_usage, read_start
from ensemble.meter.devices import RunProcess
from ensemble.store.event_log import has_locks
from ensemble.train.compilation import find_folder, name_kernel_caches
from ensemble.train.job import Job
from ensemble.train.node_checks import NODE_DIRECTORY
from pipelines.environment.machine_limits import available_bytes, limit_bytes
from pipelines.ipc import messages
from pipelines.ipc.child_processes import child_environment, make_rank_environment, reap

if TYPE_CHECKING:
    import psutil

_ALLOCATION_FAILED = re.compile(rb"memory allocation of \d+ bytes failed|std::bad_alloc")
_LAST_BYTES = 2**18  # of a log: a backtrace may follow
_CLOSE_S = 10.0  # time limit for a fork server to end
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# A log shows at once what a process prints, in UTF-8 whatever the locale is.
_OUTPUT = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}


@dataclass(eq=False)
class WorkerProcess:
    """One rank's process, a child of the fork server, and our end of its socket.

    Attributes:
        pid, pidfd: None until it has started.
        orphaned: whether the fork server that would wait for it is gone.
        buffer: the received part of a line that is not complete.
        unsent: bytes to send as soon as the socket accepts them.
        kill_pending: whether it is killed as soon as it has started.
        killed_for_memory: whether it was killed because the node is short of memory.
        lost_gpu: why it, or another rank of its member, has no GPU any more; None: it has.
        exit: the `exited` event that it sent, None before that.
        reported_s: CPU-seconds by role, as it reported last.
        log_begins: size of the log when it was started.
    """

    number: int
    job: Job
    connection: socket.socket
    log: Path
    pid: int | None = None
    pidfd: int | None = None
    orphaned: bool = False
    buffer: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    kill_pending: bool = False
    killed_for_memory: bool = False
    lost_gpu: str | None = None
    exit: Report | None = None
    reported_s: dict[str, float] = field(default_factory=dict)
    began: int | None = None
    log_begins: int = 0

    def kill(self) -> None:
        """Kill it, now or as soon as it has started; the processes that it started end when it is waited for."""
        self.kill_pending = True
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def describe(self) -> RunProcess:
        """Who uses a GPU where it does."""
        member = self.job.identity.member if self.job.is_of_member else None
        return RunProcess("train" if member is not None else "profile", member, self.job.gpu)

    def make_remaining_usage(self, used_s: float) -> Report | None:
        """A `usage` event with the CPU time that its process did not report, in its last role; None without any.

        It reports at the end of each epoch and when it ends by itself. Not included are the processes that it
        waited for, and what it used after its last report.

        Args:
            used_s: CPU-seconds of the process and of all processes that it waited for.
        """
        rest_s = used_s - sum(self.reported_s.values())
        if rest_s <= 0:
            return None
        measures = not self.job.is_of_member
        roles = [role for role in self.reported_s if role != "prepare"]
        role = roles[-1] if roles else "profile" if measures else "startup"
        return self._make_usage(role, rest_s + self.reported_s.get(role, 0.0))

    def _make_usage(self, role: str, cpu_s: float) -> Report:
        assert self.pid is not None  # it has used something, so it had started
        member = self.job.identity.member if self.job.is_of_member else None
        return make_usage(self.job.node, role, self.pid, cpu_s, member, self.job.rank, began=self.began)

    def close(self) -> None:
        self.connection.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class ForkServer:
    """A fork server that this process started, which forks workers; see `ensemble.executors.forkserver`.

    Args:
        directory: of the node, where compilers keep what they compile.
        run_dir: the run directory, of whose declaration it imports what is installed; None: it does not.
        module: that is run as the server.

    Attributes:
        control: our end of its socket; readable when `receive` has a message.
        process: the server's.
        reported_s: CPU-seconds of it that were reported last.
    """

    def __init__(
        self, directory: Path, run_dir: Path | None = None, module: str = "ensemble.executors.forkserver"
    ) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        declared = [] if run_dir is None else [str(run_dir), str(directory / "imports.log")]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *declared],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**child_environment(), **_OUTPUT, **make_node_environment(directory)},
                process_group=0,
            )
        self._idle, self._used_s, self.reported_s = True, 0.0, 0.0
        self._began = read_start(self.process.pid)

    def fork(self, worker: WorkerProcess, theirs: socket.socket, environment: dict[str, str]) -> None:
        """Request a worker; the answer is a `forked` message."""
        self._request(theirs, {"fork": worker.number, "env": environment, "log": str(worker.log)})

    def fork_checker(
        self, number: int, log: Path, listener: socket.socket, environment: dict[str, str], run_dir: str
    ) -> None:
        """Request the node's checker; the answer is a `forked` message."""
        self._request(listener, {"fork": number, "env": environment, "log": str(log), "checks": run_dir})

    def _request(self, descriptor: socket.socket, request: dict[str, Any]) -> None:
        self._idle = False
        socket.send_fds(self.control, [json.dumps(request).encode()], [descriptor.fileno()])

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """The next message and the pidfd sent with it, or None; raises `messages.ConnectionLost` if it is gone."""
        message, pidfd = messages.receive_with_descriptor(self.control)
        return json.loads(message), pidfd

    def usage(self, node: str) -> Report:
        """A `usage` event with its CPU time: the imports that all forked workers share, and what it did since."""
        if self.process.returncode is None:
            self._used_s = max(self._used_s, cpu_seconds(self.process.pid) or 0.0)
        return make_usage(node, "startup", self.process.pid, self._used_s, began=self._began)

    def close(self) -> None:
        """End it and all workers that it forked; `usage` then includes all that it used."""
        waited_s: float | None = 0.0
        if self._idle:  # it may still be importing, and has no workers to end
            self.process.kill()
        else:
            waited_s = self._shut_down()
        self.control.close()
        used_s = reap(self.process)
        if used_s is not None and waited_s is not None:
            self._used_s = max(self._used_s, used_s - waited_s)

    def _shut_down(self) -> float | None:
        """Let it end its workers and itself; returns the CPU-seconds of these. If it does not answer, kill it."""
        self.control.settimeout(_CLOSE_S)
        with contextlib.suppress(OSError, messages.ConnectionLost):  # it is gone, or hangs
            self.control.shutdown(socket.SHUT_WR)
            while True:
                message, pidfd = self.receive()
                if pidfd is not None:
                    os.close(pidfd)
                if "waited_s" in message:
                    return float(message["waited_s"])
        self.process.kill()
        return None


def make_worker_command(descriptor: int, executor: int) -> list[str]:
    """The command of a worker that is a new interpreter: for a GPU, where the fork server has begun CUDA.

    Args:
        descriptor: of its socket, which it inherits.
        executor: process id of the executor.
    """
    return [sys.executable, "-P", "-m", "ensemble.executors.worker_main", str(descriptor), str(executor)]


def kill_group(pid: int) -> None:
    """Kill a process group, if there is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def make_node_environment(directory: Path) -> dict[str, str]:
    """The part of the environment that all processes of members on a node have in common.

    It names the node's directory, by which `find_processes` recognizes them. Compilers keep what they compile
    there, unless the user named a place: otherwise PyTorch makes `torchinductor_USER` in the machine's temporary
    directory as soon as an optimizer is imported; Triton and CUDA write to the user's home.
    """
    kept = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
    caches = {name: find_folder(name) or str(directory / folder) for name, folder in kept.items()}
    return {**caches, NODE_DIRECTORY: str(directory)}


@functools.cache
def _has_locks(run_dir: str) -> bool:
    try:
        return has_locks(run_dir)
    except OSError:  # such as a full disk
        return False


def find_processes(directory: Path) -> list[psutil.Process]:
    """The processes of members, and those that they started, on the node with that directory."""
    import psutil

    psutil.process_iter.cache_clear()  # else one whose number was another's cannot be ended through what it yields
    return [process for process in psutil.process_iter() if is_of_node(process.pid, directory)]


def end_processes(directory: Path) -> None:
    """Kill the processes of members on the node with that directory, and wait until they are gone."""
    import psutil

    processes = find_processes(directory)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_CLOSE_S)


def is_of_node(pid: int, directory: Path, ranks: Collection[int] = ()) -> bool:
    """Whether a process is one of those that `find_processes` finds, or one of these or started by one.

    Args:
        pid: of the process.
        directory: of the node.
        ranks: process ids of ranks: one that changes its title (setproctitle) overwrites its environment.
    """
    import psutil

    if pid in ranks:
        return True
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return False
    if f"{NODE_DIRECTORY}={directory}".encode() in environment.split(b"\0"):
        return True
    with contextlib.suppress(psutil.Error):
        return bool(ranks) and any(parent.pid in ranks for parent in psutil.Process(pid).parents())
    return False


def make_plain_environment() -> dict[str, str]:
    """The part of the environment of a process that computes on one thread and no GPU."""
    return dict.fromkeys(_THREADS, "1") | {"CUDA_VISIBLE_DEVICES": ""}


def make_worker_environment(job: Job, device: str | None, directory: Path | None = None) -> dict[str, str]:
    """The part of the environment that a worker has of its own: its rank, threads, GPU and share of that GPU.

    CUDA numbers GPUs as NVML does, in the order of the bus, and not from the fastest.

    Args:
        job: of the worker.
        device: id of its GPU, None for the CPU.
        directory: of the node, where its Multi-Process Service may run, and where kernels are kept of a run whose
            directory has no locks.
    """
    environment = dict.fromkeys(_THREADS, str(job.identity.threads)) | {
        **make_rank_environment(job.rank, job.identity.workers),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "" if device is None else device,
    }
    if directory is not None:
        environment |= make_node_environment(directory)
        if _has_locks(job.run_dir):
            environment |= name_kernel_caches(Path(job.run_dir))
    if directory is not None and device is not None:
        environment |= make_client_environment(directory, job.identity.gpus_per_worker)
    return environment


def find_failed_allocation(log: Path, begins: int) -> str | None:
    """What a process that was aborted has written of an allocation that failed, as C++ and Rust do; None: nothing.

    Args:
        begins: where in the log it began to write.
    """
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(begins, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        failure = _ALLOCATION_FAILED.search(file.read())
        return None if failure is None else failure[0].decode()
    return None


def describe_death(code: int | None, log: Path) -> str:
    """How a process ended that did not report its end, in one line."""
    if code is None:
        return f"is gone, and so is the process that knew its exit code; see {log}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        return f"was killed by signal {-code} ({name}); see {log}"
    return f"ended with code {code} without a message; see {log}"


def describe_end(worker: WorkerProcess, code: int | None, *, is_oom: bool, lost_gpu: str | None) -> Report:
    """The `exited` event of a worker whose process is gone.

    Args:
        code: its exit code; None: unknown.
        is_oom: whether the kernel has killed a process for lack of memory, perhaps this one.
        lost_gpu: why it, or another rank of its member, has no GPU any more; None: it has.
    """
    event = worker.exit or make_exited(worker.job, None, describe_death(code, worker.log))
    is_ended = worker.exit is None and worker.killed_for_memory and code == -signal.SIGKILL
    if is_ended or is_oom:
        how = (
            "was ended because the node is short"
            if is_ended
            else f"was killed by signal {signal.SIGKILL:d} for lack"
        )
        granted_gb = worker.job.identity.memory_gb
        had = "no memory_gb was asked for" if granted_gb is None else f"{granted_gb:.3g} GiB were granted to it"
        detail = f"{how} of memory: all processes here have {limit_bytes() / 2**30:.3g} GiB, {had}"
        event |= {"reason": "oom", "node_short": True, "detail": f"{detail}; see {worker.log}"}
    aborted = worker.exit is None and code == -signal.SIGABRT
    if aborted and (failed := find_failed_allocation(worker.log, worker.log_begins)) is not None:
        grant_gb, free_gb = worker.job.identity.memory_gb, available_bytes() / 2**30
        had = "" if grant_gb is None else f", {grant_gb:.3g} GiB were granted"
        detail = f"ran out of memory: {failed}{had}, {free_gb:.3g} GiB of the machine are free"
        event |= {"reason": "oom", "detail": f"{detail}; see {worker.log}"}
    if lost_gpu is not None:
        event |= {"reason": "lost", "gpu_lost": True, "detail": f"was ended: {lost_gpu}; see {worker.log}"}
    return event
