"""`ensemble bench pipelines`: what sharing one pipeline saves, after Pittman et al., SC18.

Members train nothing here: each takes every batch, guarded as training gets it, and either does nothing
with it or waits a set time, which stands for an accelerator and uses no CPU (`step_ms`). Designs:

- `bare ring`: the limit, a program that does the same preparation and no more than a ring needs;
- `independent`: every member has a pipeline of its own, with its own preparation workers;
- `node`: one pipeline for all.

CPU-seconds are those of all processes of a run, from the first batch that any member held to the last,
read from the kernel's process clocks; `samples` counts what all members took in that time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ensemble.bench.readers import BARE, Config
from ensemble.meter import PowerMeter
from ensemble.spec import SpecError, unknown_name
from pipelines.crew import child_environment
from pipelines.errors import PipelineError
from pipelines.feed import FeederProcess, spawn

DESIGNS = (BARE, "node", "independent")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration's medians over the repeats; times in seconds, `step_ms` in milliseconds."""

    design: str
    members: int
    prep_workers: int
    cores: int
    nodes: int
    batch_size: int
    step_ms: float
    samples: int
    wall_s: float
    samples_per_s: float
    cpu_s: float
    prep_cpu_s: float
    energy_j: float | None
    energy_origin: str


def study(
    data: str,
    members: Sequence[int],
    *,
    designs: Sequence[str] = DESIGNS,
    prep_workers: int = 1,
    batch_size: int = 32,
    samples: int = 5000,
    size: int = 224,
    step_ms: float = 0.0,
    cores: int | None = None,
    repeats: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Run every design with every number of members, `repeats` times in turn, and return the medians.

    Independent members, who take many times as long, run once.

    Args:
        data: a tar archive of JPEG photographs.
        samples: that each member takes at least, after its first batch; whole epochs.
        size: pixels of a side after decoding and resizing.
        cores: pin all processes to that many cores; None leaves them alone.
        say: gets a line of progress.

    Raises:
        SpecError: there is no such design, or there are not that many cores.
        PipelineError: the archive is not there or cannot be read.
    """
    for name in designs:
        if name not in DESIGNS:
            raise SpecError(unknown_name("there is no design", name, DESIGNS))
    allowed = os.sched_getaffinity(0)
    if cores is not None and not 1 <= cores <= len(allowed):
        raise SpecError(f"{cores} cores are more than the {len(allowed)} that this process may use")
    configs = [
        Config(design, count, prep_workers, batch_size, samples, step_ms, data, size)
        for count in members
        for design in designs
    ]
    pipeline = Config("", 0, prep_workers, batch_size, samples, step_ms, data, size).pipeline()
    _ = pipeline.fields  # prepares the first photograph, or says why that cannot be
    runs: dict[Config, list[Row]] = {config: [] for config in configs}
    try:
        if cores is not None:
            os.sched_setaffinity(0, sorted(allowed)[:cores])
        for repeat in range(repeats):
            for config in configs:
                if repeat and config.design == "independent":
                    continue
                row = _run(config)
                runs[config].append(row)
                say(
                    f"{repeat + 1}/{repeats} {config.design}, {config.members} members: "
                    f"{row.samples_per_s:,.0f} samples/s, {row.cpu_s:.2f} CPU-s"
                )
    finally:
        os.sched_setaffinity(0, allowed)
    return [_median(rows) for rows in runs.values()]


def _median(rows: list[Row]) -> Row:
    """Each figure's median."""
    names = [f.name for f in dataclasses.fields(Row)]
    values = {name: [getattr(row, name) for row in rows] for name in names}
    figures = {name: each for name, each in values.items() if all(isinstance(value, float) for value in each)}
    return dataclasses.replace(rows[0], **{name: statistics.median(each) for name, each in figures.items()})


def _run(config: Config) -> Row:
    feeder: FeederProcess | None = None
    if config.design == "node":
        feeder = spawn(
            config.pipeline(),
            expect=config.members,
            workers=config.prep_workers,
            capacity=config.capacity(),
        )
        config = dataclasses.replace(config, address=feeder.address)
    try:
        return _read(config, feeder)
    finally:
        if feeder is not None:
            feeder.stop()


def _read(config: Config, feeder: FeederProcess | None) -> Row:
    power = PowerMeter("local")
    with (
        contextlib.closing(power),
        subprocess.Popen(
            [sys.executable, "-P", "-m", "ensemble.bench.readers", json.dumps(dataclasses.asdict(config))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        ) as readers,
    ):
        words = _Words(readers, config)
        words.wait("first", 1)
        power.start()
        began, before = time.perf_counter(), _clocks(readers.pid, feeder, words.producer)
        words.wait("last", config.members)
        wall_s, after = time.perf_counter() - began, _clocks(readers.pid, feeder, words.producer)
        energy = power.sample()
    used = {pid: (cpu_s - before.get(pid, (0.0, ""))[0], role) for pid, (cpu_s, role) in after.items()}
    epochs = config.epochs(config.pipeline())
    samples = config.members * (len(epochs) * len(config.pipeline()) - config.batch_size)
    return Row(
        design=config.design,
        members=config.members,
        prep_workers=config.prep_workers,
        cores=len(os.sched_getaffinity(0)),
        nodes=1,
        batch_size=config.batch_size,
        step_ms=config.step_ms,
        samples=samples,
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        cpu_s=sum(cpu_s for cpu_s, _ in used.values()),
        prep_cpu_s=sum(cpu_s for cpu_s, role in used.values() if role == "prepare"),
        energy_j=energy["energy_j"],
        energy_origin=energy["origin"],
    )


class _Words:
    """What the member processes say on their common standard output."""

    def __init__(self, readers: subprocess.Popen[bytes], config: Config) -> None:
        assert readers.stdout is not None
        self._lines = iter(readers.stdout.readline, b"")
        self._config = config
        self._heard: Counter[str] = Counter()
        self.producer: int | None = None

    def wait(self, awaited: str, count: int) -> None:
        """Wait until a word was said `count` times.

        Raises:
            PipelineError: a member died.
        """
        while self._heard[awaited] < count:
            word, number, text = next(self._lines, b"died 0 all of them ended").decode().rstrip("\n").split(" ", 2)
            self._heard[word] += 1
            if word == "producer":
                self.producer = int(number)
            elif word == "died":
                who = f"member {number}" if int(number) >= 0 else "the producer"
                raise PipelineError(f"design {self._config.design}, {who}: {text}")


def _clocks(readers_pid: int, feeder: FeederProcess | None, producer: int | None) -> dict[int, tuple[float, str]]:
    """pid -> (CPU-seconds so far, role) of every process of a run."""
    import psutil

    clocks = {}
    for root in [readers_pid, *([feeder.pid] if feeder else [])]:
        process = psutil.Process(root)
        for each in (process, *process.children(recursive=True)):
            prepares = each.pid == producer or "pipelines.worker" in each.cmdline()
            clocks[each.pid] = (process_clock_s(each.pid), "prepare" if prepares else "other")
    return clocks


def process_clock_s(pid: int) -> float:
    """CPU-seconds of another process with the resolution of its clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)
