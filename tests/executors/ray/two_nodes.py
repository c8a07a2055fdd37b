"""What the tests of members on two nodes share: how a driver is run, and the weights that are expected."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import fold, read_events
from kit.finished_runs import hashes

import ensemble
from ensemble import Ensemble
from ensemble.store import RunState

Weights = dict[str, str | None]
Event = dict[str, Any]


def wait_for_nodes(environment: dict[str, str], count: int) -> None:
    """Wait until so many nodes are alive."""
    asks = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    until = time.monotonic() + 300
    while True:
        done = subprocess.run([sys.executable, "-c", asks], env=environment, capture_output=True, text=True)
        if done.stdout.strip() == str(count):
            return
        assert time.monotonic() < until, done.stderr[-2000:]


def drive(
    command: Sequence[str],
    environment: dict[str, str],
    run_dir: Path,
    meanwhile: Callable[[list[Event]], bool] | None,
) -> RunState:
    """Run a driver to its end; `meanwhile` is shown the events until it says that it has seen enough."""
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    log = run_dir / "events.jsonl"
    try:
        while meanwhile is not None and driver.poll() is None:
            if log.exists() and meanwhile(read_events(log)):
                meanwhile = None
            time.sleep(0.05)
        _, said = driver.communicate()
    finally:
        driver.kill()
    assert driver.returncode == 0, said
    assert meanwhile is None or meanwhile(read_events(log)), "the run was over before"
    return fold(read_events(log))


def expect_weights(
    factory: pytest.TempPathFactory, executor: str, declare: Callable[[int], Ensemble]
) -> Callable[[int], Weights]:
    known: dict[int, Weights] = {}

    def after(epochs: int) -> Weights:
        if epochs not in known:
            path = factory.mktemp("alone") / "run"
            ensemble.submit(declare(epochs), path, executor=executor).wait()
            known[epochs] = hashes(path)
        return known[epochs]

    return after
