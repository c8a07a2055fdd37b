"""The template of a run's members: it has loaded the declaration, with all that this imports, and forks them.

It is a fork of the fork server with the environment of its members; other environments have another one. Its first
message is `{"ready": true}`, or `{"refused": why}` where a fork would not be what a process is that has loaded the
declaration itself. Then it serves requests as the fork server does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from ensemble.executors import checker_main, forkserver, worker_main
from ensemble.store import RunDir
from ensemble.train.own_tensors import note_process

_FORK_S = 5.0  # time limit of a fork that does nothing
_JEMALLOC = "jemalloc_bg_thd"  # of pyarrow
_OF_DEVICES = "/dev/"  # NVML keeps files of its devices open, which forks may use


def main(descriptor: int, executor: int, run_dir: str, files: dict[str, list[str]] | None) -> int:
    """Load the declaration and fork members; in these, train.

    Args:
        descriptor: of the socket.
        executor: process id of the executor.
        run_dir: the run directory.
        files: digests of the declaration, as in `Job.files`.
    """
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    files_before, memory_before = _list_files(), _list_shared_memory()
    with forkserver.end_with_executor(control), forkserver.asking_nvml():
        try:
            ensemble = RunDir(run_dir, files).load_ensemble(takes_settings=True)
        except BaseException as error:  # also a SystemExit: the members meet it themselves, and report it
            _refuse(control, f"the declaration could not be loaded: {type(error).__name__}")
    if obstacle := find_obstacle(files_before, memory_before):
        _refuse(control, obstacle)
    note_process()  # before its parameters are frozen, which are not looked at any more
    forkserver.freeze_memory()
    forkserver.report(control, {"ready": True, "used_s": forkserver.own_cpu_s()})
    worker = forkserver.serve(control)
    if worker is None:
        _end()
    control.close()
    connection, request = worker
    if "checks" in request:
        return checker_main.main(connection, executor, request["checks"], ensemble)
    return worker_main.main(connection, executor, ensemble)


def _refuse(control: socket.socket, why: str) -> NoReturn:
    forkserver.report(control, {"refused": why, "used_s": forkserver.own_cpu_s()})
    _end()


def _end() -> NoReturn:
    """End without what the declaration's modules have registered for the end of a member."""
    os._exit(0)


def find_obstacle(files: Iterable[str] = (), memory: Iterable[str] = ()) -> str | None:
    """Why forks of this process would not be as if each had loaded the declaration itself; None: they are.

    Args:
        files: that were open before it was loaded.
        memory: mappings that were shared before.
    """
    threads = _list_threads()
    if threads and _fork_once():  # libraries that know of forks, as OpenBLAS does, end their threads before one
        threads = _list_threads()
    if threads:
        return f"loading the declaration started threads: {', '.join(threads)}"
    if opened := _list_files() - {*files}:
        return f"loading the declaration opened files: {', '.join(sorted(opened))}"
    if shared := _list_shared_memory() - {*memory}:
        return f"loading the declaration made shared memory, such as a lock of multiprocessing: {min(shared)}"
    if Path(f"/proc/self/task/{os.getpid()}/children").read_bytes():
        return "loading the declaration started a process"
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        return "the declaration's modules handle SIGCHLD"
    if folders := _list_temporary_folders():
        return f"loading the declaration made folders, which the first member to end would remove: {folders[0]}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") and forkserver.has_begun_cuda():
        return "loading the declaration began CUDA"
    return None


def _list_threads() -> list[str]:
    """The names of this process's threads, without the main one's and those of jemalloc, which knows of forks."""
    threads = [thread for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()]
    names = [Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8").strip() for thread in threads]
    return [name for name in names if name != _JEMALLOC]


def _fork_once() -> bool:
    """Make a process that ends at once; returns whether it did."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pidfd, ended = os.pidfd_open(pid), select.poll()
    ended.register(pidfd, select.POLLIN)
    has_ended = bool(ended.poll(_FORK_S * 1000))
    if not has_ended:  # what runs after a fork hangs
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pidfd)
    return has_ended


def _list_files() -> set[str]:
    """The open files, pipes and sockets of this process, without those that are read by their mapping alone."""
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    mapped = {name for _, name in _list_mappings()}
    return {name for name in names if not name.startswith(_OF_DEVICES) and name not in mapped}


def _list_shared_memory() -> set[str]:
    """What this process has mapped so that other processes see what it writes."""
    return {name for flags, name in _list_mappings() if flags.startswith("rw") and flags.endswith("s")}


def _list_mappings() -> Iterator[tuple[str, str]]:
    """The flags of each mapping of this process, and the name of its file; without a name, its addresses."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            addresses, flags, _, _, _, *name = line.rstrip("\n").split(maxsplit=5)
            yield flags, name[0] if name else addresses


def _list_temporary_folders() -> list[str]:
    """The folders that the end of this process would remove, as `tempfile.TemporaryDirectory` has it."""
    finalizers = [finalizer.peek() for finalizer in weakref.finalize._registry]  # type: ignore[attr-defined]
    return [str(call[2][0]) for call in finalizers if call and call[1].__module__ in ("tempfile", "shutil")]
