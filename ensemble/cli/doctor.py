"""`ensemble doctor`: what this machine offers, and the reason for what it lacks.

`examine` never raises: a check that fails is a row that says so. All checks but one take milliseconds. A child
process imports torch and Horovod, because that may take minutes or crash.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ensemble.cli.arguments import Command
from ensemble.cli.console import find_width, print_styled, write_json
from pipelines.errors import PipelineError

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
_DOCKERS_SHM = 64 * 2**20  # bytes
POWER_LABELS = {"rapl": "RAPL", "power_meter": "ACPI power meter", "nvml": "NVML"}
_TESTED = {"Python": "3.11 to 3.14", "torch": "2.10 to 2.15", "Ray": "2.52 to 2.60", "Optuna": "4.5 to 5.0"}


def examine(timeout_s: float = IMPORT_S) -> list[Row]:
    """What this machine offers.

    Args:
        timeout_s: time limit for importing torch; after it, the rows about torch and Horovod say that nothing is
            known.

    Returns:
        Rows of `what`, `value` (text), `available` and `reason` (why it is not available, else empty).
    """
    checks: list[tuple[str, Check]] = [
        ("system", _system),
        ("cores", _cores),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("file locks", _file_locks),
        ("GPUs", _gpus),
        ("power", _power),
        ("packages", _packages),
        ("extensions", _extensions),
        ("crops of JPEG files", _decoded_parts),
        ("collectives", lambda: _collectives(timeout_s)),
    ]
    rows: list[Row] = []
    for what, check in checks:
        try:
            rows += check()
        except Exception as error:  # on an unusual machine the other rows are still of use
            rows.append(_row(what, reason=f"could not be checked: {type(error).__name__}: {error}"))
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


def _row(what: str, value: str = "", reason: str = "") -> Row:
    """A row; with a reason it is of what is not available."""
    return {"what": what, "value": value, "available": not reason, "reason": " ".join(reason.split())}


def _system() -> Iterator[Row]:
    yield _row("Python", f"{platform.python_version()} ({sys.executable}), tested {_TESTED['Python']}")
    yield _row("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")


def _cores() -> Iterator[Row]:
    from pipelines.environment.machine_limits import allowed_cores, find_pinning, usable_cpus

    allowed, usable, total = len(allowed_cores()), usable_cpus(), os.cpu_count()
    limit = f"cgroup limit {usable:g}" if usable < allowed else "no cgroup limit"
    yield _row("cores", f"{usable:g} usable: {total} in the machine, {allowed} by affinity, {limit}")
    pinning = find_pinning()
    if pinning:
        named = " ".join(f"{name}={value}" for name, value in pinning.items())
        reason = "members and feeders do not get it, as all would be pinned to the same cores; unset it"
        yield _row("threads on all cores", named, reason)


def _memory() -> Iterator[Row]:
    import psutil

    from pipelines.environment.machine_limits import available_bytes, limit_bytes

    total, usable = psutil.virtual_memory().total, limit_bytes()
    limit = "" if usable >= total else f", of {_gib(total)} in the machine by a cgroup limit"
    yield _row("memory", f"{_gib(usable)}{limit}, {_gib(available_bytes())} free")


def _shared_memory() -> Iterator[Row]:
    import mmap

    what = "shared memory (memfd)"
    try:
        with open(os.memfd_create("ensemble-doctor"), "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
        yield _row(what, "works; the rings of the pipelines lie in it")
    except OSError as error:
        yield _row(what, reason=f"{error}: feeders cannot share; members prepare for themselves")
    try:
        space, reason = shutil.disk_usage("/dev/shm"), ""
    except OSError as error:
        reason = f"{error.strerror}; Ray's object store and NCCL use it, the pipelines do not"
        yield _row("/dev/shm", reason=reason)
        return
    if space.total <= _DOCKERS_SHM:
        needs = "NCCL and Ray's object store need more (docker run --shm-size=2g), rings are not limited by it"
        reason = f"{space.total // 2**20} MiB, as containers have by default: {needs}"
    free = f"{_gib(space.total)}, {_gib(space.free)} free (used by Ray's object store and NCCL)"
    yield _row("/dev/shm", "" if reason else free, reason)


def _file_locks() -> Iterator[Row]:
    from ensemble.store.event_log import has_locks

    here = os.getcwd()
    if has_locks(here):
        yield _row("file locks", f"work in {here}; a run directory needs them")
    else:
        reason = f"none in {here}: runs there have members of one worker only (Lustre: mount it with -o flock)"
        yield _row("file locks", reason=reason)


def _gpus() -> Iterator[Row]:
    from ensemble.executors import mps
    from ensemble.meter.devices import list_gpus

    names = [gpu.model for gpu in list_gpus()]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield _row("GPUs", counts, "" if names else "NVML shows none (see NVML); members train on the cores")
    where = shutil.which(mps.BINARY)
    yield _row("MPS", f"{where}; used where a run says mps=True" if where else "", "" if where else mps.ABSENT)


def _power() -> Iterator[Row]:
    from ensemble.meter.power import POWER_SOURCES, Absent, watts_per_core
    from ensemble.meter.power.busy_time import find_busy_time
    from ensemble.meter.power.common import PowerError
    from ensemble.meter.power.estimate import VARIABLE, open_estimate
    from ensemble.spec import SpecError

    measures_cpus = []
    for provider in POWER_SOURCES.list_providers():
        label = POWER_LABELS.get(provider.name, provider.name)
        try:
            source = provider.load()()
            if isinstance(source, Absent):
                yield _row(label, reason=source.reason)
                continue
            with contextlib.closing(source):
                yield _row(label, f"measured: {', '.join(reading.name for reading in source.read())}")
            measures_cpus += [label] if source.kind in ("cpu", "node") else []
        except (PipelineError, PowerError) as error:
            yield _row(label, reason=str(error))
    busy = find_busy_time()
    if isinstance(busy, Absent):
        yield _row("CPU time", reason=busy.reason)
    else:
        yield _row("CPU time", f"of the whole {busy.scope} ({busy.file})")
    used = f"not used: {measures_cpus[0]} measures" if measures_cpus else "used, labelled as estimated"
    try:
        estimate = open_estimate(busy)
        reason = estimate.reason if isinstance(estimate, Absent) else ""
    except SpecError as error:
        reason = str(error)
    value = "" if reason else f"{watts_per_core():g} W per busy core ({VARIABLE}); {used}"
    yield _row("power estimate", value, reason)


def _packages() -> Iterator[Row]:
    for label, package in (("Ray", "ray"), ("Optuna", "optuna")):  # see docs/reference/versions.md
        try:
            yield _row(label, f"{importlib.metadata.version(package)}, tested {_TESTED[label]}")
        except importlib.metadata.PackageNotFoundError:
            yield _row(label, reason=f"the package {package} is not installed: pip install {package}")


def _extensions() -> Iterator[Row]:
    """What can be named of each kind, and which distributions have added to it."""
    from ensemble.extend import list_tables

    for table in list_tables():
        what, providers = table.kind.replace("_", " "), table.list_providers()
        names = [
            f"{entry.name} ({entry.distribution})" if entry.distribution else entry.name for entry in providers
        ]
        yield _row(what, ", ".join(names))
        yield from (_row(what, reason=conflict) for conflict in table.find_conflicts())
        for provider in providers:
            try:
                if provider.distribution:
                    provider.load()
            except PipelineError as error:
                yield _row(what, reason=str(error))


def _decoded_parts() -> Iterator[Row]:
    from pipelines.prepare.decoded_part import LIBRARY, load_library

    reason = "the package's libjpeg-turbo cannot be loaded, or decodes differently from simplejpeg"
    if not LIBRARY.exists():
        reason = "decoded whole: a C compiler or libjpeg-turbo (libjpeg-dev) was absent at the installation"
    is_loaded = load_library() is not None
    yield _row("crops of JPEG files", "decoded in part" if is_loaded else "", "" if is_loaded else reason)


def _collectives(timeout_s: float) -> Iterator[Row]:
    versions, failure = _probe(timeout_s)
    torch, unknown = versions.get("torch"), f"not known: {failure}"
    if torch is not None:
        cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
        yield _row("torch", f"{torch['version']}, {torch['threads']} threads, {cuda}, tested {_TESTED['torch']}")
    else:
        try:
            yield _row("torch", importlib.metadata.version("torch"), failure)
        except importlib.metadata.PackageNotFoundError:
            yield _row("torch", reason="the package torch is not installed: pip install torch")
    for label, hint in (("gloo", ""), ("NCCL", ""), ("MPI", " (Horovod can bring its own)")):
        if torch is not None and torch[label.lower()]:
            yield _row(label, "in torch.distributed")
        else:
            part = "CUDA" if label == "NCCL" and torch is not None and not torch["cuda"] else "it"
            yield _row(label, reason=f"this torch is built without {part}{hint}" if torch else unknown)
    horovod = versions.get("horovod")
    if importlib.util.find_spec("horovod") is None:
        reason = "not installed; optional: make horovod, or deploy/build-horovod.sh, builds it"
        yield _row("Horovod", reason=reason)
    elif horovod is None or "error" in horovod:
        error = horovod and f"horovod.torch cannot be imported: {horovod['error']}"
        yield _row("Horovod", reason=error or unknown)
    else:
        built = ", ".join(name for name in ("gloo", "mpi", "nccl") if horovod[name]) or "no backend"
        yield _row("Horovod", f"{importlib.metadata.version('horovod')} with {built}")


def _probe(timeout_s: float) -> tuple[dict[str, Any], str]:
    """What a child process finds that imports torch and Horovod, and in one line why it did not find the rest."""
    command = [sys.executable, "-P", "-c", _PROBE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
            last = (err.strip().splitlines() or [f"exit {child.returncode}"])[-1]
            failure = f"import torch failed: {last}"
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
            failure = f"the import had not ended after {timeout_s:g} s; once more may be faster"
    versions: dict[str, Any] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # the last line of a killed child may be incomplete
            versions.update(json.loads(line))
    return versions, failure


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def doctor(options: argparse.Namespace) -> int:
    """Show what this machine offers."""
    print("ensemble: importing torch, which may take minutes the first time", file=sys.stderr, flush=True)
    rows = examine()
    if options.json != "-":
        print_styled(list_lines(rows, find_width()))
    write_json(options, rows)
    return 0


DOCTOR = Command(doctor, "Show what this machine offers, and why anything is missing.")
