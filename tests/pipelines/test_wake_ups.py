"""One wake-up serves all readers of a ring: nobody sleeps through it, and nobody waits for one who was killed.

`python tests/pipelines/test_wake_ups.py SEED EPOCHS` is a storm: readers and feeders of a small ring are killed
at random moments, some of them within a wake-up. It prints what each reader that was spared has read, as a
digest, and its `stats()`. They wait for the feeder without a time limit (`forked_children`): a wake-up that is
lost, or somebody who waits for one who is dead, is a run that does not end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_pipes import LIMIT_S, record
from forked_children import Child, Say, pipeline

from pipelines import Feeder, attach
from pipelines.ipc.child_processes import child_environment
from pipelines.loader import stream_client

# The ring has room for one batch and a block, so there is no later wake-up that makes up for one that is lost.
N, CAPACITY, BLOCK = 62, 24, 4
SIZES = (20, 20, 17)  # batches of those that are spared


def digest(batches: Any) -> str:
    return hashlib.sha256(json.dumps([record(batch) for batch in batches], sort_keys=True).encode()).hexdigest()


def _feed(address: str, expect: int, say: Say, listening: int) -> None:
    with Feeder(pipeline("noise", N), capacity=CAPACITY, block=BLOCK, address=address, expect=expect):
        say(ready=True)
        threading.Event().wait()


def _read(address: str, size: int, epochs: Any, say: Say, listening: int) -> None:
    loader = attach(address, pipeline("noise", N), size, epochs, name=str(os.getpid()))

    def tell() -> Iterator[Any]:
        for batch in loader:
            say(step=batch.step)
            yield batch

    say(digest=digest(tell()), stats=loader.stats())


def storm(seed: int, epochs: int) -> list[dict[str, Any]]:
    """Run it; returns what the spared readers say at their end."""
    draw, children = random.Random(seed), list[Child]()

    def fork(body: Any, *args: Any) -> Child:
        children.append(Child(functools.partial(body, *args)))
        return children[-1]

    with tempfile.TemporaryDirectory() as directory:
        address = str(Path(directory) / "socket")
        feeder = fork(_feed, address, len(SIZES))
        while not feeder.lines():
            time.sleep(0.001)
        spared = [fork(_read, address, size, range(epochs)) for size in SIZES]
        heard: set[Child] = set()  # since they were all heard
        ended: dict[Child, dict[str, Any]] = {}
        try:
            while len(ended) < len(spared):
                victim = fork(_read, address, draw.choice((4, 16, 20)), 1000)
                time.sleep(draw.expovariate(1 / 0.02))
                for child in spared:
                    messages = child.lines()
                    assert not any("error" in message for message in messages), messages
                    heard.update([child] * bool(messages))
                    ended.update((child, message) for message in messages if "digest" in message)
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


CASES = [(0, 60), *(pytest.param(seed, 400, marks=pytest.mark.more) for seed in (1, 2))]
CASES += [pytest.param(seed, 400, marks=pytest.mark.chaos) for seed in range(100, 150)]


@pytest.mark.parametrize(("seed", "epochs"), CASES)
def test_a_killed_reader_or_feeder_takes_no_wake_up_along(seed: int, epochs: int) -> None:
    command = [sys.executable, "-W", "ignore", __file__, str(seed), str(epochs)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=child_environment(), start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # they have ended, as they should
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    for size, spared in zip(SIZES, json.loads(output), strict=True):
        assert spared["digest"] == digest(pipeline("noise", N).loader(size, range(epochs)))
        assert spared["stats"]["shared_batches"] > 0


def test_a_reader_that_others_wake_all_the_time_still_says_that_it_waits(tmp_path: Path, monkeypatch: Any) -> None:
    """Its batch is ready after 600 samples of 3 ms; another one is woken for every few of them."""
    monkeypatch.setattr(stream_client, "_WAIT_S", 0.4)
    made, begun, waits = pipeline("noise", 600, 0.003), threading.Event(), list[bool]()

    def read_all() -> None:
        for _ in attach(feeder.address, made, 4, 1, name="other"):
            begun.set()

    with Feeder(made, capacity=800, block=4, address=tmp_path / "socket", expect=2) as feeder:
        other = threading.Thread(target=read_all)
        other.start()
        late = attach(feeder.address, made, 600, 1, name="late", on_wait=lambda: waits.append(begun.is_set()))
        next(iter(late))
        other.join()
        late.close()
    assert sum(waits) >= 2


if __name__ == "__main__":
    print(json.dumps(storm(int(sys.argv[1]), int(sys.argv[2]))))
