"""Runs the designs: members read every batch through the guard that training has, and wait for an accelerator.

All begin to read when the feeders of all are there; the clock runs from any member's first batch to the last
batch. CPU-seconds are those of all processes of a run in that time, from the kernel's clocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.launch import hosts
from benchmarks.results import Report, median_row
from benchmarks.sc18.config import ACROSS, ALONE, BARE, DATALOADER, INDEPENDENT, LOOPBACK, NODE, Config
from benchmarks.sc18.processes import StudyProcesses, run_processes
from ensemble.spec import SpecError, unknown_name

#: Fields of `Config` that rows have, too.
_GIVEN = ("design", "members", "prep_workers", "nodes", "batch_size", "step_ms", "link")


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """One configuration's medians over its runs.

    Attributes:
        design, members, prep_workers, nodes, batch_size, step_ms, link: of the `Config`.
        cores: of all processes together.
        samples: that all members took while the clock ran.
        wall_s, cpu_s, prep_cpu_s: seconds; CPU-seconds of all processes, and of those that prepare samples.
        first_ms: from the start of a member's reader to its first batch, the median of all members.
        memory_mb: proportional set size of all processes when the last batch is there, 10^6 bytes.
        runs: of which the figures are medians.
    """

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
    first_ms: float
    memory_mb: float
    link: str | None = None
    runs: int = 1

    @property
    def cpu_per_1000(self) -> float:
        """CPU-seconds of all processes per 1,000 samples that members consumed."""
        return self.cpu_s / self.samples * 1000


def format_count(number: int, thing: str) -> str:
    """Such as "1 core", "2 cores"."""
    return f"{number} {thing}{'s' * (number != 1)}"


def describe(row: PipelineRow) -> str:
    """The configuration in one line."""
    counts = {"member": row.members, "core": row.cores, "preparation worker": row.prep_workers}
    parts = [row.design, *(format_count(number, thing) for thing, number in counts.items())]
    parts += [f"{row.nodes} nodes, link {row.link or 'unlimited'}"] if row.nodes > 1 else []
    return ", ".join([*parts, f"step {row.step_ms:.3g} ms"])


def study(
    base: Config,
    designs: Sequence[str] | None,
    members: Sequence[int] | None,
    steps_ms: Sequence[float],
    repeats: int,
    report: Report = lambda _: None,
) -> list[PipelineRow]:
    """Run every combination, `repeats` times in turn; returns the medians.

    Where members prepare for themselves a run takes many times as long: it is run once beside other designs. Where
    this machine cannot have hosts, nodes are groups of processes on its loopback, which is reported.

    Args:
        base: what all have in common.
        designs, members: None for the usual ones, see `--help`.

    Raises:
        SpecError: there is no such design or rate, or there are not that many cores, members or photographs.
        PipelineError: the archive is missing or cannot be read.
    """
    nodes = base.nodes
    members = members or ((1, 4, 16) if nodes == 1 else (nodes, 4 * nodes))
    designs = designs or ((BARE, NODE, INDEPENDENT) if nodes == 1 else (NODE, *ACROSS))
    if base.link is not None:
        hosts.rate_bps(base.link)  # raises
    if nodes > 1 and (reason := hosts.unavailable()) is not None:
        report(f"{reason}; the {nodes} nodes are groups of processes on this machine's loopback")
        base = dataclasses.replace(base, link=LOOPBACK)
    configs = [
        dataclasses.replace(base, step_ms=step_ms, members=count, design=design, nodes=min(nodes, count))
        for step_ms, count, design in itertools.product(steps_ms, members, designs)
    ]
    _check(configs)
    compares = not all(config.design in ALONE for config in configs)
    runs: dict[Config, list[PipelineRow]] = {config: [] for config in configs}
    for repeat in range(repeats):
        for config in configs:
            if repeat and config.design in ALONE and compares and config.samples != config.samples_alone:
                continue
            with _pin_cores(config.cores):
                row = _run_once(config)
            runs[config].append(row)
            figures = f"{row.samples_per_s:,.0f} samples/s, {row.cpu_s:.2f} CPU-s"
            report(f"{repeat + 1}/{repeats} {describe(row)}: {figures}")
    return [median_row(rows) for rows in runs.values()]


def _check(configs: Sequence[Config]) -> None:
    """Raises as `study` does."""
    allowed = len(os.sched_getaffinity(0))
    for config in configs:
        designs = (BARE, NODE, INDEPENDENT, DATALOADER, *ACROSS * (config.nodes > 1))
        if config.design in ACROSS and config.design not in designs:
            raise SpecError(f"the design {config.design!r} joins nodes: it needs 2 --hosts, with a member each")
        if config.design not in designs:
            raise SpecError(unknown_name("there is no design", config.design, designs))
        if config.cores is not None and config.cores > allowed:
            raise SpecError(f"{config.cores} cores are more than the {allowed} that this process may use")
    pipeline = configs[0].pipeline()
    _ = pipeline.fields  # prepares the first photograph: raises before anything is measured
    if (batch := configs[0].batch_size) > len(pipeline):
        raise SpecError(f"a batch of {batch} is more than the {len(pipeline)} photographs")


@contextlib.contextmanager
def _pin_cores(cores: int | None) -> Iterator[None]:
    """Pin the processes that are started meanwhile to so many cores."""
    allowed = os.sched_getaffinity(0)
    try:
        if cores is not None:
            os.sched_setaffinity(0, sorted(allowed)[:cores])
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _run_once(config: Config) -> PipelineRow:
    is_alone = config.nodes == 1 or config.link == LOOPBACK
    with (
        hosts.make_hosts(0 if is_alone else config.nodes, config.link) as made,
        run_processes(config, made) as processes,
    ):
        return _measure(config, processes)


def _measure(config: Config, processes: StudyProcesses) -> PipelineRow:
    processes.wait("ready", config.members)
    processes.start_reading()
    processes.wait("first", 1)
    start, before = time.perf_counter(), processes.cpu_clocks()
    processes.wait("last", config.members)
    stop, after = time.perf_counter(), processes.cpu_clocks()
    used = {pid: cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items()}
    preparers, memory_mb = processes.preparation_pids(), processes.memory_mb()
    processes.finish()
    taken = [batch for batches in processes.received["taken"] for batch in batches]
    samples = sum(size for time_s, size in taken if time_s > start)
    if not samples:
        raise SpecError("the runs are too short to be measured: say a larger number of --samples")
    return PipelineRow(
        **{name: getattr(config, name) for name in _GIVEN},
        cores=len(os.sched_getaffinity(0)),
        samples=samples,
        wall_s=stop - start,
        samples_per_s=samples / (stop - start),
        first_ms=statistics.median(processes.received["first"]),
        cpu_s=sum(used.values()),
        prep_cpu_s=sum(cpu_s for pid, cpu_s in used.items() if pid in preparers),
        memory_mb=memory_mb,
    )
