"""What the tests of members on two nodes share: waiting for the nodes, and the weights that are expected."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest

import ensemble
from ensemble import Ensemble
from ensemble.store import RunState, fold, read_events

Weights = dict[str, str | None]


def wait_for_nodes(
    environment: dict[str, str], count: int, on_host: Callable[[Sequence[str]], Sequence[str]] = list
) -> None:
    """Wait until so many nodes are alive; `on_host` makes of a command the one that runs it on the head's host."""
    asks = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    until = time.monotonic() + 120
    while True:
        command = on_host([sys.executable, "-c", asks])
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.stdout.strip() == str(count):
            return
        assert time.monotonic() < until, done.stderr[-2000:]


def weights(state: RunState) -> Weights:
    return {member.id: member.weights_sha256 for member in state.members.values()}


def expect_weights(
    factory: pytest.TempPathFactory, executor: str, declare: Callable[[int], Ensemble]
) -> Callable[[int], Weights]:
    """A function that returns the weights after so many epochs on this machine; each run is made once."""
    known: dict[int, Weights] = {}

    def after(epochs: int) -> Weights:
        if epochs not in known:
            path = factory.mktemp("alone") / "run"
            ensemble.submit(declare(epochs), path, executor=executor).wait()
            known[epochs] = weights(fold(read_events(path / "events.jsonl")))
        return known[epochs]

    return after
