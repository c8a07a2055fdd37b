"""One member over 1 to k workers: a step's time beside the model t = compute / n + communication(n)."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.bench.launch import hosts
from ensemble.bench.launch.ranks import contiguous, run_ranks
from ensemble.bench.models import Net
from ensemble.bench.training import Training
from ensemble.spec import SpecError
from ensemble.spec.options import COMPRESSIONS, resolve

STRONG, WEAK = "strong", "weak"
REAL = "real"
_STEPS = "ensemble.bench.scaling.measure:steps"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of workers.

    Attributes:
        scaling: "strong", one global batch for all; "weak", one batch for each worker.
        compute: "real", on this machine's processors; or such as "100 ms", an emulated accelerator: a timed wait
            of so long for the batch of one worker, which uses no processor.
        model, precision, compression, cores: what was run, and on how many cores altogether.
        workers, hosts, link: workers, on how many hosts, joined at which rate; None on one host.
        batch_size: global.
        examples_per_s: of all workers.
        step_ms: the slowest worker's; compute_ms and sync_ms: of that computing, and waiting for others.
        communication_ms: measured apart, without computing: a step's less that of one worker.
        predicted_ms: compute / n + communication(n), or compute + communication(n) where scaling is weak;
            `compute` is one worker's step. Real workers share the cores: n is at most their number then.
        efficiency: examples/s against n times those of one worker.
        sent_mb: that a worker sends in a step, 10^6 bytes.
    """

    scaling: str
    compute: str
    model: str
    precision: str
    compression: str
    cores: int
    workers: int
    hosts: int
    link: str | None
    batch_size: int
    examples_per_s: float
    step_ms: float
    compute_ms: float
    sync_ms: float
    communication_ms: float
    predicted_ms: float
    efficiency: float
    sent_mb: float

    @property
    def crowded(self) -> bool:
        """Whether there were more workers that compute than cores."""
        return self.compute == REAL and self.workers > self.cores


def study(
    net: Net,
    workers: Sequence[int],
    *,
    data: str | None = None,
    scalings: Sequence[str] = (STRONG, WEAK),
    step_ms: Sequence[float | None] = (None,),
    only_cores: bool = False,
    batch_size: int = 64,
    steps: int = 10,
    precision: str = "fp32",
    compression: str = "none",
    on_hosts: int = 1,
    link: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Time a member's steps with each number of workers.

    Args:
        workers: how many; one is always among them, all others are measured against it.
        step_ms: None computes for real; a number is an emulated accelerator's time for `batch_size` samples.
        only_cores: leave out more workers than there are cores where they compute for real.
        batch_size: global where scaling is strong; of each worker where it is weak.
        steps: of which medians are taken.
        on_hosts: the workers are on so many hosts in network namespaces, as equally many on each as can be.
        link: the rate of the hosts' links.

    Raises:
        SpecError: a batch has fewer samples than workers; there is no such compression; hosts cannot be had.
        RanksError: a worker failed.
    """
    workers = sorted({1, *workers})
    resolve("--compression", compression, COMPRESSIONS)
    if STRONG in scalings and workers[-1] > batch_size:
        raise SpecError(
            f"a batch of {batch_size} is too small for {workers[-1]} workers: take a larger --batch-size"
        )
    if on_hosts > 1 and (reason := hosts.unavailable()):
        raise SpecError(f"--hosts {on_hosts}: {reason}")
    cores = len(os.sched_getaffinity(0))
    run: dict[str, Any] = {"steps": steps, "precision": precision, "compression": compression}
    rows: list[Row] = []
    with _made(on_hosts, link) as made:
        for wait_ms, scaling in itertools.product(step_ms, scalings):
            alone: tuple[float, float] | None = None
            for count in workers:
                if only_cores and wait_ms is None and count > cores:
                    continue
                size = batch_size * (count if scaling == WEAK else 1)
                step_s = None if wait_ms is None else wait_ms / 1000 * size / batch_size
                say(f"{scaling} scaling, {count} workers, batch {size}, compute {_named(wait_ms)}")
                options = Training(net=net, data=data, batch_size=size).to_options(**run, step_s=step_s)
                used = min(count, on_hosts)
                ranks = run_ranks(_STEPS, options, placement=contiguous(count, used), hosts=made)
                slowest = max(ranks, key=lambda rank: float(rank["step_s"]))
                idle_s = max(float(rank["idle_s"]) for rank in ranks)
                alone = alone or (slowest["step_s"], idle_s)
                communication_s = max(0.0, idle_s - alone[1])
                rows.append(
                    Row(
                        scaling=scaling,
                        compute=_named(wait_ms),
                        model=net.name,
                        precision=precision,
                        compression=compression,
                        cores=cores,
                        workers=count,
                        hosts=used,
                        link=link if on_hosts > 1 else None,
                        batch_size=size,
                        examples_per_s=size / slowest["step_s"],
                        step_ms=1000 * slowest["step_s"],
                        compute_ms=1000 * (slowest["step_s"] - slowest["sync_s"]),
                        sync_ms=1000 * slowest["sync_s"],
                        communication_ms=1000 * communication_s,
                        predicted_ms=1000
                        * predicted(
                            alone[0], communication_s, count, scaling, None if wait_ms is not None else cores
                        ),
                        efficiency=alone[0] * size / batch_size / slowest["step_s"] / count,
                        sent_mb=max(float(rank["sent_bytes"]) for rank in ranks) / 1e6,
                    )
                )
    return rows


def predicted(compute_s: float, communication_s: float, workers: int, scaling: str, cores: int | None) -> float:
    """Seconds of a step: one worker's is divided among n (strong scaling), and communication comes on top.

    Args:
        compute_s: a step of one worker with its batch.
        cores: that the workers share, None where each computes on a device of its own. What n workers have to do
            together then takes at least as long as the cores need for it.
    """
    work = compute_s * (1 if scaling == STRONG else workers)
    return work / (workers if cores is None else min(workers, cores)) + communication_s


def _named(step_ms: float | None) -> str:
    return REAL if step_ms is None else f"{step_ms:g} ms"


@contextlib.contextmanager
def _made(count: int, link: str | None) -> Iterator[hosts.Hosts | None]:
    if count == 1:
        yield None
        return
    with hosts.Hosts(count, link) as made:
        yield made


def table(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Rows for people."""
    return [
        {
            "scaling": row.scaling,
            "compute": row.compute,
            "workers": row.workers,
            "hosts": row.hosts,
            "batch": row.batch_size,
            "examples/s": row.examples_per_s,
            "step_ms": row.step_ms,
            "compute_ms": row.compute_ms,
            "sync_ms": row.sync_ms,
            "communication_ms": row.communication_ms,
            "predicted_ms": row.predicted_ms,
            "efficiency": row.efficiency,
            "sent_mb": row.sent_mb,
        }
        for row in rows
    ]


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """What follows, a line for each curve."""
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        curves.setdefault((row.scaling, row.compute), []).append(row)
    for (scaling, compute), curve in curves.items():
        sound = [row for row in curve if not row.crowded]
        last = sound[-1]
        if last.workers > 1:
            yield (
                f"{scaling} scaling, compute {compute}: {last.workers} workers train "
                f"{last.examples_per_s / curve[0].examples_per_s:.3g} x the examples/s of one (efficiency "
                f"{100 * last.efficiency:.0f} %), {100 * last.sync_ms / last.step_ms:.0f} % of a step is "
                f"synchronization; {last.step_ms:.3g} ms a step, where the model says {last.predicted_ms:.3g} ms"
            )
    if any(row.crowded for row in rows):
        yield (
            f"more than {rows[0].cores} workers that compute share {rows[0].cores} cores: they cannot be faster; "
            "--step-ms emulates an accelerator for each worker"
        )
