"""Workers, consumers and feeders are killed and stopped at random, seeded points; `chaos.py` says what is checked.

A seed that fails is run again alone by `python tests/pipelines/chaos.py SEED`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.ipc.child_processes import child_environment

QUICK = (31, 36, 40)  # between them every fault and every kind of consumer
MORE = range(10)
MANY = range(100, 200)


class Conductor:
    """A process that runs seeds, so that neither its forks nor what they leave concern this one."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("chaos.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(), text=True
        )

    def run(self, seed: int) -> dict[str, Any]:
        """What happened."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        outcome: dict[str, Any] = json.loads(self._process.stdout.readline())
        return outcome

    def close(self) -> None:
        """End it; it has nothing to say any more."""
        out, _ = self._process.communicate(timeout=300)
        assert (out, self._process.returncode) == ("", 0)


@pytest.fixture(scope="module")
def conductor() -> Iterator[Conductor]:
    made = Conductor()
    yield made
    made.close()


def check(outcome: dict[str, Any]) -> None:
    """Show the plan and what was done, where something has gone wrong."""
    if outcome["error"] is not None:
        again = f"python tests/pipelines/chaos.py {outcome['seed']}"
        story = "\n".join(outcome["events"])
        pytest.fail(f"{outcome['error']}\n\n{outcome['plan']}\n\n{story}\n\nagain, alone: {again}", pytrace=False)
    assert outcome["batches"] > 0


@pytest.mark.parametrize(
    "seed",
    [
        *QUICK,
        *(pytest.param(seed, marks=pytest.mark.more) for seed in MORE),
        *(pytest.param(seed, marks=pytest.mark.chaos) for seed in MANY),
    ],
)
def test_everyone_reads_everything_once_whoever_is_killed_or_stopped(seed: int, conductor: Conductor) -> None:
    check(conductor.run(seed))
