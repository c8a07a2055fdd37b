"""Reads from NVML how much memory of a GPU is in use, and the share of time in which it computed."""

from __future__ import annotations

from typing import Any

from pipelines.providers import import_object


class GpuUse:
    """Memory and load of one GPU as this process counts them; both cover whoever uses it.

    Args:
        index: as CUDA counts in this process.
    """

    def __init__(self, index: int) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            devices = import_object("ensemble.meter.power.nvml:open_devices")(pynvml)
            self._handle, self._nvml = devices[index], pynvml
        except Exception:  # no package, no driver, no such device: what it would say is unavailable
            pass
        self.mark()

    def used_bytes(self) -> int | None:
        """Returns the memory in use, in bytes; None where it cannot be read."""
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except self._nvml.NVMLError:
            return None

    def mark(self) -> None:
        """Starts the period that `busy` covers."""
        samples = self._samples(0)
        self._since = samples[-1].timeStamp if samples else 0

    def busy(self) -> float | None:
        """Returns the share of time since `mark` in which some kernel ran; None where it cannot be read."""
        loads = [sample.sampleValue.uiVal / 100 for sample in self._samples(self._since)]
        return sum(loads) / len(loads) if loads else None

    def _samples(self, since: int) -> list[Any]:
        """The driver's own samples, several a second, of the last seconds."""
        if self._nvml is None:
            return []
        try:
            kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
            return list(self._nvml.nvmlDeviceGetSamples(self._handle, kind, since)[1])
        except self._nvml.NVMLError:
            return []
