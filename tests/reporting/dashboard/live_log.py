"""The log of a run of a thousand members of which 64 train now, and a writer that goes on with it in bursts.

Events have the fields of real ones; a thread appends them as the controller does, and holds the controller's lock.
"""

from __future__ import annotations

import fcntl
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from event_dicts import lines
from run_events import VERSIONS, epoch_fields, identity

Event = dict[str, Any]

MEMBERS, EPOCHS, RUNNING, NODES = 1000, 20, 64, 8
BURST_S = 0.2
EPOCH_S = 20.0  # of a member that ended before the watching began


class LiveLog:
    """A run directory whose log grows.

    Args:
        epoch_s: how long an epoch of a member that trains now takes, by the log's clock.
        begin_s: seconds before now at which the bursts begin, by the log's clock.
    """

    def __init__(self, path: Path, epoch_s: float, begin_s: float = 0.0) -> None:
        self.path, self.epoch_s = path, epoch_s
        self.now = time.time() - begin_s
        self.written: list[tuple[float, int]] = []
        self._rng = random.Random(1)
        self._epochs = dict.fromkeys(self.running(), 1)
        self._cpu_s = 0.0
        self._tick = 0
        path.mkdir(parents=True)
        (path / "requests").mkdir(mode=0o700)
        (path / "members").mkdir()
        self._file = open(path / "events.jsonl", "a")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._append(self._past())

    def running(self) -> range:
        """The numbers of the members that train now."""
        return range(MEMBERS - RUNNING, MEMBERS)

    def close(self) -> None:
        """Lets go of the lock."""
        self._file.close()

    def write(self, bursts: int, *, at_once: int = 1, while_true: threading.Event | None = None) -> int:
        """Appends bursts, five times a second in real time.

        Args:
            at_once: bursts that are written together: time passes so many times as fast.
            while_true: ends when it is cleared.

        Returns:
            The number of events.
        """
        many, due = 0, time.monotonic()
        for _ in range(bursts // at_once):
            if while_true is not None and not while_true.is_set():
                break
            events = [event for _ in range(at_once) for event in self._burst()]
            self._append(events)
            self.written.append((time.time(), self._file.tell()))
            many += len(events)
            due += BURST_S
            time.sleep(max(0.0, due - time.monotonic()))
        return many

    def _append(self, events: Iterator[Event] | list[Event]) -> None:
        self._file.write(lines(events).decode())
        self._file.flush()

    def _past(self) -> Iterator[Event]:
        """All that came before: the members before the last 64 have finished, these have trained an epoch."""
        began = self.now - (MEMBERS / RUNNING) * EPOCHS * EPOCH_S
        head: Event = {"name": "digits", "run_id": "r-1", "executor": "local", "mode": "list"}
        head |= {"objective": "accuracy", "direction": "max", "epochs": EPOCHS, "members": MEMBERS}
        head |= {"versions": VERSIONS, "revision": "4f2a91c", "host": "atlas", "pid": 4242, "resumed": False}
        yield {"t": began, "type": "run_started", **head}
        for node in range(NODES):
            power = {"source": "12 W per busy core", "origin": "estimated"}
            yield {
                "t": began,
                "type": "node",
                "node": f"node-{node}",
                "cpus": 16,
                "gpus": [],
                "memory_gb": 64.0,
                "power": power,
            }
        for number in range(MEMBERS):
            width, rate = 16 * 2 ** (number % 4), (0.1, 0.03)[number // 4 % 2]
            params = {"width": width, "lr": rate, "optimizer": ("sgd", "adam")[number % 2]}
            yield {"t": began, "type": "member", **identity(number, params, 10_000)}
        for number in range(MEMBERS):
            yield from self._member(number, began + number // RUNNING * EPOCHS * EPOCH_S)

    def _member(self, number: int, t: float) -> Iterator[Event]:
        who = {"member": f"member-{number}", "attempt": 0}
        place = {"node": f"node-{number % NODES}", "devices": [number // NODES % 8], "cohort": number // RUNNING}
        yield {"t": t, "type": "placed", **who, **place, "feeder": "/run/f", "first_epoch": 0}
        yield {"t": t, "type": "started", **who, "pid": 500, "epoch": 0, "step": 0, "startup_cpu_s": 1.2}
        last = 1 if number in self.running() else EPOCHS
        for epoch in range(last):
            t += EPOCH_S
            yield {
                "t": t - 1,
                "type": "progress",
                **who,
                "epoch": epoch,
                "step": 20,
                "steps": 40,
                "samples_per_s": 250,
            }
            yield (done := {"t": t, "type": "epoch", **who, "epoch": epoch} | self._metrics(number, epoch))
            yield {
                "t": t,
                "type": "checkpoint",
                **who,
                "epoch": epoch + 1,
                "step": 0,
                "path": "c",
                "weights_sha256": "a",
            }
            yield self._usage(t, number, 0.93 * EPOCH_S * (epoch + 1))
        if last == EPOCHS:
            yield {
                "t": t,
                "type": "finished",
                **who,
                "epoch": EPOCHS,
                "metrics": done["metrics"],
                "weights_sha256": "a",
            }

    def _metrics(self, number: int, epoch: int) -> Event:
        return epoch_fields(self._rng, number, epoch, EPOCH_S)

    def _usage(self, t: float, number: int, cpu_s: float) -> Event:
        who = {"node": f"node-{number % NODES}", "member": f"member-{number}", "rank": 0, "pid": 500}
        return {"t": t, "type": "usage", **who, "role": "train", "cpu_s": cpu_s, "origin": "measured"}

    def _burst(self) -> Iterator[Event]:
        """What happens within a fifth of a second: about 20 events of members, feeders and meters."""
        self._tick += 1
        self.now += BURST_S
        self._cpu_s += BURST_S
        each_s = {"progress": 1.0, "epoch": self.epoch_s, "usage": 2.0}
        for k, number in enumerate(self.running()):
            who = {"member": f"member-{number}", "attempt": 0, "epoch": self._epochs[number]}
            due = {name: self._is_due(k, RUNNING, every_s) for name, every_s in each_s.items()}
            if due["epoch"]:
                yield {"t": self.now, "type": "epoch", **who} | self._metrics(number, self._epochs[number])
                self._epochs[number] += 1
            elif due["progress"]:
                step = self._tick % 40
                yield {
                    "t": self.now,
                    "type": "progress",
                    **who,
                    "step": step,
                    "steps": 40,
                    "samples_per_s": 250 + step,
                }
            if due["usage"]:
                yield self._usage(self.now, number, 20 + 0.93 * self._cpu_s)
        for k in range(NODES):
            if self._is_due(k, NODES, 2.0):
                watts = 40 + 20 * self._rng.random()
                source = {"origin": "estimated", "source": "12 W per busy core"}
                yield {
                    "t": self.now,
                    "type": "power",
                    "node": f"node-{k}",
                    "watts": watts,
                    "energy_j": 2 * watts,
                    **source,
                }
                many = 5000 * self._tick
                count = {"prepared": many, "consumed": 7 * many, "skipped": 0, "restarts": 0, "detached": 0}
                count |= {"workers": 2, "capacity": 512, "ring_bytes": 512 * 12_300}
                levels = {"fullness": {"ring": self._rng.random(), "workers": 0.9, "waiting": 0.1}}
                cohort = (MEMBERS - 1) // RUNNING
                yield {"t": self.now, "type": "feeder", "node": f"node-{k}", "cohort": cohort, **count, **levels}

    def _is_due(self, k: int, of: int, every_s: float) -> bool:
        """Whether it is the turn of the k-th of so many, that take turns evenly within a period."""
        ticks = round(every_s / BURST_S)
        return self._tick % ticks == k * ticks // of
