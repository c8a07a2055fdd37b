"""Imports once, in the fork server, what members of a run will import: installed packages its declaration names.

The user's own modules and the declaration are loaded by each member: what they make when they are loaded (data,
generators, folders) is the member's own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import random
import select
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ensemble.store.declaration import read_named_modules
from pipelines.fingerprint.modules import is_foreign
from pipelines.workers.processes import list_threads

_FORK_S = 5.0  # time limit of a fork that does nothing
_IMPORTED: set[str] = set()
_UNSEEDED: list[Any] = []  # generators that packages made at their import


def import_declared(run_dir: str) -> str | None:
    """Import them; returns the first thing that they left behind and that must not be forked, or None."""
    files, memory, generators, modules = (
        _list_files(),
        _list_shared_memory(),
        _list_numpy_generators(),
        {*sys.modules},
    )
    with _noting_unseeded():
        for name in find_installed(read_named_modules(Path(run_dir))):
            try:
                importlib.import_module(name)
            except BaseException as error:  # SystemExit as well: the members meet it themselves, and report it
                return f"an error ({name}: {type(error).__name__})"
    earlier = {id(generator) for generator in generators}
    _UNSEEDED.extend(one for one in _list_numpy_generators() if id(one) not in earlier and _is_unseeded(one))
    _IMPORTED.update(sys.modules.keys() - modules)
    return _find_obstacle(files, memory)


def has_imported() -> bool:
    """Whether there was something to import."""
    return bool(_IMPORTED)


def adapt(threads: int) -> None:
    """Give a fork what it would have if it had imported the packages itself.

    Generators without a seed get states of its own; BLAS and OpenMP, which were imported with one thread, get its
    number of threads.
    """
    if threads > 1 and "threadpoolctl" in sys.modules:  # of scikit-learn
        sys.modules["threadpoolctl"].threadpool_limits(threads)
    for generator in _UNSEEDED:
        if isinstance(generator, random.Random):
            generator.seed()
        else:
            generator.state = type(generator)().state


@contextlib.contextmanager
def _noting_unseeded() -> Iterator[None]:
    """Take note of the generators of Python that get their state from the system within the block."""
    usual = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            _UNSEEDED.append(self)
        usual(self, a, version)

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = usual  # type: ignore[method-assign]


def _list_numpy_generators() -> list[np.random.BitGenerator]:
    return [made for made in gc.get_objects() if isinstance(made, np.random.BitGenerator)]


def _is_unseeded(generator: np.random.BitGenerator) -> bool:
    """Whether its seed is of the system: of 128 bits."""
    entropy = getattr(generator.seed_seq, "entropy", None)
    return isinstance(entropy, int) and entropy >= 2**64


def find_installed(names: Iterable[str]) -> list[str]:
    """Those modules that are of an installed distribution: its metadata lie beside its package.

    What the fingerprint of a run counts as the user's code is not, as members import a copy of it.
    """
    packages: dict[str, bool] = {}
    for name in names:
        package = name.partition(".")[0]
        if package not in packages:
            packages[package] = _is_installed(package)
    return [name for name in names if packages[name.partition(".")[0]]]


def _is_installed(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    origin = None if spec is None else spec.origin
    if spec is None or origin is None or not origin.endswith((".py", ".so")) or not is_foreign(package, origin):
        return False
    folder = Path(origin).parents[1 if spec.submodule_search_locations else 0]
    return any(folder.glob("*.dist-info"))


def _find_obstacle(files: Iterable[int], memory: Iterable[str]) -> str | None:
    """What makes this process unsafe to fork; None: nothing.

    Args:
        files: descriptors that were open before the imports.
        memory: mappings that were shared before them.
    """
    threads = list_threads()
    if threads and _fork_once():  # libraries that know of forks, as OpenBLAS does, end their threads before one
        threads = list_threads()
    if threads:
        return f"threads ({', '.join(threads)})"
    if opened := {number: name for number, name in _list_files().items() if number not in files}:
        return f"an open file ({min(opened.values())})"
    if shared := _list_shared_memory() - {*memory}:
        return f"shared memory ({min(shared)})"
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "a process"
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL:
        return "a handler of SIGCHLD"
    if tempfile._name_sequence is not None:  # type: ignore[attr-defined]
        return "a temporary file"
    if socket.getdefaulttimeout() is not None:
        return "a time limit of sockets"
    return None


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


def _list_files() -> dict[int, str]:
    """The open files, pipes and sockets of this process, without devices, such as those of a GPU."""
    names = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            if not stat.S_ISCHR(os.fstat(number).st_mode):
                names[number] = os.readlink(f"/proc/self/fd/{number}")
    return names


def _list_shared_memory() -> set[str]:
    """What this process has mapped so that other processes see what it writes."""
    names = set()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            addresses, flags, _, _, _, *name = line.rstrip("\n").split(maxsplit=5)
            if flags.startswith("rw") and flags.endswith("s"):
                names.add(name[0] if name else addresses)
    return names
