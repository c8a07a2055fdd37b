"""GPUs whose true power is known, behind a stand-in for NVIDIA's library (`nvml_stand_in.c`).

A member keeps its GPU busy in proportion to the CPU time that its process really has. Members of one GPU take
turns on it, as processes without the Multi-Process Service do: while k of them have work each computes for 1/k
of the time. An instance in MIG mode is its member's own. What a GPU draws beyond idle power goes by the time for
which each member computes, times what its kernels draw.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.energy.truth import IDLE, Truth

IDLE_W = 60.0
BUSY_W = 240.0  # beyond idle, of a GPU that computes all the time
_KEPT_S = 3.0  # the driver keeps its latest samples of utilization
_SAMPLE_S = 0.02


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """A member's load on a GPU.

    Attributes:
        gpu: number of the physical GPU.
        share: of the physical GPU, that it reserves.
        intensity: power of its kernels over `BUSY_W`.
        instance: share of the physical GPU that is its instance in MIG mode; None in other modes.
        per_cpu_s: seconds for which it would keep an idle GPU busy, for each CPU-second that it has.
    """

    gpu: int
    share: float
    per_cpu_s: float
    intensity: float = 1.0
    instance: float | None = None


def take_turns(demands: Sequence[float]) -> list[float]:
    """The share of the time for which each computes on a GPU of which they take equal turns while they have work.

    Args:
        demands: shares of the time in which each has work, independently of the others.
    """
    shares = []
    for number, own in enumerate(demands):
        others = [*demands[:number], *demands[number + 1 :]]
        share = 0.0
        for at_work in itertools.product((True, False), repeat=len(others)):
            chance = math.prod(p if works else 1 - p for p, works in zip(others, at_work, strict=True))
            share += own * chance / (1 + sum(at_work))
        shares.append(share)
    return shares


class SyntheticGpus:
    """See the module's docstring; `SyntheticNode` drives them.

    Args:
        state: file of the stand-in's state.
        number: of physical GPUs.
    """

    def __init__(self, state: Path, number: int) -> None:
        self._state, self._new_state = state, state.with_suffix(".new")
        self._energy_j = [0.0] * number
        self._loads: dict[str, tuple[int, GpuLoad]] = {}
        self._idle_j: dict[str, float] = {IDLE: 0.0}
        self._dynamic_j: dict[str, float] = {}
        self._percent: dict[str, float] = {}  # of utilization that was not reported yet, below one percent
        self._launched_s: dict[str, float] = {}  # of work that was launched and not computed yet
        self._unsampled_s = 0.0
        self._samples: deque[tuple[float, list[str]]] = deque()
        self._write()

    def add(self, name: str, pid: int, load: GpuLoad) -> None:
        """Lets a process compute from now on."""
        self._loads[name] = pid, load
        self._idle_j[name] = self._dynamic_j[name] = self._percent[name] = self._launched_s[name] = 0.0

    def read(self, cpu_s: Mapping[str, float]) -> Truth:
        """What they have used, beside the CPU-seconds of the processes."""
        return Truth(sum(self._energy_j), dict(self._idle_j), dict(self._dynamic_j), dict(cpu_s))

    def advance(self, elapsed_s: float, used_s: Mapping[str, float]) -> None:
        """Draw power for some time in which processes had so many CPU-seconds each."""
        computed = self._compute(elapsed_s, used_s)
        for gpu in range(len(self._energy_j)):
            self._energy_j[gpu] += IDLE_W * elapsed_s
            self._idle_j[IDLE] += IDLE_W * elapsed_s
        for name, share in computed.items():
            load = self._loads[name][1]
            own_j = BUSY_W * load.intensity * share * elapsed_s
            idle_j = IDLE_W * load.share * elapsed_s
            self._energy_j[load.gpu] += own_j
            self._dynamic_j[name] += own_j
            self._idle_j[name] += idle_j
            self._idle_j[IDLE] -= idle_j
        self._sample(elapsed_s, computed)
        self._write()

    def _compute(self, elapsed_s: float, used_s: Mapping[str, float]) -> dict[str, float]:
        """The share of a physical GPU's time for which each member computes."""
        demands = {}
        for name, (_, load) in self._loads.items():
            # a process that catches up on a core launches more than the GPU can do at once
            self._launched_s[name] += load.per_cpu_s * used_s.get(name, 0.0)
            demands[name] = min(1.0, self._launched_s[name] / elapsed_s)
            self._launched_s[name] -= demands[name] * elapsed_s
        shares: dict[str, float] = {}
        for gpu in range(len(self._energy_j)):
            names = [name for name, (_, load) in self._loads.items() if load.gpu == gpu and load.instance is None]
            shares |= dict(zip(names, take_turns([demands[name] for name in names]), strict=True))
        for name, (_, load) in self._loads.items():
            if load.instance is not None:
                shares[name] = demands[name] * load.instance
        return shares

    def _sample(self, elapsed_s: float, computed: Mapping[str, float]) -> None:
        """Note the utilization of each process as the driver's samples have it: whole percents, evenly in time."""
        now = time.time()
        self._unsampled_s += elapsed_s
        count = int(self._unsampled_s / _SAMPLE_S)
        self._unsampled_s -= count * _SAMPLE_S
        for age in reversed(range(count)):
            lines = []
            for name, share in computed.items():
                pid, load = self._loads[name]
                self._percent[name] += 100 * share
                percent = int(self._percent[name])
                self._percent[name] -= percent
                lines.append(f"GPU-{load.gpu} util {pid} {percent} {round(now * 1e6) - age}")
            self._samples.append((now, lines))
        while self._samples and self._samples[0][0] < now - _KEPT_S:
            self._samples.popleft()

    def _write(self) -> None:
        lines = [f"GPU-{gpu} energy {round(1e3 * joules)}" for gpu, joules in enumerate(self._energy_j)]
        lines += [f"GPU-{load.gpu} process {pid} 1" for pid, load in self._loads.values()]
        lines += [line for _, sample in self._samples for line in sample]
        self._new_state.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(self._new_state, self._state)
