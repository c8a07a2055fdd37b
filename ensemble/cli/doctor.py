"""`ensemble doctor`: what this machine offers, and the reason for what it lacks.

`examine` never raises: a check that fails is a row that says so. All checks but one take milliseconds. A child
process imports torch and Horovod, because that may take minutes or crash.
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
from typing import Any

Row = dict[str, Any]
Check = Callable[[], Iterator[Row]]

# Prints one JSON object per line, so that the lines before a crash or the time limit are kept.
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

IMPORT_S = 300.0  # time limit for importing torch, which takes minutes from a cold disk or a network file system
_NOTIFY_AFTER_S = 2.0
_DOCKERS_SHM = 64 * 2**20  # bytes


def examine(timeout_s: float = IMPORT_S, notify: Callable[[str], object] | None = None) -> list[Row]:
    """What this machine offers.

    Args:
        timeout_s: time limit for importing torch; after it, the rows about torch and Horovod say that nothing is
            known.
        notify: called with a message if the import takes long.

    Returns:
        Rows of `what`, `value` (text), `available` and `reason` (why it is not available, else empty).
    """
    probe = _Probe(timeout_s, notify or (lambda text: None))
    checks: list[tuple[str, Check]] = [
        ("system", _system),
        ("cores", _cores),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("file locks", _file_locks),
        ("GPUs", _gpus),
        ("power", _power),
        ("packages", _packages),
        ("crops of JPEG files", _decoded_parts),
        ("collectives", lambda: _collectives(probe)),
    ]
    rows: list[Row] = []
    for what, check in checks:
        try:
            rows += check()
        except Exception as error:  # on an unusual machine the other rows are still of use
            rows.append(_unavailable(what, f"could not be checked: {type(error).__name__}: {error}"))
    return rows


def list_lines(rows: list[Row], width: int | None) -> list[tuple[str, str]]:
    """The rows as a table: lines with their styles."""
    from ensemble.reporting.tables import NARROWEST, Column, lay_out

    columns = [
        Column("what", [row["what"] for row in rows]),
        Column("", ["yes" if row["available"] else "no" for row in rows]),
        Column(
            "found, or why not",
            [" · ".join(filter(None, (row["value"], row["reason"]))) for row in rows],
            folds_to=NARROWEST,
        ),
    ]
    styles = ["dim", *("" if row["available"] else "yellow" for row in rows)]
    return list(zip(lay_out(columns, width), styles, strict=True))


def _available(what: str, value: str) -> Row:
    return {"what": what, "value": value, "available": True, "reason": ""}


def _unavailable(what: str, reason: str, value: str = "") -> Row:
    return {"what": what, "value": value, "available": False, "reason": " ".join(reason.split())}


def _system() -> Iterator[Row]:
    yield _available("Python", f"{platform.python_version()} ({sys.executable})")
    yield _available("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")


def _cores() -> Iterator[Row]:
    from pipelines.environment.machine_limits import allowed_cores, find_pinning, usable_cpus

    allowed, usable, total = len(allowed_cores()), usable_cpus(), os.cpu_count()
    limit = f"cgroup limit {usable:g}" if usable < allowed else "no cgroup limit"
    yield _available("cores", f"{usable:g} usable: {total} in the machine, {allowed} by affinity, {limit}")
    pinning = find_pinning()
    if pinning:
        named = " ".join(f"{name}={value}" for name, value in pinning.items())
        reason = "members and feeders do not get it, as all would be pinned to the same cores; unset it"
        yield _unavailable("threads on all cores", reason, named)


def _memory() -> Iterator[Row]:
    import psutil

    from pipelines.environment.machine_limits import available_bytes, limit_bytes

    total, usable = psutil.virtual_memory().total, limit_bytes()
    limit = "" if usable >= total else f", of {_gib(total)} in the machine by a cgroup limit"
    yield _available("memory", f"{_gib(usable)}{limit}, {_gib(available_bytes())} free")


def _shared_memory() -> Iterator[Row]:
    import mmap

    what = "shared memory (memfd)"
    try:
        with open(os.memfd_create("ensemble-doctor"), "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
        yield _available(what, "works; the rings of the pipelines lie in it")
    except OSError as error:
        yield _unavailable(what, f"{error}: feeders cannot share; members prepare for themselves")
    try:
        space = shutil.disk_usage("/dev/shm")
        free = f"{_gib(space.total)}, {_gib(space.free)} free"
        if space.total <= _DOCKERS_SHM:
            needs = "NCCL and Ray's object store need more (docker run --shm-size=2g), rings are not limited by it"
            yield _unavailable("/dev/shm", f"{space.total // 2**20} MiB, as containers have by default: {needs}")
        else:
            yield _available("/dev/shm", f"{free} (used by Ray's object store and NCCL)")
    except OSError as error:
        text = f"{error.strerror}; Ray's object store and NCCL use it, the pipelines do not"
        yield _unavailable("/dev/shm", text)


def _file_locks() -> Iterator[Row]:
    from ensemble.store.event_log import has_locks

    here = os.getcwd()
    if has_locks(here):
        yield _available("file locks", f"work in {here}; a run directory needs them")
    else:
        text = f"none in {here}: runs there have members of one worker only (Lustre: mount it with -o flock)"
        yield _unavailable("file locks", text)


def _gpus() -> Iterator[Row]:
    from ensemble.executors import mps
    from ensemble.meter.power import list_gpus

    names = [gpu.model for gpu in list_gpus()]
    if names:
        counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        yield _available("GPUs", counts)
    else:
        yield _unavailable("GPUs", "NVML shows none (see NVML); members train on the cores")
    where = shutil.which(mps.BINARY)
    if where is None:
        yield _unavailable("MPS", mps.ABSENT)
    else:
        yield _available("MPS", f"{where}; used where a run says mps=True")


def _power() -> Iterator[Row]:
    from ensemble.meter.power import Absent, open_nvml, open_rapl, watts_per_core
    from ensemble.meter.power.busy_time import find_busy_time
    from ensemble.meter.power.common import PowerError
    from ensemble.meter.power.estimate import VARIABLE, open_estimate
    from ensemble.meter.power.hwmon import open_amd_energy, open_power_meter
    from ensemble.spec import SpecError

    opened = {
        "RAPL": open_rapl(),
        "AMD energy driver": open_amd_energy(),
        "ACPI power meter": open_power_meter(),
        "external meter": Absent("external meter", "a run reads that of Energy(meter=...)"),
        "NVML": open_nvml(),
    }
    measures_cpus = []
    for label, source in opened.items():
        if isinstance(source, Absent):
            yield _unavailable(label, source.reason)
            continue
        try:
            parts = [reading.name for reading in source.read()]
            yield _available(label, f"measured: {', '.join(parts)}")
            measures_cpus += [] if label == "NVML" else [label]
        except PowerError as error:
            yield _unavailable(label, str(error))
        finally:
            source.close()
    busy = find_busy_time()
    if isinstance(busy, Absent):
        yield _unavailable("CPU time", busy.reason)
    else:
        yield _available("CPU time", f"of the whole {busy.scope} ({busy.file})")
    try:
        estimate = open_estimate(busy)
    except SpecError as error:
        yield _unavailable("power estimate", str(error))
        return
    if isinstance(estimate, Absent):
        yield _unavailable("power estimate", estimate.reason)
    else:
        used = f"not used: {measures_cpus[0]} measures" if measures_cpus else "used, labelled as estimated"
        yield _available("power estimate", f"{watts_per_core():g} W per busy core ({VARIABLE}); {used}")


def _packages() -> Iterator[Row]:
    for label, package in (("Ray", "ray"), ("Optuna", "optuna")):
        try:
            yield _available(label, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield _unavailable(label, f"the package {package} is not installed: pip install {package}")


def _decoded_parts() -> Iterator[Row]:
    from pipelines.prepare.decoded_part import LIBRARY, load_library

    what = "crops of JPEG files"
    if load_library() is not None:
        yield _available(what, "decoded in part")
    elif LIBRARY.exists():
        yield _unavailable(
            what, "the package's libjpeg-turbo cannot be loaded, or decodes otherwise than simplejpeg"
        )
    else:
        yield _unavailable(
            what,
            "files are decoded whole: a C compiler or libjpeg-turbo (libjpeg-dev) was absent at the installation",
        )


def _collectives(probe: _Probe) -> Iterator[Row]:
    found, failure = probe.result()
    torch = found.get("torch")
    if torch is None:
        yield _describe_unimported_torch(failure)
    else:
        cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
        yield _available("torch", f"{torch['version']}, {torch['threads']} threads, {cuda}")
    for label, hint in (("gloo", ""), ("NCCL", ""), ("MPI", " (Horovod can bring its own)")):
        if torch is None:
            yield _unavailable(label, f"not known: {failure}")
        elif torch[label.lower()]:
            yield _available(label, "in torch.distributed")
        else:
            part = "CUDA" if label == "NCCL" and not torch["cuda"] else "it"
            yield _unavailable(label, f"this torch is built without {part}{hint}")
    yield _horovod(found.get("horovod"), failure)


def _describe_unimported_torch(failure: str) -> Row:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return _unavailable("torch", "the package torch is not installed: pip install torch")
    return _unavailable("torch", failure, value=version)


def _horovod(found: dict[str, Any] | None, failure: str) -> Row:
    if importlib.util.find_spec("horovod") is None:
        text = "not installed; optional: make horovod, or deploy/build-horovod.sh, builds it"
        return _unavailable("Horovod", text)
    if found is None:
        return _unavailable("Horovod", f"not known: {failure}")
    if "error" in found:
        return _unavailable("Horovod", f"horovod.torch cannot be imported: {found['error']}")
    built = ", ".join(name for name in ("gloo", "mpi", "nccl") if found[name]) or "no backend"
    return _available("Horovod", f"{importlib.metadata.version('horovod')} with {built}")


class _Probe:
    """The child process that imports torch, started first so that it runs during the other checks."""

    def __init__(self, timeout_s: float, notify: Callable[[str], object]) -> None:
        self._timeout_s, self._notify = timeout_s, notify
        self._deadline = time.monotonic() + timeout_s
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def result(self) -> tuple[dict[str, Any], str]:
        """What the child found, and in one line why it did not find the rest."""
        try:
            out, err = self._wait()
            last = (err.strip().splitlines() or [f"exit {self._child.returncode}"])[-1]
            failure = f"import torch failed: {last}"
        except subprocess.TimeoutExpired:
            self._child.kill()
            out, err = self._child.communicate()
            failure = f"the import had not ended after {self._timeout_s:g} s; once more may be faster"
        found: dict[str, Any] = {}
        for line in out.splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed child may be incomplete
                found.update(json.loads(line))
        return found, failure

    def _wait(self) -> tuple[str, str]:
        """The child's output once it has ended; raises `subprocess.TimeoutExpired` after the time limit."""
        left_s = max(0.0, self._deadline - time.monotonic())
        if left_s > _NOTIFY_AFTER_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._child.communicate(timeout=_NOTIFY_AFTER_S)
            left_s = max(0.0, self._deadline - time.monotonic())
            self._notify(f"importing torch, which takes long the first time; waiting up to {left_s:.0f} s for it")
        return self._child.communicate(timeout=left_s)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
