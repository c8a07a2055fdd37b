"""`ensemble doctor`: what this machine offers, and for what it lacks the reason.

`examine` never fails: a look that goes wrong is a row that says so. All looks but one take milliseconds. Importing
torch (and Horovod) is left to a child process, which may take long, or crash, without harm to the rest; it is
waited for.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

Row = dict[str, Any]
Look = Callable[[], Iterator[Row]]

# Prints one JSON object a line, so that what came before a crash or the time limit is kept.
_PROBE = """
import importlib.util, json
import torch, torch.distributed as dist
there = dist.is_available()
print(json.dumps({"torch": {
    "version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.version.cuda,
    "gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available(),
    "mpi": there and dist.is_mpi_available()}}), flush=True)
if importlib.util.find_spec("horovod"):
    try:
        import horovod.torch as hvd
        found = {"gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built())}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"horovod": found}), flush=True)
"""


#: How long the import of torch may take: from a cold disk or a network file system it takes minutes.
IMPORT_S = 300.0
#: After so long somebody who waits is told for what.
SAY_AFTER_S = 2.0


def examine(timeout_s: float = IMPORT_S, tell: Callable[[str], object] | None = None) -> list[Row]:
    """What this machine offers.

    Args:
        timeout_s: how long the import of torch may take; past it, what it would have told is said to be unknown.
        tell: called with a line where that is waited for.

    Returns:
        Rows of `what`, `value` (text), `available` and `reason` (why not; empty where available).
    """
    probe = _Probe(timeout_s, tell or (lambda text: None))
    looks: list[tuple[str, Look]] = [
        ("system", _system),
        ("cores", _cores),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("GPUs", _gpus),
        ("power", _power),
        ("packages", _packages),
        ("collectives", lambda: _collectives(probe)),
    ]
    rows: list[Row] = []
    for what, look in looks:
        try:
            rows += look()
        except Exception as error:  # a machine of a kind nobody thought of must not take the other rows along
            rows.append(_absent(what, f"could not be looked at: {type(error).__name__}: {error}"))
    return rows


def print_table(rows: list[Row], stream: TextIO | None = None) -> None:
    """The rows as a table for people, on standard output unless told otherwise."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, or why not", overflow="fold")
    for row in rows:
        mark = Text("yes", "green") if row["available"] else Text("no", "yellow")
        # Text, for values such as [cuda] are no markup.
        table.add_row(row["what"], mark, Text(" · ".join(filter(None, (row["value"], row["reason"])))))
    Console(file=stream).print(table)


def _present(what: str, value: str) -> Row:
    return {"what": what, "value": value, "available": True, "reason": ""}


def _absent(what: str, reason: str, value: str = "") -> Row:
    return {"what": what, "value": value, "available": False, "reason": " ".join(reason.split())}


def _system() -> Iterator[Row]:
    yield _present("Python", f"{platform.python_version()} ({sys.executable})")
    yield _present("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")


def _cores() -> Iterator[Row]:
    from ensemble.executors.host import usable_cpus

    allowed, usable, total = len(os.sched_getaffinity(0)), usable_cpus(), os.cpu_count()
    limit = f"cgroup limit {usable:g}" if usable < allowed else "no cgroup limit"
    yield _present("cores", f"{usable:g} usable: {total} in the machine, {allowed} by affinity, {limit}")


def _memory() -> Iterator[Row]:
    import psutil

    from pipelines.shm.limits import available_bytes, limit_bytes

    total, usable = psutil.virtual_memory().total, limit_bytes()
    limit = "" if usable >= total else f", of {_gib(total)} in the machine by a cgroup limit"
    yield _present("memory", f"{_gib(usable)}{limit}, {_gib(available_bytes())} free")


def _shared_memory() -> Iterator[Row]:
    import mmap

    try:
        fd = os.memfd_create("ensemble-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as first, mmap.mmap(fd, mmap.PAGESIZE) as second:
                first[0] = 42
                works = second[0] == 42
        finally:
            os.close(fd)
        if works:
            yield _present("shared memory (memfd)", "works; the rings of the pipelines lie in it")
        else:
            yield _absent("shared memory (memfd)", "what one mapping writes the other does not see")
    except (AttributeError, OSError) as error:
        yield _absent("shared memory (memfd)", f"{error}: feeders cannot share; members prepare for themselves")
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        yield _absent("/dev/shm", f"{error.strerror}; Ray's object store and NCCL use it, the pipelines do not")
    else:
        total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
        yield _present("/dev/shm", f"{_gib(total)}, {_gib(free)} free (used by Ray's object store and NCCL)")


def _gpus() -> Iterator[Row]:
    from ensemble.executors import mps
    from ensemble.meter.power import gpu_names

    names = gpu_names()
    if names:
        counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        yield _present("GPUs", counts)
    else:
        yield _absent("GPUs", "NVML shows none (see NVML); members train on the cores")
    where = shutil.which(mps.BINARY)
    if where is None:
        yield _absent("MPS", mps.ABSENT)
    else:
        yield _present("MPS", f"{where}; used where a run says mps=True")


def _power() -> Iterator[Row]:
    from ensemble.meter.power import Absent, open_nvml, open_rapl, watts_per_core
    from ensemble.meter.power.estimate import VARIABLE, open_estimate

    labels = {"rapl": "RAPL", "nvml": "NVML"}
    rapl = open_rapl()
    for source in (rapl, open_nvml()):
        if isinstance(source, Absent):
            yield _absent(labels[source.name], source.reason)
        else:
            names = ", ".join(reading.name for reading in source.read())
            yield _present(labels[source.name], f"measured: {names}")
            source.close()
    estimate = open_estimate()
    if isinstance(estimate, Absent):
        yield _absent("power estimate", estimate.reason)
    else:
        used = "used, labelled as estimated" if isinstance(rapl, Absent) else "not used: RAPL measures"
        yield _present("power estimate", f"{watts_per_core():g} W per busy core ({VARIABLE}); {used}")


def _packages() -> Iterator[Row]:
    for label, package in (("Ray", "ray"), ("Optuna", "optuna")):
        try:
            yield _present(label, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield _absent(label, f"the package {package} is not installed: pip install {package}")


def _collectives(probe: _Probe) -> Iterator[Row]:
    found, trouble = probe.result()
    torch = found.get("torch")
    if torch is None:
        yield _torch_without_import(trouble)
    else:
        cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
        yield _present("torch", f"{torch['version']}, {torch['threads']} threads, {cuda}")
    without = {
        "gloo": "this torch is built without it",
        "nccl": "this torch is built without CUDA"
        if torch and not torch["cuda"]
        else "this torch is built without it",
        "mpi": "this torch is built without it (Horovod can bring its own)",
    }
    for label, backend in (("gloo", "gloo"), ("NCCL", "nccl"), ("MPI", "mpi")):
        if torch is None:
            yield _absent(label, f"not known: {trouble}")
        elif torch[backend]:
            yield _present(label, "in torch.distributed")
        else:
            yield _absent(label, without[backend])
    yield _horovod(found.get("horovod"), trouble)


def _torch_without_import(trouble: str) -> Row:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return _absent("torch", "the package torch is not installed: pip install torch")
    return _absent("torch", trouble, value=version)


def _horovod(found: dict[str, Any] | None, trouble: str) -> Row:
    if importlib.util.find_spec("horovod") is None:
        return _absent("Horovod", "not installed; optional: make horovod, or deploy/build-horovod.sh, builds it")
    if found is None:
        return _absent("Horovod", f"not known: {trouble}")
    if "error" in found:
        return _absent("Horovod", f"horovod.torch cannot be imported: {found['error']}")
    built = [name for name in ("gloo", "mpi", "nccl") if found[name]]
    return _present("Horovod", f"{importlib.metadata.version('horovod')} with {', '.join(built) or 'no backend'}")


class _Probe:
    """The child process that imports torch, started at once so that it works while the others look."""

    def __init__(self, timeout_s: float, tell: Callable[[str], object]) -> None:
        self._timeout_s, self._tell = timeout_s, tell
        self._deadline = time.monotonic() + timeout_s
        self._trouble = ""
        self._child: subprocess.Popen[str] | None = None
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            self._trouble = f"{sys.executable} could not be started: {error}"

    def result(self) -> tuple[dict[str, Any], str]:
        """What the child found, and in one line why it found no more."""
        if self._child is None:
            return {}, self._trouble
        try:
            out, err = self._ended(self._child)
            trouble = (
                f"import torch failed: {(err.strip().splitlines() or [f'exit {self._child.returncode}'])[-1]}"
            )
        except subprocess.TimeoutExpired:
            self._child.kill()
            out, err = self._child.communicate()
            trouble = f"the import had not ended after {self._timeout_s:g} s; once more may be faster"
        found: dict[str, Any] = {}
        for line in out.splitlines():
            with contextlib.suppress(ValueError):  # the last line of a child that was ended may be cut
                found.update(json.loads(line))
        return found, trouble

    def _ended(self, child: subprocess.Popen[str]) -> tuple[str, str]:
        """What the child wrote, once it has ended; `subprocess.TimeoutExpired` where it does not in time."""
        left_s = max(0.0, self._deadline - time.monotonic())
        if left_s > SAY_AFTER_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.communicate(timeout=SAY_AFTER_S)
            self._tell(
                f"torch is being imported, which takes long the first time; waiting up to {left_s:.0f} s for it"
            )
            left_s = max(0.0, self._deadline - time.monotonic())
        return child.communicate(timeout=left_s)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
