"""How fast a member trains: seconds and samples of an epoch, and of the last second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ensemble.meter import PeakMemory, clocks

_COUNTED = ("shared_batches", "private_batches", "waited_s")


class Throughput:
    """Counts one epoch at a time, as this process saw it: after a resume, from there on."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._memory = PeakMemory()
        self.begin_epoch({})

    def begin_epoch(self, stats: dict[str, Any]) -> None:
        """Start counting; `stats` are the loader's counters."""
        self._before = stats
        self._start()
        self._samples = self._mark_samples = 0
        self._sync_s = 0.0

    def start_clock(self, stats: dict[str, Any]) -> None:
        """The first batch is there: what was waited until now is no time of the epoch."""
        self._before = {**self._before, "waited_s": stats.get("waited_s", 0)}
        self._start()

    def _start(self) -> None:
        self._began = self._mark_s = self._last_s = time.perf_counter()
        self._cpu_s = self._queued_s = 0.0
        self._clocks = clocks()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside is spent on the other workers."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._sync_s += time.perf_counter() - began

    def add(self, samples: int) -> None:
        """A step over this many samples, all ranks, is done."""
        self._samples += samples
        self._last_s = time.perf_counter()

    def trained(self) -> None:
        """The last step of the epoch is done: what comes now is no training."""
        _, self._cpu_s, self._queued_s = (now - then for now, then in zip(clocks(), self._clocks, strict=True))

    def samples_per_s(self) -> float:
        """Since the last call in this epoch, or since its start; the last rate while nothing was trained since."""
        seconds, samples = self._last_s - self._mark_s, self._samples - self._mark_samples
        if samples and seconds > 0:
            self._mark_s, self._mark_samples = self._last_s, self._samples
            self._rate = samples / seconds
        return self._rate

    def end_epoch(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Fields of the `epoch` event: `wall_s` counts the evaluation, `train_s` and `samples_per_s` do not.

        Of this rank are also `cpus`, cores kept busy in training, `queued_s`, how long it was ready to train while
        others had the cores, and `memory_gb`, the most host memory that it has held for itself so far.
        """
        training_s = self._last_s - self._began
        return {
            "wall_s": time.perf_counter() - self._began,
            "train_s": max(0.0, training_s),
            "samples_per_s": self._samples / training_s if training_s > 0 else 0.0,
            "sync_s": self._sync_s,
            "queued_s": self._queued_s,
            "cpus": self._cpu_s / training_s if training_s > 0 else 0.0,
            "memory_gb": self._memory.gb(),
            **{name: stats.get(name, 0) - self._before.get(name, 0) for name in _COUNTED},
        }
