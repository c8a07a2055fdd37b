"""Watches the GPUs of a node by NVML: the memory that others hold, compute modes, and faults of the hardware.

The driver reports errors as XIDs (docs.nvidia.com/deploy/xid-errors). `HARDWARE_XIDS` are those that call for a
reset or a restart, and errors of memory that ECC could not correct; all others are the application's, or leave
the GPU usable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

from ensemble.meter.devices import Gpu, GpuState, Mode
from ensemble.meter.power.nvml import errors_of_loss, find_physical_gpu, list_gpus, list_lost, open_device

HARDWARE_XIDS = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "halt of its power management unit",
    64: "memory could not be retired",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained uncorrectable error",
    95: "uncontained uncorrectable error",
    110: "security fault",
    119: "its system processor does not answer",
    120: "error of its system processor",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU could not be initialized",
    155: "NVLink error",
    156: "resource was retired",
    158: "fatal timeout",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}


class GpuWatch:
    """The GPUs that this process may use, where a driver answers.

    Args:
        is_own: whether a process, by its id, belongs to this run on this node.

    Attributes:
        gpus: those that worked at the start.
        lost: those that did not, by number or UUID.
        faults: why GPUs are not to be used any more, by the id of the physical GPU.
    """

    def __init__(self, is_own: Callable[[int], bool]) -> None:
        self._is_own = is_own
        self.gpus: list[Gpu] = list_gpus()
        self.lost: list[str] = []
        self.faults: dict[str, str] = {}
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        self._errors: dict[str, int] = {}  # uncorrected ECC errors when they were last counted
        self._events: Any = None
        self._held: dict[str, float] = {}
        import pynvml

        pynvml.nvmlInit()
        self._library = library = pynvml
        self.lost = list_lost(library)
        for gpu in self.gpus:
            with contextlib.suppress(library.NVMLError):
                handle = open_device(library, int(gpu.id) if gpu.id.isdigit() else gpu.id)
                self._handles |= {gpu.id: handle, gpu.parent: find_physical_gpu(library, handle)}
        with contextlib.suppress(library.NVMLError):
            self._events = library.nvmlEventSetCreate()
        for parent in dict.fromkeys(gpu.parent for gpu in self.gpus):
            if (errors := self._count_errors(parent)) is not None:
                self._errors[parent] = errors
            with contextlib.suppress(library.NVMLError):  # an old GPU, or a container without events
                library.nvmlDeviceRegisterEvents(
                    self._handles[parent], library.nvmlEventTypeXidCriticalError, self._events
                )

    # -- faults -------------------------------------------------------------------------------------------------

    def find_faults(self) -> dict[str, str]:
        """The GPUs that have broken since the last call, with the reason; they are in `faults` from now on."""
        before = set(self.faults)
        if self._library is not None:
            self._read_events()
            for parent in dict.fromkeys(gpu.parent for gpu in self.gpus):
                if parent not in self.faults:
                    self._look_for_errors(parent)
        return {parent: why for parent, why in self.faults.items() if parent not in before}

    def _look_for_errors(self, parent: str) -> None:
        library = self._library
        try:
            library.nvmlDeviceGetMemoryInfo(self._handles[parent])
        except errors_of_loss(library) as error:
            self.faults[parent] = f"the driver says: {error}"
            return
        except (library.NVMLError, KeyError):
            return
        before, errors = self._errors.get(parent), self._count_errors(parent)
        if before is not None and errors is not None and errors > before:
            self.faults[parent] = f"{errors - before} uncorrectable ECC error{'s' * (errors - before > 1)}"

    def _count_errors(self, parent: str) -> int | None:
        """Uncorrected ECC errors since the driver was loaded; None without ECC."""
        library = self._library
        try:
            return int(
                library.nvmlDeviceGetTotalEccErrors(
                    self._handles[parent],
                    library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    library.NVML_VOLATILE_ECC,
                )
            )
        except (library.NVMLError, KeyError):
            return None

    def _read_events(self) -> None:
        """Note the XIDs that the driver has reported since the last call."""
        library, parents = self._library, {gpu.parent for gpu in self.gpus}
        with contextlib.suppress(library.NVMLError):  # in the end: no more within 0 ms
            while self._events is not None:
                event = library.nvmlEventSetWait(self._events, 0)
                what = HARDWARE_XIDS.get(int(event.eventData))
                with contextlib.suppress(*errors_of_loss(library)):  # which is found next
                    parent = str(library.nvmlDeviceGetUUID(event.device))
                    if what is not None and parent in parents:
                        self.faults.setdefault(parent, f"XID {event.eventData}: {what}")

    # -- others -------------------------------------------------------------------------------------------------

    def read_states(self, in_use: Collection[str] = ()) -> dict[str, GpuState]:
        """What others make of each GPU or instance that is not broken, by id.

        Args:
            in_use: GPUs on which processes of this run may be. Where NVML does not list these processes (they may
                have no context on the GPU yet, or live in another process namespace), others are not taken to hold
                more there than before.
        """
        return {
            gpu.id: self._read_state(gpu, gpu.id in in_use) for gpu in self.gpus if gpu.parent not in self.faults
        }

    def _read_state(self, gpu: Gpu, in_use: bool) -> GpuState:
        library = self._library
        try:
            handle = self._handles[gpu.id]
            listed = list_processes(library, handle, "Compute", "MPSCompute")
            own = {pid: used for pid, used in listed.items() if self._is_own(pid)}
            held_gb = max(0.0, _read_used_gb(library, handle) - sum(used or 0.0 for used in own.values()))
            if in_use and (not own or None in own.values()):
                held_gb = min(held_gb, self._held.get(gpu.id, 0.0))
            self._held[gpu.id] = held_gb
            return GpuState(self._read_mode(gpu), held_gb, len(own) < len(listed))
        except (library.NVMLError, KeyError):
            return GpuState()

    def _read_mode(self, gpu: Gpu) -> Mode:
        library = self._library
        try:
            mode = library.nvmlDeviceGetComputeMode(self._handles[gpu.parent])
        except (library.NVMLError, KeyError):
            return "default"
        if mode == library.NVML_COMPUTEMODE_PROHIBITED:
            return "prohibited"
        return "default" if mode == library.NVML_COMPUTEMODE_DEFAULT else "exclusive"

    def close(self) -> None:
        if self._library is not None:
            with contextlib.suppress(self._library.NVMLError):
                if self._events is not None:
                    self._library.nvmlEventSetFree(self._events)
                self._library.nvmlShutdown()
            self._library, self._events = None, None


def _read_used_gb(library: Any, handle: Any) -> float:
    """Memory that processes hold, in GiB, without what the driver reserves where NVML tells the two apart."""
    try:
        used = library.nvmlDeviceGetMemoryInfo(handle, library.nvmlMemory_v2).used
    except (library.NVMLError_NotSupported, library.NVMLError_FunctionNotFound):
        used = library.nvmlDeviceGetMemoryInfo(handle).used
    return float(used) / 2**30


def list_processes(library: Any, handle: Any, *kinds: str) -> dict[int, float | None]:
    """The processes on a GPU with the memory of each in GiB; None where NVML does not say it.

    Args:
        kinds: "Compute": that compute; "MPSCompute": that do so as clients of a Multi-Process Service.
    """
    used_gb: dict[int, float | None] = {}
    for kind in kinds:
        for version in ("v3", "v2"):  # an older driver has only the second
            with contextlib.suppress(library.NVMLError):
                for process in getattr(library, f"nvmlDeviceGet{kind}RunningProcesses_{version}")(handle):
                    used = process.usedGpuMemory
                    used_gb[int(process.pid)] = None if used is None else float(used) / 2**30
                break
    return used_gb
