"""Workers, consumers and feeders are killed at random, seeded points; then the ledger is checked.

Whoever was not killed has read each sample exactly once and to the last bit what it would have read alone;
whoever was killed resumes from its last record and completes the same reading; nothing is left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from core_pipes import Job, N, alone, gone, leaves_nothing, pipe, wait_until  # noqa: F401

from pipelines.crew import child_environment
from pipelines.feed import FeederProcess, spawn

EPOCHS = (0, 4)
STREAMING = """if True:
    import sys, time, json
    from core_pipes import Job, record, spoil
    job = Job(**json.loads(sys.argv[2]))
    for batch in job.attach(sys.argv[1]):
        print(json.dumps(record(batch)), flush=True)
        spoil(batch)
        time.sleep(job.pause_s)
"""


class Member:
    """A consumer process that is started again, where its records end, whenever it was killed."""

    def __init__(self, job: Job, address: str) -> None:
        self.job, self.address, self.lives = job, address, 0
        self.records: list[Any] = []
        self.start()

    def start(self) -> None:
        steps = -(-N // self.job.batch_size)
        epoch, step = divmod(len(self.records), steps)
        rest = dataclasses.replace(self.job, epochs=(EPOCHS[0] + epoch, EPOCHS[1]), start_step=step)
        self.lives += 1
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", STREAMING, self.address, json.dumps(dataclasses.asdict(rest))],
            stdout=subprocess.PIPE,
            env=child_environment(),
            cwd=Path(__file__).parent,
        )

    def kill(self) -> None:
        self.process.kill()
        self.take_rest()
        self.start()

    def take_rest(self) -> None:
        out, _ = self.process.communicate(timeout=60)
        # A torn last line is a batch that nobody trained on.
        self.records += [json.loads(line) for line in out.splitlines(keepends=True) if line.endswith(b"\n")]


def run(seed: int, directory: Path, kills: int) -> None:
    dice = random.Random(seed)
    address = str(directory / "socket")
    capacity, workers = dice.choice([16, 24, 40, 200]), dice.choice([1, 2])
    pids: set[int] = set()

    def feed() -> FeederProcess:
        return spawn(pipe("slow"), capacity=capacity, workers=workers, address=address, every_s=0.02)

    def prepare_pids() -> list[int]:
        try:
            children = [c.pid for c in psutil.Process(feeder.pid).children()]
        except psutil.NoSuchProcess:
            return []
        pids.update(children)
        return children

    feeder = feed()
    jobs = [
        Job(
            kind="slow",
            batch_size=dice.choice([5, 8, 13]),
            epochs=EPOCHS,
            name=f"m{i}",
            pause_s=dice.choice([0, 0.004]),
        )
        for i in range(2)
    ]
    members = [Member(job, address) for job in jobs]
    try:
        for _ in range(kills):
            time.sleep(dice.uniform(0.05, 0.6))
            victim = dice.choice(["worker", "worker", "member", "feeder"])
            if victim == "worker" and prepare_pids():
                os.kill(dice.choice(prepare_pids()), signal.SIGKILL)
            elif victim == "member":
                dice.choice(members).kill()
            else:
                prepare_pids()
                pids.add(feeder.pid)
                feeder.kill()
                if dice.random() < 0.5:
                    time.sleep(dice.uniform(0.0, 0.3))
                feeder.stop()
                feeder = feed()
        for member in members:
            member.take_rest()
            assert member.process.returncode == 0
        prepare_pids()
    finally:
        feeder.stop()
        for member in members:
            member.process.kill()
            member.process.communicate()
    for member in members:
        expected = alone(dataclasses.replace(member.job, name=""))
        assert member.records == expected, f"seed {seed}: member {member.job.name} read something else"
        for epoch in range(*EPOCHS):
            assert sorted(i for e, *_, index, _ in member.records if e == epoch for i in index) == list(range(N))
    wait_until(lambda: all(map(gone, [*pids, feeder.pid])))
    assert not os.path.exists(address)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "s"
    made.mkdir()
    yield made
    assert list(made.iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_everyone_reads_everything_once_whoever_is_killed(seed: int, directory: Path) -> None:
    run(seed, directory, kills=3)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 120))
def test_everyone_reads_everything_once_under_many_kills(seed: int, directory: Path) -> None:
    run(seed, directory, kills=15)
