"""What the part 'workers' of the fabric study measures: steps of one member over workers."""

from __future__ import annotations

import itertools
import os
import statistics
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.launch import hosts
from benchmarks.launch.ranks import contiguous, run_ranks
from benchmarks.models import Net
from benchmarks.results import Report
from benchmarks.timing import BARRIER_S
from benchmarks.training import RecipeTrainer, TrainingSetup, make_trainer
from ensemble.spec import SpecError

if TYPE_CHECKING:
    from ensemble.comm import Communicator

STRONG, WEAK = SCALINGS = ("strong", "weak")
REAL = "real"
_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """One number of workers.

    Attributes:
        scaling: "strong", one global batch for all; "weak", one batch for each worker.
        compute: "real", on this machine's processors; or such as "100 ms", an emulated accelerator: a timed wait
            of that length for the batch of one worker, which uses no processor.
        model: what was trained, in fp32.  cores: of all workers together.
        workers, hosts: how many.  link: the rate of the hosts' links; None on one host.
        batch_size: global.
        examples_per_s: of all workers.
        step_ms: of the slowest worker; compute_ms and sync_ms: of that, computing and waiting for others.
        communication_ms: of a step that computes nothing, until gradients are exchanged, less that of one worker.
        efficiency: examples/s against n times those of one worker.
        sent_mb: that a worker sends in a step, 10^6 bytes.
    """

    scaling: str
    compute: str
    model: str
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
    efficiency: float
    sent_mb: float

    @property
    def shares_cores(self) -> bool:
        """Whether more workers computed than there are cores."""
        return self.compute == REAL and self.workers > self.cores


def study_workers(net: Net, options: Namespace, report: Report) -> list[WorkerRow]:
    """Time a member's steps with each number of workers; one worker is always added, as the baseline.

    Raises:
        SpecError: a batch has fewer samples than workers, or the data fewer than a batch.
        RanksError: a worker failed.
    """
    workers = sorted({1, *(options.workers or (1, 2, 4, 8))})
    if STRONG in options.scalings and workers[-1] > options.worker_batch:
        raise SpecError(
            f"a batch of {options.worker_batch} is too small for {workers[-1]} workers: "
            "take a larger --worker-batch"
        )
    check_batch(net, options.data, options.worker_batch * (workers[-1] if WEAK in options.scalings else 1))
    cores = len(os.sched_getaffinity(0))
    rows: list[WorkerRow] = []
    with hosts.make_hosts(options.hosts if options.hosts > 1 else 0, options.link) as made:
        for wait_ms, scaling in itertools.product(options.step_ms, options.scalings):
            compute = f"{wait_ms:g} ms" if wait_ms else REAL
            most = cores if compute == REAL and options.workers is None else workers[-1]
            one: dict[str, float] | None = None
            for count in (count for count in workers if count <= most):
                share = count if scaling == WEAK else 1  # of `worker_batch`, in one step of all
                size, used_hosts = options.worker_batch * share, min(count, options.hosts)
                report(f"{scaling} scaling, {count} workers, batch {size}, compute {compute}")
                arguments = {
                    "setup": asdict(TrainingSetup(net=net, data=options.data, batch_size=size)),
                    "steps": options.steps,
                    "step_s": wait_ms / 1000 * share if wait_ms else None,
                }
                placement = contiguous(count, used_hosts)
                ranks = run_ranks(f"{__name__}:time_steps", arguments, placement=placement, hosts=made)
                slowest = max(ranks, key=lambda rank: rank["step_s"])
                times = {**slowest, "exchange_s": max(rank["exchange_s"] for rank in ranks)}
                one = one or times
                communication_s = max(0.0, times["exchange_s"] - one["exchange_s"])
                rows.append(
                    WorkerRow(
                        scaling=scaling,
                        compute=compute,
                        model=net.name,
                        cores=cores,
                        workers=count,
                        hosts=used_hosts,
                        link=options.link,
                        batch_size=size,
                        examples_per_s=size / times["step_s"],
                        step_ms=1000 * times["step_s"],
                        compute_ms=1000 * (times["step_s"] - times["sync_s"]),
                        sync_ms=1000 * times["sync_s"],
                        communication_ms=1000 * communication_s,
                        efficiency=one["step_s"] * share / times["step_s"] / count,
                        sent_mb=max(rank["sent_bytes"] for rank in ranks) / 1e6,
                    )
                )
    return rows


def time_steps(comm: Communicator, options: dict[str, Any]) -> dict[str, float]:
    """Medians of this rank's training steps, of their waits for other ranks, and of steps that compute nothing.

    Args:
        options: `setup`, of a `TrainingSetup`; `steps`, how many of each; `step_s`: seconds of an emulated
            accelerator for a global batch, of which a rank sleeps its part; None computes for real.

    Returns:
        "step_s" and "sync_s"; of a step without computing "exchange_s", until gradients are exchanged,
        and "sent_bytes".
    """
    setup, steps = TrainingSetup.of(options["setup"]), options["steps"]
    batches = setup.batches(comm.rank, comm.world)
    trainer = make_trainer(setup, "fp32", comm)
    _, _, exchange_s, sent_bytes = _median_step(trainer, batches, comm, steps, 0.0)
    step_s, sync_s, *_ = _median_step(trainer, batches, comm, steps, options["step_s"])
    times = {"step_s": step_s, "sync_s": sync_s, "exchange_s": exchange_s}
    return {**times, "sent_bytes": sent_bytes}


def check_batch(net: Net, data: str | None, size: int) -> None:
    """Check that a network's data have a whole batch.

    Raises:
        SpecError: they have fewer samples.
    """
    if size > (most := len(models.splits(net, data, size, 1).train)):
        raise SpecError(f"a batch of {size} is more than the {most} samples: take fewer workers or --worker-batch")


def _median_step(
    trainer: RecipeTrainer, batches: list[Any], comm: Communicator, steps: int, emulated_s: float | None
) -> tuple[float, float, float, float]:
    """Medians of a step's seconds, its wait, and the time until gradients are exchanged; bytes sent in it."""
    samples, before = [], 0.0
    for number in range(_WARM_UP + steps):
        if number == _WARM_UP:
            comm.barrier(BARRIER_S)
            before = comm.sent_bytes
        seconds, waited = trainer.step(batches[number % len(batches)], emulated_s)
        samples.append((seconds, waited, trainer.exchanged_s))
    seconds, waited, exchanged = map(statistics.median, zip(*samples[_WARM_UP:], strict=True))
    return seconds, waited, exchanged, (comm.sent_bytes - before) / steps
