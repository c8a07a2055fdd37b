"""Reads GPU energy from NVML, NVIDIA's management library (the one behind ``nvidia-smi``).

Since Volta a GPU counts its own energy in millijoules since the driver was loaded
(``nvmlDeviceGetTotalEnergyConsumption``). An older one tells its present power only; then the mean of the power at
both ends of an interval stands for the interval, which is as good as the interval is short.

NVML counts *all* GPUs of the node, in PCI order, and knows nothing of ``CUDA_VISIBLE_DEVICES``. A reading's
`device` is the index that the run uses: the position in ``CUDA_VISIBLE_DEVICES`` where that is set, else NVML's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading

_T = TypeVar("_T")


def count_energy(total_mj: Callable[[], int]) -> Callable[[], float]:
    """Returns a function of the joules since it was last called, from a counter of millijoules."""
    last_mj = total_mj()

    def read_joules() -> float:
        nonlocal last_mj
        now_mj = total_mj()
        used_mj, last_mj = now_mj - last_mj, now_mj
        if used_mj < 0:
            raise PowerError("the GPU's energy counter went back (was its driver loaded anew?)")
        return used_mj / 1e3

    return read_joules


def integrate_power(
    power_mw: Callable[[], int], clock: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Returns a function of the joules since it was last called: the trapezoid rule on the power at each call."""
    last = (clock(), power_mw())

    def read_joules() -> float:
        nonlocal last
        (t0, p0), last = last, (clock(), power_mw())
        return (last[0] - t0) * (p0 + last[1]) / 2e3

    return read_joules


def open_nvml() -> PowerSource | Absent:
    """The GPUs of this node that the run may use."""
    try:
        import pynvml
    except ImportError:
        return Absent("nvml", "the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Absent("nvml", f"no NVIDIA driver answers: {error}")
    try:
        meters = [_meter(pynvml, handle) for handle in open_devices(pynvml)]
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        return Absent("nvml", f"the GPUs' energy and power cannot be read: {error}")
    if not meters:
        pynvml.nvmlShutdown()
        return Absent("nvml", "the NVIDIA driver reports no GPU")

    def read() -> list[Reading]:
        try:
            return [Reading(f"gpu-{i}", "gpu", meter(), device=i) for i, meter in enumerate(meters)]
        except pynvml.NVMLError as error:
            raise PowerError(f"NVML: {error}") from None

    return PowerSource("nvml", "gpu", "measured", read, pynvml.nvmlShutdown)


def gpu_names() -> list[str]:
    """Names of the GPUs as `open_nvml` counts them; empty where there are none."""
    return _query_each(lambda nvml, gpu: str(nvml.nvmlDeviceGetName(gpu)))


def gpu_memory_gb() -> list[float]:
    """Memory of each GPU in GiB, in the order of `gpu_names`; empty where it cannot be read."""
    return _query_each(lambda nvml, gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).total) / 2**30)


def _query_each(ask: Callable[[Any, Any], _T]) -> list[_T]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver: `open_nvml` tells which
        return []
    try:
        return [ask(pynvml, handle) for handle in open_devices(pynvml)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def visible_devices(value: str) -> list[int | str]:
    """``CUDA_VISIBLE_DEVICES`` as NVML indices and UUIDs; like CUDA, it stops at the first negative index."""
    devices: list[int | str] = []
    for item in (part.strip() for part in value.split(",")):
        if item.startswith("-") or not item:
            break
        devices.append(int(item) if item.isdigit() else item)
    return devices


def open_devices(library: Any) -> list[Any]:
    """NVML's handles of the GPUs in the run's order: those of ``CUDA_VISIBLE_DEVICES``, or all where it is empty.

    Ray empties it for a process that asked for no GPU, such as a node agent.
    """
    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    by_index, by_uuid = library.nvmlDeviceGetHandleByIndex, library.nvmlDeviceGetHandleByUUID
    return [
        by_index(device) if isinstance(device, int) else by_uuid(device)
        for device in visible or range(library.nvmlDeviceGetCount())
    ]


def _meter(library: Any, handle: Any) -> Callable[[], float]:
    try:
        return count_energy(lambda: int(library.nvmlDeviceGetTotalEnergyConsumption(handle)))
    except library.NVMLError_NotSupported:
        return integrate_power(lambda: int(library.nvmlDeviceGetPowerUsage(handle)))
