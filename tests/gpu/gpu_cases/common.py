"""What cases have in common: their setting, energy, clocks, peak memory, rows."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Row = dict[str, Any]
T = TypeVar("T")

NO_GPU = "measured on a GPU only"


class Absent(Exception):
    """This machine does not have what the case needs; the message is the reason."""


@dataclass(frozen=True)
class Setting:
    """Where a case runs.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal in a small size.
        budget_s: seconds that the case plans for.
    """

    device: str
    budget_s: float

    @property
    def on_gpu(self) -> bool:
        """Whether this is no rehearsal."""
        return self.device == "cuda"

    def choose(self, gpu: T, rehearsal: T) -> T:
        """A size for the GPU, or that of the rehearsal on the CPU."""
        return gpu if self.on_gpu else rehearsal

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.on_gpu:
            torch.cuda.synchronize()


def name_device(device: str) -> str:
    """The name of the device; raises RuntimeError where torch sees no GPU."""
    if device == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device; --device cpu rehearses the cases without one")
    return torch.cuda.get_device_name(0)


def row(what: str, reasons: dict[str, str] | None = None, **figures: Any) -> Row:
    """A row; of `reasons` those are kept whose figure is None."""
    missing = {name: reason for name, reason in (reasons or {}).items() if figures.get(name) is None}
    return {"what": what, **figures, **({"reasons": missing} if missing else {})}


def check(what: str, passed: bool, **details: Any) -> Row:
    """A row that says whether something holds."""
    return {"what": what, "passed": bool(passed), **details}


class GpuEnergy:
    """Energy of the GPU between calls, from NVML.

    Attributes:
        reason: why it cannot be read; None if it can.
    """

    def __init__(self, setting: Setting) -> None:
        from ensemble.meter.power import Absent as AbsentSource
        from ensemble.meter.power.nvml import open_nvml

        self.reason: str | None = NO_GPU
        self._source: Any = None
        if setting.on_gpu:
            opened = open_nvml()
            if isinstance(opened, AbsentSource):
                self.reason = opened.reason
            else:
                self.reason, self._source = None, opened
        self.read()

    def read(self) -> float | None:
        """Joules since the last call; None if they cannot be read."""
        from ensemble.meter.power import PowerError

        if self._source is None:
            return None
        try:
            return sum(reading.energy_j for reading in self._source.read())
        except PowerError as error:
            self.reason, self._source = str(error), None
            return None


class PeakMemory:
    """Peak of what torch has allocated on the GPU above what it had before; None on the CPU."""

    reason = NO_GPU

    def __init__(self, setting: Setting) -> None:
        self._on_gpu = setting.on_gpu
        if self._on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def megabytes(self) -> float | None:
        """The peak, 10^6 bytes."""
        return (torch.cuda.max_memory_allocated() - self._before) / 1e6 if self._on_gpu else None


@contextlib.contextmanager
def follow_memory(setting: Setting) -> Iterator[Row]:
    """A context after which the row has the peaks of memory in use, above what was in use when it began.

    `gpu_memory_mb` is of the whole GPU, `host_memory_mb` of this process and all that it started: a page that n of
    them map counts 1/n in each. Both are looked at twice a second.
    """
    from benchmarks.sc18.processes import process_tree, read_memory
    from ensemble.meter.gpu import GpuUse

    device, host, gpu = GpuUse(0) if setting.on_gpu else None, list[int](), list[Any]()

    def follow() -> None:
        while not ended.wait(0.5 if host else 0):
            gpu.append(device and device.used_bytes())
            host.append(0)
            for pid in process_tree(os.getpid()):
                with contextlib.suppress(OSError):  # it has ended
                    host[-1] += read_memory(pid).get("Pss", 0)

    ended, thread = threading.Event(), threading.Thread(target=follow, daemon=True)
    figures = Row(reasons={"gpu_memory_mb": "NVML does not say what is in use" if setting.on_gpu else NO_GPU})
    thread.start()
    try:
        yield figures
    finally:
        ended.set()
        thread.join()
    figures["host_memory_mb"] = (max(host) - host[0]) / 1e6
    figures["gpu_memory_mb"] = None if None in gpu else (max(gpu) - gpu[0]) / 1e6


@dataclass(frozen=True)
class Timed:
    """Calls of a function in a row.

    Attributes:
        count: of calls.  seconds: of all.  energy_j: of the GPU in that time; None if unknown.
    """

    count: int
    seconds: float
    energy_j: float | None

    @property
    def each_s(self) -> float:
        """Seconds of a call."""
        return self.seconds / self.count

    @property
    def watts(self) -> float | None:
        """Mean power of the GPU."""
        return None if self.energy_j is None else self.energy_j / self.seconds


def time_calls(
    setting: Setting, call: Callable[[], Any], seconds: float, energy: GpuEnergy | None = None, warm: int = 3
) -> Timed:
    """Call a function for that many seconds, three times at least, after `warm` calls; one call in a rehearsal.

    The device is waited for at the ends and after every group of calls, so that the queue stays short.
    """
    for _ in range(setting.choose(warm, 1)):
        call()
    setting.synchronize()
    if energy is not None:
        energy.read()
    count, group, start = 0, 1, time.perf_counter()
    while True:
        for _ in range(group):
            call()
        count += group
        setting.synchronize()
        elapsed = time.perf_counter() - start
        if not setting.on_gpu or (elapsed >= seconds and count >= 3):
            break
        group = max(1, min(2 * group, int(count * 0.05 / max(elapsed, 1e-6))))
    return Timed(count, elapsed, None if energy is None else energy.read())


def attempt(what: str, measure: Callable[[], Row]) -> Row:
    """The row that `measure` returns; where it raises, a failed check, so that the case goes on."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        line = next(iter(str(error).splitlines()), "")
        return check(what, False, error=f"{type(error).__name__}: {line}")
