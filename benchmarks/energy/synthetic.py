"""Processors and GPUs whose true power is known: models of power, driven by the CPU clocks of real processes.

A thread reads the clocks of the processes some forty times a second, integrates the power that the model gives for
their load, and counts it up where the sources of a run's meter read it. It keeps what each process truly cost. It
goes by the CPU time that processes really had, so it does not matter what else the machine does.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ensemble.bench.pipelines.processes import process_clock_s
from ensemble.meter.power.estimate import node_busy_s

#: Names of what is no member's: idle energy that nobody reserves, other processes, and the study's own.
IDLE, OTHER, DRIVER = "idle", "other", "orchestrate"
_PERIOD_S = 0.025
_WRAP_J = 20.0  # powercap's counters wrap for the first time so many joules after they were made
_RANGE_S = 10.0  # and again after so many seconds of the most power that the machine's cores can draw
_KEPT_S = 3.0  # NVIDIA's driver keeps its latest samples of utilization
_SAMPLE_S = 0.02


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Truth:
    """What a node has used so far.

    Attributes:
        energy_j: of the whole node.
        idle_j: of it, what does not depend on load, by the names that reserve a share of the node, and `IDLE` for
            the rest.
        dynamic_j: of the processes by name, and of `OTHER` processes of the machine. Where the model is not linear
            a member has no part of its own; then those are only a split of their sum by load.
        cpu_s: CPU-seconds by the same names.
    """

    energy_j: float = 0.0
    idle_j: defaultdict[str, float] = field(default_factory=_zeros)
    dynamic_j: defaultdict[str, float] = field(default_factory=_zeros)
    cpu_s: defaultdict[str, float] = field(default_factory=_zeros)

    def add(self, idle_j: float, shares: Mapping[str, float], dynamic_j: Mapping[str, float]) -> None:
        """Charges idle energy to those who reserve shares, the rest to `IDLE`, and what each caused beyond it."""
        self.energy_j += idle_j + sum(dynamic_j.values())
        for name, share in {**shares, IDLE: 1 - sum(shares.values())}.items():
            self.idle_j[name] += idle_j * share
        for name, joules in dynamic_j.items():
            self.dynamic_j[name] += joules

    def since(self, before: Truth) -> Truth:
        """What was used after an earlier moment."""
        used = copy.deepcopy(self)
        used.energy_j -= before.energy_j
        for now, then in zip(vars(used).values(), vars(before).values(), strict=True):
            if isinstance(now, defaultdict):
                now.update({name: value - then[name] for name, value in now.items()})
        return used

    def joules_of(self, name: str) -> float:
        """All that a name cost: its share of what is idle, and its own."""
        return self.idle_j[name] + self.dynamic_j[name]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How a process loads a node.

    Attributes:
        share: of the node, or of its physical GPU, that it reserves.
        intensity: power of its work over that of usual work.
        gpu: number of its physical GPU.
        instance: share of the physical GPU that is its instance in MIG mode; None in other modes.
        per_cpu_s: seconds for which it would keep an idle GPU busy, for each CPU-second that it has.
    """

    share: float = 0.0
    intensity: float = 1.0
    gpu: int = 0
    instance: float | None = None
    per_cpu_s: float = 0.0


class SyntheticNode:
    """See the module's docstring. The counters grow while the context is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._truth = Truth()
        self._pids: dict[str, int] = {}
        self._loads: dict[str, Load] = {}
        self._clocks: dict[str, float] = {}
        self._claimed_s = self._ahead_s = 0.0
        self._last, self._busy_s = time.monotonic(), node_busy_s()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="synthetic node", daemon=True)

    def __enter__(self) -> Self:
        self._last, self._busy_s = time.monotonic(), node_busy_s()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def add(self, name: str, pid: int, load: Load, since_s: float = 0.0) -> None:
        """Lets a process draw power for the CPU time that it uses beyond its first `since_s` seconds."""
        with self._lock:
            self._advance()
            self._pids[name], self._loads[name], self._clocks[name] = pid, load, since_s

    def read(self) -> Truth:
        """What it has used up to this moment, which the counters then show as well."""
        with self._lock:
            self._advance()
            return copy.deepcopy(self._truth)

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            with self._lock:
                self._advance()

    def _advance(self) -> None:
        now = time.monotonic()
        elapsed_s, self._last = now - self._last, now
        if elapsed_s > 0:
            used = self._read_clocks()
            for name, used_s in used.items():
                self._truth.cpu_s[name] += used_s
            self._draw(elapsed_s, used)

    def _draw(self, elapsed_s: float, used: Mapping[str, float]) -> None:
        """Draws power for some time in which processes had so many CPU-seconds each."""
        raise NotImplementedError

    def _read_clocks(self) -> dict[str, float]:
        """CPU-seconds of each process, and of all others, since the last call."""
        used: dict[str, float] = {}
        for name, pid in self._pids.items():
            try:
                now_s = process_clock_s(pid)
            except OSError:  # it has ended
                continue
            used[name], self._clocks[name] = max(0.0, now_s - self._clocks[name]), now_s
        # The machine counts busy time in steps, so either count may be ahead of the other for a moment.
        self._claimed_s += sum(used.values())
        ahead_s = node_busy_s() - self._busy_s - self._claimed_s
        used[OTHER] = max(0.0, ahead_s - self._ahead_s)
        self._ahead_s = max(self._ahead_s, ahead_s)
        return used


# --- processors ------------------------------------------------------------------------------------------------


#: What a package and its memory draw in any case.
IDLE_W = {"cpu": 40.0, "dram": 8.0}


@dataclass(frozen=True, kw_only=True)
class PowerModel:
    """Watts of a package and its memory, by the cores that members keep busy.

    A package's dynamic power is ``uncore_w (1 - exp(-load / knee)) + core_w load**exponent``: the uncore wakes
    with the first load and is shared, and with more busy cores each is slower (turbo) or half a core (SMT), and
    costs less. With no uncore and an exponent of 1 it is linear. Memory's is the same for each busy core.
    Processes that are not members' add `core_w` and `dram_w` for each busy core, whatever the members do.

    Attributes:
        core_w, dram_w: of one busy core.
        uncore_w, knee: see above; `knee` in cores.
        exponent: at most 1.
        core_s: CPU-seconds of a member on this machine that are a second of one of the node's cores: where they
            are few, members have all the time that they want whatever else the machine does.
    """

    core_w: float = 12.0
    dram_w: float = 2.0
    uncore_w: float = 0.0
    knee: float = 0.25
    exponent: float = 1.0
    core_s: float = 1.0

    def dynamic_w(self, load: float) -> dict[str, float]:
        """Watts above idle by kind of part, of members who keep `load` cores busy."""
        package = self.uncore_w * -math.expm1(-load / self.knee) + self.core_w * load**self.exponent
        return {"cpu": package, "dram": self.dram_w * load}


LINEAR = PowerModel()
CONCAVE = PowerModel(uncore_w=8.0, knee=0.5, exponent=0.8, core_s=0.2)


class SyntheticProcessors(SyntheticNode):
    """One processor package and its memory, counted in files as the kernel's powercap has them, which wrap around.

    Args:
        root: an empty folder, which becomes the root of the powercap zones.
        model: its power.
    """

    def __init__(self, root: Path, model: PowerModel) -> None:
        super().__init__()
        self._model = model
        self._total_j = {"cpu": 0.0, "dram": 0.0}
        busy_w = model.uncore_w + (model.core_w + model.dram_w) * (os.cpu_count() or 1)
        self._range_uj = round(1e6 * max(2 * _WRAP_J, _RANGE_S * (sum(IDLE_W.values()) + busy_w)))
        package = root / "intel-rapl:0"
        zones = {"cpu": (package, "package-0"), "dram": (package / "intel-rapl:0:0", "dram")}
        self._files = {kind: _make_zone(folder, name, self._range_uj) for kind, (folder, name) in zones.items()}
        self._write()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for file in self._files.values():
            os.close(file)

    def _draw(self, elapsed_s: float, used: Mapping[str, float]) -> None:
        model, members = self._model, used.keys() - {DRIVER, OTHER}
        per_core = 1 / (elapsed_s * model.core_s)
        loads = {name: used[name] * self._loads[name].intensity * per_core for name in members}
        load = sum(loads.values())
        shared_w = model.dynamic_w(load)
        shares = {name: load.share for name, load in self._loads.items()}
        for kind, per_core_w in (("cpu", model.core_w), ("dram", model.dram_w)):
            dynamic_j = {name: shared_w[kind] * elapsed_s * own / load for name, own in loads.items() if load > 0}
            dynamic_j |= {name: per_core_w * used_s for name, used_s in used.items() if name not in members}
            idle_j = IDLE_W[kind] * elapsed_s
            self._truth.add(idle_j, shares, dynamic_j)
            self._total_j[kind] += idle_j + sum(dynamic_j.values())
        self._write()

    def _write(self) -> None:
        for kind, file in self._files.items():
            # as many digits each time, in one write: a reader sees the old count or the new one
            counted_uj = round((self._total_j[kind] - _WRAP_J) * 1e6) % self._range_uj
            os.pwrite(file, b"%015d\n" % counted_uj, 0)


def _make_zone(folder: Path, name: str, range_uj: int) -> int:
    """Makes a powercap zone; returns the descriptor of its counter."""
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n", encoding="utf-8")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n", encoding="utf-8")
    return os.open(folder / "energy_uj", os.O_CREAT | os.O_RDWR, 0o644)


# --- GPUs ------------------------------------------------------------------------------------------------------

GPU_IDLE_W = 60.0
_GPU_BUSY_W = 240.0  # beyond idle, of a GPU that computes all the time


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


class SyntheticGpus(SyntheticNode):
    """GPUs behind a stand-in for NVIDIA's library (`nvml_stand_in.c`).

    A member keeps its GPU busy in proportion to the CPU time that its process really has. Members of one GPU take
    turns on it, as processes without the Multi-Process Service do: while k of them have work each computes for 1/k
    of the time. An instance in MIG mode is its member's own. What a GPU draws beyond idle power goes by the time
    for which each member computes, times what its kernels draw.

    Args:
        state: file of the stand-in's state.
        number: of physical GPUs.
    """

    def __init__(self, state: Path, number: int) -> None:
        super().__init__()
        self._state = state
        self._energy_j = [0.0] * number
        self._percent = _zeros()  # of utilization that was not reported yet, below one percent
        self._launched_s = _zeros()  # of work that was launched and not computed yet
        self._unsampled_s = 0.0
        self._samples: deque[tuple[float, list[str]]] = deque()
        self._write()

    def _draw(self, elapsed_s: float, used: Mapping[str, float]) -> None:
        computed = self._compute(elapsed_s, used)
        for gpu, before_j in enumerate(self._energy_j):
            loads = {name: load for name, load in self._loads.items() if load.gpu == gpu}
            dynamic_j = {
                name: _GPU_BUSY_W * load.intensity * computed[name] * elapsed_s for name, load in loads.items()
            }
            shares = {name: load.share for name, load in loads.items()}
            self._truth.add(GPU_IDLE_W * elapsed_s, shares, dynamic_j)
            self._energy_j[gpu] = before_j + GPU_IDLE_W * elapsed_s + sum(dynamic_j.values())
        self._sample(elapsed_s, computed)
        self._write()

    def _compute(self, elapsed_s: float, used: Mapping[str, float]) -> dict[str, float]:
        """The share of a physical GPU's time for which each member computes."""
        demands = {}
        for name, load in self._loads.items():
            # a process that catches up on a core launches more than the GPU can do at once
            self._launched_s[name] += load.per_cpu_s * used.get(name, 0.0)
            demands[name] = min(1.0, self._launched_s[name] / elapsed_s)
            self._launched_s[name] -= demands[name] * elapsed_s
        shares = {name: demands[name] * (load.instance or 0.0) for name, load in self._loads.items()}
        for gpu in range(len(self._energy_j)):
            names = [name for name, load in self._loads.items() if load.gpu == gpu and load.instance is None]
            shares |= dict(zip(names, take_turns([demands[name] for name in names]), strict=True))
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
                self._percent[name] += 100 * share
                percent = int(self._percent[name])
                self._percent[name] -= percent
                on = f"GPU-{self._loads[name].gpu} util {self._pids[name]}"
                lines.append(f"{on} {percent} {round(now * 1e6) - age}")
            self._samples.append((now, lines))
        while self._samples and self._samples[0][0] < now - _KEPT_S:
            self._samples.popleft()

    def _write(self) -> None:
        lines = [f"GPU-{gpu} energy {round(1e3 * joules)}" for gpu, joules in enumerate(self._energy_j)]
        lines += [f"GPU-{load.gpu} process {self._pids[name]} 1" for name, load in self._loads.items()]
        lines += [line for _, sample in self._samples for line in sample]
        new = self._state.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(new, self._state)
