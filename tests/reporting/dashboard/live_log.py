"""The log of a run of a thousand members of which 64 train now, which goes on in bursts under the log's lock."""

from __future__ import annotations

import fcntl
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.event_dicts import lines
from kit.run_events import Log, epoch_fields, identity, run_started

Event = dict[str, Any]

MEMBERS, EPOCHS, RUNNING, NODES = 1000, 20, 64, 8
BURST_S = 0.2
EPOCH_S = 20.0  # of a member that ended before the watching began


class LiveLog:
    """A run directory whose log grows: an epoch of what trains takes `epoch_s`; it begins `begin_s` before now."""

    def __init__(self, path: Path, epoch_s: float, begin_s: float = 0.0) -> None:
        self.path, self.epoch_s, self.now = path, epoch_s, time.time() - begin_s
        self.written: list[tuple[float, int]] = []
        self._rng, self._tick = random.Random(1), 0
        self._epochs = dict.fromkeys(range(MEMBERS - RUNNING, MEMBERS), 1)
        for name in ("requests", "members"):
            (path / name).mkdir(mode=0o700, parents=True)
        self._file = open(path / "events.jsonl", "ab", buffering=0)  # noqa: SIM115
        self.close = self._file.close
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(lines([*self._past()]))

    def write(self, bursts: int, *, at_once: int = 1, until: threading.Event | None = None) -> None:
        """Appends bursts, so many together, five times a second in real time, until it has ended."""
        due = time.monotonic()
        for _ in range(bursts // at_once):
            if until is not None and until.is_set():
                break
            self._file.write(lines([event for _ in range(at_once) for event in self._burst()]))
            self.written.append((time.time(), self._file.tell()))
            due += BURST_S
            time.sleep(max(0.0, due - time.monotonic()))

    def _past(self) -> Iterator[Event]:
        began, log = self.now - (MEMBERS / RUNNING) * EPOCHS * EPOCH_S, Log()
        run_started(log, "digits", "list", EPOCHS, MEMBERS)
        power = {"source": "12 W per busy core", "origin": "estimated"}
        for node in range(NODES):
            log.add(0.0, "node", node=f"node-{node}", cpus=16, gpus=[], memory_gb=64.0, power=power)
        for number in range(MEMBERS):
            params = {"width": 16 * 2 ** (number % 4), "lr": (0.1, 0.03)[number // 4 % 2]}
            log.add(0.0, "member", **identity(number, params | {"optimizer": ("sgd", "adam")[number % 2]}, 10_000))
        yield from ({**event, "t": began} for event in log.entries)
        for number in range(MEMBERS):
            t = began + number // RUNNING * EPOCHS * EPOCH_S
            who = {"member": f"member-{number}", "attempt": 0}
            place = {"node": f"node-{number % NODES}", "devices": [number // NODES % 8], "feeder": "/run/f"}
            yield {"t": t, "type": "placed", **who, **place, "cohort": number // RUNNING, "first_epoch": 0}
            yield {"t": t, "type": "started", **who, "pid": 500, "epoch": 0, "step": 0, "startup_cpu_s": 1.2}
            saved = {"step": 0, "path": "c", "weights_sha256": "a"}
            for epoch in range(1 if number in self._epochs else EPOCHS):
                t += EPOCH_S
                yield self._progress(t - 1, number, epoch, step=20)
                yield (done := self._epoch(t, number, epoch))
                yield {"t": t, "type": "checkpoint", **who, "epoch": epoch + 1, **saved}
                yield self._usage(t, number, 0.93 * EPOCH_S * (epoch + 1))
            if number not in self._epochs:
                end = {"epoch": EPOCHS, "metrics": done["metrics"], "weights_sha256": "a"}
                yield {"t": t, "type": "finished", **who, **end}

    def _progress(self, t: float, number: int, epoch: int, step: int) -> Event:
        where = {"member": f"member-{number}", "attempt": 0, "epoch": epoch, "step": step, "steps": 40}
        return {"t": t, "type": "progress", **where, "samples_per_s": 230 + step}

    def _epoch(self, t: float, number: int, epoch: int) -> Event:
        where = {"member": f"member-{number}", "attempt": 0, "epoch": epoch}
        return {"t": t, "type": "epoch", **where, **epoch_fields(self._rng, number, epoch, EPOCH_S)}

    def _usage(self, t: float, number: int, cpu_s: float) -> Event:
        who = {"node": f"node-{number % NODES}", "member": f"member-{number}", "rank": 0, "pid": 500}
        return {"t": t, "type": "usage", **who, "role": "train", "cpu_s": cpu_s, "origin": "measured"}

    def _burst(self) -> Iterator[Event]:
        self._tick += 1
        self.now += BURST_S
        for k, (number, epoch) in enumerate([*self._epochs.items()]):
            if self._is_due(k, RUNNING, self.epoch_s):
                yield self._epoch(self.now, number, epoch)
                self._epochs[number] += 1
            elif self._is_due(k, RUNNING, 1.0):
                yield self._progress(self.now, number, epoch, step=self._tick % 40)
            if self._is_due(k, RUNNING, 2.0):
                yield self._usage(self.now, number, 20 + 0.93 * BURST_S * self._tick)
        for k in range(NODES):
            if self._is_due(k, NODES, 2.0):
                of, watts = {"t": self.now, "node": f"node-{k}"}, 40 + 20 * self._rng.random()
                many = 5000 * self._tick
                energy = {"watts": watts, "energy_j": 2 * watts, "source": "12 W per busy core"}
                yield {"type": "power", **of, **energy, "origin": "estimated"}
                count = {"prepared": many, "consumed": 7 * many, "skipped": 0, "restarts": 0, "detached": 0}
                count |= {"workers": 2, "capacity": 512, "ring_bytes": 512 * 12_300, "cohort": MEMBERS // RUNNING}
                levels = {"ring": self._rng.random(), "workers": 0.9, "waiting": 0.1}
                yield {"type": "feeder", **of, **count, "fullness": levels}

    def _is_due(self, k: int, of: int, every_s: float) -> bool:
        ticks = round(every_s / BURST_S)
        return self._tick % ticks == k * ticks // of
