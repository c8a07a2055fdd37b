"""A node whose true power is known: a model of power, driven by the CPU clocks of real processes.

The node has one processor package and its memory. A thread reads the clocks of the processes some forty times a
second, integrates the power that the model gives for their load, and counts it up in files as the kernel's
powercap has them (`ensemble.meter.power.rapl`), which wrap around as its counters do. It keeps what each process
truly cost. It goes by the CPU time that processes really had, so it does not matter what else the machine does.
"""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from benchmarks.energy.truth import IDLE, OTHER, Truth
from ensemble.bench.pipelines.processes import process_clock_s
from ensemble.meter.power.estimate import node_busy_s

if TYPE_CHECKING:
    from benchmarks.energy.synthetic_gpus import SyntheticGpus

PERIOD_S = 0.025
_WRAP_J = 20.0  # the counters wrap for the first time so many joules after they were made
_RANGE_S = 10.0  # and again after so many seconds of the most power that the machine's cores can draw


@dataclass(frozen=True, kw_only=True)
class PowerModel:
    """Watts of a package and its memory, by the cores that members keep busy.

    A package's dynamic power is ``uncore_w (1 - exp(-load / knee)) + core_w load**exponent``: the uncore wakes
    with the first load and is shared, and with more busy cores each is slower (turbo) or half a core (SMT), and
    costs less. With no uncore and an exponent of 1 it is linear. Memory's is the same for each busy core.
    Processes that are not members' add `core_w` and `dram_w` for each busy core, whatever the members do.

    Attributes:
        cpu_idle_w, dram_idle_w: what each draws in any case.
        core_w, dram_w: of one busy core.
        uncore_w, knee: see above; `knee` in cores.
        exponent: at most 1.
        core_s: CPU-seconds of a member on this machine that are a second of one of the node's cores: where they
            are few, members have all the time that they want whatever else the machine does.
    """

    cpu_idle_w: float = 40.0
    dram_idle_w: float = 8.0
    core_w: float = 12.0
    dram_w: float = 2.0
    uncore_w: float = 0.0
    knee: float = 0.25
    exponent: float = 1.0
    core_s: float = 1.0

    @property
    def idle_w(self) -> dict[str, float]:
        """Idle watts by kind of part."""
        return {"cpu": self.cpu_idle_w, "dram": self.dram_idle_w}

    def dynamic_w(self, load: float) -> dict[str, float]:
        """Watts above idle by kind of part, of members who keep `load` cores busy."""
        package = self.uncore_w * -math.expm1(-load / self.knee) + self.core_w * load**self.exponent
        return {"cpu": package, "dram": self.dram_w * load}


LINEAR = PowerModel()
CONCAVE = PowerModel(uncore_w=8.0, knee=0.5, exponent=0.8, core_s=0.2)


class SyntheticNode:
    """See the module's docstring. The counters grow while the context is open.

    Args:
        root: an empty folder, which becomes the root of the powercap zones.
        model: its power.
        others: names of processes that are not members'.
        gpus: are driven by the same processes, and account for themselves.
    """

    def __init__(
        self,
        root: Path,
        model: PowerModel,
        others: frozenset[str] = frozenset(),
        gpus: SyntheticGpus | None = None,
    ) -> None:
        self._model = model
        self._others = others
        self._gpus = gpus
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._clocks: dict[str, float] = {}
        self._claimed_s = self._ahead_s = 0.0
        self._last, self._busy_s = time.monotonic(), node_busy_s()
        self._shares: dict[str, float] = {}
        self._intensities: dict[str, float] = {}
        self._idle_j: dict[str, float] = {IDLE: 0.0}
        self._dynamic_j: dict[str, float] = {OTHER: 0.0}
        self._cpu_s: dict[str, float] = {OTHER: 0.0}
        self._total_j = {"cpu": 0.0, "dram": 0.0}
        most_w = (
            sum(model.idle_w.values()) + model.uncore_w + (model.core_w + model.dram_w) * (os.cpu_count() or 1)
        )
        self._range_uj = round(1e6 * max(2 * _WRAP_J, _RANGE_S * most_w))
        package = root / "intel-rapl:0"
        self._files = {
            "cpu": _make_zone(package, "package-0", self._range_uj),
            "dram": _make_zone(package / "intel-rapl:0:0", "dram", self._range_uj),
        }
        self._write()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="synthetic node", daemon=True)

    def __enter__(self) -> SyntheticNode:
        self._last, self._busy_s = time.monotonic(), node_busy_s()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        for file in self._files.values():
            os.close(file)

    def add(self, name: str, pid: int, since_s: float = 0.0, share: float = 0.0, intensity: float = 1.0) -> None:
        """Lets a process draw power for the CPU time that it uses beyond its first `since_s` seconds.

        Args:
            share: of the node, that it reserves from now on.
            intensity: the load of a core that a member keeps busy: its power over that of usual work.
        """
        with self._lock:
            self._advance()
            self._shares[name], self._intensities[name] = share, intensity
            self._pids[name], self._clocks[name] = pid, since_s
            self._dynamic_j.setdefault(name, 0.0)
            self._cpu_s.setdefault(name, 0.0)

    def read(self) -> Truth:
        """What it has used up to this moment, which the counters then show as well."""
        with self._lock:
            self._advance()
            energy_j = sum(self._total_j.values())
            return Truth(energy_j, dict(self._idle_j), dict(self._dynamic_j), dict(self._cpu_s))

    def read_gpus(self) -> Truth:
        """As `read`, of the GPUs."""
        with self._lock:
            self._advance()
            assert self._gpus is not None
            return self._gpus.read(self._cpu_s)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            with self._lock:
                self._advance()

    def _advance(self) -> None:
        now = time.monotonic()
        elapsed_s, self._last = now - self._last, now
        if elapsed_s <= 0:
            return
        used = self._read_clocks()
        members = {name: used_s for name, used_s in used.items() if name != OTHER and name not in self._others}
        rest = {name: used_s for name, used_s in used.items() if name not in members}
        per_core = 1 / (elapsed_s * self._model.core_s)
        loads = {name: used_s * self._intensities[name] * per_core for name, used_s in members.items()}
        load = sum(loads.values())
        shared_w = self._model.dynamic_w(load)
        for kind, per_core_w in (("cpu", self._model.core_w), ("dram", self._model.dram_w)):
            shared_j, idle_j = shared_w[kind] * elapsed_s, self._model.idle_w[kind] * elapsed_s
            for name, own in loads.items():
                self._dynamic_j[name] += shared_j * own / load if load > 0 else 0.0
            for name, used_s in rest.items():
                self._dynamic_j[name] += per_core_w * used_s
            for name, share in {**self._shares, IDLE: 1 - sum(self._shares.values())}.items():
                self._idle_j[name] = self._idle_j.get(name, 0.0) + idle_j * share
            self._total_j[kind] += idle_j + shared_j + per_core_w * sum(rest.values())
        self._write()
        if self._gpus is not None:
            self._gpus.advance(elapsed_s, members)

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
        for name, used_s in used.items():
            self._cpu_s[name] += used_s
        return used

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
