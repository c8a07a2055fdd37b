"""How long a consumer waits because of another: `python tests/pipelines/pauses.py [REPETITIONS [WINDOW_S]]`.

One consumer takes a batch of 32 every 4 ms from a ring that its feeder keeps full. Meanwhile others join, leave
and are killed, and a preparation worker of two is. For each event: the longest time that a batch took to come in
the window (0.3 s) after it, and, to compare, in the one before; medians over the repetitions, ms. Prints a table,
then the rows as a JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from chaos_checks import children
from chaos_processes import Child, Say

from pipelines import Batch, Pipeline, attach, sources
from pipelines.feeder.process import FeederProcess, spawn

STEP_S = 0.004
BATCH = 32
WITHOUT_END = 1 << 20


def images() -> Pipeline:
    source = sources.arrays(id="pauses", image=np.zeros((512, 3, 64, 64), np.float32), label=np.arange(512))
    return Pipeline(source, seed=0)


class Observer:
    """The consumer that measures."""

    def __init__(self, address: str, pipeline: Pipeline, window_s: float) -> None:
        self.window_s = window_s
        self.loader = attach(address, pipeline, BATCH, range(WITHOUT_END), name="observer")
        self._batches: Iterator[Batch] = iter(self.loader)

    def longest_ms(self, seconds: float | None = None) -> float:
        """The longest that a batch took, over a while: the window if nothing else is said."""
        end, longest = time.monotonic() + (self.window_s if seconds is None else seconds), 0.0
        while time.monotonic() < end:
            began = time.perf_counter()
            next(self._batches)
            longest = max(longest, time.perf_counter() - began)
            time.sleep(STEP_S)
        return longest * 1e3


def other(address: str, pipeline: Pipeline, step_s: float) -> Child:
    """Another consumer, which joins when it is asked to end its waiting, and leaves when it is sent SIGTERM."""

    def body(say: Say, listening: int) -> None:
        left: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: left.append(1))
        os.read(listening, 1)
        loader = attach(address, pipeline, BATCH, WITHOUT_END)
        for batch in loader:
            if not batch.step:
                say(epoch=batch.epoch)
            time.sleep(step_s)
            if left:
                loader.close()
                break
        signal.pause()

    return Child(body)


def wait_for(child: Child, observer: Observer) -> None:
    """Until it reads the stream, too."""
    while not child.lines():
        observer.longest_ms(0.02)


def measure(
    feeder: FeederProcess, observer: Observer, pipeline: Pipeline, repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """event -> [(before, after), ...] in ms."""
    seen: dict[str, list[tuple[float, float]]] = {}

    def note(event: str, happen: Callable[[], None]) -> None:
        before = observer.longest_ms()
        happen()
        seen.setdefault(event, []).append((before, observer.longest_ms()))

    for _ in range(repetitions):
        # Forked before it is measured: a fork is the forking process's own pause.
        leaver, victim = (other(feeder.address, pipeline, STEP_S) for _ in range(2))
        note("join", leaver.ask_to_end)
        wait_for(leaver, observer)
        note("leave", lambda child=leaver: child.signal(signal.SIGTERM))  # type: ignore[misc]
        victim.ask_to_end()
        wait_for(victim, observer)
        note("kill", lambda child=victim: child.signal(signal.SIGKILL))  # type: ignore[misc]
        leaver.close()
        victim.close()
        worker = min(children(feeder.pid))
        note("kill worker", lambda pid=worker: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
        observer.longest_ms(3 * observer.window_s)  # its successor starts
    return seen


def main(repetitions: int = 7, window_s: float = 0.3) -> int:
    torch.set_num_threads(1)
    pipeline = images()
    feeder = spawn(pipeline, capacity=256, workers=2)
    observer = Observer(feeder.address, pipeline, window_s)
    observer.longest_ms(1.0)
    seen = measure(feeder, observer, pipeline, repetitions)
    if observer.loader.stats()["private_batches"]:
        print(f"the observer had to work alone: {observer.loader.stats()}", file=sys.stderr)
        return 1
    observer.loader.close()
    feeder.stop()
    rows = {
        event: [round(statistics.median(side), 2) for side in zip(*pairs, strict=True)]
        for event, pairs in seen.items()
    }
    print(f"{'event':14}{'before':>10}{'after':>10}   longest wait for a batch, ms, median of {repetitions}")
    for event, (before, after) in rows.items():
        print(f"{event:14}{before:10.2f}{after:10.2f}")
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:3])))
