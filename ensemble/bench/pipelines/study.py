"""Runs the pipelines study.

Members read every batch through the guard that training has. Their step is a timed wait that uses no CPU, for an
accelerator (`step_ms`; 0: nothing), or a small model's forward and backward pass. Designs:

- `bare ring`: the limit, a program that does the same preparation and no more than a ring needs;
- `node`: one pipeline for all members of a node;
- `independent`: every member has a pipeline of its own, with its own preparation workers;
- `loader`: the same as a script alone has it, `Pipeline.loader` with workers;
- `dataloader`: every member has a plain torch DataLoader of its own, with as many workers.

CPU-seconds are those of all processes of a run, from any member's first batch to the last batch, read from the
kernel's process clocks; `samples` counts those that all members consumed in that time. Several nodes are
hosts in network namespaces on this machine (`ensemble.bench.launch.hosts`), which share its processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ensemble.bench.launch import hosts
from ensemble.bench.pipelines.config import (
    ACROSS,
    ALONE,
    DATALOADER,
    DESIGNS,
    EMULATED,
    LOADER,
    LOOPBACK,
    MODEL,
    Config,
)
from ensemble.bench.pipelines.processes import StudyProcesses
from ensemble.bench.pipelines.rows import PipelineRow, describe
from ensemble.bench.results import Report, median_row
from ensemble.meter import PowerMeter
from ensemble.spec import Energy, SpecError, unknown_name
from pipelines import Pipeline


def study(
    data: str,
    members: Sequence[int] = (),
    *,
    designs: Sequence[str] = (),
    prep_workers: Sequence[int] = (1,),
    samples: int = 5000,
    samples_alone: int = 1000,
    step: str = EMULATED,
    step_ms: Sequence[float] = (0.0,),
    cores: Sequence[int | None] = (None,),
    nodes: int = 1,
    links: Sequence[str | None] = (None,),
    repeats: int = 5,
    open_meter: Callable[[], PowerMeter] = lambda: PowerMeter("local", energy=Energy(measure_idle_s=0)),
    report: Report = lambda _: None,
    **fixed: Any,
) -> list[PipelineRow]:
    """Run every design in every combination, `repeats` times in turn; returns the medians.

    Designs in which members prepare for themselves take many times as long: they have fewer samples, and run once
    beside others.

    Args:
        data: see `Config`.
        members: how many read at once, on all nodes together; by default 1, 4 and 16, or one and four a node.
        designs: by default bare ring, node and independent; on several nodes all that have one stream, and node.
        prep_workers: preparation processes, of each node or of each member that prepares for itself.
        samples: that each member consumes at least, after its first batch; whole epochs.
        samples_alone: the same where every member prepares for itself.
        step: "emulated", a timed wait of each of `step_ms`, or "model", a real one.
        cores: pin all processes to that many cores; None leaves them alone.
        nodes: more than one are hosts in network namespaces, joined by `links`; where this machine cannot have
            those, they are groups of processes on its loopback, which is reported.
        links: rates, as `tc` writes them (``1gbit``); None does not limit them.
        open_meter: returns the meter of the machine's energy in one run, which closes it.
        fixed: further fields of `Config`.

    Raises:
        SpecError: there is no such design or rate, or there are not that many cores or members.
        PipelineError: the archive is missing or cannot be read.
    """
    members = members or ((1, 4, 16) if nodes == 1 else (nodes, 4 * nodes))
    designs = designs or (DESIGNS if nodes == 1 else ("node", *ACROSS))
    check_options(designs, members, cores, nodes, links)
    if nodes > 1 and (reason := hosts.unavailable()) is not None:
        report(f"{reason}; the {nodes} nodes are groups of processes on this machine's loopback")
        links = (LOOPBACK,)
    step_ms = step_ms if step == EMULATED else (0.0,)
    configs = [
        Config(
            design=design,
            members=count,
            prep_workers=workers,
            cores=pinned,
            samples=min(samples, samples_alone) if design in ALONE else samples,
            step=step,
            step_ms=wait_ms,
            data=data,
            nodes=nodes,
            link=link,
            **fixed,
        )
        for pinned, workers, link, wait_ms, count, design in itertools.product(
            cores, prep_workers, links, step_ms, members, designs
        )
    ]
    _ = configs[0].pipeline().fields  # prepares the first photograph: raises before anything is measured
    runs: dict[Config, list[PipelineRow]] = {config: [] for config in configs}
    for repeat in range(repeats):
        for config in configs:
            if repeat and config.design in ALONE and not set(designs) <= {*ALONE}:
                continue
            with _pin_cores(config.cores):
                row = _run_once(config, open_meter)
            runs[config].append(row)
            figures = f"{row.samples_per_s:,.0f} samples/s, {row.cpu_s:.2f} CPU-s"
            report(f"{repeat + 1}/{repeats} {describe(row)}: {figures}")
    return [median_row(rows) for rows in runs.values()]


def check_options(
    designs: Sequence[str],
    members: Sequence[int],
    cores: Sequence[int | None],
    nodes: int,
    links: Sequence[str | None],
) -> None:
    """Raises SpecError as `study` does."""
    known = (*DESIGNS, LOADER, DATALOADER, *(ACROSS if nodes > 1 else ()))
    for name in designs:
        if name in ACROSS and name not in known:
            raise SpecError(f"the design {name!r} joins nodes: say how many with --hosts")
        if name not in known:
            raise SpecError(unknown_name("there is no design", name, known))
    allowed = os.sched_getaffinity(0)
    for count in cores:
        if count is not None and not 1 <= count <= len(allowed):
            raise SpecError(f"{count} cores are more than the {len(allowed)} that this process may use")
    if min(members) < nodes:
        raise SpecError(f"{nodes} hosts need at least that many members, got {min(members)}")
    for rate in links:
        if rate is not None:
            hosts.rate_bps(rate)


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
        with StudyProcesses(config, made.command if made else None) as processes:
            row = _measure(config, processes, open_meter)
        if made is None:
            return row
        wire = sum(made.traffic(node).sent for node in range(config.nodes))
        return dataclasses.replace(row, mtu=config.mtu, wire_mb=wire / 1e6)


def _measure(config: Config, processes: StudyProcesses, open_meter: Callable[[], PowerMeter]) -> PipelineRow:
    with contextlib.closing(open_meter()) as power:
        processes.wait("first", 1)
        power.start()
        start, before = time.perf_counter(), processes.cpu_clocks()
        processes.wait("last", config.members)
        wall_s, after = time.perf_counter() - start, processes.cpu_clocks()
        (energy,) = power.sample()
    used = {pid: cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items()}
    preparers, memory_mb = processes.preparation_pids(), processes.memory_mb()
    processes.finish()
    pipeline = config.pipeline()
    stream = len(config.epochs(pipeline)) * len(pipeline)
    samples = config.members * (stream - config.batch_size)
    across, step, step_ms = config.design in ACROSS, EMULATED, config.step_ms
    if config.step == MODEL:
        step = f"{MODEL} on {processes.step_times[0][1]}"
        step_ms = statistics.fmean(mean_ms for mean_ms, _ in processes.step_times)
    known = [part for part in energy["parts"] if part["origin"] == "measured"]  # an estimate has no idle power
    idle = [part["idle_j"] for part in known if part.get("idle_j") is not None]
    return PipelineRow(
        design=config.design,
        members=config.members,
        prep_workers=config.prep_workers,
        cores=len(os.sched_getaffinity(0)),
        nodes=config.nodes,
        batch_size=config.batch_size,
        step_ms=step_ms,
        samples=samples,
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        first_ms=statistics.median(processes.first_ms),
        cpu_s=sum(used.values()),
        prep_cpu_s=sum(cpu_s for pid, cpu_s in used.items() if pid in preparers),
        energy_j=energy["energy_j"],
        energy_origin=energy["origin"],
        step=step,
        memory_mb=memory_mb,
        others_cpu_s=max(0.0, energy["busy_s"] - sum(used.values())),
        link=config.link,
        sent_mb=sum(group["sent_bytes"] for group in processes.groups.values()) / 1e6 if across else None,
        bound_mb=(config.nodes - 1) * stream * _payload_bytes(pipeline) / 1e6 if across else None,
        chosen=_final_designs(processes.groups.values()) if across else None,
        idle_j=sum(idle) if idle else None,
    )


def _final_designs(groups: Iterable[dict[str, Any]]) -> str:
    """The nodes' designs at the end of a run: one, unless the nodes have separated."""
    each = {f"{group['design']} {group['preparers']}" if "design" in group else "none" for group in groups}
    return " or ".join(sorted(each))


def _payload_bytes(pipeline: Pipeline) -> int:
    """Bytes of one sample's fields."""
    fields = pipeline.fields.values()
    return sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in fields)
