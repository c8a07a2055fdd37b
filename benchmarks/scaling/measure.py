"""What the scaling study measures: steps over workers, and accuracy over batches."""

from __future__ import annotations

import itertools
import os
import statistics
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.members import Accuracy, MemberResult, compare, declare, train_members
from benchmarks.models import Net
from benchmarks.training import RecipeTrainer, TrainingSetup, make_trainer
from ensemble.bench.launch import hosts
from ensemble.bench.launch.ranks import contiguous, run_ranks
from ensemble.bench.results import Report
from ensemble.bench.timing import BARRIER_S
from ensemble.spec import Member, SpecError
from ensemble.spec.options import COMPRESSIONS, resolve

if TYPE_CHECKING:
    from ensemble.comm import Communicator
    from pipelines import Pipeline

STRONG, WEAK = SCALINGS = ("strong", "weak")
REAL = "real"
_WARM_UP = 2

# --- workers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """One number of workers.

    Attributes:
        scaling: "strong", one global batch for all; "weak", one batch for each worker.
        compute: "real", on this machine's processors; or such as "100 ms", an emulated accelerator: a timed wait
            of that length for the batch of one worker, which uses no processor.
        model, compression: what was trained, in fp32.  cores: of all workers together.
        workers, hosts: how many.  link: the rate of the hosts' links; None on one host.
        batch_size: global.
        examples_per_s: of all workers.
        step_ms: of the slowest worker; compute_ms and sync_ms: of that, computing and waiting for others.
        communication_ms: measured without computing: a step's less that of one worker.
        predicted_ms: compute / n + communication(n), or compute + communication(n) where scaling is weak;
            `compute` is one worker's step. Real workers share the cores: n is at most their number then.
        efficiency: examples/s against n times those of one worker.
        sent_mb: that a worker sends in a step, 10^6 bytes.
    """

    scaling: str
    compute: str
    model: str
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
    def predicted_per_s(self) -> float:
        """Examples/s of the predicted step."""
        return 1000 * self.batch_size / self.predicted_ms

    @property
    def linear_per_s(self) -> float:
        """Examples/s without any loss against one worker."""
        return self.examples_per_s / self.efficiency

    @property
    def shares_cores(self) -> bool:
        """Whether more workers computed than there are cores."""
        return self.compute == REAL and self.workers > self.cores


def study_workers(net: Net, options: Namespace, report: Report) -> list[WorkerRow]:
    """Time a member's steps with each number of workers; one worker is always added, as the baseline.

    Raises:
        SpecError: a batch has fewer samples than workers; there is no such compression; hosts cannot be made.
        RanksError: a worker failed.
    """
    workers = sorted({1, *(options.workers or (1, 2, 4, 8))})
    resolve("--compression", options.compression, COMPRESSIONS)
    if STRONG in options.scalings and workers[-1] > options.worker_batch:
        raise SpecError(
            f"a batch of {options.worker_batch} is too small for {workers[-1]} workers: "
            "take a larger --worker-batch"
        )
    is_spread = options.hosts > 1
    if is_spread and (reason := hosts.unavailable()):
        raise SpecError(f"--hosts {options.hosts}: {reason}")
    cores = len(os.sched_getaffinity(0))
    rows: list[WorkerRow] = []
    with hosts.make_hosts(options.hosts if is_spread else 0, options.link) as made:
        for wait_ms, scaling in itertools.product(options.step_ms, options.scalings):
            compute = f"{wait_ms:g} ms" if wait_ms else REAL
            most = cores if compute == REAL and options.workers is None else workers[-1]
            one: dict[str, float] | None = None
            for count in (count for count in workers if count <= most):
                share = count if scaling == WEAK else 1  # of `worker_batch`, in one step of all
                size, used_hosts = options.worker_batch * share, min(count, options.hosts)
                report(f"{scaling} scaling, {count} workers, batch {size}, compute {compute}")
                given = {
                    "setup": asdict(TrainingSetup(net=net, data=options.data, batch_size=size)),
                    "steps": options.steps,
                    "compression": options.compression,
                    "step_s": wait_ms / 1000 * share if wait_ms else None,
                }
                placement = contiguous(count, used_hosts)
                ranks = run_ranks(f"{__name__}:time_steps", given, placement=placement, hosts=made)
                slowest = max(ranks, key=lambda rank: rank["step_s"])
                times = {**slowest, "idle_s": max(rank["idle_s"] for rank in ranks)}
                one = one or times
                communication_s = max(0.0, times["idle_s"] - one["idle_s"])
                shared = cores if compute == REAL else None
                rows.append(
                    WorkerRow(
                        scaling=scaling,
                        compute=compute,
                        model=net.name,
                        compression=options.compression,
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
                        predicted_ms=1000 * predict_step_s(one["step_s"], communication_s, count, scaling, shared),
                        efficiency=one["step_s"] * share / times["step_s"] / count,
                        sent_mb=max(rank["sent_bytes"] for rank in ranks) / 1e6,
                    )
                )
    return rows


def predict_step_s(
    compute_s: float, communication_s: float, workers: int, scaling: str, cores: int | None
) -> float:
    """Seconds of a step by the model: one worker's, divided by n where scaling is strong, plus communication.

    Args:
        compute_s: a step of one worker with its batch.
        cores: that the workers share, which limits them; None where each computes on a device of its own.
    """
    work = compute_s * (1 if scaling == STRONG else workers)
    return work / (workers if cores is None else min(workers, cores)) + communication_s


def time_steps(comm: Communicator, options: dict[str, Any]) -> dict[str, float]:
    """Medians of this rank's training steps, of their waits for other ranks, and of steps that compute nothing.

    Args:
        options: `setup`, of a `TrainingSetup`; `steps`, how many of each; `compression`; `step_s`: seconds of an
            emulated accelerator for a global batch, of which a rank sleeps its part; None computes for real.

    Returns:
        "step_s" and "sync_s"; "idle_s", a step without computing: what exchange and optimizer cost alone;
        "sent_bytes" of such a step.
    """
    setup, steps = TrainingSetup.of(options["setup"]), options["steps"]
    batches = setup.batches(comm.rank, comm.world)
    trainer = make_trainer(setup, "fp32", comm, options["compression"])
    idle_s, _, sent_bytes = _median_step(trainer, batches, comm, steps, 0.0)
    step_s, sync_s, _ = _median_step(trainer, batches, comm, steps, options["step_s"])
    return {"step_s": step_s, "sync_s": sync_s, "idle_s": idle_s, "sent_bytes": sent_bytes}


def _median_step(
    trainer: RecipeTrainer, batches: list[Any], comm: Communicator, steps: int, emulated_s: float | None
) -> tuple[float, float, float]:
    """Medians of a step's seconds and of its wait; bytes sent in a step."""
    found, before = [], 0.0
    for number in range(_WARM_UP + steps):
        if number == _WARM_UP:
            comm.barrier(BARRIER_S)
            before = comm.sent_bytes
        found.append(trainer.step(batches[number % len(batches)], emulated_s))
    seconds, waits = zip(*found[_WARM_UP:], strict=True)
    return statistics.median(seconds), statistics.median(waits), (comm.sent_bytes - before) / steps


# --- batches -------------------------------------------------------------------------------------------------

SGD, LARS, LARS_DECAY = "sgd", "lars", "lars-decay"
# The share of a layer's norm that a step of rate 1 changes. The usual 0.001 needs rates of 10 to 30, which would
# apply unadapted to biases and normalization.
_TRUST = 0.02
# Running statistics of normalization are averages over 1,280 samples, as is usual with this batch. Averages over
# ten batches would lag behind the weights where there are few steps: at 8,192 SGD would lose one point and LARS,
# which changes weights faster, eight. (Akiba et al. 2017 use the last batch's for this reason.)
_NORM_BATCH = 128
# The rate rises in this share of the epochs; then it falls, squared.
_WARM_UP_EPOCHS = 0.2
_COMMON = {"momentum": 0.9, "weight_decay": 5e-4}
#: The options of each optimizer. Only the last one decays and adapts biases and normalization.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    SGD: {"name": "sgd", **_COMMON, "decay_norm": False},
    LARS: {"name": "lars", **_COMMON, "trust": _TRUST, "decay_norm": False},
    LARS_DECAY: {"name": "lars", **_COMMON, "trust": _TRUST, "decay_norm": True},
}


@dataclass(frozen=True, kw_only=True)
class BatchRow(Accuracy):
    """One batch size with one optimizer, at the best learning rate of its grid.

    Attributes:
        batch_size, optimizer: what was run; "lars-decay" decays and adapts normalization too.
        steps: of the whole training.
        lr: the best on the validation split.  edge: whether it is an end of the grid: a better one may lie beyond.
        grid: rate -> accuracy there in percent, one seed; None where it diverged.
    """

    batch_size: int
    optimizer: str
    steps: int
    lr: float | None
    edge: bool
    grid: dict[float, float | None]

    @property
    def grid_percent(self) -> str:
        """The grid in a line, for people."""
        return "  ".join(f"{lr:g}: {'-' if found is None else f'{found:.1f}'}" for lr, found in self.grid.items())


def study_batches(net: Net, options: Namespace, report: Report) -> list[BatchRow]:
    """Train the grid and then the best rate of each batch and optimizer with fresh seeds.

    The grid has one seed and is measured on the validation split, which chooses the rate; the fresh seeds are
    measured on the test split, by which nothing was chosen.

    Raises:
        SpecError: a batch is larger than the data, or there is too little data.
        PipelineError: the data cannot be read.
    """
    splits = models.splits(net, options.data, options.samples, options.held_out)
    batches = sorted(set(options.batches or ((128, 512, 2048, 8192) if options.data else (32, 128, 512))))
    if batches[-1] > len(splits.train):
        raise SpecError(f"a batch of {batches[-1]} is more than the {len(splits.train)} samples: take more")

    def train(name: str, members: list[Member], measured: Pipeline) -> list[MemberResult]:
        declared = declare(
            name,
            net,
            splits.train,
            measured,
            members,
            options.epochs,
            batch_size=batches[0],
            precision="bf16",
            schedule={"name": "polynomial", "power": 2.0, "warmup_epochs": _WARM_UP_EPOCHS * options.epochs},
            cache=None if options.data is None else "memory",  # digits are not decoded
            optimizer=None,  # each member has its own
        )
        return train_members(declared, options.run_dir, report)

    keys = list(itertools.product(batches, OPTIMIZERS))
    rates_of = {name: options.rates if name == SGD else options.lars_rates for name in OPTIMIZERS}
    cases = [(batch, name, lr) for batch, name in keys for lr in rates_of[name]]
    members = [make_member(net, options.data, name, batch, lr, 0) for batch, name, lr in cases]
    grids: dict[tuple[int, str], dict[float, float | None]] = {key: {} for key in keys}
    for (batch, name, lr), result in zip(cases, train("scaling-grid", members, splits.valid), strict=True):
        grids[batch, name][lr] = result.accuracy
    best = {key: lr for key, grid in grids.items() if (lr := best_rate(grid)) is not None}
    seeds = range(1, options.seeds + 1)
    chosen = [
        (batch, seed, name) for batch in batches for seed in seeds for name in OPTIMIZERS if (batch, name) in best
    ]
    members = [
        make_member(net, options.data, name, batch, best[batch, name], seed) for batch, seed, name in chosen
    ]
    results = train("scaling-seeds", members, splits.test) if members else []
    rows = []
    for batch in batches:
        own = [result for (size, _, _), result in zip(chosen, results, strict=True) if size == batch]
        compared = compare(own, [name for name in OPTIMIZERS if (batch, name) in best], SGD)
        for name in OPTIMIZERS:
            grid, lr = grids[batch, name], best.get((batch, name))
            rows.append(
                BatchRow(
                    batch_size=batch,
                    optimizer=name,
                    steps=options.epochs * -(-len(splits.train) // batch),
                    lr=lr,
                    edge=lr in (min(grid), max(grid)),
                    grid=grid,
                    **vars(compared.get(name, Accuracy(note="diverged at every rate of the grid"))),
                )
            )
    return rows


def make_member(net: Net, data: str | None, optimizer: str, batch: int, lr: float, seed: int) -> Member:
    """The member with this optimizer, global batch, learning rate and seed."""
    norm = min(1.0, models.NORM_MOMENTUM * batch / _NORM_BATCH)
    params = {**net.params(data), "lr": lr, "norm_momentum": norm}
    return Member(params, batch_size=batch, seed=seed, optimizer=OPTIMIZERS[optimizer])


def best_rate(grid: dict[float, float | None]) -> float | None:
    """The learning rate with the highest accuracy, the smaller one of equals; None where all diverged."""
    done = {lr: accuracy for lr, accuracy in grid.items() if accuracy is not None}
    return max(sorted(done), key=lambda lr: done[lr]) if done else None
