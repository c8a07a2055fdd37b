"""Measures how long a rank keeps its GPU busy, by CUDA events around the work of each batch.

The time between two events includes gaps between kernels that the host launched late and, where ranks share a GPU
in turns, the turns of the others; not the wait for the batch. Reading waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class GpuBusy:
    """Sums the GPU time between `begin` and `end`."""

    def __init__(self, make_event: Callable[[], Any], find_stream: Callable[[], Any]) -> None:
        self._make_event, self._find_stream = make_event, find_stream
        self._spare: list[Any] = []
        self._began: Any = None
        self._open: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    def begin(self) -> None:
        """Mark the beginning of a batch's work; one that was not ended counts for nothing."""
        event = self._began or self._take_event()
        event.record(self._find_stream())
        self._began = event

    def end(self) -> None:
        """Mark the end of the batch's work."""
        if self._began is not None:
            end = self._take_event()
            end.record(self._find_stream())
            self._open.append((self._began, end))
            self._began = None
            self._collect()

    def _take_event(self) -> Any:
        return self._spare.pop() if self._spare else self._make_event()

    def _collect(self) -> None:
        while self._open and self._open[0][1].query():
            began, end = self._open.popleft()
            self._seconds += began.elapsed_time(end) / 1e3
            self._spare += [began, end]

    def read(self) -> float:
        """Seconds of all batches whose work the GPU has done."""
        try:
            self._collect()
        except RuntimeError:  # a kernel has failed, and with it all that follows: the rank ends for that
            self._open.clear()
        return self._seconds


#: Of this process by device, over all members of a run: `usage` events are cumulative within a run.
_BY_DEVICE: dict[torch.device, GpuBusy] = {}


def reset_gpu_busy() -> None:
    """Measure all devices from 0: another run begins in this process."""
    _BY_DEVICE.clear()


def open_gpu_busy(device: torch.device) -> GpuBusy | None:
    """Returns the measurement of a device in this process; None where it is no GPU."""
    if device.type != "cuda":
        return None
    import torch

    def make_event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    if device not in _BY_DEVICE:
        _BY_DEVICE[device] = GpuBusy(make_event, lambda: torch.cuda.current_stream(device))
    return _BY_DEVICE[device]


def describe_gpu_busy(gpu: str | None = None) -> dict[str, Any]:
    """`gpu_busy_s` of this process's `usage` events, cumulative, and its `gpu`; nothing where it has used none.

    Args:
        gpu: the id of its GPU; None where that is not known.
    """
    if not _BY_DEVICE:
        return {}
    named = {} if gpu is None else {"gpu": gpu}
    return {"gpu_busy_s": sum(busy.read() for busy in _BY_DEVICE.values()), **named}
