"""A storm: readers and feeders of a small ring are killed at random moments, some of them within a wake-up.

`python tests/pipelines/wake_ups.py SEED EPOCHS` prints a JSON line: what the readers that were spared have read,
as one digest each, and their `stats()`. They wait for the feeder without a time limit (`forked_children`): a
wake-up that is lost, or somebody who waits for one who is dead, is a run that does not end.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked_children import Child, Say, pipeline, record

from pipelines import Feeder, attach

# The ring has room for one batch and a block, so there is no later wake-up that makes up for one that is lost.
N, CAPACITY, BLOCK = 62, 24, 4
SIZES = (20, 20, 17)  # batches of those that are spared


def digest(batches: Any) -> str:
    """Of all batches, to the last bit."""
    return hashlib.sha256(json.dumps([record(batch) for batch in batches]).encode()).hexdigest()


def _feed(address: str, expect: int, say: Say, listening: int) -> None:
    with Feeder(pipeline("noise", N, 0.0), capacity=CAPACITY, block=BLOCK, address=address, expect=expect):
        say(ready=True)
        threading.Event().wait()


def _read(address: str, size: int, epochs: Any, say: Say, listening: int) -> None:
    loader = attach(address, pipeline("noise", N, 0.0), size, epochs, name=str(os.getpid()))

    def tell() -> Iterator[Any]:
        for batch in loader:
            say(step=batch.step)
            yield batch

    say(digest=digest(tell()), stats=loader.stats())


def _listen(child: Child) -> list[dict[str, Any]]:
    said = child.lines()
    for each in said:
        assert "error" not in each, each["error"]
    return said


def storm(seed: int, epochs: int) -> list[dict[str, Any]]:
    """Run it; returns what the spared readers say at their end."""
    draw = random.Random(seed)
    children: list[Child] = []

    def fork(body: Any, *args: Any) -> Child:
        children.append(Child(functools.partial(body, *args)))
        return children[-1]

    with tempfile.TemporaryDirectory() as directory:
        address = str(Path(directory) / "socket")
        feeder = fork(_feed, address, len(SIZES))
        while not _listen(feeder):
            time.sleep(0.001)
        spared = [fork(_read, address, size, range(epochs)) for size in SIZES]
        heard: set[Child] = set()  # since they were all heard
        ended: dict[Child, dict[str, Any]] = {}
        try:
            while len(ended) < len(spared):
                victim = fork(_read, address, draw.choice((4, 16, 20)), 1000)
                time.sleep(draw.expovariate(1 / 0.02))
                for child in spared:
                    said = _listen(child)
                    heard.update([child] * bool(said))
                    ended.update((child, each) for each in said if "digest" in each)
                killed = [victim]
                if len(heard) == len(spared):  # the feeder's end would help those who have slept through a wake-up
                    heard = set(ended)
                    killed += [feeder] * (draw.random() < 0.1)
                for child in killed:
                    child.close()
                    children.remove(child)
                if feeder not in children:
                    feeder = fork(_feed, address, 0)
            return [ended[child] for child in spared]
        finally:
            for child in children:
                child.close()


if __name__ == "__main__":
    print(json.dumps(storm(int(sys.argv[1]), int(sys.argv[2]))))
