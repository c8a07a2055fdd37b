"""Reads which processes keep each GPU busy: SM-seconds by member, from the driver's utilization of processes.

`smUtil` of ``nvmlDeviceGetProcessUtilization`` is the share of the samples since the last reading that were of
the process, so the shares of processes sum to the GPU's (nvtop, issue 110). No sample is counted twice. Figures
are not used in MIG mode, under the Multi-Process Service, and where the driver's process ids are of another
namespace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ensemble.meter.devices import Gpu, RunProcess
from ensemble.meter.gpus import list_processes
from ensemble.meter.power.nvml import errors_of_loss, find_physical_gpu, is_in_mig_mode, open_device

IN_USE = "SM utilization"
MIG = "the driver reports no utilization of processes in MIG mode"
MPS = "under the Multi-Process Service the driver's utilization of processes is not documented"
OTHER_NAMESPACE = (
    "the driver's process ids are of another namespace: it lists one of the run on a GPU where it is not"
)
NOT_LISTED = "the driver lists none of the run's processes that use it"
NO_SAMPLES = "the driver has no utilization of any process on it"
NONSENSE = "the driver returns impossible utilizations"
_LATE_US = 1_000_000  # how late the driver publishes samples at most; it collects them once a second
_LASTING = 30  # readings that could not be used, one after the other, before the reason is reported
_MPS_SERVER = "nvidia-cuda-mps"  # the first 15 characters are its name in /proc

Activity = list[list[Any]]


class GpuSample(NamedTuple):
    """The utilization of a GPU by one process since the last reading, in percent; see the module."""

    pid: int
    at_us: int
    sm_percent: int


def select_samples(samples: Iterable[GpuSample], since_us: int, now_us: int) -> list[GpuSample] | None:
    """The samples of processes that used the GPU; None where one cannot be.

    Args:
        samples: as the driver returned them.
        since_us: the time after which it was asked for some.
        now_us: the time now.
    """
    used = [sample for sample in samples if sample.sm_percent > 0]
    is_sane = all(one.sm_percent <= 100 and since_us < one.at_us <= now_us + _LATE_US for one in used)
    return used if is_sane else None


def sum_by_owner(
    samples: Iterable[GpuSample], interval_s: float, find_owner: Callable[[int], RunProcess | None]
) -> Activity:
    """SM-seconds of an interval by who used the GPU.

    Args:
        samples: one for each process.
        interval_s: which they cover.
        find_owner: returns the process of the run that has that id or has started that one; None: there is none.

    Returns:
        [role, member or None, SM-seconds] of each, in order; what is not the run's is ["other", None, SM-seconds].
    """
    used_s: dict[tuple[str, str | None], float] = {}
    for sample in samples:
        owner = find_owner(sample.pid)
        key = ("other", None) if owner is None else (owner.role, owner.member)
        used_s[key] = used_s.get(key, 0.0) + sample.sm_percent / 100 * interval_s
    return [[role, member, round(used_s[role, member], 6)] for role, member in sorted(used_s, key=str)]


def find_distrust(gpu: str, listed: Iterable[RunProcess | None], has_ranks: bool) -> tuple[str, bool] | None:
    """Why the process ids that the driver lists on a GPU say nothing, and whether that is for good; None: they do.

    Args:
        gpu: its id.
        listed: the process of the run that each id names; None: none.
        has_ranks: whether processes of the run are on the GPU.
    """
    named = [process for process in listed if process is not None]
    if any(process.gpu not in (None, gpu) for process in named):
        return OTHER_NAMESPACE, True
    return (NOT_LISTED, False) if has_ranks and not named else None


def describe_activity(gpus: Collection[str], reasons: Mapping[str, str]) -> str:
    """How the activity on GPUs is known, in one line.

    Args:
        gpus: their ids.
        reasons: why it is not, by id.
    """
    by_reason: dict[str, list[str]] = {}
    for gpu in sorted(set(gpus) & set(reasons)):
        by_reason.setdefault(reasons[gpu], []).append(gpu)
    if len(by_reason) == 1 and set(gpus) <= set(reasons):
        return next(iter(by_reason))
    without = [f"not on {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "; ".join([*([] if set(gpus) <= set(reasons) else [IN_USE]), *without])


class _Processes:
    """Finds out what processes are; what it has found is kept while it is asked for."""

    def __init__(self) -> None:
        self._known: dict[int, int | None] = {}
        self._asked: dict[int, int | None] = {}
        self._servers: dict[int, bool] = {}

    def find(self, pid: int, run: Mapping[int, RunProcess]) -> RunProcess | None:
        """The process of the run with that id, or the closest one that started it."""
        if pid in run:
            return run[pid]
        ancestor = self._known[pid] if pid in self._known else _find_ancestor(pid, run)
        self._asked[pid] = ancestor
        return None if ancestor is None else run.get(ancestor)

    def is_mps_server(self, pid: int) -> bool:
        """Whether a process that `find` was asked for is the server of a Multi-Process Service."""
        if pid not in self._servers:
            self._servers[pid] = _read_name(pid).startswith(_MPS_SERVER)
        return self._servers[pid]

    def forget(self) -> None:
        """Forget those that were not asked for since the last call: their numbers may come again."""
        self._known, self._asked = self._asked, {}
        self._servers = {pid: is_server for pid, is_server in self._servers.items() if pid in self._known}


def _find_ancestor(pid: int, run: Collection[int]) -> int | None:
    """The closest process of the run that started a process; None where there is none, or it has ended."""
    try:
        while pid > 1:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            pid = int(stat[stat.rindex(")") + 1 :].split()[1])
            if pid in run:
                return pid
    except (OSError, ValueError):
        pass
    return None


def _read_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    except OSError:
        return ""


class GpuActivity:
    """The activity on the GPUs of a node, by process, between readings.

    Args:
        gpus: that the run may use.
        with_mps: whether the run's processes use them through its Multi-Process Service.
        now_us: the time in microseconds since 1970.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        with_mps: bool = False,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._parents = list(dict.fromkeys(gpu.parent for gpu in gpus))
        self._now_us = now_us
        self._reasons: dict[str, str] = {}  # for good
        self._unused: dict[str, tuple[str, int]] = {}  # the reason now, and for how many readings
        self._handles: dict[str, Any] = {}
        self._library: Any = None
        self._processes = _Processes()
        self._since_us = dict.fromkeys(self._parents, now_us())
        if with_mps:
            self._reasons = dict.fromkeys(self._parents, MPS)
        elif gpus:
            self._open(gpus)

    def _open(self, gpus: Sequence[Gpu]) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._library = pynvml
        for gpu in gpus:
            try:
                handle = open_device(pynvml, int(gpu.id) if gpu.id.isdigit() else gpu.id)
                self._handles[gpu.parent] = whole = find_physical_gpu(pynvml, handle)
                if gpu.id != gpu.parent or is_in_mig_mode(pynvml, whole):
                    self._reasons[gpu.parent] = MIG
            except pynvml.NVMLError as error:
                self._reasons[gpu.parent] = f"the driver does not answer: {error}"

    def describe(self) -> str:
        """How the activity is known, or why it is not; empty without a GPU."""
        lasting = {gpu: why for gpu, (why, readings) in self._unused.items() if readings >= _LASTING}
        return describe_activity(self._parents, lasting | self._reasons)

    def sample(self, run: Mapping[int, RunProcess], interval_s: float) -> dict[str, Activity]:
        """The activity since the last call, or since the making of this object, by the id of the physical GPU.

        GPUs are missing of which it is not known.

        Args:
            run: the processes of the run at any time since the last call, by id.
            interval_s: seconds since the last call.
        """
        now_us = self._now_us()
        activities: dict[str, Activity] = {}
        for gpu in self._parents:
            if gpu in self._reasons:
                continue
            activity = self._read(gpu, run, interval_s, now_us)
            if activity is not None:
                activities[gpu] = activity
        self._processes.forget()
        return activities

    def _read(self, gpu: str, run: Mapping[int, RunProcess], interval_s: float, now_us: int) -> Activity | None:
        """The activity on one GPU; None where it is not known, and why is noted."""
        samples = self._read_samples(gpu, now_us)
        if samples is None:
            return None
        has_ranks = any(process.gpu == gpu for process in run.values())
        if not samples:
            if has_ranks:
                self._leave_unused(gpu, NO_SAMPLES)
            return []
        owners = {sample.pid: self._processes.find(sample.pid, run) for sample in samples}
        handle, library = self._handles[gpu], self._library
        strangers = [pid for pid, owner in owners.items() if owner is None]
        if list_processes(library, handle, "MPSCompute") or any(map(self._processes.is_mps_server, strangers)):
            self._reasons[gpu] = MPS
            return None
        named = list(owners.values())
        if has_ranks and len(strangers) == len(owners):  # the ranks may only be idle
            named += [self._processes.find(pid, run) for pid in list_processes(library, handle, "Compute")]
        distrust = find_distrust(gpu, named, has_ranks)
        if distrust is not None:
            reason, is_final = distrust
            for parent in self._parents if is_final else ():  # the others' ids are of that namespace as well
                self._reasons.setdefault(parent, reason)
            self._leave_unused(gpu, reason)
            return None
        self._unused.pop(gpu, None)
        return sum_by_owner(samples, interval_s, owners.get)

    def _read_samples(self, gpu: str, now_us: int) -> list[GpuSample] | None:
        """The samples since the last reading; None where they cannot be used, and why is noted."""
        library, since_us = self._library, min(self._since_us[gpu], now_us)  # the clock may have been set back
        try:
            answered = library.nvmlDeviceGetProcessUtilization(self._handles[gpu], since_us)
        except library.NVMLError as error:
            if error.value not in (library.NVML_ERROR_NOT_FOUND, library.NVML_SUCCESS):
                self._fail(gpu, error)
                return None
            answered = []
        readings = [
            GpuSample(int(reading.pid), int(reading.timeStamp), int(reading.smUtil)) for reading in answered
        ]
        samples = select_samples(readings, since_us, now_us)
        newest_us = max((sample.at_us for sample in samples or ()), default=since_us)
        self._since_us[gpu] = max(newest_us, now_us - _LATE_US)
        if samples is None:
            self._leave_unused(gpu, NONSENSE)
        return samples

    def _fail(self, gpu: str, error: Any) -> None:
        """Note why a GPU's utilization cannot be read, for good where that cannot change."""
        library = self._library
        final = {
            library.NVML_ERROR_NOT_SUPPORTED: MIG
            if is_in_mig_mode(library, self._handles[gpu])
            else "the driver does not support the utilization of processes on this GPU",
            library.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old to report the utilization of processes",
            library.NVML_ERROR_NO_PERMISSION: "the driver does not permit to read the utilization of processes",
        }
        if isinstance(error, errors_of_loss(library)):
            self._reasons[gpu] = f"the driver says: {error}"
        elif error.value in final:
            self._reasons[gpu] = final[error.value]
        else:
            self._leave_unused(gpu, f"the driver says: {error}")

    def _leave_unused(self, gpu: str, reason: str) -> None:
        self._unused[gpu] = reason, self._unused.get(gpu, ("", 0))[1] + 1

    def add_to(self, power: Mapping[str, Any], run: Mapping[int, RunProcess]) -> None:
        """Add `activity` to the parts of a `power` event that are GPUs of which it is known; see `sample`."""
        if self._parents:
            activities = self.sample(run, power["interval_s"])
            for part in power["parts"]:
                if part["kind"] == "gpu" and part["device"] in activities:
                    part["activity"] = activities[part["device"]]

    def close(self) -> None:
        if self._library is not None:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlShutdown()
            self._library = None
