"""Reads GPU energy from NVML, NVIDIA's management library, for the GPUs that this process may use.

Since Volta a GPU counts its own energy in millijoules; of an older one the power at both ends of an interval is
integrated. A GPU is named by its UUID. The energy of an instance in MIG mode is counted with the whole GPU's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ensemble.meter.devices import Gpu
from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading, integrate_power

STALLED_S = 10.0  # counters advance several times a second
MOST_W = 5000.0  # several times what any GPU draws

log = logging.getLogger(__name__)


class ImplausibleEnergy(PowerError):
    """A GPU's counter says what cannot be; the energy of the interval is not known."""


def count_energy(total_mj: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """Returns a function of the joules since it was last called, from a counter of millijoules.

    It raises `ImplausibleEnergy`, and goes on from the counter's new value, where the counter went back or took a
    jump that no GPU's power explains (its driver was loaded anew, or the GPU reset), and as long as the counter
    stands still: even a GPU at rest draws some watts.
    """
    last_mj, changed_s = total_mj(), clock()

    def read_joules() -> float:
        nonlocal last_mj, changed_s
        now_mj, now_s = total_mj(), clock()
        used_j, length_s = (now_mj - last_mj) / 1e3, now_s - changed_s
        if used_j == 0.0:
            if length_s >= STALLED_S:
                raise ImplausibleEnergy("its energy counter stands still")
            return 0.0
        last_mj, changed_s = now_mj, now_s
        if used_j < 0:
            raise ImplausibleEnergy("its energy counter went back (was its driver reloaded?)")
        if used_j > MOST_W * max(1.0, length_s):
            raise ImplausibleEnergy(f"its energy counter jumped by {used_j:g} J in {length_s:.1f} s")
        return used_j

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
        handles = _open_physical_gpus(pynvml)
        meters = [(_find_id(pynvml, handle, i), _meter(pynvml, handle)) for i, handle in enumerate(handles)]
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        return Absent("nvml", f"the GPUs' energy and power cannot be read: {error}")
    if not meters:
        pynvml.nvmlShutdown()
        return Absent("nvml", "the NVIDIA driver reports no GPU")

    doubts: dict[str, str] = {}

    def read() -> list[Reading]:
        readings = []
        try:
            for i, (name, meter) in enumerate(meters):
                # The others are still there, and their counters are right.
                with contextlib.suppress(*errors_of_loss(pynvml)), _doubting(name, doubts):
                    readings.append(Reading(f"gpu-{i}", "gpu", meter(), device=name))
        except pynvml.NVMLError as error:
            raise PowerError(f"NVML: {error}") from None
        return readings

    return PowerSource("nvml", "gpu", "measured", read, pynvml.nvmlShutdown)


@contextlib.contextmanager
def _doubting(gpu: str, doubts: dict[str, str]) -> Iterator[None]:
    """Warn of a counter that says what cannot be, once for each cause in a row; its energy is not counted."""
    try:
        yield
    except ImplausibleEnergy as error:
        if doubts.get(gpu) != str(error):
            log.warning("GPU %s: %s: its energy is not counted", gpu, error)
        doubts[gpu] = str(error)
    else:
        doubts.pop(gpu, None)


def list_gpus() -> list[Gpu]:
    """The GPUs that this process may use, without those that are lost."""
    import pynvml

    pynvml.nvmlInit()
    try:
        gpus = []
        for i, handle in enumerate(open_devices(pynvml)):
            physical = find_physical_gpu(pynvml, handle)
            number, whole = _find_number(pynvml, physical, i), _find_id(pynvml, physical, i)
            for device in _list_instances(pynvml, handle) or [handle]:
                with contextlib.suppress(*errors_of_loss(pynvml)):
                    name, model = _find_id(pynvml, device, i), str(pynvml.nvmlDeviceGetName(device))
                    memory_gb = float(pynvml.nvmlDeviceGetMemoryInfo(device).total) / 2**30
                    share = 1.0 if name == whole else _find_share(pynvml, device, physical)
                    gpus.append(Gpu(name, model, memory_gb, (str(number), whole, name), whole, share))
        return gpus
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _find_share(library: Any, instance: Any, physical: Any) -> float | None:
    """The slices of a MIG instance over those of the whole GPU: of its largest profile; None where it is unknown.

    NVML tells the attributes of instances only. Slices are compared, not multiprocessors: those of the largest
    profile are more than those of all small ones together (132 and 7 x 16 of an H100).
    """
    most = 0
    for profile in range(library.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with contextlib.suppress(library.NVMLError):  # this GPU has no such profile
            info = library.nvmlDeviceGetGpuInstanceProfileInfo(physical, profile, version=1)
            most = max(most, int(info.sliceCount))
    try:
        slices = int(library.nvmlDeviceGetAttributes(instance).computeInstanceSliceCount)
    except library.NVMLError:
        return None
    return min(1.0, slices / most) if most and slices else None


def errors_of_loss(library: Any) -> tuple[type[Exception], ...]:
    """NVML's errors of a GPU that has fallen off the bus, or does nothing more before it is reset."""
    return library.NVMLError_GpuIsLost, library.NVMLError_ResetRequired


def find_physical_gpu(library: Any, handle: Any) -> Any:
    """NVML's handle of the GPU of which a device is a MIG instance; the handle itself where it is none."""
    try:
        return library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except library.NVMLError:  # a whole GPU, or a driver without MIG
        return handle


def _open_physical_gpus(library: Any) -> list[Any]:
    """NVML's handles of the GPUs of `open_devices`, each once, also where only instances of it are used."""
    handles = [find_physical_gpu(library, handle) for handle in open_devices(library)]
    return list({_find_id(library, handle, i): handle for i, handle in enumerate(handles)}.values())


def _find_number(library: Any, handle: Any, otherwise: int) -> int:
    """Its number in the order of the bus."""
    try:
        return int(library.nvmlDeviceGetIndex(handle))
    except library.NVMLError:
        return otherwise


def _find_id(library: Any, handle: Any, number: int) -> str:
    try:
        return str(library.nvmlDeviceGetUUID(handle))
    except library.NVMLError:
        return str(number)


def _list_instances(library: Any, handle: Any) -> list[Any]:
    """The MIG instances of a GPU; empty where it is not in MIG mode."""
    instances = []
    if not is_in_mig_mode(library, handle):
        return []
    try:
        for i in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(library.NVMLError_NotFound):  # numbers of instances need not be consecutive
                instances.append(library.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))
    except library.NVMLError:  # a GPU, or a driver, without MIG
        return []
    return instances


def is_in_mig_mode(library: Any, handle: Any) -> bool:
    """Whether a GPU is in MIG mode, in which processes run on instances of it."""
    try:
        return bool(library.nvmlDeviceGetMigMode(handle)[0] == library.NVML_DEVICE_MIG_ENABLE)
    except library.NVMLError:  # a GPU, or a driver, without MIG
        return False


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

    Ray empties it for a process that asked for no GPU, such as a node agent. GPUs that are lost are left out.
    """
    handles = []
    for device in _list_devices(library):
        with contextlib.suppress(*errors_of_loss(library)):
            handles.append(open_device(library, device))
    return handles


def list_lost(library: Any) -> list[str]:
    """The GPUs that `open_devices` leaves out, by number or UUID."""
    lost = []
    for device in _list_devices(library):
        try:
            library.nvmlDeviceGetMemoryInfo(open_device(library, device))
        except errors_of_loss(library):
            lost.append(str(device))
        except library.NVMLError:
            pass
    return lost


def _list_devices(library: Any) -> Sequence[int | str]:
    visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return visible or range(library.nvmlDeviceGetCount())


def open_device(library: Any, device: int | str) -> Any:
    """NVML's handle of a GPU, or of an instance, by its number or UUID."""
    if isinstance(device, int):
        return library.nvmlDeviceGetHandleByIndex(device)
    return library.nvmlDeviceGetHandleByUUID(device)


def _meter(library: Any, handle: Any) -> Callable[[], float]:
    try:
        return count_energy(lambda: int(library.nvmlDeviceGetTotalEnergyConsumption(handle)))
    except library.NVMLError_NotSupported:
        return integrate_power(lambda: int(library.nvmlDeviceGetPowerUsage(handle)))


def read_gpu_load() -> float | None:
    """The share of the driver's last period (a sixth to one second) in which kernels ran on the busiest GPU.

    None where it cannot be read, such as of a GPU in MIG mode.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        loads = [pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100 for device in open_devices(pynvml)]
        return max(loads, default=0.0)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
