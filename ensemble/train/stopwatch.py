"""Measures a member's steps and evaluations: seconds, cores, memory and load of a GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ensemble.comm import Communicator
from ensemble.meter import read_clocks
from ensemble.meter.gpu import GpuUse
from ensemble.train.gather import gather_json

if TYPE_CHECKING:
    from pipelines import Batch

# Short steps are warmed up by more of them: the C library's allocator learns from the first ten or so.
WARM_UP, MORE_WARM_UP, WARM_UP_S = 2, 8, 0.1
MIN_STEPS, MAX_STEPS = 3, 10  # steps to measure; more of very short ones
MIN_MEASURED_S = 0.05
LONG_S = 2.0  # of longer steps one is enough
GPU_S = 0.6  # the driver samples a GPU's load a few times a second


class Stopwatch:
    """Times a member's steps and evaluations, and decides how many to measure; all ranks call it together.

    Args:
        steps_s: seconds of steps to measure, approximately.
        fixed_steps: of the epoch; None: as many as are worth to be timed.
        most_steps: that the member ever takes: a schedule may have no more.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        steps_s: float,
        gpu: GpuTimer | None,
        evaluations: int,
        fixed_steps: int | None,
        most_steps: int,
    ) -> None:
        self._comm, self._device, self._gpu = comm, device, gpu
        self._steps_s, self._evaluations, self.fixed_steps = steps_s, evaluations, fixed_steps
        self._most_steps = max(WARM_UP + 1, most_steps)
        self._min_s = MIN_MEASURED_S if gpu is None else GPU_S
        self.samples = 0
        self._laps: list[tuple[float, float]] = []
        self._evaluated: list[tuple[float, float]] = []
        self._first = self._end = WARM_UP

    def has_next(self) -> bool:
        """Whether another step is to be timed; all ranks get the same answer."""
        if self.steps == WARM_UP:
            step_s = max(1e-6, gather_json(self._comm, self._laps[-1][0])[0])
            fitting = min(MAX_STEPS, max(MIN_STEPS, math.ceil(self._steps_s / step_s)))
            self._first += min(MORE_WARM_UP, int(WARM_UP_S / step_s))
            self._end = self._first + (1 if step_s > LONG_S else max(fitting, math.ceil(self._min_s / step_s)))
            self._end = min(self._end, self._most_steps)
            self._first = min(self._first, self._end - 1)
            if self.fixed_steps is not None:
                self._first, self._end = min(self._first, self.fixed_steps - 1), self.fixed_steps
        if self.steps == self._first and self._gpu is not None:
            self._gpu.use.mark()
        return self.steps < self._end

    @property
    def steps(self) -> int:
        """How many steps were timed, those of the warm-up included."""
        return len(self._laps)

    @property
    def is_complete(self) -> bool:
        """Whether all steps were timed that were to be."""
        return WARM_UP < self._end <= self.steps

    def start(self, batch: Batch) -> None:
        """Start a step: the training loop gets its batch."""
        self.samples = batch.global_size
        self._began = read_clocks()

    def stop(self) -> None:
        """End a step: the training loop asks for the next batch."""
        self._laps.append(self._read_lap())

    def time_evaluations(self) -> Iterator[None]:
        """Time so many evaluations of a batch; a long one once."""
        for number in range(self._evaluations):
            if number and self._evaluated[-1][0] > self._steps_s:
                break
            self._began = read_clocks()
            yield
            self._evaluated.append(self._read_lap())

    def _read_lap(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        wall_s, cpu_s, queued_s = (
            after - before for after, before in zip(read_clocks(), self._began, strict=True)
        )
        return max(wall_s - queued_s, 1e-9), cpu_s

    def evaluation(self) -> dict[str, float] | None:
        """`evaluate_s` and `evaluate_cpu_s` of a batch, the least of all; None where nothing was evaluated."""
        if not self._evaluated:
            return None
        wall_s, cpu_s = min(self._evaluated)  # the first call allocates, and imports what it needs
        return {"evaluate_s": wall_s, "evaluate_cpu_s": cpu_s}

    def figures(self) -> dict[str, float]:
        """Seconds of a step and cores kept busy, time in the run queue excluded."""
        laps = self._laps[self._first :] or self._laps
        if not laps:
            raise RuntimeError("it took no step over the batches of member.batches()")
        return {
            "step_s": statistics.median(wall_s for wall_s, _ in laps),
            "cpus": statistics.median(cpu_s / wall_s for wall_s, cpu_s in laps),
        }


class GpuTimer:
    """Measures a member's use of this rank's GPU; made before the process allocates memory there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.use = GpuUse(device.index or 0)
        self._others = self.use.used_bytes()

    def begin(self) -> None:
        """Reset before another member."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def figures(self) -> dict[str, float]:
        """Memory, CUDA's own included, and the load where the driver reports it."""
        used, busy = self.use.used_bytes(), self.use.busy()
        own = 0
        if used is not None and self._others is not None:
            own = max(0, used - self._others - torch.cuda.memory_reserved(self._device))
        most = torch.cuda.max_memory_reserved(self._device) + own
        size = torch.cuda.get_device_properties(self._device).total_memory
        figures = {"gpu_memory_gb": most / 2**30, "gpu_size_gb": size / 2**30}
        return figures | ({} if busy is None else {"gpus": busy})
