"""Runs the pipelines study.

Members read every batch through the guard that training has. Their step is a timed wait that uses no CPU, for an
accelerator (`step_ms`; 0: nothing), or a small model's forward and backward pass. Designs:

- `bare ring`: the limit, a program that does the same preparation and no more than a ring needs;
- `node`: one pipeline for all members of a node;
- `independent`: every member has a pipeline of its own, with its own preparation workers;
- `loader`: the same as a script alone has it, `Pipeline.loader` with workers;
- `dataloader`: every member has a plain torch DataLoader of its own, with as many workers.

All members begin to read at once, when the feeders of all are there, and the clock runs from any member's first
batch to the last batch: no feeder's start is measured. CPU-seconds are those of all processes of a run in that
time, from the kernel's clocks, and `samples` counts those that members took in it. Several nodes are hosts in
network namespaces on this machine (`ensemble.bench.launch.hosts`), which share its processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ensemble.bench.launch import hosts
from ensemble.bench.pipelines import queues
from ensemble.bench.pipelines.config import (
    ACROSS,
    ALONE,
    DESIGNS,
    EMULATED,
    LOOPBACK,
    MODEL,
    ON_ONE_NODE,
    WITH_PREPARERS,
    Config,
)
from ensemble.bench.pipelines.processes import StudyProcesses, run_processes
from ensemble.bench.results import Report, median_row
from ensemble.meter import PowerMeter
from ensemble.spec import Energy, SpecError, unknown_name
from pipelines import Pipeline

#: Fields of `Config` that rows have, too.
_GIVEN = ("design", "members", "prep_workers", "nodes", "preparers", "batch_size", "link")
#: Fields of `Config` that may be lists; of those further to the right the values change faster.
_COMBINED = ("cores", "prep_workers", "link", "step", "step_ms", "members", "preparers", "design")


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """One configuration's medians over its runs.

    Attributes:
        design, members, prep_workers, nodes, preparers, batch_size, link: of the `Config`.
        cores: of all processes together.
        step_ms: milliseconds of a member's step: given where it is emulated, measured of a model.
        samples: that all members took while the clock ran.
        first_ms: from the start of a member's reader to its first batch, the median of all members.
        wall_s, cpu_s, prep_cpu_s: seconds; CPU-seconds of all processes, and of those that prepare samples.
        energy_j: of the whole machine in that time, joules.  energy_origin: measured, estimated or unavailable.
        step: what `step_ms` is: "emulated", or "model on cpu" or "model on cuda".
        runs: of which the figures are medians.
        memory_mb: proportional set size of all processes when the last batch is there, 10^6 bytes.
        others_cpu_s: CPU-seconds of the machine's other processes meanwhile, which lower samples/s; `energy_j`
            contains them.
        mtu: bytes of an Ethernet frame's payload on the hosts' links.
        wire_mb: bytes that left the hosts' interfaces in the whole run, with headers and acknowledgements, 10^6.
        sent_mb: of these the samples that feeders sent each other, 10^6 bytes.
        bound_mb: the least that must be sent: every sample's bytes to all nodes but one, 10^6 bytes.
        chosen: the design across nodes in the end, with its preparing nodes, as in "multi 4".
        queue_mean, queue_full: how full the rings were, of 1; the share of the time in which they had no room.
        member_waiting: the share of the time in which some member of a feeder waited for samples: its ring was
            empty, or it was ahead of a slower one. All three are means of all feeders (`queues.Queues`).
        limit: what the others waited for: "preparation", "members" or "links".
        queue_course: seconds after the start, and the mean level of the rings; of the first run.
        read_ms: CPU-milliseconds to read a record, without preparing it, from the page cache.
        idle_j: of `energy_j`, what the parts of the machine of which it is known would have used without work.
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
    energy_j: float | None
    energy_origin: str
    step: str = EMULATED
    runs: int = 1
    memory_mb: float | None = None
    others_cpu_s: float = 0.0
    link: str | None = None
    mtu: int | None = None
    wire_mb: float | None = None
    sent_mb: float | None = None
    bound_mb: float | None = None
    chosen: str | None = None
    idle_j: float | None = None
    first_ms: float = 0.0
    preparers: int | None = None
    queue_mean: float | None = None
    queue_full: float | None = None
    member_waiting: float | None = None
    limit: str | None = None
    queue_course: tuple[tuple[float, float], ...] = ()
    read_ms: float | None = None

    @property
    def watts(self) -> float | None:
        """The machine's mean power, in watts; its origin is `energy_origin`."""
        return None if self.energy_j is None else self.energy_j / self.wall_s

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
    parts += [format_count(row.preparers, "preparing node")] if row.preparers else []
    parts += [f"{row.nodes} nodes, link {row.link or 'unlimited'}"] if row.nodes > 1 else []
    return ", ".join([*parts, f"step {row.step_ms:.3g} ms {row.step}"])


def study(
    data: str,
    *,
    repeats: int = 5,
    open_meter: Callable[[], PowerMeter] = lambda: PowerMeter("local", energy=Energy(measure_idle_s=0)),
    report: Report = lambda _: None,
    **fields: Any,
) -> list[PipelineRow]:
    """Run every combination, `repeats` times in turn; returns the medians.

    Where members prepare for themselves a run takes many times as long: it is run once beside other designs.

    Args:
        data: see `Config`.
        open_meter: returns the meter of the machine's energy in one run, which closes it.
        fields: of `Config`: lists of cores, prep_workers, link, step, step_ms, members, preparers and design, each
            combined with every other that it says something of, and one value of the others. With fewer members
            than nodes there are as many nodes as members. By default 1, 4 and 16 members, or one and four a node;
            and the designs bare ring, node and independent; on several nodes all that have one stream, and node.
            Where this machine cannot have hosts, nodes are groups of processes on its loopback, which is reported.

    Raises:
        SpecError: there is no such design or rate, or there are not that many cores, members or photographs.
        PipelineError: the archive is missing or cannot be read.
    """
    nodes = fields.get("nodes", 1)
    lists: dict[str, Sequence[Any] | None] = {name: fields.pop(name, None) for name in _COMBINED}
    lists["members"] = lists["members"] or ((1, 4, 16) if nodes == 1 else (nodes, 4 * nodes))
    lists["design"] = lists["design"] or (DESIGNS if nodes == 1 else ("node", *ACROSS))
    combined = {name: values for name, values in lists.items() if values}
    for rate in combined.get("link", ()):
        hosts.rate_bps(rate)  # raises
    if nodes > 1 and (reason := hosts.unavailable()) is not None:
        report(f"{reason}; the {nodes} nodes are groups of processes on this machine's loopback")
        combined["link"] = (LOOPBACK,)
    values = [dict(zip(combined, each, strict=True)) for each in itertools.product(*combined.values())]
    configs = list(dict.fromkeys(_fit(Config(data=data, **each, **fields)) for each in values))
    _check(configs)
    pipeline = configs[0].pipeline()
    _ = pipeline.fields  # prepares the first photograph: raises before anything is measured
    if (batch := configs[0].batch_size) > len(pipeline):
        raise SpecError(f"a batch of {batch} is more than the {len(pipeline)} photographs")
    read_ms = measure_reading_ms(pipeline)
    compares = not all(config.design in ALONE for config in configs)
    runs: dict[Config, list[PipelineRow]] = {config: [] for config in configs}
    for repeat in range(repeats):
        for config in configs:
            if repeat and config.design in ALONE and compares:
                continue
            with _pin_cores(config.cores):
                row = _run_once(config, open_meter)
            runs[config].append(row)
            figures = f"{row.samples_per_s:,.0f} samples/s, {row.cpu_s:.2f} CPU-s"
            report(f"{repeat + 1}/{repeats} {describe(row)}: {figures}")
    return [dataclasses.replace(median_row(rows), read_ms=read_ms) for rows in runs.values()]


def measure_reading_ms(pipeline: Pipeline) -> float:
    """CPU-milliseconds to read a record that lies in the page cache: the mean of one pass, after another."""
    source = pipeline.source
    for _ in range(2):
        before = time.thread_time()
        for index in range(len(source)):
            _ = source[index]
    return 1000 * (time.thread_time() - before) / len(source)


def _fit(config: Config) -> Config:
    """Without what says nothing of this configuration, so that none is run twice."""
    nodes = min(config.nodes, config.members)
    preparers = min(config.preparers, nodes) if config.preparers and config.design in WITH_PREPARERS else None
    step_ms = config.step_ms if config.step == EMULATED else 0.0
    link = config.link if nodes > 1 else None
    return dataclasses.replace(config, nodes=nodes, preparers=preparers, step_ms=step_ms, link=link)


def _check(configs: Sequence[Config]) -> None:
    """Raises SpecError as `study` does."""
    allowed = len(os.sched_getaffinity(0))
    for config in configs:
        known = (*ON_ONE_NODE, *ACROSS * (config.nodes > 1))
        if config.design in ACROSS and config.design not in known:
            raise SpecError(f"the design {config.design!r} joins nodes: it needs 2 --hosts, with a member each")
        if config.design not in known:
            raise SpecError(unknown_name("there is no design", config.design, known))
        if config.cores is not None and config.cores > allowed:
            raise SpecError(f"{config.cores} cores are more than the {allowed} that this process may use")


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


def _run_once(config: Config, open_meter: Callable[[], PowerMeter]) -> PipelineRow:
    is_alone = config.nodes == 1 or config.link == LOOPBACK
    with hosts.make_hosts(0 if is_alone else config.nodes, config.link, config.mtu) as made:
        with run_processes(config, made) as processes:
            row = _measure(config, processes, open_meter)
        if made is None:
            return row
        wire = sum(made.traffic(node).sent for node in range(config.nodes))
        return dataclasses.replace(row, mtu=config.mtu, wire_mb=wire / 1e6)


def _measure(config: Config, processes: StudyProcesses, open_meter: Callable[[], PowerMeter]) -> PipelineRow:
    with contextlib.closing(open_meter()) as power:
        processes.wait("ready", config.members)
        processes.start_reading()
        processes.wait("first", 1)
        power.start()
        start, before = time.perf_counter(), processes.cpu_clocks()
        processes.wait("last", config.members)
        stop, after = time.perf_counter(), processes.cpu_clocks()
        wall_s = stop - start
        (energy,) = power.sample()
    used = {pid: cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items()}
    preparers, memory_mb = processes.preparation_pids(), processes.memory_mb()
    processes.finish()
    taken = [batch for batches in processes.received["taken"] for batch in batches]
    samples = sum(size for time_s, size in taken if time_s > start)
    if not samples:
        raise SpecError("the runs are too short to be measured: say a larger number of --samples")
    step, step_ms = config.step, config.step_ms
    if step == MODEL:
        steps_ms, devices = zip(*processes.received["last"], strict=True)
        step, step_ms = f"{MODEL} on {devices[0]}", statistics.fmean(steps_ms)
    known = [part for part in energy["parts"] if part["origin"] == "measured"]  # an estimate has no idle power
    levels = queues.summarize(processes.levels(), start, stop)
    idle = [part["idle_j"] for part in known if part.get("idle_j") is not None]
    same = {name: getattr(config, name) for name in _GIVEN}
    row = PipelineRow(
        **same,
        cores=len(os.sched_getaffinity(0)),
        step=step,
        step_ms=step_ms,
        samples=samples,
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        first_ms=statistics.median(processes.received["first"]),
        cpu_s=sum(used.values()),
        prep_cpu_s=sum(cpu_s for pid, cpu_s in used.items() if pid in preparers),
        energy_j=energy["energy_j"],
        energy_origin=energy["origin"],
        idle_j=sum(idle) if idle else None,
        memory_mb=memory_mb,
        others_cpu_s=max(0.0, energy["busy_s"] - sum(used.values())),
    )
    if levels is not None:
        row = dataclasses.replace(
            row,
            queue_mean=levels.mean,
            queue_full=levels.full,
            member_waiting=levels.waiting,
            limit=levels.limit,
            queue_course=levels.course,
        )
    if config.design not in ACROSS:
        return row
    pipeline = config.pipeline()
    stream = len(config.epochs(pipeline)) * len(pipeline)
    groups, fields = processes.received["feeder"], pipeline.fields.values()
    sample_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in fields)
    # One design at the end of a run, unless the nodes have separated.
    final = {f"{group['design']} {group['preparers']}" if "design" in group else "none" for group in groups}
    return dataclasses.replace(
        row,
        sent_mb=sum(group["sent_bytes"] for group in groups) / 1e6,
        bound_mb=(config.nodes - 1) * stream * sample_bytes / 1e6,
        chosen=" or ".join(sorted(final)),
    )
