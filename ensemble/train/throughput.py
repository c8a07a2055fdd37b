"""Measures how fast a member trains: seconds and samples of an epoch, and of the last second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ensemble.meter import PeakMemory, read_clocks

_LOADER_COUNTERS = ("shared_batches", "private_batches", "private_skipped", "waited_s")


class Throughput:
    """Times and counts of one epoch at a time in this process; after a resume, from there on.

    Attributes:
        memory: measures the peak memory of the process; None: nobody asks for it.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self.memory: PeakMemory | None = PeakMemory()
        self.begin_epoch({})

    def begin_epoch(self, stats: dict[str, Any]) -> None:
        """Start counting an epoch, from these counters of the loader."""
        self._stats_before = stats
        self._reset_clocks()
        self._samples = self._mark_samples = 0
        self._sync_s = 0.0

    def restart_clock(self, stats: dict[str, Any]) -> None:
        """Leave out the time so far; called when the first batch is there."""
        self._stats_before = {**self._stats_before, "waited_s": stats.get("waited_s", 0)}
        self._reset_clocks()

    def _reset_clocks(self) -> None:
        self._start = self._mark_s = self._last_s = time.perf_counter()
        self._cpu_s = self._queued_s = self._paused_s = 0.0
        self._clocks = read_clocks()

    @contextlib.contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Count the time inside the block as waiting for the other workers."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._sync_s += time.perf_counter() - start

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Do not count the time inside the block as training: an evaluation within an epoch."""
        before = read_clocks()
        try:
            yield
        finally:
            wall_s, cpu_s, queued_s = _subtract(read_clocks(), before)
            self._paused_s += wall_s
            self._mark_s += wall_s
            start_s, cpu_before_s, queued_before_s = self._clocks
            self._clocks = start_s, cpu_before_s + cpu_s, queued_before_s + queued_s

    def add_step(self, samples: int) -> None:
        """Count a step over this many samples, of all ranks."""
        self._samples += samples
        self._last_s = time.perf_counter()

    def end_training(self) -> None:
        """Stop the CPU clocks after the last step of the epoch; evaluation follows."""
        _, self._cpu_s, self._queued_s = _subtract(read_clocks(), self._clocks)

    def samples_per_s(self) -> float:
        """The rate since the last call in this epoch, or since its start; if no step was done, the last rate."""
        seconds, samples = self._last_s - self._mark_s, self._samples - self._mark_samples
        if samples and seconds > 0:
            self._mark_s, self._mark_samples = self._last_s, self._samples
            self._rate = samples / seconds
        return self._rate

    def end_epoch(self, stats: dict[str, Any]) -> dict[str, Any]:
        """The fields of the `epoch` event.

        `wall_s` includes the evaluation, `train_s` and `samples_per_s` do not. Of this rank alone are `sync_s`,
        waiting for other workers; `cpus`, cores kept busy in training; `queued_s`, ready to train while others had
        the cores; and `memory_gb`, the peak of its own host memory so far.
        """
        train_s = max(0.0, self._last_s - self._start - self._paused_s)
        return {
            "wall_s": time.perf_counter() - self._start,
            "train_s": train_s,
            "samples_per_s": (self._samples / train_s if train_s else 0.0) or None,
            "sync_s": self._sync_s,
            "queued_s": self._queued_s,
            "cpus": self._cpu_s / train_s if train_s else 0.0,
            "memory_gb": 0.0 if self.memory is None else self.memory.gb(),
            **{name: stats.get(name, 0) - self._stats_before.get(name, 0) for name in _LOADER_COUNTERS},
        }


def _subtract(after: tuple[float, ...], before: tuple[float, ...]) -> Iterator[float]:
    return (second - first for second, first in zip(after, before, strict=True))
